"""A merge on a Ray cluster: workers on any machine each do a share of it, and this process keeps the journal.

The driver cuts the work into shares, the units of a result by its files. Workers open the plan themselves, from the
recipe, and write into the files that the driver has made, on a file system that all machines have. A share is in the
journal once its worker has answered; the shares of a worker that dies are given to another.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .._version import __version__
from ..errors import InputError, MachineError
from ..recipe import Recipe, reduction_factor
from ..storage.staging import Staging
from ..text import one_line
from .measuring import Advance
from .on_worker import Merging, Order
from .plan import Plan, Unit
from .reads import State
from .spreading import Part, Run
from .statistics import Statistics, ThresholdSearch
from .target import Target

#: Entries that a worker takes at a time, at most; and into how many shares for each worker the work is cut at least.
SHARE, SHARES = 1 << 27, 16
#: How often a share is tried that ends the worker that has it.
TRIES = 3
#: Seconds without any worker after which the cluster is given up.
PATIENCE = 120.0
#: Bytes of the object store of a cluster of our own: counts pass through it, tensors do not.
STORE = 200_000_000


def _worker_class() -> type:
    """What runs on the workers. Made in here, so that Ray sends it as it is: gradmerge may be missing there."""

    class MergeWorker:
        def open(self, order: dict[str, Any], versions: dict[str, str], driver: str) -> tuple[Any, ...]:
            """Open a merge, and say which machine and process this is, or what is wrong with it."""
            import os
            import platform
            import sys

            import ray

            address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
            name = f"{platform.node()} ({address})"
            if getattr(self, "opened", None) is not None:
                self.opened.close()
            self.opened: Any = None
            try:
                import torch

                from gradmerge._version import __version__

                own = {"gradmerge": __version__, "torch": torch.__version__}
                for package, version in versions.items():
                    if own[package] != version:
                        message = (
                            f"has {package} {own[package]}, and the driver {version}. Install the same everywhere."
                        )
                        return name, os.getpid(), 2, message
                from gradmerge.engine.on_worker import Order, opened

                self.opened, status, message = opened(Order(**order), address == driver)
                return name, os.getpid(), status, message
            except ImportError as error:
                message = f"gradmerge cannot be imported by {sys.executable} there ({error}). Install it on every node."
                return name, os.getpid(), 2, message

        def do(self, *share: Any) -> tuple[Any, int, str]:
            from gradmerge.engine.on_worker import done

            return done(self.opened, *share)

    return MergeWorker


@dataclass(eq=False)
class _Worker:
    """A worker as the driver knows it."""

    actor: Any
    ready: bool = False
    name: str = "?"
    pid: int = 0
    load: int = 0


@dataclass
class RayCluster:
    """Workers on a cluster: one that is there, or one of our own on this machine, until the ``with`` block ends."""

    workers: int | None = None
    """By default as many as have room."""
    threads: int | None = None
    """Of each worker; by default its machine's cores, at most 4."""
    address: str | None = None
    """HOST:PORT, auto, or by default RAY_ADDRESS; where that is not set, a cluster of our own is started."""
    allowed: dict[str, Any] = field(default_factory=dict)
    """Options of :func:`gradmerge.engine.planning.open_plan`."""
    seconds: float = 0.0
    """What starting Ray and the first worker took."""

    def __enter__(self) -> RayCluster:
        self._ray = _imported()
        self._own = not self._ray.is_initialized()
        self._crew: list[_Worker] = []
        self._flying: dict[Any, tuple[_Worker, int | None]] = {}
        self._losses = 0
        self._order: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._own:
            with contextlib.suppress(Exception):
                self._ray.shutdown()

    def _start(self) -> None:
        """Start Ray on this machine, or connect to a cluster; quietly, and without a report to its makers."""
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        settings: dict[str, Any] = {}
        if address == "local":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            self.threads = self.threads or max(1, min(4, cores // (self.workers or 1)))
            settings = {"num_cpus": max(cores, self.threads * (self.workers or 1)), "object_store_memory": STORE}
        elif address != "auto":
            _check_address(address)
        main = threading.current_thread() is threading.main_thread()
        before = signal.getsignal(signal.SIGTERM) if main else None
        try:
            self._ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                **settings,
            )
        except (Exception, SystemExit) as error:
            where = "a Ray cluster cannot be started here" if settings else f"no Ray cluster answers at {address}"
            advice = "" if settings else " Start one with `ray start --head`, and give its HOST:PORT."
            raise MachineError(f"{where}: {one_line(str(error))[:500]}.{advice}") from error
        finally:
            if main:
                signal.signal(signal.SIGTERM, before or signal.SIG_DFL)  # Ray sets one of its own

    def _count_workers(self) -> None:
        """Decide on the number of workers and threads, and start them."""
        cores = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        threads = self.threads = self.threads or max(1, min(4, max(cores)))
        room = sum(own // threads for own in cores)
        wanted = self.workers or room
        if not 0 < wanted <= room:
            text = f"the cluster has {sum(cores)} cores on {len(cores)} nodes, room for {room} workers"
            raise InputError(
                f"{text} of {threads} threads, and not for {max(1, wanted)}; give other --workers, --threads"
            )
        self.workers = wanted
        make = self._ray.remote(num_cpus=threads, max_restarts=0, scheduling_strategy="SPREAD")
        self._actor = make(_worker_class())
        self._crew = [_Worker(self._actor.remote()) for _ in range(wanted)]

    def begin(self, recipe: Recipe, plan: Plan, staging: Staging, fingerprint: str, state: State, finite: bool) -> None:
        """Have the workers open a merge; back when the first of them has. Others may come later.

        The cluster starts here: whatever is wrong with the recipe has been said by then.
        """
        begun = time.perf_counter()
        if not self._crew:
            if self._own:
                self._start()
            self._count_workers()
        run = secrets.token_hex(16)
        staging.sign(run)
        order = Order(
            recipe=recipe.model_dump(mode="json"),
            folder=str(recipe.folder.absolute()),
            made={name: str(place) for name, place in recipe.made.items()},
            allowed={**self.allowed, "allow_config": list(self.allowed.get("allow_config", ()))},
            block=plan.block,
            allow_nonfinite=not finite,
            precision_factor=1.0 / reduction_factor(recipe.reduction, plan.examples),
            fingerprint=fingerprint,
            state=state,
            staged=str(staging.folder),
            out=staging.out.name,
            shard_size=recipe.output.shard_size,
            run=run,
        )
        self._order = self._ray.put(asdict(order))
        for worker in self._crew:
            self._open(worker)
        self._run([], None, None, None, lambda share, found: None, first=True)
        self.seconds += time.perf_counter() - begun

    def _open(self, worker: _Worker) -> None:
        worker.ready, worker.load = False, 0
        for stale in [reference for reference, (other, _) in self._flying.items() if other is worker]:
            del self._flying[stale]
        versions = {"gradmerge": __version__, "torch": torch.__version__}
        driver = self._ray.util.get_node_ip_address()
        self._flying[worker.actor.open.remote(self._order, versions, driver)] = worker, None

    def spread(self, plan: Plan, part: Part, runs: Sequence[Run], known: Any, advance: Advance) -> Iterator[Any]:
        """As :data:`gradmerge.engine.spreading.Spread` says: a map on the workers, whose results come as they do."""
        found: list[Any] = []

        def use(share: Sequence[Run], result: tuple[Any, int]) -> None:
            advance(result[1])
            found.append(result[0])

        self._run(self._cut(runs), part, known, plan.inputs.mean_curvature, use)
        yield from found

    def merge(
        self,
        plan: Plan,
        target: Target,
        units: Sequence[Unit],
        statistics: Statistics,
        search: ThresholdSearch | None,
        advance: Advance,
    ) -> None:
        """Have units merged and written into the target's files; ``search`` is told what was counted on the way."""
        numbers = {(unit.job.name, unit.start): unit.number for unit in units}
        target.files.close()  # so that every machine sees them
        order = {unit.number: target.files.place(unit.job.name) for unit in units}
        placed = sorted(units, key=lambda unit: (*order[unit.number], unit.start))
        shares: list[list[Run]] = []
        for file in dict.fromkeys(order[unit.number][0] for unit in placed):
            own = [unit for unit in placed if order[unit.number][0] == file]
            shares += self._cut([(unit.job.name, unit.start, unit.stop) for unit in own], of=units)

        def use(share: Sequence[Run], result: tuple[Any, int]) -> None:
            (records, counts), read = result
            for (name, start, _), record in zip(share, records, strict=True):
                target.done(numbers[name, start], record)
            if search is not None:
                search.add(counts)
            advance(read)

        known = Merging(statistics, None if search is None else search.looks_for)
        self._run(shares, None, known, plan.inputs.mean_curvature, use)

    def _cut(self, runs: Sequence[Run], of: Sequence[Unit] | None = None) -> list[list[Run]]:
        """Shares of runs, in their order: small enough that all workers have some until the end."""
        assert self.workers is not None
        total = sum(stop - start for _, start, stop in runs)
        if of is not None:
            total = sum(unit.stop - unit.start for unit in of)
        limit = min(SHARE, total // (self.workers * SHARES))
        shares: list[list[Run]] = []
        entries = limit
        for run in runs:
            if entries >= limit:
                shares.append([])
                entries = 0
            shares[-1].append(run)
            entries += run[2] - run[1]
        return shares

    def _run(
        self,
        shares: Sequence[Sequence[Run]],
        part: Part | None,
        known: Any,
        damping: float | None,
        use: Callable[[Sequence[Run], Any], None],
        *,
        first: bool = False,
    ) -> None:
        """Have every share done once, by whoever is free, and ``use`` what is found; or wait for the ``first`` worker.

        Whatever ends it before all is done also ends the workers, so that none writes any more.
        """
        ray = self._ray
        try:
            sent = ray.put((part, known))
            left, tries = deque(range(len(shares))), Counter[int]()
            under_way, last = 0, time.monotonic()
            while left or under_way or (first and not any(worker.ready for worker in self._crew)):
                # Two at a time: the next is there when the last is done.
                free = sorted((w for w in self._crew if w.ready and w.load < 2), key=lambda worker: worker.load)
                for worker in free[: len(left)]:
                    index = left.popleft()
                    answer = worker.actor.do.remote(sent, shares[index], damping, self.threads)
                    self._flying[answer] = worker, index
                    worker.load += 1
                    under_way += 1
                if free and left and free[0].load < 2:
                    continue
                answered, _ = ray.wait(list(self._flying), timeout=1.0)
                if answered or any(worker.ready for worker in self._crew):
                    last = time.monotonic()
                elif time.monotonic() - last > PATIENCE:
                    raise MachineError(f"no worker has started within {PATIENCE:.0f} s: {self._room()}")
                for reference in answered:
                    worker, share = self._flying.pop(reference)
                    try:
                        found, status, message = self._answer(worker, share, reference)
                    except ray.exceptions.RayActorError as error:
                        again = self._replace(worker, share, error)
                        under_way -= len(again)
                        left.extendleft(reversed(again))
                        tries.update(again[:1])  # those that waited behind it are not to blame
                        self._give_up(tries, shares, worker, error)
                        continue
                    if status:
                        raise (InputError if status == 2 else MachineError)(message)
                    if share is not None:
                        under_way -= 1
                        worker.load -= 1
                        self._losses = 0
                        use(shares[share], found)
        except ray.exceptions.RayError as error:
            self.stop()
            raise MachineError(f"the Ray cluster failed: {one_line(str(error))[:500]}") from error
        except BaseException:
            self.stop()
            raise

    def _answer(self, worker: _Worker, share: int | None, reference: Any) -> tuple[Any, int, str]:
        """What a worker has found, or its status and what is wrong."""
        answer = self._ray.get(reference)
        if share is not None:
            found, status, message = answer
            return found, status, message if status != 1 else f"on {worker.name}: {message}"
        worker.name, worker.pid, status, message = answer
        worker.ready = not status
        return None, status, f"worker on {worker.name}: {message}"

    def _replace(self, dead: _Worker, share: int | None, error: Exception) -> list[int]:
        """Start another worker in place of one that has died; the shares that it had, the one it was at first."""
        lost = [reference for reference, (worker, _) in self._flying.items() if worker is dead]
        shares = [share, *(self._flying.pop(reference)[1] for reference in lost)]
        self._crew.remove(dead)
        self._losses += 1
        assert self.workers is not None
        if self._losses > TRIES * self.workers:
            raise MachineError(f"workers end again and again, the last on {dead.name}: {_why(error)}")
        self._crew.append(_Worker(self._actor.remote()))
        self._open(self._crew[-1])
        return sorted(index for index in shares if index is not None)

    def _give_up(self, tries: Counter[int], shares: Sequence[Sequence[Run]], worker: _Worker, error: Exception) -> None:
        index, most = next(iter(tries.most_common(1)), (0, 0))
        if most >= TRIES:
            name = shares[index][0][0]
            raise MachineError(f"{name}: {most} workers have ended at it, the last on {worker.name}: {_why(error)}")

    def _room(self) -> str:
        free, all_ = (
            int(found.get("CPU", 0)) for found in (self._ray.available_resources(), self._ray.cluster_resources())
        )
        return f"{free} of the cluster's {all_} cores are free, and a worker takes {self.threads}"

    def stop(self) -> None:
        """End the workers; back when they have, or after a few seconds."""
        crew, self._crew = self._crew, []
        with contextlib.suppress(Exception):
            for worker in crew:
                self._ray.kill(worker.actor)
            under_way = list(self._flying)
            self._flying.clear()
            if under_way:
                self._ray.wait(under_way, num_returns=len(under_way), timeout=5.0)


def _why(error: Exception) -> str:
    text = one_line(str(error))
    return "out of memory" if "OOM" in text and "common causes" not in text else text[:400]


def _check_address(address: str) -> None:
    """Stop at once where nobody listens: Ray itself would try for a while."""
    host, colon, port = address.rpartition(":")
    if "://" in address or not colon or not host or not port.isdigit():
        raise InputError(f"--ray-address {address}: give HOST:PORT of the head node, as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise MachineError(
            f"--ray-address {address}: no Ray cluster answers there ({error}). Start one with `ray start --head`."
        ) from error


def _imported() -> Any:
    """Ray, told to keep quiet: what it has to say is in its logs."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # what it prints of workers that die
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"--engine ray: Ray is not installed ({error}). Install it with: pip install 'gradmerge[ray]'"
        ) from error
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    return ray
