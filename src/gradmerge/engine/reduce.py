"""Reductions over blocks: the one function that computes sums, norms and counts over whole tensors and models."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ..checkpoints.checkpoint import Buffers
from .jobs import Block, Job
from .plan import Plan
from .thread_pool import run_parallel

CHUNK = 1 << 19
"""Entries of a block in reductions. It is fixed, so that sums do not depend on the block size of the merge."""

Advance = Callable[[int], None]
"""Reports how many more bytes have been read."""
BlockFunction = Callable[[Plan, Block, Buffers], Any]
"""Computes the part of one block: a list, or something else with ``+=``. Ray pickles it."""


def ignore(nbytes: int) -> None:
    """Report nothing."""


class Reduce(Protocol):
    """Reduces over blocks, on this machine or on a cluster."""

    def __call__(
        self, plan: Plan, function: BlockFunction, blocks: Sequence[Block], advance: Advance = ignore
    ) -> Any: ...


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
    sums: list[list[Any]] = []
    sizes = {job.name: plan.bytes_read(job) for job in plan.jobs}
    lock = threading.Lock()

    def make_worker() -> Callable[[Block], None]:
        buffers, partial = Buffers(), list[Any]()
        sums.append(partial)

        def work(block: Block) -> None:
            part = function(plan, block, buffers)
            if partial:
                partial[0] += part
            else:
                partial.append(part)
            with lock:
                advance(share_of(sizes[block.job.name], block))

        return work

    run_parallel(blocks, make_worker, threads)
    return add_up(partial[0] for partial in sums if partial)


def add_up(parts: Iterable[Any]) -> Any:
    """Return the sum of parts of a reduction."""
    total: Any = None
    for part in parts:
        if total is None:
            total = part
        else:
            total += part
    return [] if total is None else total


def share_of(nbytes: int, block: Block) -> int:
    """Return the share of a block in the bytes that are read for its job."""
    return nbytes * (block.stop - block.start) // max(1, block.job.info.numel)


def whole_tensors(jobs: Iterable[Job]) -> list[Block]:
    """Return a block for each whole tensor, the largest first, so that all threads end at about the same time."""
    blocks = [Block(-1, job, 0, job.info.numel) for job in jobs]
    return sorted(blocks, key=lambda block: -block.stop)


def chunks(plan: Plan, size: int | None = None) -> list[Block]:
    """Return blocks of a size (by default CHUNK) over all merged tensors; layers are not cut."""
    size = size or CHUNK
    blocks = [
        Block(-1, job, start, min(start + size, job.info.numel))
        for job in plan.block_jobs
        for start in range(0, job.info.numel, size)
    ]
    return blocks + whole_tensors(plan.layers)


def exact_sum(values: Iterable[float]) -> float:
    """Return the sum of floats, rounded once, so that it does not depend on their order."""
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is larger than any number
        return math.nan
