"""Predictions while somebody waits: of large models, from a sample of the entries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from ..curvature.summary import group_of
from ..engine.jobs import Block, BlockJob, Job
from ..engine.plan import Plan
from ..recipe import Recipe
from .grid import Setting
from .predictor import Predictor
from .preview import Advance, Outcome

#: Entries that are looked at, about, where a model has more than twice as many.
ENTRIES = 4_000_000
#: Entries of one stretch of the sample.
RUN = 1 << 14


@dataclass
class SampledPlan(Plan):
    """A plan of which only some entries are looked at: stretches at even distances, as many of every large tensor.

    What a rule must see whole is looked at whole.
    """

    share: float = 1.0

    def blocks(self, size: int | None = None) -> Iterator[Block]:
        number = 0
        for job in self.jobs:
            for start in self._starts(job):
                yield Block(number, job, start, min(start + self._run(job), job.info.numel))
                number += 1

    def _run(self, job: Job) -> int:
        cut = isinstance(job, BlockJob) and job.granularity == "entries"
        return min(RUN, max(1, job.info.numel)) if cut else max(1, job.info.numel)

    def _starts(self, job: Job) -> list[int]:
        run = self._run(job)
        count = max(1, round(self.share * job.info.numel / run))
        return [k * (job.info.numel - run) // max(1, count - 1) for k in range(count)] if run < job.info.numel else [0]

    def scale(self, job: Job) -> float:
        """What a sum over the sample of a tensor is to be multiplied by."""
        return max(1, job.info.numel) / (len(self._starts(job)) * self._run(job))


class QuickPredictor(Predictor):
    """Predicts one setting at a time, layer by layer, on inputs that are open already."""

    def __init__(self, recipe: Recipe, plan: Plan, threads: int) -> None:
        entries = sum(job.info.numel for job in plan.merged)
        given = {one.name: getattr(plan, one.name) for one in fields(Plan)} | {"notes": []}
        share = min(1.0, ENTRIES / max(1, entries)) if entries > 2 * ENTRIES else 1.0
        sampled = SampledPlan(**given, share=share) if share < 1 else Plan(**given)
        super().__init__(recipe, [], threads=threads, plan=sampled)
        self.group_by = lambda name: name

    def look(self, settings: Sequence[Setting], advance: Advance = lambda done: None) -> list[Outcome]:
        rows = super().look(settings, advance)
        plan = self.plan
        scales = {job.name: plan.scale(job) for job in plan.merged} if isinstance(plan, SampledPlan) else {}
        for row in rows:
            layers: dict[str, dict[str, float]] = {}
            for name, costs in row.parts.items():
                layer = layers.setdefault(group_of(name), dict.fromkeys(costs, 0.0))
                for task, cost in costs.items():
                    layer[task] += cost * scales.get(name, 1.0)
            row.parts = layers
            row.costs = {task: sum(layer[task] for layer in layers.values()) for task in row.costs}
            row.values = dict(row.costs)
        return rows
