"""Rank settings by a score, with standard errors of differences, and choose among settings that are tied."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..display import Displayed, View
from ..progress import Progress
from ..recipe import Recipe, Varying, leaves
from ..rules import METHODS
from ..tasks.metrics import Difference, averaged, difference, standard_error
from ..text import Measured
from .settings import Axis, Grid, Setting, is_removal, make_setting, task_names

if TYPE_CHECKING:
    from .evaluate import Evaluator

Advance = Callable[[int], None]
"""Called with the number of merges that are done."""
Rows = dict[str, Tensor]
"""Metric → one number per row of the data, whose mean is the metric."""

#: The first metric of a task is the first of these that its metrics have. The mean of a perplexity over tasks would
#: mean little, so the loss comes before it.
HEADLINES = ("accuracy", "micro_f1", "spearman_r", "r2", "loss_per_token", "mse", "loss_per_example")
_LOWER_IS_BETTER = ("loss_per_token", "mse", "loss_per_example", "perplexity")
#: Predictions as close to the best as this count as equal.
CLOSE = 0.01
#: Random draws for the error of the worst of several means.
DRAWS = 1000


def headline(metrics: Mapping[str, Any]) -> str:
    """Return the name of a task's first metric. It skips metrics that are None, such as R² of constant labels."""
    optional = ("r2", "spearman_r")
    known = (name for name in HEADLINES if name in metrics and (name not in optional or metrics[name] is not None))
    return next(known, next(iter(metrics)))


def higher_is_better(metric: str) -> bool:
    return metric not in _LOWER_IS_BETTER


def loss_name(metrics: Mapping[str, Any]) -> str:
    """Return the metric with the mean loss of an example: in nats, or for a regression the mean squared error."""
    return "loss_per_example" if "loss_per_example" in metrics else "mse"


def loss_of(metrics: Mapping[str, Any]) -> float:
    """Return the mean loss of an example; infinity if it is unknown."""
    found = metrics.get(loss_name(metrics))
    return math.inf if found is None else float(found)


def with_error(metrics: Mapping[str, Any], name: str) -> float | None:
    """Return a metric with its standard error; None if it was not measured."""
    value, error = metrics.get(name), metrics.get("standard_errors", {}).get(name)
    return value if value is None or error is None else Measured(value, error)


