"""Search one weight for each task, for the smallest loss of the worst task.

The first round evaluates points that fill the ranges, and points with the same weight for all tasks. Each further round
evaluates points around the best one, and the minima of quadratics fitted to all results. All points of a round are
evaluated together; without data that is one pass over the files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe
from ..rules import METHODS
from .evaluate import Evaluator
from .ranking import Outcome, Preview, largest_cost, make_preview, set_scores
from .settings import Dimension, Grid, Setting, Weights, parse_range, parse_weights, takes_weights, weight_keys

#: The range of a weight, if the user gives none.
DEFAULT_RANGE = "0:1.5"
#: Points of the first round.
SAMPLES = 64
#: How far each round goes from the best point, as a share of the ranges.
RADII = (0.2, 0.05, 0.0125)
#: Points of the first round with the same weight for all tasks, at most.
DIAGONAL = 16
#: Minima of fitted quadratics that each further round evaluates.
GUESSES = 4


def search_grid(
    weights: Weights | None, recipe: Recipe, methods: Sequence[str], fixed: Sequence[Dimension] = ()
) -> Grid:
    """Return a grid with the range of each task's weight: the given range, or 0 to 1.5.

    ``fixed`` are dimensions of other keys, with one value each.
    """
    parsed = parse_weights(weights, recipe, methods, DEFAULT_RANGE)
    given = {key: dimension for dimension in parsed for key in dimension.keys}
    default = replace(parse_range(DEFAULT_RANGE), methods=tuple(filter(takes_weights, methods)))
    ranges = [replace(given.get(key, default), keys=(key,)) for key in weight_keys(recipe)]
    return Grid(recipe, methods, [*fixed, *ranges])


def search(grid: Grid, evaluator: Evaluator, *, progress: Progress) -> Preview:
    """Search the weights for every method of a grid, and rank all evaluated settings."""
    if removing := [method for method in grid.methods if METHODS[method].removes]:
        raise InputError(
            f"{removing[0]}: its tasks are meant to become worse, so no weights are best for them; preview a range of "
            "strengths"
        )
    if evaluator.measured and grid.recipe.base is None:
        raise InputError(
            "the recipe has no base; without it, the share of fine-tuning's gain that is lost is not known"
        )
    searches = [_WeightSearch(method, grid) for method in grid.methods]
    expected = 1 + len(searches) * (SAMPLES + DIAGONAL + len(RADII) * (SAMPLES // 2 + GUESSES))
    progress.begin("searching", expected)
    asked = dict.fromkeys([*grid.own, *(setting for each in searches for setting in each.first())])
    rows = evaluator.evaluate(list(asked), progress.advance)
    for number, radius in enumerate(RADII):
        further = [
            setting for each in searches for setting in each.further(rows, radius, 2 * radius if number else 1.0)
        ]
        if further:
            rows += evaluator.evaluate(further, progress.advance)
    progress.advance(max(0, expected - len(rows)))  # points that were evaluated before
    criterion = set_scores(rows, evaluator.measured, by_costs=True)
    found = make_preview(grid.recipe, evaluator, rows, grid.axis, criterion)
    if found.best() is None:
        raise InputError("no setting gives a finite loss; check the models and their curvature")
    return found


class _WeightSearch:
    """The search for the weights of one method. Points are in units of the ranges: 0 is the low end, 1 the high end."""

    def __init__(self, method: str, grid: Grid) -> None:
        self.method, self._grid = method, grid
        self._ranges = [dimension for dimension in grid.dimensions if dimension.is_weight]
        self._lows = torch.tensor([range_.low for range_ in self._ranges], dtype=torch.float64)
        self._widths = torch.tensor([range_.high for range_ in self._ranges], dtype=torch.float64) - self._lows
        self._points = SobolEngine(len(self._ranges), scramble=True, seed=0)
        self._asked: set[Setting] = set()

    def first(self) -> list[Setting]:
        """Return settings of the first round: points that fill the ranges, and points with equal weights."""
        diagonal = torch.linspace(0, 1, DIAGONAL, dtype=torch.float64)[:, None].expand(-1, len(self._lows))
        return self._settings(torch.cat([self._points.draw(SAMPLES, dtype=torch.float64), diagonal]))

    def further(self, rows: Sequence[Outcome], radius: float, reach: float) -> list[Setting]:
        """Return settings of a later round: points around the best, and minima of quadratics within ``reach`` of it."""
        own = [row for row in rows if row.setting in self._asked and math.isfinite(largest_cost(row))]
        if not own or not takes_weights(self.method):
            return []
        weights = torch.tensor([row.setting.weights for row in own], dtype=torch.float64)
        points = ((weights - self._lows) / self._widths.clamp(min=1e-12)).clamp(0, 1)
        best = points[min(range(len(own)), key=lambda i: largest_cost(own[i]))]
        costs = torch.tensor([list(row.costs.values()) for row in own], dtype=torch.float64)
        return self._settings(torch.cat([self._minima(points, costs, best, radius, reach), self._around(best, radius)]))

    def _around(self, point: Tensor, radius: float, count: int = SAMPLES // 2) -> Tensor:
        spread = 2 * self._points.draw(count, dtype=torch.float64) - 1
        return (point + spread * radius).clamp(0, 1)

    def _minima(self, points: Tensor, costs: Tensor, best: Tensor, near: float, reach: float) -> Tensor:
        """Fit a quadratic to the costs of each task, most closely near the best. Return minima of the largest one."""
        features = quadratic_features(points)
        if len(points) < features.shape[1] + 2:
            return points[:0]
        closeness = 1 / (near**2 + (points - best).square().mean(1, keepdim=True))
        fitted = torch.linalg.lstsq(features * closeness, costs * closeness).solution
        found = best[None]
        for _ in range(6):
            points = torch.cat([found, self._around(found[0], reach, 2048)])
            scores = (quadratic_features(points) @ fitted).amax(1)
            found = points[scores.argsort()[:GUESSES]]
            reach /= 3
        return found

    def _settings(self, points: Tensor) -> list[Setting]:
        """Return the settings of points, without those of earlier rounds."""
        found = []
        for values in (self._lows + points * self._widths).tolist():
            # As many decimals as a person would write.
            rounded = [
                min(max(round(value, 3 if range_.high - range_.low >= 0.1 else 6) + 0.0, range_.low), range_.high)
                for range_, value in zip(self._ranges, values, strict=True)
            ]
            fixed = [d.values[0] for d in self._grid.dimensions_of(self.method) if not d.is_weight]
            setting = self._grid.setting(self.method, [*fixed, *(rounded if takes_weights(self.method) else ())])
            if setting not in self._asked:
                self._asked.add(setting)
                found.append(setting)
        return found


def quadratic_features(points: Tensor) -> Tensor:
    """Return 1, x_i and x_i x_j for every point."""
    pairs = torch.combinations(torch.arange(points.shape[1]), with_replacement=True)
    products = points[:, pairs[:, 0]] * points[:, pairs[:, 1]]
    return torch.cat([torch.ones_like(points[:, :1]), points, products], 1)
