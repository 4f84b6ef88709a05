"""Run a merge on a Ray cluster.

The driver, which is the process that the user starts, opens the plan, creates the output files and keeps the journal.
It cuts the work into byte ranges of the output files and maps them over actors. Ray places the actors, starts an actor
again if it dies, and repeats its range. Workers open the plan themselves, from the recipe, and write into the files of
the driver on a shared file system. A range is in the journal after its worker has answered, and by then it is on the
disk.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ..errors import GradmergeError, InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..recipe import Recipe
from ..text import one_line
from .input_state import State
from .jobs import Block, MergeOptions
from .journal import boot_id
from .output import Output
from .plan import Plan
from .ray_worker import MergeTask, MergeWorker, Range, sign_folder, versions
from .reduce import Advance, BlockFunction, add_up, ignore
from .statistics import Statistics

if TYPE_CHECKING:
    from .adapter import AdapterOutput

#: Entries of a share: at most, and so few that each worker has this many shares.
MAX_ENTRIES, SHARES_PER_WORKER = 1 << 27, 16
#: How often a share is repeated after its worker died.
RETRIES = 3
#: Seconds until the first worker must have started.
START_SECONDS = 120.0
#: Bytes of the object store of a cluster of our own. Statistics pass through it, tensors do not.
OBJECT_STORE = 200_000_000


@dataclass
class RayCluster:
    """Runs reductions and merges on an existing cluster, or on one that it starts on this machine."""

    workers: int | None = None
    """By default as many as the cluster has cores for."""
    threads: int | None = None
    """Of each worker; by default at most 4."""
    address: str | None = None
    """HOST:PORT, or ``auto``; by default RAY_ADDRESS. Without either, a cluster starts on this machine."""
    allowed: dict[str, Any] = field(default_factory=dict)
    """Options of :func:`gradmerge.engine.build_plan.open_plan`."""
    seconds: float = 0.0
    """Time until the first worker had started."""

    def __enter__(self) -> RayCluster:
        self._ray = _import_ray()
        self._ours = not self._ray.is_initialized()
        self._handles_sigterm = self._stopped = False
        self._actors: list[Any] = []
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[Any, list[Block]]] = {}
        """Answers that are expected → the actor and its share, which is empty while it opens the merge."""
        return self

    def __exit__(self, *_: object) -> None:
        self._kill_workers()
        if self._ours and self._ray.is_initialized():
            with suppress(Exception):
                self._ray.shutdown()
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._stopped:  # end as the signal would have ended the process
            os.kill(os.getpid(), signal.SIGTERM)

    def begin(
        self, recipe: Recipe, plan: Plan, folder: AtomicDir, fingerprint: str, state: State, options: MergeOptions
    ) -> None:
        """Start the cluster, describe the merge to the workers, and wait until the first of them has opened it."""
        start = time.perf_counter()
        if not self._ray.is_initialized():
            self._connect()
        self._count, threads = self._size()
        actor = self._ray.remote(
            num_cpus=threads, max_restarts=-1, max_task_retries=RETRIES, scheduling_strategy="SPREAD"
        )(MergeWorker)
        self._actors += [actor.remote() for _ in range(self._count - len(self._actors))]
        run = secrets.token_hex(16)
        sign_folder(folder.folder, run)
        merge = MergeTask(
            recipe=recipe.to_dict(),
            recipe_folder=str(recipe.folder.absolute()),
            made={name: str(folder) for name, folder in recipe.made.items()},
            plan_options={**self.allowed, "allow_config": list(self.allowed.get("allow_config", ()))},
            block=plan.block,
            options=options,
            fingerprint=fingerprint,
            state=state,
            folder=str(folder.folder),
            name=folder.out.name,
            shard_size=recipe.output.shard_size,
            threads=threads,
            run=run,
            boot=boot_id(),
            versions=versions(),
        )
        self._merge = self._ray.put(merge)
        self._idle = []
        self._running = {actor.open.remote(self._merge): (actor, []) for actor in self._actors[: self._count]}
        self._wait_for_worker(threads)
        self.seconds += time.perf_counter() - start

    def reduce(self, plan: Plan, function: BlockFunction, blocks: Sequence[Block], advance: Advance = ignore) -> Any:
        """Return the sum of ``function(plan, block, buffers)`` over blocks."""
        parts = []
        with closing(self._map(plan, self._cut(blocks, _entries(blocks)), function, None)) as results:
            for _, part, read in results:
                advance(read)
                parts.append(part)
        return add_up(parts)

    def merge(
        self,
        plan: Plan,
        statistics: Statistics,
        blocks: Sequence[Block],
        output: Output | AdapterOutput,
        options: MergeOptions,
        advance: Advance = ignore,
    ) -> None:
        """Merge blocks and write them to the files of the output."""
        assert isinstance(output, Output)  # adapters are written by the local engine alone
        output.files.close()  # so that every machine sees them
        files = {block.job.name: output.files.model.locate(block.job.name) for block in blocks}
        in_file_order = sorted(blocks, key=lambda block: (*files[block.job.name], block.start))
        shares: list[list[Block]] = []
        for _, group in groupby(in_file_order, lambda block: files[block.job.name][0]):
            shares += self._cut(list(group), _entries(blocks))
        with closing(self._map(plan, shares, None, statistics)) as results:
            for share, _, read in results:
                output.done([block.number for block in share])
                advance(read)

    def _cut(self, blocks: Sequence[Block], total: int) -> list[list[Block]]:
        """Cut blocks, in their order, into shares. There are some for every worker until the end."""
        limit = min(MAX_ENTRIES, total // (SHARES_PER_WORKER * self._count))
        shares: list[list[Block]] = []
        entries = limit
        for block in blocks:
            if entries >= limit:
                shares.append([])
                entries = 0
            shares[-1].append(block)
            entries += block.stop - block.start
        return shares

    def _map(
        self, plan: Plan, shares: Sequence[list[Block]], function: BlockFunction | None, statistics: Statistics | None
    ) -> Generator[tuple[list[Block], Any, int], None, None]:
        """Run a task for each share, and yield it with its result and the bytes read, as the tasks end.

        Closing the generator ends the workers, so that none writes any more.
        """
        ray = self._ray
        function, statistics = ray.put(function), ray.put(statistics)
        waiting = deque(shares)
        try:
            while waiting or any(share for _, share in self._running.values()):
                while waiting and self._idle:
                    actor, share = self._idle.pop(), waiting.popleft()
                    ranges: list[Range] = [(block.job.name, block.start, block.stop) for block in share]
                    damping = plan.inputs.mean_curvature
                    answer = actor.run.remote(self._merge, function, ranges, statistics, damping)
                    self._running[answer] = actor, share
                for share, result in self._answers(1.0):
                    if share:
                        yield (share, *result)
        except BaseException:
            self._kill_workers()
            raise

    def _answers(self, timeout: float) -> list[tuple[list[Block], Any]]:
        """Return the answers that arrive within some seconds: at most one, with its share."""
        answers, _ = self._ray.wait(list(self._running), timeout=timeout)
        results = []
        for answer in answers:
            actor, share = self._running.pop(answer)
            try:
                results.append((share, self._ray.get(answer)))
            except self._ray.exceptions.RayError as error:
                raise _translate(error, share) from error
            self._idle.append(actor)
        return results

    def _kill_workers(self) -> None:
        """End the workers, so that none writes any more."""
        actors, self._actors, self._idle = self._actors, [], []
        answers, self._running = list(self._running), {}
        with suppress(Exception):
            for actor in actors:
                self._ray.kill(actor)
            if answers:
                self._ray.wait(answers, num_returns=len(answers), timeout=5.0)

    def _connect(self) -> None:
        """Connect to a cluster, or start one on this machine. Nothing is reported to Ray's makers."""
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        settings: dict[str, Any] = {}
        if address == "local":
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            settings["num_cpus"] = max(cores, (self.threads or 1) * (self.workers or 1))
            settings["object_store_memory"] = OBJECT_STORE
        elif address != "auto":
            _check_address(address)
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM) if main else None
        try:
            self._ray.init(
                address=address, include_dashboard=False, log_to_driver=False, configure_logging=False, **settings
            )
        except (Exception, SystemExit) as error:
            raise MachineError(
                f"ray_address {address}: Ray cannot start or connect: {one_line(str(error))[:500]}. Start a cluster "
                "with `ray start --head`. If it requires a token, set RAY_AUTH_MODE=token."
            ) from error
        finally:
            if main:  # Ray installs its own handler
                self._handles_sigterm = handler in (None, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, self._stop if self._handles_sigterm else handler)

    def _stop(self, *_: object) -> None:
        """On SIGTERM, stop the workers and then end: the default handler would leave them running for a while."""
        self._stopped = True
        raise KeyboardInterrupt

    def _size(self) -> tuple[int, int]:
        """Return the number of workers and of threads of each."""
        cores = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        rooms = {threads: sum(node // threads for node in cores) for threads in (self.threads or 4, 3, 2, 1)}
        threads = self.threads or next((n for n in (4, 3, 2) if rooms[n] >= (self.workers or 1)), 1)
        workers = self.workers or rooms[threads]
        if not 0 < workers <= rooms[threads]:
            raise InputError(
                f"workers: the cluster has {sum(cores)} cores on {len(cores)} nodes, enough for {rooms[threads]} "
                f"workers of {threads} threads, not for {max(1, workers)}. Change workers or threads."
            )
        return workers, threads

    def _wait_for_worker(self, threads: int) -> None:
        """Raise if no worker starts, or if it cannot open the merge."""
        try:
            if self._answers(START_SECONDS):
                return
            free = int(self._ray.available_resources().get("CPU", 0))
            raise MachineError(
                f"no worker has started within {START_SECONDS:.0f} s: a worker takes {threads} cores, and {free} are "
                "free. Use fewer threads, or wait for other jobs."
            )
        except BaseException:
            self._kill_workers()
            raise


def _entries(blocks: Sequence[Block]) -> int:
    return sum(block.stop - block.start for block in blocks)


def _translate(error: Any, share: Sequence[Block]) -> GradmergeError:
    """Return the error of a worker as an error of this process."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, GradmergeError):
        return type(cause)(str(cause))
    if isinstance(cause, ImportError) or "ModuleNotFoundError" in str(error):
        reason = one_line(str(cause or error))[-300:]
        return InputError(f"a worker cannot import gradmerge ({reason}). Install the same packages everywhere.")
    if cause is not None:
        return MachineError(f"internal error on a worker: {error}")
    name = share[0].job.name if share else "opening the merge"
    reason = one_line(str(error))[:500]
    return MachineError(f"{name}: Ray failed, or workers died {RETRIES + 1} times at this tensor: {reason}")


def _check_address(address: str) -> None:
    """Raise if nothing listens at HOST:PORT. Ray itself would try for a while."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise InputError(f"ray_address {address}: pass HOST:PORT of the head node, such as 10.0.0.1:6379, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise MachineError(
            f"ray_address {address}: no Ray cluster answers ({error}). Start one with `ray start --head`."
        ) from error


def _import_ray() -> Any:
    """Import Ray without its messages and usage statistics."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # messages about workers that died
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the default of 15 starves workers beside other programs
    try:
        import ray
    except ImportError as error:
        raise InputError(f"engine ray: Ray is not installed ({error}). Run: pip install 'gradmerge[ray]'") from error
    logging.getLogger("ray").setLevel(logging.CRITICAL)
    return ray
