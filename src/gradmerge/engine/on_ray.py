"""Run a merge on a Ray cluster.

The driver, which is the process that the user starts, opens the plan, creates the output files and keeps the journal.
It cuts the work into shares, byte ranges of the output files, and maps a Ray task over them. Ray places the tasks, and
repeats a task whose process died. Each process opens the plan itself, from the recipe, and writes into the files of the
driver on a shared file system. A share is in the journal after its task has ended, and by then it is on the disk.
"""

from __future__ import annotations

import functools
import logging
import operator
import os
import platform
import signal
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import GradmergeError, InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..recipe import make_recipe
from ..text import one_line
from .executor import Advance, BlockFunction, BlockOutput, LocalExecutor, allow_many_files, available_cores, ignore
from .input_state import State, changed, files_read, fingerprint_of, state_of
from .jobs import Block
from .output import Output, WeightFiles, boot_id, read_header
from .plan import Plan, open_plan
from .statistics import Statistics

#: Entries of a share: at most, and so few that each worker has this many shares.
MAX_ENTRIES, SHARES = 1 << 27, 16
#: How often a share is repeated after its process died.
RETRIES = 3
#: Seconds until a worker must see the folder of the driver.
FOLDER_DELAY = 10.0
#: Bytes of the object store of a cluster of our own. Statistics pass through it, tensors do not.
OBJECT_STORE = 200_000_000

Range = tuple[str, int, int]
"""The name of a tensor, its first entry and one past the last."""
Work = tuple[BlockFunction | None, Statistics, float | None]
"""The function to reduce (None to merge), and what is known already: statistics and the mean curvature."""


@dataclass(frozen=True)
class MergeTask:
    """A merge as the driver describes it to the other processes."""

    recipe: dict[str, Any]
    recipe_folder: str
    """Where relative paths of the recipe start."""
    merged_folders: dict[str, str]
    """Results of named recipes."""
    plan_options: dict[str, Any]
    """Options of :func:`gradmerge.engine.plan.open_plan`."""
    block: int
    allow_nonfinite: bool
    fingerprint: str
    state: State
    """Size and modification time of every input, as the driver sees them."""
    folder: str
    """The unfinished folder, in which the driver has created the files."""
    name: str
    """The name of the result."""
    threads: int


class MergeWorker:
    """A merge that a process of the cluster has opened."""

    def __init__(self, task: MergeTask) -> None:
        """Raise if this machine differs from the driver's."""
        allow_many_files()
        self.task, self.executor = task, LocalExecutor(task.threads)
        recipe = make_recipe(task.recipe, folder=Path(task.recipe_folder), allow_code=True)
        recipe = recipe.with_merged_folders({name: Path(path) for name, path in task.merged_folders.items()})
        try:
            self.plan = open_plan(recipe, **task.plan_options)
        except InputError as error:
            raise _unlike(str(error)) from error
        self.plan.block, self.plan.allow_nonfinite = task.block, task.allow_nonfinite
        ours, theirs = ([entry[:3] for entry in state] for state in (state_of(files_read(self.plan)), task.state))
        if path := changed(ours, theirs):  # inodes may differ
            raise _unlike(f"{path}: is missing, or differs from the driver's file in size or modification time")
        if fingerprint_of(self.plan, task.state) != task.fingerprint:
            raise _unlike("the recipe and its models are read differently. Install the same packages everywhere.")

    def merge(self, blocks: Sequence[Block], advance: Advance) -> None:
        """Merge blocks into the files of the driver."""
        task, folder = self.task, Path(self.task.folder)
        deadline = time.monotonic() + FOLDER_DELAY  # network file systems take a moment
        while (header := read_header(folder)).get("fingerprint") != task.fingerprint:
            if time.monotonic() > deadline:
                raise _unlike(
                    f"{folder}: is not the folder of this merge. Choose an output on a file system that all machines "
                    "share under the same path, and do not start two merges to it."
                )
            time.sleep(0.2)
        files = WeightFiles(self.plan, folder, task.name)
        try:
            self.executor.merge(self.plan, blocks, files, advance)
        finally:
            # If this machine crashes, the journal, which the driver writes, must not name blocks that are lost.
            files.close(sync=not header["boot"] or header["boot"] != boot_id())


