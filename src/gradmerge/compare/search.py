"""A search for the weights with the smallest loss of the worst task, or the smallest sum over tasks.

A first round looks at points that fill the ranges and at the diagonal, where all weights are the same; each further
round at points around the best one, and at the best points of quadratics through what is known. All points of a round
are looked at together, which without data is one pass over the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..display import Displayed, View
from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe, Varying, in_words
from .grid import Setting, Space, settings_of, takes_weights
from .preview import Looker, Outcome, Preview, make_preview, reference_setting, score_by_costs, worst_or_sum
from .sweeps import Changes
from .weight_ranges import HIGH, LOW, Range, Ranges, rounded

OBJECTIVES = ("worst", "sum")
#: Points of the first round.
SAMPLES = 64
#: How far a round goes from the best point, as a share of the ranges.
RADII = (0.2, 0.05, 0.0125)
#: Weights of the diagonal in the first round, at most.
DIAGONAL = 16
#: Best points of the quadratics that each further round looks at.
GUESSES = 4


@dataclass(frozen=True, repr=False)
class Suggestion(Displayed):
    """Weights to merge with, and what was looked at to find them."""

    method: str
    weights: dict[str, Varying]
    """Task → weight; empty for a method that takes none."""
    objective: str
    """What is smallest there: the loss of the `worst` task, or the `sum`."""
    measured: bool
    """On data; else predicted from curvature."""
    costs: dict[str, float | None]
    """Task → predicted loss as a multiple of that of the recipe's own merge that the objective looks at, its worst
    task's or its sum; on data, the lost share of fine-tuning's gain."""
    evaluated: Preview
    """Every setting that was looked at."""

    def _line(self) -> list[str]:
        weights = " ".join(f"{task} {in_words(weight)}" for task, weight in self.weights.items())
        return [self.method, weights or "no weights", "measured" if self.measured else "predicted"]

    def _view(self) -> View:
        cost = "lost share of what fine-tuning gained" if self.measured else "predicted loss, × the recipe's merge"
        weights = {
            task: weight if isinstance(weight, float) else in_words(weight) for task, weight in self.weights.items()
        }
        rows = [[task, weights.get(task), self.costs.get(task)] for task in self.evaluated.tasks]
        return ["task", "weight", cost], rows, self.evaluated.verdict


def check_objective(objective: str) -> None:
    if objective not in OBJECTIVES:
        raise InputError(f"--objective {objective}: known are {', '.join(OBJECTIVES)}")


def search_ranges(ranges: Ranges | None, tasks: Sequence[str], recipe: Recipe) -> Ranges:
    """Return the ranges to search: those given, and 0 to 1.5 for the other tasks. Each task has its own weight."""
    anywhere = Range(LOW, HIGH)
    given = ranges or Ranges(tuple(tasks), tuple(recipe.weights))
    own = {task: given.own.get(task, given.shared or anywhere) for task in tasks}
    return replace(given, shared=None, own=own)


def suggest(
    recipe: Recipe,
    looker: Looker,
    methods: Sequence[str],
    ranges: Ranges,
    *,
    objective: str = "worst",
    fixed: Mapping[str, Changes] | None = None,
    progress: Progress,
) -> Suggestion:
    """Search weights for every method, and take the best.

    ``fixed`` are, by method, keys of the recipe that all its settings change.
    """
    check_objective(objective)
    if "removal" in methods:
        worse = "removal: its tasks are meant to become worse"
        raise InputError(f"{worse}, so that no weights are best for them; preview a range of strengths")
    if looker.measured and recipe.base is None:
        raise InputError(
            "the recipe names no base; how much of what fine-tuning gained is lost is not known without it"
        )
    space = Space(ranges, fixed=fixed or {})
    searches = [_WeightSearch(method, space, objective) for method in methods]
    reference = reference_setting(recipe, methods, space.fixed)
    expected = sum(search.expected for search in searches) + 1
    progress.begin("searching", expected)
    first = [setting for search in searches for setting in search.first()]
    rows = looker.look([reference, *(setting for setting in first if not setting.same(reference))], progress.advance)
    for round_, radius in enumerate(RADII):
        asked = [setting for search in searches for setting in search.further(rows, round_, radius)]
        if asked:
            rows += looker.look(asked, progress.advance)
    progress.advance(max(0, expected - len(rows)))  # points that were known already
    criterion = score_by_costs(rows, looker.measured, objective)
    for row in rows:
        position = ranges.position(row.setting.weights) if row.setting.weights else None
        row.setting = replace(row.setting, position=position)
    own = next((row for row in rows if row.setting.same(reference)), rows[0])
    if len(rows) > 1 and reference.weights and not ranges.holds(reference.weights):
        rows = [row for row in rows if row is not own]
    found = make_preview(recipe, looker, rows, own, ranges.axis, criterion)
    found.keeps_own = any(row is own for row in rows)
    best = found.best()
    if best is None:
        raise InputError("no setting gives a finite loss; are the models or their curvature damaged?")
    costs = {task: best.costs[task] if found.measured else found.relative(best, task) for task in found.tasks}
    return Suggestion(best.setting.method, found.weights(best), objective, found.measured, costs, found)


class _WeightSearch:
    """The search for the weights of one method."""

    def __init__(self, method: str, space: Space, objective: str) -> None:
        ranges = space.ranges
        self.method, self.space, self.ranges, self.objective = method, space, ranges, objective
        self._dimensions = [one for _, one in ranges.dimensions()]
        varying = [i for i, one in enumerate(self._dimensions) if one.high > one.low]
        self._free = varying if takes_weights(method) else []
        self._lows = torch.tensor([one.low for one in self._dimensions], dtype=torch.float64)
        self._widths = torch.tensor([one.high for one in self._dimensions], dtype=torch.float64) - self._lows
        self._points = SobolEngine(max(1, len(self._free)), scramble=True, seed=0)
        self._seen: set[tuple[Varying, ...]] = set()

    @property
    def expected(self) -> int:
        further = len(RADII) * (SAMPLES // 2 + GUESSES)
        return SAMPLES + DIAGONAL + further if self._free else 1

    def first(self) -> list[Setting]:
        """Points that fill the ranges, and the diagonal."""
        if not self._free:
            return settings_of(self.method, self.space, [self._weights(self._lows)])
        steps = torch.linspace(0, 1, DIAGONAL, dtype=torch.float64)
        diagonal = steps[:, None].expand(-1, len(self._free))
        if len({(self._dimensions[i].low, self._dimensions[i].high) for i in self._free}) > 1:
            low = max(self._dimensions[i].low for i in self._free)
            high = min(self._dimensions[i].high for i in self._free)
            same = low + steps[:, None] * (high - low)
            diagonal = (same - self._lows[self._free]) / self._widths[self._free] if high > low else diagonal
        return self._settings(torch.cat([self._points.draw(SAMPLES, dtype=torch.float64), diagonal]))

    def further(self, rows: Sequence[Outcome], round_: int, radius: float) -> list[Setting]:
        """Points around the best so far, and the best points of quadratics through what is known."""
        if not self._free:
            return []
        own = [row for row in rows if row.setting.method == self.method and math.isfinite(self._score(row))]
        own = [row for row in own if self.ranges.holds(row.setting.weights)]
        if not own:
            return []
        best = self._unit(min(own, key=self._score))
        spread = self._points.draw(SAMPLES // 2, dtype=torch.float64)
        around = (best + (2 * spread - 1) * radius).clamp(0, 1)
        guesses = self._guesses(own, best, radius, 1.0 if round_ == 0 else 2 * radius)
        return self._settings(torch.cat([guesses, around]))

    def _guesses(self, rows: Sequence[Outcome], best: Tensor, near: float, reach: float) -> Tensor:
        """Where quadratics, one per task, fitted most closely near the best point, have the smallest worst or sum."""
        places = torch.stack([self._unit(row) for row in rows])
        features = quadratic_features(places)
        if len(rows) < features.shape[1] + 2:
            return best.new_empty(0, len(self._free))
        costs = torch.tensor([list(row.costs.values()) for row in rows], dtype=torch.float64)
        closeness = 1 / (near**2 + (places - best).square().mean(1, keepdim=True))
        fitted = torch.linalg.lstsq(features * closeness, costs * closeness).solution

        def score(points: Tensor) -> Tensor:
            predicted = quadratic_features(points) @ fitted
            found: Tensor = predicted.amax(1) if self.objective == "worst" else predicted.sum(1)
            return found

        centre, width = best[None], reach
        for _ in range(6):
            spread = self._points.draw(2048, dtype=torch.float64)
            points = torch.cat([centre, (centre[:1] + (2 * spread - 1) * width).clamp(0, 1)])
            centre = points[score(points).argsort()[:GUESSES]]
            width /= 3
        return centre

    def _score(self, row: Outcome) -> float:
        return worst_or_sum(row.costs, self.objective)

    def _unit(self, row: Outcome) -> Tensor:
        """The free weights of a row, 0 at the low end of their range and 1 at the high one."""
        places = [places for places, _ in self.ranges.dimensions()]
        weights = torch.tensor([row.setting.weights[places[i][0]] for i in self._free], dtype=torch.float64)
        return ((weights - self._lows[self._free]) / self._widths[self._free]).clamp(0, 1)

    def _settings(self, units: Tensor) -> list[Setting]:
        """Settings that were not asked for yet."""
        points = []
        for unit in units:
            values = self._lows.clone()
            values[self._free] += unit * self._widths[self._free]
            weights = self._weights(values)
            if weights not in self._seen:
                self._seen.add(weights)
                points.append(weights)
        return settings_of(self.method, self.space, points)

    def _weights(self, values: Tensor) -> tuple[Varying, ...]:
        pairs = zip(self._dimensions, values.tolist(), strict=True)
        return self.ranges.weights([one.nearest(rounded(value, one.high - one.low)) for one, value in pairs])


def quadratic_features(points: Tensor) -> Tensor:
    """1, x_i and x_i x_j for every point."""
    count = points.shape[1]
    pairs = torch.combinations(torch.arange(count), with_replacement=True)
    products = points[:, pairs[:, 0]] * points[:, pairs[:, 1]]
    return torch.cat([torch.ones_like(points[:, :1]), points, products], 1)
