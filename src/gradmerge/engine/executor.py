"""Running blocks and reductions on the threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..checkpoints.checkpoint import Buffers
from .jobs import Block, Job, MergedBlock, MergeOptions
from .plan import Plan
from .reduce import Advance, BlockFunction, ignore, reduce_blocks, share_of
from .statistics import Statistics
from .thread_pool import run_parallel, with_buffers

if TYPE_CHECKING:
    from .adapter import AdapterOutput
    from .output import Output


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
    sizes = {job.name: plan.bytes_read(job) for job in plan.jobs}
    lock = threading.Lock()

    def work(buffers: Buffers, block: Block) -> None:
        job = block.job
        if block.start == 0 and job.name in next_jobs:
            read_ahead(plan, next_jobs[job.name])
        put(job.merge(plan, block, statistics, buffers, options))
        with lock:
            advance(share_of(sizes[job.name], block))

    run_parallel(plan.blocks() if blocks is None else blocks, with_buffers(work), threads)


def read_ahead(plan: Plan, job: Job) -> None:
    """Ask the operating system for a job's inputs, so that the disk works while the processor does."""
    for name in job.tensors:
        for checkpoint in plan.inputs.checkpoints:
            checkpoint.will_need(plan.inputs.stored_name(checkpoint, name))
    for source in plan.inputs.curvatures:
        source.will_need(job.name)


@dataclass
class LocalExecutor:
    """Merges and reduces on threads of this process."""

    threads: int = 1

    def reduce(self, plan: Plan, function: BlockFunction, blocks: Sequence[Block], advance: Advance = ignore) -> Any:
        """Return the sum of ``function(plan, block, buffers)`` over blocks, see :func:`reduce_blocks`."""
        return reduce_blocks(plan, function, blocks, self.threads, advance)

    def merge(
        self,
        plan: Plan,
        statistics: Statistics,
        blocks: Sequence[Block],
        output: Output | AdapterOutput,
        options: MergeOptions,
        advance: Advance = ignore,
    ) -> None:
        """Merge blocks and write them to the output."""
        merge_blocks(
            plan, statistics, output.put, blocks=blocks, threads=self.threads, options=options, advance=advance
        )
