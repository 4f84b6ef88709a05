"""Many merges of the same models side by side: what each would cost, from curvature alone or on data.

- From curvature: predicted excess loss of every task, per example that its curvature was estimated on. It ranks merges;
  it is no loss in nats, and nothing here shows it as one.
- On data: every merge is formed in memory and evaluated; nothing is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ..display import Displayed, View
from ..engine.plan import Plan
from ..progress import Progress
from ..recipe import Recipe, Varying, leaves
from ..tasks.standard_errors import Difference
from ..text import Measured
from .grid import Setting, is_removal, recipe_with, takes_weights
from .predict import task_names
from .scores import Criterion, Ranking, headline, higher_is_better, loss_of, mean_ranks, measured, steady
from .significance import are_tied, score_difference, score_error, simplicity
from .sweeps import Changes

Advance = Callable[[int], None]
"""Called with the number of merges that are done."""


@dataclass
class Outcome:
    """One setting, and what was found out about it."""

    setting: Setting
    values: dict[str, float | None]
    """Task → the metric that is shown first, or the predicted excess loss per example."""
    metrics: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Task → all metrics, where data was given."""
    costs: dict[str, float] = field(default_factory=dict)
    """Task → what a search minimises: predicted excess loss, or the lost share of what fine-tuning had gained."""
    parts: dict[str, dict[str, float]] = field(default_factory=dict)
    """Part of the model → the same of that part, which add up; without data."""
    rows: dict[str, dict[str, Tensor]] = field(default_factory=dict, compare=False, repr=False)
    """Task → metric (the one shown first, and the loss) → one number per row of its data, whose mean is the metric."""
    shares: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    """Task → the same of what a search minimises."""
    score: float | None = None
    """What settings are compared by; see the preview's criterion."""
    rank: int | None = None
    """1 for the best of all settings."""
    ranks: dict[str, int | None] = field(default_factory=dict)
    """Task → the same, for that task alone."""


