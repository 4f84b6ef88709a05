"""A search for weights that differ between layers, from the best weights that do not.

A task's weight becomes a list of a few points, as a recipe has it: spread over the layers from first to last, with
straight lines between them; what is outside the layers takes the first. What is made small is what it was before, the
loss of the worst task or the sum over tasks, of the whole model.

- From curvature, predicted losses add up over layers: L_t = Σ_l L_tl(w_l), with w_l the weights of all tasks there. The
  search for plain weights saw every layer under many weights, which fit a quadratic of w_l to each L_tl; where merges
  are linear in their weights (task arithmetic, DARE) it is one, and the fit is exact. The lists are sought on
  max_t Σ_l L_tl or Σ_t Σ_l L_tl. So "worst" asks for the task that is worst in sum: a task may lose in some layers what
  it gains in others, and no layer has a worst task of its own. What is found is predicted from curvature as any
  setting, and fitted again nearby. Lists within 1 % of the best plain weights are as good, and not taken.
- On data losses do not add up. Every round moves each point of each list up and down alone, fits a quadratic of all
  points to each task's loss, and looks at where the quadratics are smallest, and at half and a quarter of the way.
  First every third row of each task is held back: plain weights and lists, both chosen on the other rows, are compared
  on them. If the lists are better there by more than two standard errors of the difference (on the same rows), the
  search is done again on all rows, from the best plain weights, and its lists are taken, unless all rows do not tell
  them from plain weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoints.layer_names import layer_stacks, place_of
from ..errors import InputError
from ..progress import Progress
from ..recipe import Varying
from ..text import nearest
from .evaluator import Evaluator
from .grid import takes_weights
from .predictor import Predictor
from .preview import Looker, Outcome, worst_or_sum
from .setting_ties import share_difference
from .suggest import Judged, OverLayers, Suggestion, quadratic_features, suggestion_of
from .weight_ranges import Ranges, rounded

WAYS = ("layers",)
#: Points of a list; a model with fewer layers has as many as layers.
POINTS, MOST_POINTS = 3, 16
#: How far points are moved in each round, as a share of their range. Without data the first round needs no moves.
MOVES_PREDICTED = (0.5, 0.1, 0.03, 0.01)
MOVES_MEASURED = (0.15, 0.08, 0.04)
#: Shares of the way to where the quadratics are smallest that a round looks at.
SHARES = (1.0, 0.5, 0.25)
#: One row of so many is held back.
HELD_BACK = 3
FEWEST_ROWS = 2 * HELD_BACK
#: What moving a point over its whole range must gain to be worth it, as a share of the loss.
WORTH = 1e-3
#: Directions that settings hardly differ in are no part of a fit: rounding errors would decide there.
SMALLEST = 1e-4


def check_by(by: str | None, points: int | None) -> int:
    """Check both, and say how many points a list has."""
    if by is not None and by not in WAYS:
        raise InputError(f"--by {by}: weights can differ by {', '.join(WAYS)}{nearest(by, WAYS)}")
    if points is not None and by is None:
        raise InputError("--points goes with --by layers: it is the length of a list over the layers")
    if points is not None and not 2 <= points <= MOST_POINTS:
        raise InputError(f"--points {points}: a list over the layers has between 2 and {MOST_POINTS} points here")
    return points or POINTS


class LayerLists:
    """Weights as lists over the layers: ``points`` numbers for every dimension of the ranges."""

    def __init__(self, ranges: Ranges, names: Sequence[str], points: int) -> None:
        self._stacks = layer_stacks(names)
        self.layers = max(self._stacks.values(), default=0)
        if self.layers < 2:
            few = "a single layer" if self.layers else "no numbered layers (such as model.layers.0.…)"
            raise InputError(f"--by layers: the models have {few}; leave it out for one weight for the whole model")
        self.points, self.ranges = min(points, self.layers), ranges
        every = [one for _, one in ranges.dimensions()]
        self.lows = torch.tensor([one.low for one in every], dtype=torch.float64)[:, None]
        self.widths = torch.tensor([one.high for one in every], dtype=torch.float64)[:, None] - self.lows
        if not bool((self.widths > 0).any()):
            raise InputError("--weights: every task has a single weight to search, which cannot differ between layers")

    @property
    def size(self) -> int:
        """Points that may be moved, all tasks together."""
        return int((self.widths > 0).sum()) * self.points

    def part(self, name: str) -> str:
        """Tensors of the same weights: those at the same place between the first and the last layer."""
        found = place_of(name, self._stacks)
        return repr(0.0 if found is None else found[1] / max(1, self._stacks[found[0]] - 1))

    def interpolation(self, part: str) -> Tensor:
        """What each point of a list adds to the weight of a part."""
        place = float(part) * (self.points - 1)
        return (1 - (torch.arange(self.points, dtype=torch.float64) - place).abs()).clamp(min=0)

    def units(self, weights: Sequence[Varying]) -> Tensor:
        """The points of a setting, 0 at the low end of their range and 1 at the high one."""
        own = [weights[places[0]] for places, _ in self.ranges.dimensions()]
        rows = [list(weight) if isinstance(weight, tuple) else [weight] * self.points for weight in own]
        values = torch.tensor(rows, dtype=torch.float64)
        return torch.where(self.widths > 0, (values - self.lows) / self.widths.clamp(min=1e-12), 0.0)

    def weights(self, units: Tensor) -> tuple[Varying, ...]:
        """One weight per task: a list, or a number where all of its points are the same."""
        point: list[Varying] = []
        for (_, one), row in zip(self.ranges.dimensions(), (self.lows + units * self.widths).tolist(), strict=True):
            values = tuple(one.nearest(rounded(value, one.high - one.low)) for value in row)
            point.append(values if len(set(values)) > 1 else values[0])
        return self.ranges.weights(point)


class _LayerSearch:
    """The search for the lists of one method, from a plain setting of it."""

    def __init__(
        self,
        looker: Looker,
        lists: LayerLists,
        method: str,
        known: Sequence[Outcome],
        objective: str,
        hold: bool = False,
    ) -> None:
        self._looker, self._lists, self._objective, self._method, self._hold = looker, lists, objective, method, hold
        self._rows = [row for row in known if row.setting.method == method and self._known(row)]
        self.plain = self.best = min(self._rows, key=self.score)
        self.looked = 0

    def _known(self, row: Outcome) -> bool:
        return self._lists.ranges.holds(row.setting.weights) and math.isfinite(worst_or_sum(row.costs, "sum"))

    def costs(self, row: Outcome) -> dict[str, float]:
        """What the search makes small: predicted, or on the rows that it may see."""
        if not isinstance(self._looker, Evaluator) or not self._hold:
            return row.costs
        return {task: float(share[~held_back(len(share))].mean()) for task, share in row.shares.items()}

    def score(self, row: Outcome) -> float:
        return worst_or_sum(self.costs(row), self._objective)

    def run(self, progress: Progress) -> None:
        measured = isinstance(self._looker, Evaluator)
        moves = MOVES_MEASURED if measured else MOVES_PREDICTED
        moved = len(moves) if measured else len(moves) - 1
        total = moved * 2 * self._lists.size + len(moves) * len(SHARES) * 2
        progress.begin("searching over the layers", total)
        for round_, move in enumerate(moves):
            if measured or round_ > 0:
                self._look(self._moved(move), progress)
            self._look(self._guesses(near=move, reach=2 * move), progress)
        progress.advance(max(0, total - self.looked))

    def _moved(self, move: float) -> list[Tensor]:
        """The best so far with each point moved up and down, alone."""
        centre = self._lists.units(self.best.setting.weights)
        found = []
        for place in (self._lists.widths > 0).expand_as(centre).nonzero().tolist():
            for step in (move, -move):
                units = centre.clone()
                units[tuple(place)] += step
                found.append(units.clamp(0, 1))
        return found

    def _guesses(self, near: float, reach: float) -> list[Tensor]:
        """Where quadratics, fitted most closely near the best so far, are smallest within reach, and on the way."""
        centre = self._lists.units(self.best.setting.weights)
        starts = torch.stack([centre, self._lists.units(self.plain.setting.weights)]) - centre
        low, high = (-centre).clamp(min=-reach), (1 - centre).clamp(max=reach)
        flat = (starts.clamp(low, high).flatten(1), low.flatten(), high.flatten())
        ends = smallest_at(self._fitted(centre, near), *flat, self._objective).view_as(starts)
        return [centre + share * end for end in ends for share in SHARES]

    def _fitted(self, centre: Tensor, near: float) -> Quadratics:
        """A quadratic for every task: of each part's weights, summed over parts; on data, of all points at once."""
        units = torch.stack([self._lists.units(row.setting.weights) for row in self._rows])
        offsets = (units - centre).flatten(1)
        if isinstance(self._looker, Evaluator):
            parts = [(torch.eye(centre.numel(), dtype=torch.float64), [self.costs(row) for row in self._rows])]
        else:
            each = torch.eye(len(centre), dtype=torch.float64)
            parts = [
                (torch.kron(each, self._lists.interpolation(part)[None]), [row.parts[part] for row in self._rows])
                for part in self._rows[0].parts
            ]
        found = Quadratics(*(torch.zeros((), dtype=torch.float64) for _ in range(3)))
        for matrix, costs in parts:
            known = torch.tensor([list(one.values()) for one in costs], dtype=torch.float64)
            found += Quadratics.through(offsets @ matrix.T / near, known).of(matrix / near)
        return found

    def _look(self, places: Sequence[Tensor], progress: Progress) -> None:
        """Look at settings that are not known yet, and keep the best."""
        known = {row.setting.weights for row in self._rows}
        asked = dict.fromkeys(weights for weights in map(self._lists.weights, places) if weights not in known)
        if not asked:
            return
        settings = [replace(self.best.setting, weights=weights, position=None) for weights in asked]
        rows = self._looker.look(settings, progress.advance)
        self.looked += len(rows)
        rows = [row for row in rows if math.isfinite(worst_or_sum(row.costs, "sum"))]
        self._rows += rows
        self.best = min([self.best, *rows], key=self.score)


