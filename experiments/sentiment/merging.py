"""Every merge of the experiment, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

import gradmerge as gm

from ..common.states import read_state
from .data import BASE, SETS, TASKS

State = dict[str, Tensor]

#: What the tables call a method. "of four" leaves the base out of an average; the others count it as the fifth model.
RULES = {
    "average": "average",
    "fisher-averaging-mean": "Fisher averaging (mean)",
    "fisher-averaging-sum": "Fisher averaging (sum)",
    "regmean": "RegMean",
    "ties": "TIES (top 20 %)",
    "gradient-matching-identity": "gradient matching (N · I)",
    "gradient-matching-mean": "gradient matching (mean)",
    "average of four": "average",
    "fisher-averaging-mean of four": "Fisher averaging (mean)",
    "fisher-averaging-sum of four": "Fisher averaging (sum)",
    "regmean of four": "RegMean",
}
#: These are merged at many weights; at weight 1 they are rows of the tables too.
SWEPT = ("task-arithmetic", "gradient-matching")


@dataclass
class Parts:
    """What merges are made of, read from the stages when it is first needed."""

    models: Mapping[str, Path]
    """Folder of each data set's model; the base is that of IMDB."""
    curvatures: Mapping[str, Path]
    grams: Mapping[str, Path]
    rows: Mapping[str, int]
    """N of each training set."""
    damping: float
    density: float
    threads: int = 2

    @cached_property
    def base(self) -> State:
        return read_state(self.models[BASE])

    @cached_property
    def tuned(self) -> list[State]:
        return [read_state(self.models[name]) for name in TASKS]

    @cached_property
    def prior(self) -> gm.Curvature:
        return gm.Curvature.load(self.curvatures[BASE])

    @cached_property
    def curvature(self) -> list[gm.Curvature]:
        return [gm.Curvature.load(self.curvatures[name]) for name in TASKS]

    def merged(self, rule: str) -> State:
        """The state dict that a rule of ``RULES`` gives."""
        plain, _, only = rule.partition(" of ")
        return self._makers[plain](only == "four")

    def swept(self, method: str, weight: float) -> State:
        """Task arithmetic, or gradient matching with summed curvature, with one weight for all tasks."""
        weights = [weight] * len(TASKS)
        if method == "task-arithmetic":
            return self._merge(method, weights=weights)
        return self._merge(method, prior=self.prior, curvature=self.curvature, weights=weights)

    @property
    def _makers(self) -> dict[str, Callable[[bool], State]]:
        return {
            "average": lambda four: self._merge("average", options={"include_base": not four}),
            "fisher-averaging-mean": lambda four: self._fisher("mean", four),
            "fisher-averaging-sum": lambda four: self._fisher("sum", four),
            "regmean": self._regmean,
            "ties": lambda _: self._merge("ties", options={"density": self.density}),
            "gradient-matching-mean": lambda _: self._merge(
                "gradient-matching", prior=self.prior, curvature=self.curvature, reduction="mean"
            ),
            "gradient-matching-identity": lambda _: self._merge(
                "gradient-matching",
                prior=float(self.rows[BASE]),
                curvature=[float(self.rows[name]) for name in TASKS],
            ),
        }

    def _fisher(self, reduction: str, four: bool) -> State:
        how = {"reduction": reduction, "options": {"include_base": not four}}
        return self._merge("fisher-averaging", prior=self.prior, curvature=self.curvature, **how)

    def _regmean(self, four: bool) -> State:
        grams = [read_state(self.grams[name]) for name in (TASKS if four else SETS)]
        return self._merge("regmean", self.tuned if four else [self.base, *self.tuned], curvature=grams)

    def _merge(self, method: str, tuned: Sequence[State] | None = None, **more: Any) -> State:
        return gm.merge_state_dicts(
            self.base,
            self.tuned if tuned is None else tuned,
            method,
            damping=self.damping,
            threads=self.threads,
            **more,
        )
