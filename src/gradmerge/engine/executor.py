"""Work on the blocks of a plan on threads of this process: sums over blocks, and the merge itself."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import torch

from ..checkpoints.checkpoint import Buffers
from .jobs import Block, Job, MergedBlock

if TYPE_CHECKING:
    from .on_ray import RayCluster
    from .plan import Plan

CHUNK = 1 << 19
"""Entries of a block in reductions. It is fixed, so that sums do not depend on the block size of the merge."""
SWITCH_INTERVAL = 5e-5
"""Seconds after which a thread that waits for the interpreter's lock gets it. Python's default of 5 ms is as long as
several blocks, and an operation on a block takes a hundredth of that."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

Item = TypeVar("Item")
Advance = Callable[[int], None]
"""Called with the number of bytes read since the last call."""
BlockFunction = Callable[["Plan", Block, Buffers], Any]
"""Computes the part of a sum for one block: a list, or another object with ``+=``. Ray pickles it."""
Executor: TypeAlias = "LocalExecutor | RayCluster"
"""Reduces and merges blocks, on this machine or on a cluster."""


class BlockOutput(Protocol):
    """Receives merged blocks."""

    def put(self, merged: MergedBlock) -> None:
        """Take a merged block. Several threads call it at once, in any order of the blocks."""


def ignore(nbytes: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class LocalExecutor:
    """Reduces and merges blocks on threads of this process."""

    threads: int = 1

    def __enter__(self) -> LocalExecutor:
        return self

    def __exit__(self, *_: object) -> None:
        """Do nothing. A cluster ends here."""

    def begin(self, *merge: object) -> None:
        """Do nothing. A cluster starts its workers here."""

    def reduce(self, plan: Plan, function: BlockFunction, blocks: Iterable[Block], advance: Advance = ignore) -> Any:
        """Return the sum of ``function(plan, block, buffers)`` over blocks; an empty list without any block.

        The parts are added with ``+=`` in any order. So the function returns integers or a list. Lists are
        concatenated: sum their floats with :func:`exact_sum`, and the result does not depend on the threads.
        """
        total: Any = None
        lock = threading.Lock()

        def add(block: Block, buffers: Buffers) -> None:
            nonlocal total
            part = function(plan, block, buffers)
            with lock:
                if total is None:
                    total = part
                else:
                    total += part

        self._run(plan, add, blocks, advance)
        return [] if total is None else total

    def merge(self, plan: Plan, blocks: Iterable[Block], output: BlockOutput, advance: Advance = ignore) -> None:
        """Merge blocks, and pass each result to ``output.put``.

        The result does not depend on the number of threads.
        """
        next_jobs = dict(zip((job.name for job in plan.jobs), plan.jobs[2:], strict=False))
        if plan.device.type == "cuda":  # torch loads its linear algebra at the first use: not in two threads
            torch.linalg.eigvalsh(torch.eye(2, device=plan.device))

        def merge(block: Block, buffers: Buffers) -> None:
            if block.start == 0 and block.job.name in next_jobs:
                read_ahead(plan, next_jobs[block.job.name])
            output.put(block.job.merge(plan, block, buffers))

        self._run(plan, merge, blocks, advance)

    def _run(
        self, plan: Plan, work: Callable[[Block, Buffers], None], blocks: Iterable[Block], advance: Advance
    ) -> None:
        """Call a function on every block, and report the bytes that it has read."""
        sizes = {job.name: job.bytes_read(plan) for job in plan.jobs}
        lock = threading.Lock()

        def work_and_report(block: Block, buffers: Buffers) -> None:
            work(block, buffers)
            share = (block.stop - block.start) / max(1, block.job.info.numel)
            with lock:
                advance(int(sizes[block.job.name] * share))

        run_parallel(blocks, work_and_report, self.threads)


def read_ahead(plan: Plan, job: Job) -> None:
    """Ask the operating system for a job's inputs, so that the disk works while the processor does."""
    for name in job.tensors:
        for checkpoint in plan.inputs.checkpoints:
            checkpoint.will_need(name)
    for source in plan.inputs.curvatures:
        source.will_need(job.name)


# Blocks of reductions, and exact sums


def whole_tensors(jobs: Iterable[Job]) -> list[Block]:
    """Return a block for each whole tensor, the largest first, so that all threads end at about the same time."""
    return sorted((Block(job, 0, job.info.numel) for job in jobs), key=lambda block: -block.stop)


def chunks(plan: Plan, size: int = CHUNK) -> list[Block]:
    """Return blocks of a size over all merged tensors; layers are not cut."""
    blocks = [block for job in plan.block_jobs for block in job.split(size)]
    return blocks + whole_tensors(plan.layer_jobs)


def sample_blocks(jobs: Iterable[Job], length: int, step: int) -> Iterator[Block]:
    """Yield blocks of a length that begin every ``step`` entries of some tensors; all entries if they are equal."""
    position = 0
    for job in jobs:
        while position < job.info.numel:
            block = Block(job, position, min(position + length, job.info.numel))
            yield block
            position = block.stop if step <= length else position + step
        position -= job.info.numel


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of floats, rounded once, so that it does not depend on their order."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is larger than any number
        return math.nan


# Threads


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Make PyTorch compute on the calling thread only, and switch between threads often; restore both at the end."""
    before, interval = torch.get_num_threads(), sys.getswitchinterval()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        sys.setswitchinterval(interval)


@one_thread_each()
def run_parallel(items: Iterable[Item], work: Callable[[Item, Buffers], None], threads: int) -> None:
    """Call ``work`` on every item, on several threads that take the items in order. Each thread has its own buffers.

    The first error stops all threads and is raised here, and so is Ctrl-C.
    """
    _keep_freed_memory()
    stream = iter(items)
    lock = threading.Lock()
    stop = threading.Event()

    def drain() -> None:
        buffers = Buffers()
        while not stop.is_set():
            with lock:
                item = next(stream, None)
            if item is None:
                return
            work(item, buffers)

    with ThreadPoolExecutor(threads, "gradmerge", functools.partial(torch.set_num_threads, 1)) as pool:
        try:
            for future in as_completed([pool.submit(drain) for _ in range(threads)]):
                future.result()
        finally:
            stop.set()


@functools.cache
def _keep_freed_memory() -> None:
    """Make glibc reuse freed blocks instead of returning them to the system; does nothing with other C libraries.

    By default glibc maps new memory for each allocation of a megabyte, and the page faults take several times as long
    as the arithmetic.
    """
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_M_MMAP_THRESHOLD, 1 << 28)
            mallopt(_M_TRIM_THRESHOLD, 1 << 28)


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allow_many_files() -> None:
    """Raise the limit on open files: every shard stays open, and large models have many."""
    with contextlib.suppress(OSError, ValueError):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
        if soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