@dataclass
class Outcome:
    """One setting and its results."""

    setting: Setting
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task → all metrics, if data was given."""
    costs: dict[str, float] = field(default_factory=dict)
    """Task → what a search minimizes: the predicted excess loss, or the lost share of fine-tuning's gain."""
    rows: dict[str, Rows] = field(default_factory=dict, compare=False, repr=False)
    """Task → metric (the first one, and the loss) → one number per row."""
    shares: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Task → the lost share of each row, whose mean is the cost."""
    score: float | None = None
    """The number that settings are compared by; see :class:`Criterion`."""
    rank: int | None = None
    """1 for the best of all settings, and for those tied with it."""

    @property
    def values(self) -> dict[str, float | None]:
        """Task → its first metric, or the predicted excess loss per example; None if it is not known."""
        if self.metrics:
            return {task: found[headline(found)] if found else None for task, found in self.metrics.items()}
        return {task: cost if math.isfinite(cost) else None for task, cost in self.costs.items()}


@dataclass(frozen=True)
class Criterion:
    """The score that settings are compared by."""

    name: str
    higher: bool
    """Higher is better."""
    shares: bool = False
    """The score is the share of what fine-tuning gained that the worst task loses; 1 % is 0.01."""


@dataclass(repr=False)
class Preview(Displayed):
    """The settings of a preview and their results."""

    recipe: Recipe
    tasks: list[str]
    """The tasks that settings are compared on: all and the base, or those with data."""
    models: list[str]
    """Names of the fine-tuned models, in the order of the recipe; a setting has a weight for each."""
    measured: bool
    """Whether results are measured on data. Otherwise they are predicted from curvature."""
    criterion: Criterion
    rows: list[Outcome]
    """All settings, also the recipe's own if its method is compared."""
    reference: Outcome
    """The row that predictions are relative to: the recipe's own, or else the first one."""
    axis: Axis
    alone: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Model (`base` or a fine-tuned one) → task → metrics, if data was given."""
    examples: dict[str, int] = field(default_factory=dict)
    """Task → number of rows of its data."""
    notes: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    """Commands to run next: merge, calibrate."""
    verdict: list[str] = field(default_factory=list)
    """The result in sentences."""
    _good: dict[str | None, list[Outcome]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Set the ranks of all settings. Settings tied with the leading one also have rank 1."""
        tied = {id(row) for row in self.as_good()} if self.measured else set()
        scores = {id(row): self._sort_key(row)[0] for row in self._scored()}
        ordered = sorted(scores.values())
        for row in self.rows:
            score = scores.get(id(row))
            row.rank = None if score is None else 1 if id(row) in tied else 1 + bisect.bisect_left(ordered, score)

    def _scored(self) -> list[Outcome]:
        return [row for row in self.rows if row.score is not None]

    def _line(self) -> list[str]:
        best = self.best()
        found = f"best: {best.setting.name}" if best is not None else "no best"
        if (tied := len(self.all_tied())) > 1:
            found += f", tied with {tied - 1} more"
        return [f"{len(self.rows)} settings", found, "measured" if self.measured else "predicted"]

    def _view(self) -> View:
        how = self.criterion.name + ("" if self.measured else ", × reference")
        rows = [[row.rank, row.setting.name, self.shown_score(row)] for row in self.ranked()]
        return ["rank", "setting", how], rows, self.verdict

    def ranked(self) -> list[Outcome]:
        """Return the settings, best first. Tied settings are ordered by their scores."""
        return sorted(self.rows, key=lambda row: (row.rank is None, row.rank, self._sort_key(row)))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.setting.method for row in self.rows))

    def metric(self, task: str) -> str:
        """Return the name of a task's first metric."""
        return headline(next(row.metrics[task] for row in self.rows if row.metrics.get(task)))

    def higher(self, task: str) -> bool:
        """Return whether a higher value of a task is better."""
        return self.measured and higher_is_better(self.metric(task))

    def relative(self, value: float | None) -> float | None:
        """Return a predicted loss as a multiple of the reference's score; if that is 0, of the largest score."""
        whole = self.reference.score or 0.0
        if whole <= 0:
            whole = max((row.score for row in self.rows if row.score is not None), default=0.0)
        return value / whole if value is not None and whole > 0 else None

    def shown_score(self, row: Outcome) -> float | None:
        """Return the score for tables: with its standard error if measured, else as a multiple of the reference's."""
        if not self.measured or row.score is None:
            return self.relative(row.score)
        return Measured(row.score, score_error(row, self.criterion))

    def shown_value(self, row: Outcome, task: str) -> float | None:
        """Return the value of one task for tables: its first metric, or its predicted loss."""
        if not self.measured:
            return self.relative(row.values.get(task))
        return with_error(row.metrics.get(task, {}), self.metric(task))

    def weights(self, row: Outcome) -> dict[str, Varying]:
        """Return model → weight; empty for a method without weights."""
        return dict(zip(self.models, row.setting.weights, strict=True)) if row.setting.weights else {}

    @property
    def own(self) -> Outcome | None:
        """The recipe's own merge; None if its method is not compared."""
        own = make_setting(self.recipe, self.recipe.method)
        return self.reference if self.reference.setting == own else None

    def _sort_key(self, row: Outcome) -> tuple[float, float]:
        """Return a sort key, best first: the score, then the mean loss over tasks."""
        losses = [loss_of(metrics) for metrics in row.metrics.values()] or [0.0]
        score = -(row.score or 0.0) if self.criterion.higher else row.score or 0.0
        # Without the digits that rounding errors decide, so that equal merges are equal.
        return float(f"{score:.7g}"), float(f"{sum(losses) / len(losses):.7g}")

    def difference(self, row: Outcome, other: Outcome) -> Difference | None:
        """Return the difference of two scores on the same rows; None for predictions."""
        return score_difference(row, other, self.criterion) if self.measured else None

    def are_alike(self, row: Outcome, other: Outcome) -> bool:
        """Return whether two settings are tied, or predicted within 1 % of each other."""
        if row.score is None or other.score is None:
            return False
        if self.measured:
            apart = self.difference(row, other)
            return row is other or (apart is not None and apart.tied)
        return abs(row.score - other.score) <= CLOSE * abs(other.score) + 1e-12

    def as_good(self, method: str | None = None) -> list[Outcome]:
        """Return the setting with the best score, of a method or of all, and then the settings that are alike.

        The list is empty for a removal, because forgetting and retaining are opposite goals.
        """
        if method not in self._good:
            removing = {name for name, rule in METHODS.items() if rule.removes}
            known = [row for row in self._scored() if method in (None, row.setting.method)]
            known = [row for row in known if row.setting.method not in removing]
            leading = None if is_removal(self.recipe) else min(known, key=self._sort_key, default=None)
            alike = [row for row in known if leading is not None and self.are_alike(row, leading)]
            self._good[method] = sorted(alike, key=lambda row: row is not leading)
        return self._good[method]

    def leading(self, method: str | None = None) -> Outcome | None:
        """Return the setting with the best score, of a method or of all methods."""
        return next(iter(self.as_good(method)), None)

    def among_best(self, row: Outcome) -> bool:
        """Return whether a setting is the leading one or tied with it."""
        return self.leading() is not None and row.rank == 1

    def all_tied(self) -> list[Outcome]:
        """Return the leading setting and those tied with it; empty for predictions."""
        return self.as_good() if self.measured else []

    def best(self, method: str | None = None) -> Outcome | None:
        """Return the setting to use, of a method or of all methods.

        Measured: the recipe's own merge, if it is the leading setting or tied with it. Otherwise it is the simplest of
        the tied settings that are better than the recipe's own. Predicted: the recipe's own merge, if it is within
        1 % of the leading setting, and otherwise the leading setting.
        """
        good, own = self.as_good(method), self.own
        if not good:
            return None
        if own is not None and method in (None, own.setting.method):
            if any(row is own for row in good):
                return own
            good = [row for row in good if not self.are_alike(row, own)]
        good = good if self.measured else good[:1]
        return min(good, key=lambda row: (simplicity(row.setting), self._sort_key(row)))

    def spans(self, rows: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
        """Return task → the smallest and largest weight in some settings, without weights that vary over the layers."""
        found = {}
        for task, weights in zip(self.models, zip(*(row.setting.weights for row in rows), strict=True), strict=False):
            numbers = [weight for weight in weights if not isinstance(weight, tuple)]
            if len(numbers) == len(weights):
                found[task] = min(numbers), max(numbers)
        return found


def compare(grid: Grid, evaluator: Evaluator, *, progress: Progress) -> Preview:
    """Evaluate all settings of a grid, and the recipe's own merge, and rank them; see :func:`set_scores`."""
    asked = list(dict.fromkeys([*grid.settings(), *grid.own]))
    progress.begin("previewing", len(asked))
    rows = evaluator.evaluate(asked, progress.advance)
    return make_preview(grid.recipe, evaluator, rows, grid.axis, set_scores(rows, evaluator.measured))


def make_preview(
    recipe: Recipe, evaluator: Evaluator, rows: list[Outcome], axis: Axis, criterion: Criterion
) -> Preview:
    """Rank outcomes that have their scores. The reference is the recipe's own merge, or else the first row."""
    tasks, notes, measured = evaluator.tasks, evaluator.notes(), evaluator.measured
    own = make_setting(recipe, recipe.method)
    reference = next((row for row in rows if row.setting == own), rows[0])
    if not measured and not (reference.score or 0) > 0:
        notes.append(f"{reference.setting.name} is predicted to cost nothing: multiples are of the largest score")
    if all(row.score is None for row in rows):
        notes.append(
            "no setting has a score: the tasks have different metrics, and without a base losses cannot be compared"
        )
    known: dict[str, Any] = {"alone": evaluator.alone, "examples": evaluator.examples, "notes": notes}
    return Preview(recipe, tasks, task_names(recipe), measured, criterion, rows, reference, axis, **known)


def set_scores(rows: Sequence[Outcome], measured: bool, by_costs: bool = False) -> Criterion:
    """Set the score of every outcome, and return the criterion.

    The score is the average of the tasks' first metrics. It is the cost of the worst task for predictions, if the
    tasks have different metrics, and with ``by_costs``.
    """
    names = {headline(metrics) for row in rows for metrics in row.metrics.values() if metrics}
    if by_costs or not measured or len(names) > 1:
        for row in rows:
            cost = largest_cost(row)
            row.score = cost if math.isfinite(cost) else None
        if measured:
            return Criterion("share lost of what fine-tuning gained, worst task", False, shares=True)
        return Criterion("predicted loss of the worst task", False)
    name = next(iter(names), "loss_per_example")
    for row in rows:
        known = [value for value in row.values.values() if value is not None]
        row.score = sum(known) / len(known) if known and len(known) == len(row.values) else None
    several = len(rows[0].values) > 1
    return Criterion(f"average {name}" if several else name, higher_is_better(name))


def largest_cost(row: Outcome) -> float:
    """Return the cost of the worst task; infinity if a cost is unknown."""
    return max((cost if math.isfinite(cost) else math.inf for cost in row.costs.values()), default=math.inf)


def task_differences(row: Outcome, other: Outcome) -> dict[str, Difference]:
    """Return task → the difference of its first metric between two settings.

    The rows are the same. Metrics such as R² have no value per row: their error comes from both standard errors.
    """
    found = {}
    for task, metrics in row.metrics.items():
        name, against = headline(metrics) if metrics else "", other.metrics.get(task, {})
        if name in row.rows.get(task, {}) and name in other.rows.get(task, {}):
            found[task] = difference(row.rows[task][name], other.rows[task][name])
        elif name in metrics and name in against:
            errors = (one["standard_errors"].get(name) or math.nan for one in (metrics, against))
            found[task] = Difference(metrics[name] - against[name], math.hypot(*errors))
    return found


def score_difference(row: Outcome, other: Outcome, criterion: Criterion) -> Difference | None:
    """Return the difference of the scores of two settings. The rows of different tasks are independent."""
    if row.score is None or other.score is None:
        return None
    if not criterion.shares:
        differences = list(task_differences(row, other).values())
        return averaged(differences) if differences and len(differences) == len(row.values) else None
    return share_difference(row.shares, other.shares)


def share_difference(shares: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> Difference:
    """Return the difference of the worst task's mean lost share between two settings.

    Which task is worst may depend on the rows. So the error is the standard deviation over random draws of the means.
    The two means of a task are drawn together, because they use the same rows.
    """
    generator = torch.Generator().manual_seed(0)
    means, drawn = [], []
    for task, rows in shares.items():
        both = torch.stack([rows, others[task]]).double()
        means.append(both.mean(1))
        noise = torch.randn(DRAWS, 2, generator=generator, dtype=torch.float64)
        if len(rows) > 1:
            sizes, axes = torch.linalg.eigh(both.cov() / len(rows))
            drawn.append(means[-1] + (noise * sizes.clamp(min=0).sqrt()) @ axes.T)
        else:
            drawn.append(noise * math.nan)

    def gap(largest: Tensor) -> Tensor:
        return largest[..., 0] - largest[..., 1]

    value, values = gap(torch.stack(means).amax(0)), gap(torch.stack(drawn).amax(0))
    return Difference(float(value), float(values.std()))


def lost_share(row: Outcome, task: str) -> float | None:
    """Return the share of fine-tuning's gain on a task that a setting loses, with its standard error."""
    cost, rows = row.costs.get(task), row.shares.get(task)
    return cost if cost is None or rows is None else Measured(cost, standard_error(rows))


def score_error(row: Outcome, criterion: Criterion) -> float | None:
    """Return the standard error of a score; None for predictions."""
    if row.score is None or not row.metrics:
        return None
    if not criterion.shares:
        errors = [found["standard_errors"].get(headline(found)) or math.nan for found in row.metrics.values()]
        return math.hypot(*errors) / len(errors)
    return standard_error(row.shares[max(row.costs, key=lambda task: row.costs[task])])


def simplicity(setting: Setting) -> tuple[int, ...]:
    """Return a sort key: fewest changed keys, then a method with few inputs, then fewest different weights."""
    inputs = METHODS[setting.method].inputs
    needs = sum(name in inputs for name in ("prior", "curvature", "penalty", "weights"))
    return len(setting.changes), needs, len({leaf for weight in setting.weights for leaf in leaves(weight)})