@dataclass(repr=False)
class Preview(Displayed):
    """The settings of a preview and their results."""

    recipe: Recipe
    tasks: list[str]
    """The tasks that settings are compared on: all and the base, or those with data."""
    models: list[str]
    """Names of the tuned models, in the order of the recipe; a setting has one weight for each."""
    measured: bool
    """On data; else predicted from curvature."""
    criterion: Criterion
    rows: list[Outcome]
    reference: Outcome
    """What predictions are relative to: the recipe's own method at its own weights, if it is among those previewed."""
    axis: str
    """What varies along a setting's position."""
    alone: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """Model (`base`, or a tuned one) → task → metrics, where data was given."""
    examples: dict[str, int] = field(default_factory=dict)
    """Task → number of rows of its data."""
    notes: list[str] = field(default_factory=list)
    calibrate_command: str = ""
    """The command that calibrates the best merge; empty if it cannot be calibrated."""
    verdict: list[str] = field(default_factory=list)
    """What a user should know, in sentences."""

    keeps_own: bool = True
    """Whether the recipe's own merge may be taken; not where weights were searched in ranges without it."""
    _ties: dict[int, list[Outcome]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def _line(self) -> list[str]:
        best = self.best()
        found = f"best: {best.setting.name}" if best is not None else "no best"
        if (tied := len(self.all_tied())) > 1:
            found += f" of {tied} that are tied"
        return [f"{len(self.rows)} settings", found, "measured" if self.measured else "predicted"]

    def _view(self) -> View:
        how = self.criterion.name + ("" if self.measured else ", × reference")
        rows = [[row.rank, row.setting.name, self.shown_score(row)] for row in self.ranked()]
        return ["rank", "setting", how], rows, self.verdict

    def ranked(self) -> list[Outcome]:
        """The settings, the best first; those that are tied by their scores."""
        return sorted(self.rows, key=lambda row: (row.rank is None, row.rank, self._badness(row)))

    @property
    def methods(self) -> list[str]:
        return list(dict.fromkeys(row.setting.method for row in self.rows))

    def metric(self, task: str) -> str:
        """Name of the metric of a task that is shown first."""
        return headline(next(row.metrics[task] for row in (self.reference, *self.rows) if row.metrics.get(task)))

    def relative(self, row: Outcome, task: str) -> float | None:
        """Predicted excess loss of a task, in the unit of the score: the largest over tasks, or their sum, is it."""
        return self._relative(row.values.get(task))

    @staticmethod
    def relative_to(row: Outcome, other: Outcome) -> float | None:
        """The score of one setting as a multiple of another's."""
        return row.score / other.score if row.score is not None and other.score else None

    def relative_score(self, row: Outcome) -> float | None:
        """The predicted loss that settings are compared by, as a multiple of the reference's, or of the largest."""
        return self._relative(row.score)

    def _relative(self, value: float | None) -> float | None:
        """A multiple of the reference's score, or of the largest, whichever is above 0: some predictions are below."""
        whole = self.reference.score or 0.0
        if whole <= 0:
            whole = max((row.score for row in self.rows if row.score is not None), default=0.0)
        return value / whole if value is not None and whole > 0 else None

    def shown_score(self, row: Outcome) -> float | None:
        """The score as tables have it: measured with its standard error, else a multiple of the reference's."""
        if not self.measured or row.score is None:
            return self.relative_score(row)
        return Measured(row.score, score_error(row, self.criterion))

    def shown_value(self, row: Outcome, task: str) -> float | None:
        """The same of one task: the metric that is shown first, or the predicted loss."""
        return measured(row.metrics.get(task, {}), self.metric(task)) if self.measured else self.relative(row, task)

    def weights(self, row: Outcome) -> dict[str, Varying]:
        return dict(zip(self.models, row.setting.weights, strict=True)) if row.setting.weights else {}

    def leading(self, method: str | None = None) -> Outcome | None:
        """The setting of a method, or of all, with the best score, be it by chance; of equal ones that of the smaller
        loss. The recipe's own is among them even if it was not asked for. None for removal, be it by negation: what
        goes and what stays pull against each other."""
        if is_removal(self.recipe):
            return None
        known = [row for row in self.compared() if row.score is not None and row.setting.method != "removal"]
        return min((row for row in known if method in (None, row.setting.method)), key=self._badness, default=None)

    def compared(self) -> list[Outcome]:
        """The settings, and the recipe's own if it was not asked for but may be taken."""
        own = self.own
        more = [] if own is None or not self.keeps_own or any(own is row for row in self.rows) else [own]
        return [*self.rows, *more]

    def _badness(self, row: Outcome) -> tuple[float, float]:
        losses = [loss_of(metrics) for metrics in row.metrics.values()] or [0.0]
        score = steady(row.score or 0.0)
        return -score if self.criterion.higher else score, steady(sum(losses) / len(losses))

    def difference(self, row: Outcome, other: Outcome) -> Difference | None:
        """How much larger a setting's score is than another's, on the same rows; None for what was not measured, and
        for mean ranks, which have no error: there :meth:`tied` looks at every task."""
        return score_difference(row, other, self.criterion) if self.measured else None

    def tied(self, best: Outcome) -> list[Outcome]:
        """The other settings that the data cannot tell from one, usually the leading one: within two standard errors.

        Of mean ranks, those that no task's metric tells from it. None where nothing was measured.
        """
        if id(best) not in self._ties:
            others = (row for row in self.rows if row is not best and self.measured)
            self._ties[id(best)] = [row for row in others if are_tied(row, best, self.criterion)]
        return self._ties[id(best)]

    def among_best(self, row: Outcome) -> bool:
        """Whether a setting is the leading one or tied with it; also the reference, where that is none of the rows."""
        leading = self.leading()
        if leading is None or row is leading:
            return leading is not None
        if row is self.reference and not any(row is other for other in self.rows):
            return self.measured and are_tied(row, leading, self.criterion)
        return any(row is other for other in self.tied(leading))

    def all_tied(self) -> list[Outcome]:
        """The leading setting and those tied with it, the recipe's own among them even if it was not asked for."""
        return [row for row in self.compared() if self.measured and self.among_best(row)]

    def best(self, method: str | None = None) -> Outcome | None:
        """The setting of a method, or of all, to take.

        Of the leading one and those tied with it the recipe's own, even if it was not asked for, else the simplest
        (:func:`simplicity`) of those that are not tied with it, and of equally simple ones the one with the best score.
        Of predictions the recipe's own within 1 % of the leading one, else that.
        """
        leading, own = self.leading(method), self.own
        if leading is None:
            return None
        among = self.as_good(method) if self.measured else [leading]
        if own is not None and method in (None, own.setting.method):
            tied = own is leading or self._alike(own, leading)
            if tied and self.keeps_own:
                return own
            among = among if tied else [row for row in among if not self._alike(row, own)]
        return min(among, key=lambda row: (simplicity(row.setting), self._badness(row)))

    def _alike(self, row: Outcome, other: Outcome) -> bool:
        """Whether a setting is as good as another, usually the leading one: tied, or predicted within 1 % of it."""
        return are_tied(row, other, self.criterion) if self.measured else self.criterion.close(row, other)

    @property
    def own(self) -> Outcome | None:
        """The recipe's own merge; None where its method is not among those previewed."""
        return self.reference if self.reference.setting.method == self.recipe.method else None

    def as_good(self, method: str | None = None) -> list[Outcome]:
        """The settings of a method, or of all, that are as good as its leading one, with that: tied, if measured, and
        within 1 % if predicted."""
        leading = self.leading(method)
        if leading is None:
            return []
        same = [row for row in self.rows if method in (None, row.setting.method)]
        if self.measured:
            tied = self.tied(leading)
            return [row for row in same if row is leading or any(row is other for other in tied)]
        return [row for row in same if self._alike(row, leading)]

    def spans(self, rows: Sequence[Outcome]) -> dict[str, tuple[float, float]]:
        """Task → the smallest and the largest of its weights in some settings; none where they differ by layer."""
        found = {}
        for task, weights in zip(self.models, zip(*(row.setting.weights for row in rows), strict=True), strict=False):
            numbers = [weight for weight in weights if not isinstance(weight, tuple)]
            if len(numbers) == len(weights):
                found[task] = min(numbers), max(numbers)
        return found

    def rank_all(self) -> None:
        """Fill in the ranks of all settings; those that are tied with the leading one are first with it."""
        self._ties.clear()
        overall = Ranking([row.score for row in self.compared()], self.criterion.higher)
        for row in (*self.rows, self.reference):
            row.rank = 1 if self.among_best(row) else overall.place(row.score)
        for task in self.tasks:
            one = Ranking([row.values.get(task) for row in self.rows], self.higher(task))
            for row in self.rows:
                row.ranks[task] = one.place(row.values.get(task))

    def higher(self, task: str) -> bool:
        """Whether a higher value of a task is better."""
        return self.measured and higher_is_better(self.metric(task))


class Looker(Protocol):
    """Predicts or evaluates settings: ``Predictor`` from curvature, ``Evaluator`` on data."""

    plan: Plan
    tasks: list[str]
    measured: bool
    examples: dict[str, int]

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]: ...

    def look(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        """The outcome of every setting, in their order; settings that cannot be formed are left out."""
        ...

    def notes(self) -> list[str]: ...

    def close(self) -> None: ...


def reference_setting(recipe: Recipe, methods: Sequence[str], fixed: Mapping[str, Changes] | None = None) -> Setting:
    """The recipe's own merge; where its method is not previewed, the first that is, at the recipe's weights."""
    method = recipe.method if recipe.method in methods else methods[0]
    changes = (fixed or {}).get(method, ())
    return Setting(method, tuple(recipe.weights) if takes_weights(method) else (), changes=changes)


def _meaning(recipe: Recipe) -> dict[str, Any]:
    """A recipe with all defaults filled in, so that two that mean the same are the same."""
    return {**recipe.model_dump(), "options": recipe.resolved_options}


def compare(
    recipe: Recipe,
    looker: Looker,
    settings: Sequence[Setting],
    axis: str,
    *,
    objective: str = "worst",
    fixed: Mapping[str, Changes] | None = None,
    progress: Progress,
) -> Preview:
    """Look at all settings, and at the reference, and compare them.

    On data, by the average of the tasks' metrics, or by the mean of their ranks where metrics differ; from curvature,
    by the worst task (``objective`` "worst") or the sum over tasks ("sum"). ``fixed`` are, by method, changes that all
    its settings have.
    """
    reference = reference_setting(recipe, [setting.method for setting in settings], fixed)
    alike = (s for s in settings if (s.method, s.weights) == (reference.method, reference.weights))
    same = _meaning(recipe_with(recipe, reference))
    reference = next((setting for setting in alike if _meaning(recipe_with(recipe, setting)) == same), reference)
    asked = list(settings)
    if not any(setting.same(reference) for setting in settings):
        asked.append(reference)
    progress.begin("previewing", len(asked))
    rows = looker.look(asked, progress.advance)
    found = next((row for row in rows if row.setting.same(reference)), rows[0])
    shown = [row for row in rows if row is not found] if len(asked) > len(settings) else rows
    return make_preview(recipe, looker, shown or [found], found, axis, score_all(rows, looker.measured, objective))


def make_preview(
    recipe: Recipe, looker: Looker, rows: list[Outcome], reference: Outcome, axis: str, criterion: Criterion
) -> Preview:
    """Rows that have their scores, ranked."""
    found = Preview(
        recipe,
        looker.tasks,
        task_names(recipe),
        looker.measured,
        criterion,
        rows,
        reference,
        axis,
        looker.alone,
        looker.examples,
    )
    found.rank_all()
    found.notes = [*looker.notes(), *_indifferent(found)]
    if not found.measured and not (reference.score or 0) > 0:
        found.notes.append(f"{reference.setting.name} is predicted to cost nothing: multiples are of the largest score")
    return found


def score_all(rows: Sequence[Outcome], measured: bool, objective: str) -> Criterion:
    """Give every row its score, and say what it is."""
    if not measured:
        return score_by_costs(rows, False, objective)
    names = {headline(metrics) for row in rows for metrics in row.metrics.values() if metrics}
    if len(names) <= 1:
        name = next(iter(names), "loss_per_example")
        for row in rows:
            known = [value for value in row.values.values() if value is not None]
            row.score = sum(known) / len(known) if len(known) == len(row.values) else None
        several = len(rows[0].values) > 1
        return Criterion(f"average {name}" if several else name, higher_is_better(name))
    for row, score in zip(rows, mean_ranks(rows), strict=True):
        row.score = score
    return Criterion("mean rank over tasks", False, by_rank=True)


def score_by_costs(rows: Sequence[Outcome], measured: bool, objective: str) -> Criterion:
    """Give every row the cost of its worst task, or the sum, and say what that is."""
    for row in rows:
        total = worst_or_sum(row.costs, objective)
        row.score = total if math.isfinite(total) else None
    if measured:
        of = "worst task" if objective == "worst" else "summed"
        return Criterion(f"share lost of what fine-tuning gained, {of}", False, shares=True, worst=objective == "worst")
    name = "predicted loss of the worst task" if objective == "worst" else "sum of predicted losses"
    return Criterion(name, False, worst=objective == "worst")


def worst_or_sum(costs: Mapping[str, float], objective: str) -> float:
    values = list(costs.values())
    if not all(math.isfinite(value) for value in values):
        return math.inf
    return max(values) if objective == "worst" else sum(values)


def _indifferent(found: Preview) -> list[str]:
    """Notes on methods that divide by the sum of the weights: one weight for all tasks changes nothing there."""
    notes = []
    for method in found.methods:
        rows = [row for row in found.rows if row.setting.method == method and len(set(row.setting.weights)) == 1]
        rows = [row for row in rows if row.setting.changes == rows[0].setting.changes]
        losses = [
            [loss_of(metrics) for metrics in row.metrics.values()] if found.measured else list(row.costs.values())
            for row in rows
            if min(leaves(row.setting.weights[0])) > 0
        ]
        losses = [one for one in losses if all(map(math.isfinite, one))]
        pairs = ((a, b) for one in losses for a, b in zip(one, losses[0], strict=True))
        if len(found.models) > 1 and len(losses) > 2 and all(math.isclose(a, b, rel_tol=1e-5) for a, b in pairs):
            notes.append(
                f"{method}: a weight that all tasks share makes no difference to it, only their ratios do; "
                f"give tasks ranges of their own, such as --weights {found.models[0]}=0:1:0.25"
            )
    return notes
