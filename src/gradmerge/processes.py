"""The processes of one run, as torchrun and `accelerate launch` start them: who takes which rows, and sums over all.

Every process runs the same program on rows of its own. Where they meet, in a sum or a wait, nobody waits for ever:

- Whoever fails leaves word with the store that all can read, and the others raise the same error where they meet next.
- Whoever is gone without a word no longer beats: every process counts up a number in the store once a second.

Without such a launcher there is one process, and all of this is nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .errors import GradmergeError, InputError, MachineError
from .progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

#: Seconds without a sign of life after which a process is given up, and the variable that says otherwise.
PATIENCE, PATIENCE_VARIABLE = 300.0, "GRADMERGE_PROCESS_TIMEOUT"
#: Seconds until all processes must have joined, between two signs of life, and between two looks at the store.
JOIN, BEAT, LOOK = 600.0, 1.0, 0.05
#: Seconds that a process which failed gives the first one to say so.
GRACE = 30.0


class Announced(NamedTuple):
    """What a launcher tells a process of its place."""

    rank: int
    number: int
    """How many there are."""
    local: int
    """Its number on its own machine, which picks its GPU."""


def announced() -> Announced | None:
    """What torchrun or `accelerate launch` has put into the environment; None for one process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    texts = [os.environ.get(name, "") for name in names]
    if not all(texts) or not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        return None
    try:
        found = Announced(*map(int, texts))
    except ValueError:
        raise InputError(f"{', '.join(names)} in the environment are {', '.join(texts)}: not whole numbers") from None
    if not 0 <= found.rank < found.number or found.local < 0:
        raise InputError(f"RANK={found.rank} in the environment: not one of WORLD_SIZE={found.number} processes")
    return found if found.number > 1 else None


def explained(error: BaseException) -> tuple[str, int]:
    """What one process tells the others of an error: words, and an exit status. The command line has a better one."""
    if isinstance(error, GradmergeError):
        return str(error), error.status
    return f"{type(error).__name__}: {error}", 1