_opened: list[MergeWorker] = []
"""The merge that this process has opened."""


def run_share(task: MergeTask, work: Work, ranges: Sequence[Range]) -> tuple[Any, int]:
    """Reduce a function over ranges of tensors, or without a function, merge them and write them to the output.

    Returns:
        The sum of the function's results (None for a merge), and the number of bytes read.
    """
    if not _opened or _opened[0].task != task:
        while _opened:
            _opened.pop().plan.inputs.close()
        _opened.append(MergeWorker(task))
    worker, plan, read = _opened[0], _opened[0].plan, list[int]()
    function, plan.statistics, plan.inputs.mean_curvature = work
    jobs = {job.name: job for job in plan.jobs}
    blocks = [Block(jobs[name], start, stop) for name, start, stop in ranges]
    if function is not None:
        return worker.executor.reduce(plan, function, blocks, read.append), sum(read)
    worker.merge(blocks, read.append)
    return None, sum(read)


@dataclass
class RayCluster:
    """Reduces and merges on an existing cluster, or on one that it starts on this machine."""

    workers: int | None = None
    """By default as many as the cluster has cores for."""
    threads: int | None = None
    """Of each worker; by default at most 4."""
    address: str | None = None
    """HOST:PORT, or ``auto``; by default RAY_ADDRESS. Without either, a cluster starts on this machine."""
    allowed: dict[str, Any] = field(default_factory=dict)
    """Options of :func:`gradmerge.engine.plan.open_plan`."""

    def __enter__(self) -> RayCluster:
        self._ray = _import_ray()
        self._ours = not self._ray.is_initialized()
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours and self._ray.is_initialized():
            with suppress(Exception):
                self._ray.shutdown()

    def begin(self, plan: Plan, folder: AtomicDir, fingerprint: str, state: State) -> None:
        """Start the cluster, and describe the merge to it."""
        if not self._ray.is_initialized():
            self._connect()
        self._in_parallel, threads = self._size()
        recipe = plan.recipe
        task = MergeTask(
            recipe=recipe.to_dict(),
            recipe_folder=str(recipe.folder.absolute()),
            merged_folders={name: str(folder) for name, folder in recipe.merged_folders.items()},
            plan_options={**self.allowed, "allow_config": list(self.allowed.get("allow_config", ()))},
            block=plan.block,
            allow_nonfinite=plan.allow_nonfinite,
            fingerprint=fingerprint,
            state=state,
            folder=str(folder.folder),
            name=folder.out.name,
            threads=threads,
        )
        self._task = self._ray.put(task)
        remote = self._ray.remote(num_cpus=threads, max_retries=RETRIES, scheduling_strategy="SPREAD")
        self._run = remote(run_share)

    def reduce(self, plan: Plan, function: BlockFunction, blocks: Iterable[Block], advance: Advance = ignore) -> Any:
        """Return the sum of ``function(plan, block, buffers)`` over blocks."""
        parts = []
        with closing(self._map(plan, blocks, function)) as results:
            for _, part, read in results:
                advance(read)
                parts.append(part)
        return functools.reduce(operator.iadd, parts) if parts else []

    def merge(self, plan: Plan, blocks: Iterable[Block], output: BlockOutput, advance: Advance = ignore) -> None:
        """Merge blocks. The workers write them to the files of the output."""
        assert isinstance(output, Output)
        output.files.close()  # so that every machine sees them
        with closing(self._map(plan, blocks, None)) as results:
            for share, _, read in results:
                output.record_blocks(share)
                advance(read)

    def _cut(self, blocks: Iterable[Block]) -> list[list[Block]]:
        """Cut blocks, in their order, into shares. There are some for each worker until the end."""
        every = list(blocks)
        limit = min(MAX_ENTRIES, sum(block.stop - block.start for block in every) // (SHARES * self._in_parallel))
        shares: list[list[Block]] = []
        entries = limit
        for block in every:
            if entries >= limit:
                shares.append([])
                entries = 0
            shares[-1].append(block)
            entries += block.stop - block.start
        return shares

    def _map(
        self, plan: Plan, blocks: Iterable[Block], function: BlockFunction | None
    ) -> Generator[tuple[list[Block], Any, int], None, None]:
        """Run a task for each share of the blocks, and yield it with its result and the bytes read, as the tasks end.

        An error ends the other tasks, so that none writes any more.
        """
        work = self._ray.put((function, plan.statistics, plan.inputs.mean_curvature))
        waiting, running = deque(self._cut(blocks)), dict[Any, list[Block]]()
        try:
            while waiting or running:
                while waiting and len(running) < self._in_parallel:
                    share = waiting.popleft()
                    ranges: list[Range] = [(block.job.name, block.start, block.stop) for block in share]
                    running[self._run.remote(self._task, work, ranges)] = share
                for answer in self._ray.wait(list(running), timeout=1.0)[0]:
                    share = running.pop(answer)
                    yield (share, *self._ray.get(answer))
        except BaseException as error:
            with suppress(Exception):
                for answer in running:
                    self._ray.cancel(answer, force=True)
                self._ray.wait(list(running), num_returns=len(running), timeout=5.0)
            if isinstance(error, self._ray.exceptions.RayError):
                raise _translate(error) from error
            raise

    def _connect(self) -> None:
        """Connect to a cluster, or start one on this machine."""
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        settings: dict[str, Any] = {}
        if address == "local":
            cores = max(available_cores(), (self.workers or 1) * (self.threads or 1))
            settings = {"num_cpus": cores, "object_store_memory": OBJECT_STORE}
        main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM) if main else None
        try:
            self._ray.init(
                address=address, include_dashboard=False, log_to_driver=False, configure_logging=False, **settings
            )
        except (Exception, SystemExit) as error:
            raise MachineError(
                f"ray_address {address}: Ray cannot start or connect: {one_line(str(error))[:500]}. Start a cluster "
                "with `ray start --head`, and pass HOST:PORT of its head node, or auto. If it requires a token, set "
                "RAY_AUTH_MODE=token."
            ) from error
        if main:  # Ray installs its own handler. The default one would leave the workers running for a while.
            default = handler in (None, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.default_int_handler if default else handler)

    def _size(self) -> tuple[int, int]:
        """Return the number of workers and of threads of each."""
        cores = [int(node["Resources"].get("CPU", 0)) for node in self._ray.nodes() if node["Alive"]]
        threads = self.threads or max(1, min(4, sum(cores) // (self.workers or 1)))
        possible = sum(node // threads for node in cores)
        workers = self.workers or possible
        if not 0 < workers <= possible:
            raise InputError(
                f"workers: the cluster has {sum(cores)} cores on {len(cores)} nodes, enough for {possible} workers of "
                f"{threads} threads, not for {max(1, workers)}. Change workers or threads."
            )
        return workers, threads


def _translate(error: Any) -> GradmergeError:
    """Return the error of a worker as an error of this process."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, GradmergeError):
        return type(cause)(str(cause))
    return MachineError(
        f"a worker failed, or died {RETRIES + 1} times at the same share: {one_line(str(error))[-500:]}. Install the "
        "same packages on all machines."
    )


def _unlike(message: str) -> InputError:
    advice = "All workers read the inputs and write the output under the same paths as the driver."
    return InputError(f"worker on {platform.node()}: {message}\n  {advice}")


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
