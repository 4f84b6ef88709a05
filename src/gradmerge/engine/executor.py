"""Work on the blocks of a plan, on threads of this process: sums over blocks, and the merge itself."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..checkpoints.checkpoint import Buffers
from .jobs import Block, Job, MergedBlock, MergeOptions
from .plan import Plan
from .thread_pool import run_parallel, with_buffers

if TYPE_CHECKING:
    from .on_ray import RayCluster
    from .output import Output
    from .statistics import Statistics

CHUNK = 1 << 19
"""Entries of a block in reductions. It is fixed, so that sums do not depend on the block size of the merge."""

Advance = Callable[[int], None]
"""Reports how many more bytes have been read."""
BlockFunction = Callable[[Plan, Block, Buffers], Any]
"""Computes the part of one block: a list, or something else with ``+=``. Ray pickles it."""
Executor: TypeAlias = "LocalExecutor | RayCluster"
"""Reduces and merges blocks, on this machine or on a cluster."""


def ignore(nbytes: int) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class LocalExecutor:
    """Reduces and merges blocks on threads of this process."""

    threads: int = 1

    def reduce(self, plan: Plan, function: BlockFunction, blocks: Sequence[Block], advance: Advance = ignore) -> Any:
        """Return the sum of ``function(plan, block, buffers)`` over blocks, see :func:`reduce_blocks`."""
        return reduce_blocks(plan, function, blocks, self.threads, advance)

    def merge(
        self,
        plan: Plan,
        statistics: Statistics,
        blocks: Sequence[Block],
        output: Output,
        options: MergeOptions,
        advance: Advance = ignore,
    ) -> None:
        """Merge blocks and write them to the output."""
        merge_blocks(
            plan, statistics, output.put, blocks=blocks, threads=self.threads, options=options, advance=advance
        )


def merge_blocks(
    plan: Plan,
    statistics: Statistics,
    put: Callable[[MergedBlock], None],
    *,
    blocks: Iterable[Block] | None = None,
    threads: int = 1,
    options: MergeOptions = MergeOptions(),  # noqa: B008 (immutable)
    advance: Advance = ignore,
) -> None:
    """Merge blocks (by default all) and ``put`` each result, from several threads and in any order.

    The result of a block depends on the plan alone, not on the number of threads.
    """
    next_jobs = dict(zip((job.name for job in plan.jobs), plan.jobs[2:], strict=False))
    if options.device.type == "cuda":  # torch loads its linear algebra at the first use, which two threads must not do
        torch.linalg.eigvalsh(torch.eye(2, device=options.device))

    def merge(buffers: Buffers, block: Block) -> None:
        if block.start == 0 and block.job.name in next_jobs:
            read_ahead(plan, next_jobs[block.job.name])
        put(block.job.merge(plan, block, statistics, buffers, options))

    _run(plan, merge, plan.blocks() if blocks is None else blocks, threads, advance)


def reduce_blocks(
    plan: Plan,
    function: BlockFunction,
    blocks: Iterable[Block],
    threads: int = 1,
    advance: Advance = ignore,
) -> Any:
    """Return the sum of ``function(plan, block, buffers)`` over blocks; an empty list without any block.

    The parts are added with ``+=`` in any order, so that a function returns a list, which is concatenated, or integers.
    Then the result does not depend on the number of threads: sum floats of a list with :func:`exact_sum`.
    """
    totals: list[Any] = []
    lock = threading.Lock()

    def add(buffers: Buffers, block: Block) -> None:
        part = function(plan, block, buffers)
        with lock:
            if totals:
                totals[0] += part
            else:
                totals.append(part)

    _run(plan, add, blocks, threads, advance)
    return totals[0] if totals else []


def _run(
    plan: Plan, work: Callable[[Buffers, Block], None], blocks: Iterable[Block], threads: int, advance: Advance
) -> None:
    """Call a function on every block, and report the bytes that it has read."""
    sizes = {job.name: plan.bytes_read(job) for job in plan.jobs}
    lock = threading.Lock()

    def work_and_report(buffers: Buffers, block: Block) -> None:
        work(buffers, block)
        share = (block.stop - block.start) / max(1, block.job.info.numel)
        with lock:
            advance(int(sizes[block.job.name] * share))

    run_parallel(blocks, with_buffers(work_and_report), threads)


def read_ahead(plan: Plan, job: Job) -> None:
    """Ask the operating system for a job's inputs, so that the disk works while the processor does."""
    for name in job.tensors:
        for checkpoint in plan.inputs.checkpoints:
            checkpoint.will_need(plan.inputs.stored_name(checkpoint, name))
    for source in plan.inputs.curvatures:
        source.will_need(job.name)


def add_up(parts: Iterable[Any]) -> Any:
    """Return the sum of parts of a reduction; an empty list without any part."""
    parts = iter(parts)
    total: Any = next(parts, [])
    for part in parts:
        total += part
    return total


def whole_tensors(jobs: Iterable[Job]) -> list[Block]:
    """Return a block for each whole tensor, the largest first, so that all threads end at about the same time."""
    blocks = [Block(-1, job, 0, job.info.numel) for job in jobs]
    return sorted(blocks, key=lambda block: -block.stop)


def chunks(plan: Plan, size: int | None = None) -> list[Block]:
    """Return blocks of a size (by default CHUNK) over all merged tensors; layers are not cut."""
    blocks = [Block(-1, job, *range_) for job in plan.block_jobs for range_ in job.cut(size or CHUNK)]
    return blocks + whole_tensors(plan.kronecker_jobs)


def sample_blocks(jobs: Iterable[Job], length: int, step: int) -> Iterator[Block]:
    """Yield blocks of a length that begin every ``step`` entries of some tensors; all entries if they are equal."""
    position = 0
    for job in jobs:
        while position < job.info.numel:
            block = Block(-1, job, position, min(position + length, job.info.numel))
            yield block
            position = block.stop if step <= length else position + step
        position -= job.info.numel


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of floats, rounded once, so that it does not depend on their order."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is larger than any number
        return math.nan