class Processes:
    """One process that is alone; :class:`Group` is one of several."""

    rank, count, local = 0, 1, 0
    _called = -1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def share(self, total: int) -> range:
        """Which of ``total`` rows this process takes: one stretch, in the order of the processes."""
        return range(total * self.rank // self.count, total * (self.rank + 1) // self.count)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, the same bits in all of them.

        They must give the same shapes and types in the same order. The same processes add in the same order each time.
        """

    def from_first(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by that of the first process."""

    def gather(self, value: Any) -> list[Any]:
        """What every process gives, in their order: values that JSON can hold."""
        return [value]

    def rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with one row per example, joined in the order of the processes; one without examples gives none."""
        return list(tensors)

    def wait(self) -> None:
        """Until all have come here."""

    def check(self) -> None:
        """Raise if another process has failed."""

    def call(self, meeting: int) -> None:
        """Ask all to come to a meeting, after what they are at."""
        self._called = meeting

    def called(self, meeting: int) -> bool:
        """Whether somebody has."""
        return self._called == meeting

    def shared(self, progress: Progress) -> Progress:
        """What tells the first process's ``progress`` how far all of them are together."""
        return progress

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """An error inside is raised in every process, instead of leaving the others waiting; all end it together."""
        yield

    @contextlib.contextmanager
    def guarded(self, what: str = "the work") -> Iterator[None]:
        """A collective of torch's inside that fails because a process is gone is an error that says so."""
        yield

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise if a fact is not the same in all processes, as where they see other files."""
        for rank, others in enumerate(every := self.gather(facts)):
            for name in facts:
                if others.get(name) != every[0].get(name):
                    told = f"process {rank} has {others.get(name)!r}, and process 0 {every[0].get(name)!r}"
                    raise InputError(f"the processes do not see the same {name}: {told}. Give all the same files.")


ALONE = Processes()
_joined: Group | None = None


def current() -> Processes:
    """This process among those that a launcher started, joined on first use; or alone."""
    global _joined
    if _joined is None and (found := announced()) is not None:
        _joined = Group(found)
        atexit.register(_joined.leave)
    return ALONE if _joined is None else _joined


def joined() -> Group | None:
    """The group, where this process has joined one."""
    return _joined


class Group(Processes):
    """One of several processes."""

    explain: Callable[[BaseException], tuple[str, int]] = staticmethod(explained)

    def __init__(self, place: Announced) -> None:
        import torch
        import torch.distributed as torch_distributed

        dist: Any = torch_distributed
        self.rank, self.count, self.local = place
        self._patience = float(os.environ.get(PATIENCE_VARIABLE) or PATIENCE)
        self._told = False
        self._watched: SharedProgress | None = None
        if not os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
        long = timedelta(days=30)  # who is given up, and when, is decided here
        try:
            if dist.is_initialized():  # by a script that calls gradmerge
                self.rank, self.count = dist.get_rank(), dist.get_world_size()
                store: Any = dist.distributed_c10d._get_default_store()
                self._cpu: Any = dist.new_group(backend="gloo", timeout=long)
            else:
                store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN)))
                backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
                inner = dist.PrefixStore("gradmerge-group", store)
                dist.init_process_group(backend, store=inner, rank=self.rank, world_size=self.count, timeout=long)
                self._cpu = None
        except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
            reason = str(error).splitlines()[0]
            raise MachineError(
                f"process {self.rank} of {self.count} cannot join the others at {os.environ.get('MASTER_ADDR')}:"
                f"{os.environ.get('MASTER_PORT')}: {reason}. Were all of them started, and does the address lead to "
                "the first machine? GLOO_SOCKET_IFNAME names the network interface to use."
            ) from error
        self._store = dist.PrefixStore("gradmerge", store)
        self._store.set(f"who/{self.rank}", f"on {socket.gethostname()}, pid {os.getpid()}")
        self._left = threading.Event()
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        beats = 0
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it those who would look
            while not self._left.wait(BEAT if beats else 0):
                beats += 1
                self._store.set(f"beat/{self.rank}", str(beats))

    def leave(self) -> None:
        """Leave the group; a process that has failed just ends, since others may not be there any more."""
        global _joined
        import torch.distributed as dist

        self._left.set()
        if not self._told and dist.is_initialized() and self._cpu is None:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        _joined = None

    def add(self, tensors: Iterable[Tensor]) -> None:
        import torch.distributed as dist

        self._all(tensors, lambda t, group: dist.all_reduce(t, group=group, async_op=True))

    def from_first(self, tensors: Iterable[Tensor]) -> None:
        import torch.distributed as dist

        self._all(tensors, lambda t, group: dist.broadcast(t, 0, group=group, async_op=True))

    def _all(self, tensors: Iterable[Tensor], begin: Callable[[Tensor, Any], Any]) -> None:
        given = [tensor.detach() for tensor in tensors]
        whole = [tensor.contiguous() for tensor in given]
        if any(tensor.is_cuda for tensor in whole):
            self.wait()  # a GPU cannot be called off: it begins once all are here
        self._meet([begin(tensor, None if tensor.is_cuda else self._cpu) for tensor in whole])
        for tensor, result in zip(given, whole, strict=True):
            if result is not tensor and result.data_ptr() != tensor.data_ptr():
                tensor.copy_(result)

    def gather(self, value: Any) -> list[Any]:
        import torch

        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(one.numpy())) for one in self._gathered(text)]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        """Flat CPU tensors of any length, of every process."""
        import torch
        import torch.distributed as dist

        sizes = torch.zeros(self.count, dtype=torch.int64)
        sizes[self.rank] = len(own)
        self._meet([dist.all_reduce(sizes, group=self._cpu, async_op=True)])
        padded = torch.zeros(int(sizes.max()), dtype=own.dtype)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in range(self.count)]
        self._meet([dist.all_gather(found, padded, group=self._cpu, async_op=True)])
        return [one[:size] for one, size in zip(found, sizes.tolist(), strict=True)]

    def rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        import torch

        own = [[str(one.dtype).removeprefix("torch."), list(one.shape[1:])] for one in tensors]
        shapes: list[tuple[str, list[int]]] = next((given for given in self.gather(own) if given), [])
        found = []
        for place, (name, shape) in enumerate(shapes):
            dtype = getattr(torch, name)
            flat = tensors[place].cpu().flatten() if tensors else torch.empty(0, dtype=dtype)
            parts = self._gathered(flat.to(torch.uint8) if dtype == torch.bool else flat)
            found.append(torch.cat(parts).to(dtype).reshape(-1, *shape))
        return found

    def wait(self) -> None:
        import torch
        import torch.distributed as dist

        self._meet([dist.all_reduce(torch.zeros(1), group=self._cpu, async_op=True)])

    def _meet(self, works: Sequence[Any]) -> None:
        """Until all processes have done their part of these collectives."""
        with self.guarded():
            self._until(lambda: all(work.is_completed() for work in works))
            for work in works:
                work.wait()

    @contextlib.contextmanager
    def guarded(self, what: str = "the work") -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            self._lost(error, what)

    def call(self, meeting: int) -> None:
        with self.guarded():
            self._store.set(f"call/{meeting}", "")

    def called(self, meeting: int) -> bool:
        with self.guarded():
            return bool(self._store.check([f"call/{meeting}"]))

    def _until(self, done: Callable[[], bool]) -> None:
        nap, looks, beats = 1e-4, 0, dict.fromkeys(range(self.count), (b"", 0))
        while not done():
            time.sleep(nap)
            nap = min(2 * nap, LOOK)
            if nap < LOOK:
                continue
            # Looks are counted, not seconds: while the whole machine sleeps, nobody is silent.
            looks += 1
            if looks % 4 == 0:
                self._look()
            if looks % 20 == 0:
                if self._watched is not None:
                    self._watched.look()
                for rank, now in enumerate(self._beats()):
                    if now != beats[rank][0]:
                        beats[rank] = now, looks
                    elif (looks - beats[rank][1]) * LOOK > self._patience:
                        self._give_up([rank])

    def _beats(self) -> list[bytes]:
        keys = [f"beat/{rank}" for rank in range(self.count)]
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _lost(self, error: BaseException, what: str = "the work") -> NoReturn:
        """Say why a collective failed: what another process has told, or which one is gone."""
        try:
            before = self._beats()
            for _ in range(int(3 * BEAT / LOOK)):
                time.sleep(LOOK)
                self._look()
            silent = [rank for rank, (one, now) in enumerate(zip(before, self._beats(), strict=True)) if one == now]
        except RuntimeError:
            silent = []
        self._give_up(silent, error, what)

    def _give_up(self, ranks: Sequence[int], error: BaseException | None = None, what: str = "the work") -> NoReturn:
        names = []
        for rank in ranks:
            with contextlib.suppress(RuntimeError):
                names.append(f"process {rank} of {self.count} ({self._store.get(f'who/{rank}').decode()})")
        whose = ", ".join(names) or "one of the others"
        gone = f"{whose} has ended, or cannot be reached any more, in the middle of {what}"
        where = "What it said last, and the system's log (dmesg) if memory ran out, tell why"
        raise MachineError(f"{gone}. {where}. Nothing was written under its final name.") from error

    def check(self) -> None:
        with self.guarded():
            self._look()

    def _look(self) -> None:
        """Raise what another process has told."""
        if not self._store.check(["error"]):
            return
        told = json.loads(self._store.get("error"))
        kind = InputError if told["status"] == InputError.status else MachineError
        raise kind(self._attributed(told))

    def _attributed(self, told: dict[str, Any]) -> str:
        who = self._store.get(f"who/{told['rank']}").decode()
        return f"{told['message']}\n  (process {told['rank']} of {self.count}, {who})"

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        if self._told:
            raise MachineError("an earlier call failed in one of the processes: start all of them anew")
        try:
            yield
            self.wait()
        except BaseException as error:
            self.tell(error)
            raise

    def tell(self, error: BaseException) -> dict[str, Any]:
        """Leave word of an error; what was told first is what all end with."""
        self._told = True
        message, status = self.explain(error)
        told = {"message": message, "status": status, "rank": self.rank}
        with contextlib.suppress(RuntimeError):
            told = json.loads(self._store.compare_set("error", "", json.dumps(told)))
        return told

    def settle(self, error: BaseException) -> tuple[str, int, bool]:
        """What all processes end with, and whether this one is to say so: the first, or one that it leaves alone."""
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends all once one has ended
        if isinstance(error, Stopped):
            try:
                self._lost(error)
            except GradmergeError as found:
                error = found
        told = self.tell(error)
        own = self.explain(error)[0]
        try:
            message = told["message"] if told["message"] == own else own if own.startswith(told["message"]) else ""
            message = message or self._attributed(told)
            deadline = 0 if self.first else int(GRACE / LOOK)
            while deadline and not self._store.check(["said"]):
                deadline -= 1
                time.sleep(LOOK)
            speaks = self._store.add("said", 1) == 1
        except RuntimeError:  # the store went with the process that held it
            return own, int(told["status"]), True
        return message, int(told["status"]), speaks

    def shared(self, progress: Progress) -> Progress:
        self._watched = SharedProgress(self, self._store, progress)
        return self._watched


class Stopped(KeyboardInterrupt):
    """The launcher ended this process, since another one has ended or somebody asked it to."""


def stop_with_the_others() -> None:
    """Let what a launcher sends to end a process end it as Ctrl-C does, so that nothing half-done stays."""

    def stop(*_: Any) -> NoReturn:
        raise Stopped

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


def end_with_the_first(status: int) -> None:
    """Of processes that all fail alike before they have met, let the first one speak: the launcher ends the rest."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
    time.sleep(GRACE / 3)


class SharedProgress(Progress):
    """Counts what all processes have done, in the store, and tells the first one's bar."""

    def __init__(self, group: Group, store: Any, inner: Progress) -> None:
        self._group, self._store, self._inner = group, store, inner
        self._begun = self._seen = 0

    @property
    def _key(self) -> str:
        return f"done/{self._begun}"

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._begun, self._seen = self._begun + 1, 0
        if self._group.first:
            self._inner.begin(what, total, done)

    def advance(self, amount: int) -> None:
        self._group.check()
        self._show(self._store.add(self._key, amount))

    def look(self) -> None:
        """Show what the others have done while this process waits."""
        self._show(self._store.add(self._key, 0))

    def _show(self, done: int) -> None:
        if self._group.first and done > self._seen:
            self._inner.advance(done - self._seen)
            self._seen = done
