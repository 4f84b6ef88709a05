"""A merge on a Ray cluster: workers on any machine each do a share of it, and this process keeps the journal.

The driver cuts the work into shares, the units of a result by its files. Workers open the plan themselves, from the
recipe, and write into the files that the driver has made, on a file system that all machines have. A share is in the
journal once its worker has answered; the shares of a worker that dies are given to another.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from ...io.atomic_dir import AtomicDir
from ...recipe import Recipe, reduction_factor
from ..input_state import State
from ..plan.plan import Plan, Unit
from ..run.output import Target
from ..run.reduce import Advance
from ..run.spreading import Part, Run
from ..run.statistics import Statistics, ThresholdSearches
from .crew import Crew
from .worker import Merging, Order

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

    def spread(self, plan: Plan, part: Part, runs: Sequence[Run], known: Any, advance: Advance) -> Iterator[Any]:
        """Map over runs on the workers, as :data:`gradmerge.engine.run.spreading.Spread` says."""
        total = sum(stop - start for _, start, stop in runs)
        with closing(self.crew.run(self._cut(runs, total), part, known, plan.inputs.mean_curvature)) as answers:
            for _, (found, read) in answers:
                advance(read)
                yield found

    def merge(
        self,
        plan: Plan,
        target: Target,
        units: Sequence[Unit],
        statistics: Statistics,
        search: ThresholdSearches | None,
        advance: Advance,
    ) -> None:
        """Have units merged and written into the target's files; ``search`` is told what was counted on the way."""
        target.files.close()  # so that every machine sees them
        numbers = {(unit.job.name, unit.start): unit.number for unit in units}
        files = {unit.job.name: target.files.place(unit.job.name) for unit in units}
        placed = sorted(units, key=lambda unit: (*files[unit.job.name], unit.start))
        total = sum(unit.stop - unit.start for unit in units)
        shares: list[list[Run]] = []
        for _, own in groupby(placed, lambda unit: files[unit.job.name][0]):
            shares += self._cut([(unit.job.name, unit.start, unit.stop) for unit in own], total)
        known = Merging(statistics, None if search is None else search.looks_for)
        with closing(self.crew.run(shares, None, known, plan.inputs.mean_curvature)) as answers:
            for share, (counts, read) in answers:
                target.done([numbers[name, start] for name, start, _ in share])
                if search is not None:
                    search.add(counts)
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
