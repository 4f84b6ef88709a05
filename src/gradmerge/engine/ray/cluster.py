"""A merge on a Ray cluster: workers on any machine each do a share of it, and this process keeps the journal.

The driver cuts the work into shares, the units of a result by its files. Workers open the plan themselves, from the
recipe, and write into the files that the driver has made, on a file system that all machines have. A share is in the
journal once its worker has answered; the shares of a worker that dies are given to another.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from ...io.atomic_dir import AtomicDir
from ...recipe import Recipe, reduction_factor
from ..input_state import State
from ..plan.jobs import MergeOptions
from ..plan.plan import Block, Plan
from ..run.output import Output
from ..run.reduce import Advance, BlockFunction, add_up, ignore
from ..run.statistics import Statistics
from .crew import Crew
from .worker import Order, Run

#: Entries that a worker takes at a time, at most; and into how many shares for each worker the work is cut at least.
SHARE, SHARES = 1 << 27, 16


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
    """Options of :func:`gradmerge.engine.plan.build.open_plan`."""
    seconds: float = 0.0
    """What starting Ray and the first worker took."""

    def __enter__(self) -> RayCluster:
        begun = time.perf_counter()
        self.crew = Crew(self.workers, self.threads, self.address)
        self.seconds = time.perf_counter() - begun
        return self

    def __exit__(self, *_: object) -> None:
        self.crew.close()

    def begin(
        self, recipe: Recipe, plan: Plan, staging: AtomicDir, fingerprint: str, state: State, finite: bool
    ) -> None:
        """Have the workers open a merge; back when the first of them has. Others may come later.

        The cluster starts here: whatever is wrong with the recipe has been said by then.
        """
        begun = time.perf_counter()
        run = secrets.token_hex(16)
        staging.sign(run)
        order = Order(
            recipe=recipe.to_dict(),
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
        self.crew.open(asdict(order))
        self.seconds += time.perf_counter() - begun

    def reduce(self, plan: Plan, function: BlockFunction, blocks: Sequence[Block], advance: Advance = ignore) -> Any:
        """Return the sum of ``function(plan, block, buffers)`` over blocks, computed by the workers."""
        runs = [(block.job.name, block.start, block.stop) for block in blocks]
        total = sum(stop - start for _, start, stop in runs)
        damping, parts = plan.inputs.mean_curvature, []
        with closing(self.crew.run(self._cut(runs, total), function, None, damping)) as answers:
            for _, (part, read) in answers:
                advance(read)
                parts.append(part)
        return add_up(parts)

    def merge(
        self,
        plan: Plan,
        statistics: Statistics,
        blocks: Sequence[Block],
        output: Output,
        options: MergeOptions,
        advance: Advance = ignore,
    ) -> None:
        """Have the workers merge blocks and write them into the output's files."""
        output.files.close()  # so that every machine sees them
        numbers = {(block.job.name, block.start): block.number for block in blocks}
        files = {block.job.name: output.files.place(block.job.name) for block in blocks}
        placed = sorted(blocks, key=lambda block: (*files[block.job.name], block.start))
        total = sum(block.stop - block.start for block in blocks)
        shares: list[list[Run]] = []
        for _, own in groupby(placed, lambda block: files[block.job.name][0]):
            shares += self._cut([(block.job.name, block.start, block.stop) for block in own], total)
        with closing(self.crew.run(shares, None, statistics, plan.inputs.mean_curvature)) as answers:
            for share, (_, read) in answers:
                output.done([numbers[name, start] for name, start, _ in share])
                advance(read)

    def _cut(self, runs: Sequence[Run], total: int) -> list[list[Run]]:
        """Shares of runs, in their order: of all entries, so few in each that every worker has some until the end."""
        limit = min(SHARE, total // (SHARES * (self.crew.workers or 1)))
        shares: list[list[Run]] = []
        entries = limit
        for run in runs:
            if entries >= limit:
                shares.append([])
                entries = 0
            shares[-1].append(run)
            entries += run[2] - run[1]
        return shares
