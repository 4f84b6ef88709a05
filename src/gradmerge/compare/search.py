"""Search one weight for each task: the smallest loss of the worst task, or the smallest sum over tasks.

The first round evaluates points that fill the ranges, and points with the same weight for all tasks. Each further round
evaluates points around the best one, and the minima of quadratics fitted to all results. All points of a round are
evaluated together; without data that is one pass over the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe, Varying
from ..rules import METHODS
from .evaluate import Evaluator
from .ranking import Outcome, Preview, make_preview, set_scores_by_costs, worst_or_sum
from .settings import (
    SEARCHED_WEIGHTS,
    Changes,
    Dimension,
    Grid,
    Setting,
    Weights,
    own_setting,
    parse_range,
    parse_weights,
    takes_weights,
)

OBJECTIVES = ("worst", "sum")
#: Points of the first round.
SAMPLES = 64
#: How far each round goes from the best point, as a share of the ranges.
RADII = (0.2, 0.05, 0.0125)
#: Points of the first round with the same weight for all tasks, at most.
DIAGONAL = 16
#: Minima of fitted quadratics that each further round evaluates.
GUESSES = 4


def check_objective(objective: str) -> None:
    if objective not in OBJECTIVES:
        raise InputError(f"objective: {objective} is not one of {', '.join(OBJECTIVES)}")


def search_grid(
    weights: Weights | None, recipe: Recipe, methods: Sequence[str], fixed: Mapping[str, Changes] | None = None
) -> Grid:
    """The ranges to search: those given, and 0 to 1.5 for other tasks. Each task has its own weight."""
    given = {key: one for one in parse_weights(weights, recipe, methods, SEARCHED_WEIGHTS) for key in one.keys}
    anywhere = replace(parse_range(SEARCHED_WEIGHTS), methods=tuple(filter(takes_weights, methods)))
    keys = [f"models.{i}.weight" for i in range(len(recipe.models))]
    ranges = [replace(given.get(key, anywhere), keys=(key,)) for key in keys]
    return Grid(recipe, methods, ranges, fixed=fixed or {})


def search(grid: Grid, evaluator: Evaluator, *, objective: str = "worst", progress: Progress) -> Preview:
    """Search weights for every method of a grid, and rank all settings that were evaluated."""
    check_objective(objective)
    if removing := [method for method in grid.methods if METHODS[method].removes]:
        raise InputError(
            f"{removing[0]}: its tasks are meant to become worse, so no weights are best for them; preview a range of "
            "strengths"
        )
    if evaluator.measured and grid.recipe.base is None:
        raise InputError(
            "the recipe has no base; without it, the share of fine-tuning's gain that is lost is not known"
        )
    searches = [_WeightSearch(method, grid, objective) for method in grid.methods]
    reference = own_setting(grid.recipe, grid.methods, grid.fixed)
    expected = sum(one.expected for one in searches) + 1
    progress.begin("searching", expected)
    first = [setting for one in searches for setting in one.first()]
    rows = evaluator.evaluate([reference, *(one for one in first if one != reference)], progress.advance)
    for number, radius in enumerate(RADII):
        asked = [setting for one in searches for setting in one.further(rows, number, radius)]
        if asked:
            rows += evaluator.evaluate(asked, progress.advance)
    progress.advance(max(0, expected - len(rows)))  # points that were evaluated before
    criterion = set_scores_by_costs(rows, evaluator.measured, objective)
    own = next((row for row in rows if row.setting == reference), rows[0])
    outside = len(rows) > 1 and reference.weights and not _holds(grid.weights, reference.weights)
    shown = [row for row in rows if row is not own] if outside else rows
    more: dict[str, Any] = {"objective": objective, "allows_own": not outside}
    found = make_preview(grid.recipe, evaluator, shown, own, grid.axis, criterion, **more)
    if found.best() is None:
        raise InputError("no setting gives a finite loss; check the models and their curvature")
    return found


def _holds(ranges: Sequence[Dimension], weights: Sequence[Varying]) -> bool:
    """Whether weights are numbers inside the ranges."""
    pairs = zip(ranges, weights, strict=True)
    return all(not isinstance(weight, tuple) and one.nearest(weight) == weight for one, weight in pairs)


class _WeightSearch:
    """The search for the weights of one method."""

    def __init__(self, method: str, grid: Grid, objective: str) -> None:
        self.method, self.grid, self.objective, self._ranges = method, grid, objective, grid.weights
        varying = [i for i, one in enumerate(self._ranges) if one.high > one.low]
        self._free = varying if takes_weights(method) else []
        self._lows = torch.tensor([one.low for one in self._ranges], dtype=torch.float64)
        self._widths = torch.tensor([one.high for one in self._ranges], dtype=torch.float64) - self._lows
        self._points = SobolEngine(max(1, len(self._free)), scramble=True, seed=0)
        self._seen: set[Setting] = set()

    @property
    def expected(self) -> int:
        further = len(RADII) * (SAMPLES // 2 + GUESSES)
        return SAMPLES + DIAGONAL + further if self._free else 1

    def first(self) -> list[Setting]:
        """Points that fill the ranges, and points with the same weight for all tasks."""
        if not self._free:
            return self._settings(torch.zeros(1, 0, dtype=torch.float64))
        steps = torch.linspace(0, 1, DIAGONAL, dtype=torch.float64)
        diagonal = steps[:, None].expand(-1, len(self._free))
        if len({(self._ranges[i].low, self._ranges[i].high) for i in self._free}) > 1:
            low = max(self._ranges[i].low for i in self._free)
            high = min(self._ranges[i].high for i in self._free)
            same = low + steps[:, None] * (high - low)
            diagonal = (same - self._lows[self._free]) / self._widths[self._free] if high > low else diagonal
        return self._settings(torch.cat([self._points.draw(SAMPLES, dtype=torch.float64), diagonal]))

    def further(self, rows: Sequence[Outcome], number: int, radius: float) -> list[Setting]:
        """Points around the best so far, and minima of fitted quadratics."""
        own = [row for row in rows if row.setting.method == self.method and math.isfinite(self._score(row))]
        own = [row for row in own if self._free and _holds(self._ranges, row.setting.weights)]
        if not own:
            return []
        best = self._unit(min(own, key=self._score))
        spread = self._points.draw(SAMPLES // 2, dtype=torch.float64)
        around = (best + (2 * spread - 1) * radius).clamp(0, 1)
        guesses = self._guesses(own, best, radius, 1.0 if number == 0 else 2 * radius)
        return self._settings(torch.cat([guesses, around]))

    def _guesses(self, rows: Sequence[Outcome], best: Tensor, near: float, reach: float) -> Tensor:
        """The minima of the worst, or the sum, of one quadratic for each task, fitted most closely near the best."""
        points = torch.stack([self._unit(row) for row in rows])
        features = quadratic_features(points)
        if len(rows) < features.shape[1] + 2:
            return best.new_empty(0, len(self._free))
        costs = torch.tensor([list(row.costs.values()) for row in rows], dtype=torch.float64)
        closeness = 1 / (near**2 + (points - best).square().mean(1, keepdim=True))
        fitted = torch.linalg.lstsq(features * closeness, costs * closeness).solution

        def score(points: Tensor) -> Tensor:
            predicted = quadratic_features(points) @ fitted
            found: Tensor = predicted.amax(1) if self.objective == "worst" else predicted.sum(1)
            return found

        center, width = best[None], reach
        for _ in range(6):
            spread = self._points.draw(2048, dtype=torch.float64)
            points = torch.cat([center, (center[:1] + (2 * spread - 1) * width).clamp(0, 1)])
            center = points[score(points).argsort()[:GUESSES]]
            width /= 3
        return center

    def _score(self, row: Outcome) -> float:
        return worst_or_sum(row.costs, self.objective)

    def _unit(self, row: Outcome) -> Tensor:
        """The free weights of a row, 0 at the low end of their range and 1 at the high end."""
        weights = torch.tensor([row.setting.weights[i] for i in self._free], dtype=torch.float64)
        return ((weights - self._lows[self._free]) / self._widths[self._free]).clamp(0, 1)

    def _settings(self, units: Tensor) -> list[Setting]:
        """The settings of points that were not evaluated before."""
        found = []
        for unit in units:
            values = self._lows.clone()
            values[self._free] += unit * self._widths[self._free]
            pairs = zip(self._ranges, values.tolist(), strict=True)
            weights = [one.nearest(_rounded(value, one.high - one.low)) for one, value in pairs]
            setting = self.grid.setting(self.method, weights if takes_weights(self.method) else [])
            if setting not in self._seen:
                self._seen.add(setting)
                found.append(setting)
        return found


def _rounded(weight: float, width: float) -> float:
    """A weight with as many decimals as a person would write, in a range of some width."""
    return round(weight, 3 if width >= 0.1 else 6) + 0.0


def quadratic_features(points: Tensor) -> Tensor:
    """1, x_i and x_i x_j for every point."""
    pairs = torch.combinations(torch.arange(points.shape[1]), with_replacement=True)
    products = points[:, pairs[:, 0]] * points[:, pairs[:, 1]]
    return torch.cat([torch.ones_like(points[:, :1]), points, products], 1)
