"""One of several processes that work together. Where they meet, in a sum or a wait, nobody waits for ever:

- Whoever fails leaves word with the store that all can read, and the others raise the same error where they meet next.
- Whoever is gone without a word no longer beats: every process counts up a number in the store once a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import GradmergeError, InputError, MachineError
from .processes import GRACE, Announced, Processes, Stopped
from .progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

#: Seconds without a sign of life after which a process is given up, and the variable that says otherwise.
PATIENCE, PATIENCE_VARIABLE = 300.0, "GRADMERGE_PROCESS_TIMEOUT"
#: Seconds until all processes must have joined, between two signs of life, and between two looks at the store.
JOIN, BEAT, LOOK = 600.0, 1.0, 0.05


def explained(error: BaseException) -> tuple[str, int]:
    """What one process tells the others of an error: words, and an exit status. The command line has a better one."""
    if isinstance(error, GradmergeError):
        return str(error), error.status
    return f"{type(error).__name__}: {error}", 1


def _patience() -> float:
    text = os.environ.get(PATIENCE_VARIABLE) or str(PATIENCE)
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) > 0:  # which NaN is not
            return seconds
    raise InputError(f"{PATIENCE_VARIABLE}={text} in the environment: not a number of seconds, more than 0")


class Group(Processes):
    """One of several processes."""

    explain: Callable[[BaseException], tuple[str, int]] = staticmethod(explained)

    def __init__(self, place: Announced) -> None:
        import torch
        import torch.distributed as torch_distributed

        dist: Any = torch_distributed
        self.rank, self.count, _ = place
        self._patience = _patience()
        self._told, self._gone = False, set[int]()
        self._watched: SharedProgress | None = None
        self.begun = 0
        """Times that progress has begun: every one has a count of its own in the store."""
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
        import torch.distributed as dist

        self._left.set()
        with contextlib.suppress(RuntimeError):
            # The first process may hold the store, where the others look for what went wrong.
            for _ in range(int(3 * BEAT / LOOK) if self._told and self.first else 0):
                if self._store.add("known", 0) >= self.count - len(self._gone):
                    break
                time.sleep(LOOK)
        if not self._told and dist.is_initialized() and self._cpu is None:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()

    def add(self, tensors: Iterable[Tensor]) -> None:
        import torch.distributed as dist

        given = [tensor.detach() for tensor in tensors]
        whole = [tensor.contiguous() for tensor in given]
        if any(tensor.is_cuda for tensor in whole):
            self.wait()  # a GPU cannot be called off: it begins once all are here
        self._meet([dist.all_reduce(t, group=None if t.is_cuda else self._cpu, async_op=True) for t in whole])
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
        with self._guarded():
            self._until(lambda: all(work.is_completed() for work in works))
            for work in works:
                work.wait()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Raise an error that says so if a collective inside fails because a process is gone."""
        try:
            yield
        except RuntimeError as error:
            self._lost(error)

    def call(self, meeting: int) -> None:
        with self._guarded():
            self._store.set(f"call/{meeting}", "")

    def called(self, meeting: int) -> bool:
        with self._guarded():
            return bool(self._store.check([f"call/{meeting}"]))

    def _until(self, done: Callable[[], bool]) -> None:
        nap, looks = 1e-4, 0
        beats = dict.fromkeys(range(self.count), (b"", 0))
        while not done():
            time.sleep(nap)
            nap = min(2 * nap, LOOK)
            # Looks are counted, not seconds: while the whole machine sleeps, nobody is silent.
            looks += nap >= LOOK
            try:
                if looks and looks % 4 == 0:
                    self._look_around(looks, beats)
            except RuntimeError:
                if not done():  # otherwise the store went with one that had no more to do
                    raise

    def _look_around(self, looks: int, beats: dict[int, tuple[bytes, int]]) -> None:
        """Raise what another process has told, and give one up that has been silent for long."""
        self._look()
        if looks % 20:
            return
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

    def _lost(self, error: BaseException) -> NoReturn:
        """Say why a collective failed: what another process has told, or which one is gone."""
        silent: list[int] = []
        try:
            silent = self._silent()
        except RuntimeError:  # the store is gone as well: with the first process, unless the launcher holds it
            self._gone |= set() if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" else {0}
        self._give_up(silent, error)

    def _silent(self) -> list[int]:
        """The processes that no longer give a sign of life; unless one has told why, which is raised."""
        before = self._beats()
        for _ in range(int(3 * BEAT / LOOK)):
            time.sleep(LOOK)
            self._look()
        return [rank for rank, (one, now) in enumerate(zip(before, self._beats(), strict=True)) if one == now]

    def _give_up(self, ranks: Sequence[int], error: BaseException | None = None) -> NoReturn:
        self._gone |= set(ranks)
        names = []
        for rank in sorted(self._gone):
            who = ""
            with contextlib.suppress(RuntimeError):
                who = f" ({self._store.get(f'who/{rank}').decode()})"
            names.append(f"process {rank} of {self.count}{who}")
        whose = ", ".join(names) or "one of the others"
        gone = f"{whose} has ended, or cannot be reached any more, in the middle of the work"
        where = "What it said last, and the system's log (dmesg) if memory ran out, tell why"
        raise MachineError(f"{gone}. {where}. Nothing was written under its final name.") from error

    def check(self) -> None:
        with self._guarded():
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
            why = self._why_stopped(error) if isinstance(error, Stopped) else error
            self.tell(why)
            if why is error:
                raise
            raise why from error

    def tell(self, error: BaseException) -> dict[str, Any]:
        """Leave word of an error; what was told first is what all end with."""
        message, status = self.explain(error)
        told = {"message": message, "status": status, "rank": self.rank}
        with contextlib.suppress(RuntimeError):
            told = json.loads(self._store.compare_set("error", "", json.dumps(told)))
            self._store.add("known", 0 if self._told else 1)
        self._told = True
        return told

    def settle(self, error: BaseException) -> tuple[str, int, bool]:
        """What all processes end with, and whether this one is to say so: the first, or one that it leaves alone."""
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a launcher ends all once one has ended
        if isinstance(error, Stopped):
            error = self._why_stopped(error)
        told, own = self.tell(error), self.explain(error)[0]
        try:
            message = own if own.startswith(told["message"]) else self._attributed(told)
            for _ in range(0 if self.first or 0 in self._gone else int(GRACE / LOOK)):
                if self._store.check(["said"]):
                    break
                time.sleep(LOOK)
            speaks = self._store.add("said", 1) == 1
        except RuntimeError:  # the store went with the first process: it has spoken, unless it was lost
            return own, int(told["status"]), 0 in self._gone
        return message, int(told["status"]), speaks

    def _why_stopped(self, error: BaseException) -> BaseException:
        try:
            if silent := self._silent():
                self._give_up(silent, error)
        except GradmergeError as found:
            return found
        except RuntimeError:
            pass
        return MachineError(
            "stopped from outside (SIGTERM). Nothing was written under its final name; where the command has --resume, "
            "that goes on."
        )

    def shared(self, progress: Progress) -> Progress:
        self._watched = SharedProgress(self, self._store, progress)
        return self._watched


class SharedProgress(Progress):
    """Counts what all processes have done, in the store, and tells the first one's bar."""

    def __init__(self, group: Group, store: Any, inner: Progress) -> None:
        self._group, self._store, self._inner = group, store, inner
        self._key, self._seen = "", 0

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self._group.begun += 1
        self._key, self._seen = f"done/{self._group.begun}", 0
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
