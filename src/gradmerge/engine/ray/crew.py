"""The workers of a merge on Ray: started, given shares of the work, and replaced where they die."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..._version import __version__
from ...errors import InputError, MachineError
from ...text import one_line
from ..run.reduce import BlockFunction
from .worker import Run

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
                from gradmerge.engine.ray.worker import Order, opened

                self.opened, status, message = opened(Order(**order), address == driver)
                return name, os.getpid(), status, message
            except ImportError as error:
                message = f"gradmerge cannot be imported by {sys.executable} there ({error}). Install it on every node."
                return name, os.getpid(), 2, message

        def do(self, *share: Any) -> tuple[Any, int, str]:
            from gradmerge.engine.ray.worker import done

            return done(self.opened, *share)

    return MergeWorker


class _WrongInput(Exception):
    """The input is wrong, and the workers are fine."""


@dataclass(eq=False)
class Worker:
    """A worker as the driver knows it."""

    actor: Any
    ready: bool = False
    name: str = "?"
    pid: int = 0
    load: int = 0


class Crew:
    """Workers on a Ray cluster: one that is there, or one of our own on this machine."""

    def __init__(self, workers: int | None, threads: int | None, address: str | None) -> None:
        self.workers, self.threads, self._address = workers, threads, address
        self.members: list[Worker] = []
        self._ray = _imported()
        self._own = not self._ray.is_initialized()
        self._flying: dict[Any, tuple[Worker, int | None]] = {}
        self._losses = 0
        self._order: Any = None
        self._plain = self._terminated = False

    def open(self, order: dict[str, Any]) -> None:
        """Have the workers open a merge, and start them before that; back when the first of them has."""
        if not self._ray.is_initialized():
            self._start()
        self._order = self._ray.put(order)
        for worker in self.members:
            self._open(worker)
        list(self.run([], None, None, None, first=True))

    def _start(self) -> None:
        """Start Ray on this machine, or connect to a cluster; quietly, and without a report to its makers."""
        address = self._address or os.environ.get("RAY_ADDRESS") or "local"
        settings: dict[str, Any] = {}
        if address == "local":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            wanted = (self.threads or 1) * (self.workers or 1)
            settings = {"num_cpus": max(cores, wanted), "object_store_memory": STORE}
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
            what = "Ray cannot be started here" if settings else f"--ray-address {address}: no cluster can be joined"
            advice = (
                "" if settings else " Is it there (`ray start --head`)? Does it take a token (RAY_AUTH_MODE=token)?"
            )
            raise MachineError(f"{what}: {one_line(str(error))[:500]}.{advice}") from error
        finally:
            if main:  # Ray sets a handler of its own
                plain = before in (None, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, self._terminate if plain else before)
                self._plain = plain

    def _terminate(self, *_: object) -> None:
        """What the signal would do at once, in order: else some of Ray's processes would stay for a while."""
        self._terminated = True
        raise KeyboardInterrupt

    def _count_workers(self) -> None:
        """Decide on the number of workers and threads, and start them."""
        cores = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        rooms = {threads: sum(own // threads for own in cores) for threads in (4, 3, 2, 1)}
        fits = (threads for threads, room in rooms.items() if room >= (self.workers or 1))
        threads = self.threads = self.threads or next(fits, 1)
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
        for _ in range(wanted):
            self._hire()

    def _hire(self) -> None:
        self.members.append(Worker(self._actor.remote()))
        self._open(self.members[-1])

    def _open(self, worker: Worker) -> None:
        worker.ready, worker.load = False, 0
        for stale in [reference for reference, (other, _) in self._flying.items() if other is worker]:
            del self._flying[stale]
            self._ray.cancel(stale)
        versions = {"gradmerge": __version__, "torch": torch.__version__}
        driver = self._ray.util.get_node_ip_address()
        self._flying[worker.actor.open.remote(self._order, versions, driver)] = worker, None

    def run(
        self,
        shares: Sequence[Sequence[Run]],
        part: BlockFunction | None,
        known: Any,
        damping: float | None,
        *,
        first: bool = False,
    ) -> Generator[tuple[Sequence[Run], Any], None, None]:
        """Have every share done once, by whoever is free: each with what was found; or wait for the ``first`` worker.

        Whatever ends it before all is done also ends the workers, so that none writes any more.
        """
        ray = self._ray
        try:
            if not self.members:
                self._count_workers()
            sent = ray.put((part, known))
            left, tries = deque(range(len(shares))), Counter[int]()
            under_way, last = 0, time.monotonic()
            while left or under_way or (first and not any(worker.ready for worker in self.members)):
                # Two at a time: the next is there when the last is done.
                free = sorted((w for w in self.members if w.ready and w.load < 2), key=lambda worker: worker.load)
                for worker in free[: len(left)]:
                    index = left.popleft()
                    answer = worker.actor.do.remote(sent, shares[index], damping, self.threads)
                    self._flying[answer] = worker, index
                    worker.load += 1
                    under_way += 1
                if free and left and free[0].load < 2:
                    continue
                answered, _ = ray.wait(list(self._flying), timeout=1.0)
                if answered or any(worker.ready for worker in self.members):
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
                    if status == 2 and share is not None:
                        self._settle()
                        raise _WrongInput(message)
                    if status:
                        raise (InputError if status == 2 else MachineError)(message)
                    if share is not None:
                        under_way -= 1
                        worker.load -= 1
                        self._losses = 0
                        yield shares[share], found
        except _WrongInput as error:
            raise InputError(str(error)) from None
        except ray.exceptions.RayError as error:
            self.stop()
            raise MachineError(f"the Ray cluster failed: {one_line(str(error))[:500]}") from error
        except BaseException:
            self.stop()
            raise

    def _settle(self) -> None:
        """Wait until no worker is at work, so that they can be asked something else; or end them."""
        under_way = [reference for reference, (_, share) in self._flying.items() if share is not None]
        if under_way and self._ray.wait(under_way, num_returns=len(under_way), timeout=10.0)[1]:
            self.stop()
        for reference in under_way:
            self._flying.pop(reference, None)
        for worker in self.members:
            worker.load = 0

    def _answer(self, worker: Worker, share: int | None, reference: Any) -> tuple[Any, int, str]:
        """What a worker has found, or its status and what is wrong."""
        answer = self._ray.get(reference)
        if share is not None:
            found, status, message = answer
            return found, status, message if status != 1 else f"on {worker.name}: {message}"
        worker.name, worker.pid, status, message = answer
        worker.ready = not status
        return None, status, f"worker on {worker.name}: {message}"

    def _replace(self, dead: Worker, share: int | None, error: Exception) -> list[int]:
        """Start another worker in place of one that has died; the shares that it had, the one it was at first."""
        lost = [reference for reference, (worker, _) in self._flying.items() if worker is dead]
        shares = [share, *(self._flying.pop(reference)[1] for reference in lost)]
        self.members.remove(dead)
        self._losses += 1
        assert self.workers is not None
        if self._losses > TRIES * self.workers:
            raise MachineError(f"workers end again and again, the last on {dead.name}: {_why(error)}")
        with contextlib.suppress(Exception):
            self._ray.kill(dead.actor)  # it may only be out of reach
        self._hire()
        return sorted(index for index in shares if index is not None)

    def _give_up(self, tries: Counter[int], shares: Sequence[Sequence[Run]], worker: Worker, error: Exception) -> None:
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
        crew, self.members = self.members, []
        with contextlib.suppress(Exception):
            for worker in crew:
                self._ray.kill(worker.actor)
            under_way = list(self._flying)
            self._flying.clear()
            if under_way:
                self._ray.wait(under_way, num_returns=len(under_way), timeout=5.0)

    def close(self) -> None:
        """End the workers, and the cluster if it is our own."""
        self.stop()
        if self._own:
            with contextlib.suppress(Exception):  # of a cluster of our own, what it would wait a second for
                self._ray._private.worker._global_node.kill_monitor(check_alive=False)
            with contextlib.suppress(Exception):
                self._ray.shutdown()
        if self._plain:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._terminated:
            os.kill(os.getpid(), signal.SIGTERM)


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
    # Of a cluster of our own: with Ray's 15, workers would hardly start beside other programs.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"--engine ray: Ray is not installed ({error}). Install it with: pip install 'gradmerge[ray]'"
        ) from error
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    return ray