@dataclass
class Quadratics:
    """value + slopeᵀx + ½ xᵀ bend x, one for every task."""

    value: Tensor
    slope: Tensor
    bend: Tensor

    @classmethod
    def through(cls, places: Tensor, costs: Tensor) -> Quadratics:
        """Fitted to costs, (settings, tasks), at some places; most closely to those near 0."""
        closeness = 1 / (1 + places.square().mean(1, keepdim=True)).square()
        # gelsd: what the usual driver makes of settings that leave directions open differs from call to call.
        known = (quadratic_features(places) * closeness, costs * closeness)
        fit = torch.linalg.lstsq(*known, rcond=SMALLEST, driver="gelsd").solution.T
        size = places.shape[1]
        one, other = torch.combinations(torch.arange(size), with_replacement=True).T
        half = places.new_zeros(len(fit), size, size)
        half[:, one, other] = fit[:, 1 + size :]
        return cls(fit[:, 0], fit[:, 1 : 1 + size], half + half.mT)

    def of(self, matrix: Tensor) -> Quadratics:
        """The same of x where these are of ``matrix`` x."""
        return Quadratics(self.value, self.slope @ matrix, matrix.T @ self.bend @ matrix)

    def __add__(self, other: Quadratics) -> Quadratics:
        return Quadratics(self.value + other.value, self.slope + other.slope, self.bend + other.bend)

    def at(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """The values (points, tasks), and the gradients (points, tasks, size)."""
        bent = torch.einsum("tnm,pm->ptn", self.bend, points)
        values = self.value + points @ self.slope.T + 0.5 * torch.einsum("ptn,pn->pt", bent, points)
        return values, self.slope + bent


def smallest_at(
    quadratics: Quadratics, starts: Tensor, low: Tensor, high: Tensor, objective: str, steps: int = 600
) -> Tensor:
    """From each start, the point of a box where the worst or the sum of some quadratics is smallest.

    Adam's steps, projected; the maximum is smoothed, less and less. A small pull to the start keeps points where they
    are that gain nothing.
    """
    points, found = starts.clone(), starts.clone()
    least = torch.full((len(starts),), math.inf, dtype=torch.float64)
    scale = max(float(quadratics.at(starts)[0].abs().amax()), 1e-300)
    mean, square = torch.zeros_like(starts), torch.zeros_like(starts)
    for step in range(steps + 1):
        costs, slopes = (one / scale for one in quadratics.at(points))
        away = points - starts
        exact = (costs.amax(1) if objective == "worst" else costs.sum(1)) + WORTH * away.square().sum(1)
        better = exact < least
        least, found = torch.where(better, exact, least), torch.where(better[:, None], points, found)
        left = 1 - step / steps
        shares = (costs / (0.1 * 1e-4 ** (1 - left))).softmax(1) if objective == "worst" else torch.ones_like(costs)
        gradient = (shares[:, :, None] * slopes).sum(1) + 2 * WORTH * away
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()
        direction = mean / (1 - 0.9 ** (step + 1)) / ((square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-12)
        points = (points - (0.1 * left**3 * (high - low).amax() + 1e-6) * direction).clamp(low, high)
    return found


def held_back(rows: int) -> Tensor:
    """Which rows of a task the search does not see."""
    return torch.arange(rows) % HELD_BACK == HELD_BACK - 1


def suggest_by_layers(
    looker: Looker, plain: Suggestion, ranges: Ranges, *, points: int, progress: Progress
) -> Suggestion:
    """A suggestion with weights over the layers, where they are better than the plain weights of another.

    The method is that of the best plain setting with weights.
    """
    found = plain.evaluated
    weighted = [row for row in (found.leading(method) for method in found.methods if takes_weights(method)) if row]
    weighted = [row for row in weighted if ranges.holds(row.setting.weights) and row.score is not None]
    if not weighted:
        raise InputError("--by layers: no setting with weights in the ranges can be merged")
    best = min(weighted, key=lambda row: row.score or 0.0)
    lists = _lists_of(looker, ranges, points)
    method, looked, judged, better = best.setting.method, 0, None, True
    if isinstance(looker, Evaluator):
        without = _LayerSearch(looker, lists, method, found.rows, plain.objective, hold=True)
        without.run(progress)
        plainly, layered = (
            {task: shares[held_back(len(shares))] for task, shares in row.shares.items()}
            for row in (without.plain, without.best)
        )
        gain = share_difference(plainly, layered, plain.objective == "worst")
        judged = Judged(without.plain, without.best, gain.value, gain.error)
        looked, better = without.looked, gain.value > 0 and not gain.tied
    search = _LayerSearch(looker, lists, method, found.rows, plain.objective)
    if better:
        search.run(progress)
    chosen = search.best if better or judged is None else judged.layered
    chosen.score = worst_or_sum(chosen.costs, plain.objective)
    assert best.score is not None
    taken = better and chosen.score < best.score and (judged is not None or not found.criterion.close(chosen, best))
    over = OverLayers(best, chosen, lists.layers, looked + search.looked, judged, taken)
    if not taken:
        return replace(plain, over_layers=over)
    found.rows.append(chosen)
    found.rank_all()
    # It may be tied with simpler weights, or a method without any may be better still.
    return suggestion_of(found, plain.objective, replace(over, taken=found.best() is chosen))


def prepare_for_layers(looker: Looker, methods: Sequence[str], ranges: Ranges, points: int) -> None:
    """What must be known before the search for plain weights: that there are layers, and whose costs are to be kept."""
    if not any(map(takes_weights, methods)):
        raise InputError(f"--by layers: {', '.join(methods)} takes no weights that could differ between layers")
    lists = _lists_of(looker, ranges, points)
    if isinstance(looker, Predictor):
        looker.group_by = lists.part
    for task, rows in looker.examples.items():
        if rows < FEWEST_ROWS:
            few = (
                f"{rows} row{'s' if rows > 1 else ''}; at least {FEWEST_ROWS} are needed, of which a third is held back"
            )
            raise InputError(f"--by layers: the data of {task} has {few} to judge what was found")


def _lists_of(looker: Looker, ranges: Ranges, points: int) -> LayerLists:
    inputs = looker.plan.inputs
    return LayerLists(ranges, [*(inputs.base or inputs.tuned[0]).tensors], points)
