"""Exploring merges one after another, with all that they share kept in memory: what a page with sliders asks for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..arguments import checked
from ..compare.controls import Choices, Control
from ..compare.interactive import InteractiveEvaluator, Stop, Superseded
from ..compare.predictions import Answer, Answering, Flip
from ..compare.ranking import Outcome, Preview, are_tied, headline, higher_is_better, make_preview, set_scores, unbeaten
from ..compare.settings import BASE, Axis, Setting, changes_inputs, check_methods, is_removal, recipe_with
from ..display import Displayed, View
from ..engine.run import MergeResult
from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe
from ..refinement.rows import TaskRows, count_rows, select_rows
from ..tasks import LoadOptions, complete, measure
from ..tasks.standard_errors import Difference, difference
from ..text import nearest, one_line
from .calibrate import CalibrationResult, calibrate
from .demo_folders import data_of_demo, recipe_of_demo
from .diagnose import report_folder
from .merge import default_threads, merge, merged_first, recipe_of_models
from .preview import write_preview
from .recipe_yaml import recipe_documents

if TYPE_CHECKING:
    import altair as alt


#: Copies of a model while it is calibrated: one that stays as it is, and two of `gm.calibrate`.
COPIES = 3

#: One for all explorers: how many threads torch takes and what transformers says are settings of the whole process.
_COMPUTING = threading.Lock()


def _never() -> bool:
    return False


@dataclass(frozen=True)
class CalibrationComparison:
    """A merge before and after calibration, measured on rows that the calibration did not read."""

    result: CalibrationResult
    metric: dict[str, str]
    """Task → the metric that is shown first."""
    before: dict[str, dict[str, Any]]
    """Task → metrics of the merge."""
    after: dict[str, dict[str, Any]]
    """Task → metrics of the calibrated merge."""
    differences: dict[str, Difference | None]
    """Task → how much larger this metric is after calibration; None if the metric is not known row by row."""
    rows: dict[str, int]
    """Task → number of rows that were measured."""


class Explorer(Displayed):
    """Merges of a recipe's models, one setting after another.

    :func:`gradmerge.explore` makes it. It may be used from several threads: one computes at a time, the others wait.

    Args:
        recipe, data, loading, threads: As of :func:`gradmerge.explore`, all checked.
        allowed: What else may be read: ``allow_pickle``, ``allow_config`` and ``dequantize``.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Mapping[str, str],
        loading: LoadOptions,
        *,
        threads: int = 1,
        allowed: Mapping[str, Any],
    ) -> None:
        self.recipe = recipe
        self._threads, self._allowed, self._sources = threads, dict(allowed), dict(data)
        self._predicting = threading.Lock()
        with contextlib.ExitStack() as stack:
            ready = stack.enter_context(merged_first(recipe, None, threads, allowed))
            self._moves = InteractiveEvaluator(ready, data, loading, threads=threads, **allowed)
            stack.callback(self._moves.close)
            self._predictor = self._moves.predictor()
            self._choices = Choices(ready, self._moves.plan)
            self._open = stack.pop_all()
        self._answering = Answering(self._moves)
        self.methods = self._choices.methods
        """The methods that can be formed here, the recipe's own first."""
        self.tasks = self._moves.tasks
        """The tasks with data, `base` for the base's own."""
        self.models = self._choices.models
        """The tuned models, in the order of the recipe."""
        self.own = self._choices.setting(None, {}, {})
        """The recipe's own setting."""
        self.history: list[Outcome] = []
        """What was measured, in the order of time; each setting once."""
        self.layer_groups = self._choices.layer_groups
        """What the numbers of a weight that is a list are called, from first to last; empty without layers."""
        self.removes = [name for name in self.models if name in self.tasks] if is_removal(recipe) else []
        """The tasks that are to be forgotten, where the recipe removes."""
        self._own_costs: dict[str, float] = {}
        self._compared: Preview | None = None

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._open.close()

    def _line(self) -> list[str]:
        return [f"{len(self.models)} models", f"{len(self.tasks)} tasks", f"{len(self.history)} settings measured"]

    def _view(self) -> View:
        rows = [[row.setting.name, *(row.values.get(task) for task in self.tasks)] for row in self.history]
        return ["setting", *self.tasks], rows, self.notes

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        return self._moves.notes()

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model (`base`, or a tuned one) → task → metrics; measured with the first setting, or when asked for."""
        with contextlib.nullcontext() if self._moves.alone_is_known else self._computing():
            return self._moves.alone

    @property
    def examples(self) -> dict[str, int]:
        """Task → rows of its data."""
        return self._moves.examples

    def controls(self, method: str) -> list[Control]:
        """What can be moved beside the weights: the damping, and the method's options."""
        return self._choices.controls(method)

    def weight_control(self, method: str) -> Control | None:
        """The range of a model's weight; None for a method that takes none."""
        return self._choices.weight_control(method)

    @checked("weights")
    def setting(
        self,
        method: str | None = None,
        weights: Mapping[str, float | Sequence[float]] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Setting:
        """A setting of the recipe, checked.

        Args:
            method: One of ``methods``; by default the recipe's own.
            weights: Model → a number, or a list with one for each of ``layer_groups``; those that are not named have
                the recipe's.
            changes: Keys of the recipe with their values, as `{"damping": 1e-3, "density": 0.2}`.

        Returns:
            What :meth:`measure` and the others take.

        >>> explorer.setting("ties", {"yelp": 0.5}, {"density": 0.2})  # doctest: +SKIP
        """
        made = self._choices.setting(method, weights or {}, changes or {})
        self._moves.plans.check(made)
        return made

    def strengths(self, method: str | None = None) -> list[Setting]:
        """Settings of a removal from nothing to more than the recipe's own: what its trade-off is measured on."""
        return self._choices.strengths(method)

    def _check_task(self, task: str) -> None:
        if task not in self.tasks:
            known = ", ".join(self.tasks)
            raise InputError(f"{task}: has no data here{nearest(task, self.tasks)}\n  Tasks are {known}.")

    @contextlib.contextmanager
    def _computing(self, stop: Stop = _never) -> Iterator[None]:
        """Alone, and always on as many threads, so that numbers do not depend on who calls."""
        while not _COMPUTING.acquire(timeout=0.02):
            if stop():
                raise Superseded
        try:
            with self._moves.fixed_threads():
                yield
        finally:
            _COMPUTING.release()

    def predict(self, setting: Setting) -> dict[str, float] | None:
        """What a setting is predicted to cost each task, from curvature alone.

        Args:
            setting: Of :meth:`setting`.

        Returns:
            Task → predicted excess loss, as a multiple of the recipe's own; tasks that the recipe's own costs nothing
            are left out. None without curvature of every model, and for a setting that merges other tensors.

        >>> explorer.predict(explorer.own)["yelp"]  # doctest: +SKIP
        1.0
        """
        costs = None if (found := self._predicted(setting)) is None else found.costs
        return costs and {task: cost / own for task, cost in costs.items() if (own := self._own_costs[task]) > 0}

    def _predicted(self, setting: Setting) -> Outcome | None:
        if self._predictor is None or any(changes_inputs(key) for key, _ in setting.changes):
            return None
        with self._predicting:
            if not self._own_costs:
                self._own_costs = self._predictor.evaluate([self.own])[0].costs
            return self._predictor.evaluate([setting])[0]

    def measure(self, setting: Setting, stop: Stop = _never, advance: Callable[[float], None] | None = None) -> Outcome:
        """Form a setting in memory and evaluate it on the data of every task: the numbers of a merge on disk.

        Args:
            setting: Of :meth:`setting`.
            stop: Asked after every block and batch; once it says True, :class:`gradmerge.Superseded` is raised.
            advance: Told the share of the work that is done, from 0 to 1.

        Returns:
            Metrics of every task, with what they are of every row. What was measured before is not measured again.

        >>> explorer.measure(explorer.setting(weights={"yelp": 0.5})).values  # doctest: +SKIP
        {'yelp': 0.91, 'sst2': 0.88}
        """
        if (known := self._measured(setting)) is not None:
            return known
        with self._computing(stop):
            if (known := self._measured(setting)) is None:
                known = self._moves.measure(setting, stop, advance or (lambda share: None))
                self.history.append(known)
            return known

    def _measured(self, setting: Setting) -> Outcome | None:
        return next((row for row in self.history if row.setting == setting), None)

    def preview(self) -> Preview:
        """All that was measured, compared and ranked, as :func:`gradmerge.preview` does."""
        rows = [replace(row) for row in self.history]
        if not rows:
            raise InputError("nothing is measured yet")
        if self._compared is None or len(self._compared.rows) < len(rows):
            own = next((row for row in rows if row.setting == self.own), rows[0])
            criterion = set_scores(rows, True, "worst")
            axis = Axis("weight", models=tuple(range(len(self.models))))
            self._compared = make_preview(self.recipe, self._moves, rows, own, axis, criterion)
        return self._compared

    def best(self) -> Outcome | None:
        """The best so far: of the leading setting and those tied with it the recipe's own, else the simplest.

        None if nothing is measured, and for a removal: what goes and what stays pull against each other.
        """
        found = self.preview().best() if self.history and not self.removes else None
        return None if found is None else self._measured(found.setting)

    def tied(self, one: Outcome, other: Outcome) -> bool:
        """Whether the rows do not tell two settings apart."""
        a, b = replace(one), replace(other)
        return are_tied(a, b, set_scores([a, b], True, "worst"))

    def front(self) -> list[Outcome]:
        """The settings that no other is better than on every task; on what is to be forgotten, worse is better."""

        def gain(row: Outcome, task: str) -> float:
            better = higher_is_better(headline(row.metrics[task])) != (task in self.removes)
            return (row.values[task] or 0.0) * (1 if better else -1)

        return unbeaten([(row, [gain(row, task) for task in self.tasks]) for row in self.history])

    def shown_rows(self, task: str, n: int = 8) -> list[int]:
        """Rows of a task to show: spread evenly over its data."""
        self._check_task(task)
        total = self.examples[task]
        return [number * total // min(n, total) for number in range(min(n, total))]

    def answers(self, task: str, rows: Sequence[int], setting: Setting, stop: Stop = _never) -> list[Answer]:
        """Some rows, and what the base, the task's own model and a merge say to them.

        Args:
            task: One of ``tasks``.
            rows: Their numbers, from 0; :meth:`shown_rows` gives some.
            setting: The merge.
            stop: As of :meth:`measure`, asked while others compute.

        Returns:
            For each row the input, what would be right, and three replies.

        >>> explorer.answers("yelp", [0], explorer.own)[0].merged.text  # doctest: +SKIP
        'positive'
        """
        self._check_task(task)
        wrong = [row for row in rows if not 0 <= row < self.examples[task]]
        if wrong:
            raise InputError(f"rows: {task} has {self.examples[task]} rows, from 0 on, and no row {wrong[0]}")
        with self._computing(stop):
            return self._answering.answers(task, rows, setting)

    def flips(self, task: str, setting: Setting, against: str = "base", stop: Stop = _never) -> list[Flip]:
        """Which rows a merge gets right and another model wrong, or the other way round.

        Args:
            task: One of ``tasks``.
            setting: The merge, which is measured if it was not.
            against: `base`, `tuned` (the task's own model), `best` (so far) or `own` (the recipe's).
            stop: As of :meth:`measure`.

        Returns:
            The rows that turned, with both replies; of a task without right and wrong, those whose loss changed most.

        >>> [flip.row for flip in explorer.flips("yelp", setting, "best")]  # doctest: +SKIP
        [3, 17]
        """
        self._check_task(task)
        known = ("base", "tuned", "best", "own")
        if against not in known:
            hint = f"{nearest(against, known)}\n  Known are {', '.join(known)}."
            raise InputError(f"against {against!r}: not known{hint}")
        after = self.measure(setting, stop).rows[task]
        other: Setting | str = BASE if against == "base" else task
        if against in ("best", "own"):
            best = self.best() if against == "best" else self.measure(self.own, stop)
            if best is None:
                return []
            other, before = best.setting, best.rows[task]
        else:
            before = self._moves.alone_rows.get(str(other), {}).get(task, {})
        if not before:
            return []
        with self._computing(stop):
            return self._answering.flips(task, other, before, setting, after)

    def figures(self, outcome: Outcome) -> dict[str, alt.LayerChart]:
        """Charts of all that was measured, with one setting as the present: `tasks`, `front`, `layers`, `trade-off`."""
        from ..report.studio_figures import figures, predicted_layers, remaining_layers

        predicted = self._predicted(outcome.setting)
        found = figures(self.preview(), outcome, self.best(), self.removes)
        if predicted is not None:
            found["layers"] = predicted_layers(predicted, self._own_costs)
        elif BASE in self.alone:
            with self._computing():
                found["layers"] = remaining_layers(self._moves.remaining_distances(outcome.setting), self.models)
        return found

    def calibrate(
        self, setting: Setting, *, stop: Stop = _never, progress: bool | Progress = False
    ) -> CalibrationComparison:
        """Calibrate a setting's merge in memory on every other row, and measure it on the rest before and after.

        Output factors are not used (``curvature="none"``). Others can measure settings meanwhile.

        Args:
            setting: Of :meth:`setting`.
            stop: As of :meth:`measure`, asked while others compute.
            progress: Told how many blocks are done.

        Returns:
            What :func:`gradmerge.calibrate` returns, and the metrics of every task.

        >>> explorer.calibrate(explorer.own).after["yelp"]["accuracy"]  # doctest: +SKIP
        0.93
        """
        with self._computing(stop):
            models = self._moves.copies(setting, self.tasks, COPIES)
            batches = {task: list(self._moves.data[task].batches()) for task in self.tasks}
        merged = models.pop("")
        halves = {task: _every_other_row(given) for task, given in batches.items()}
        counted = {task: count_rows(half.held_out) for task, half in halves.items()}
        if short := [task for task, number in counted.items() if number < 2]:
            raise InputError(f"{short[0]}: calibration needs at least four rows of each task")
        unlabeled = {task: self._unlabeled(task, half.fit) for task, half in halves.items()}
        result = calibrate(merged, unlabeled, teachers=models, curvature="none", progress=progress)
        assert result.model is not None
        metric, before, after, differences = {}, {}, {}, {}
        with self._computing(stop):
            for task, half in halves.items():
                output = self._moves.data[task].loaded.loss
                one, other = (measure(model, half.held_out, output) for model in (merged, result.model))
                before[task], after[task] = one.summary(), other.summary()
                name, rows, others = headline(before[task]), one.rows(), other.rows()
                metric[task] = name
                known = name in rows and name in others
                differences[task] = difference(others[name], rows[name]) if known else None
        return CalibrationComparison(result, metric, before, after, differences, counted)

    def _unlabeled(self, task: str, batches: Sequence[Any]) -> list[dict[str, Any]]:
        """Batches without labels; text to text keeps them, as inputs of the decoder."""
        keep = self._moves.data[task].loaded.task == "seq2seq"
        return [{name: value for name, value in dict(one).items() if keep or name != "labels"} for one in batches]

    def recipe_text(self, setting: Setting, folder: str | Path | None = None) -> str:
        """A setting as YAML that `gradmerge merge` runs from a file in ``folder``, by default the working folder."""
        written = recipe_documents(recipe_with(self.recipe, setting), Path() if folder is None else Path(folder))
        return f"# {one_line(setting.name)}\n# gradmerge merge recipe.yml -o merged\n{written}"

    def save(
        self, setting: Setting, out: str | Path, *, progress: bool | Progress = True, **settings: Any
    ) -> MergeResult:
        """Merge a setting to disk, as :func:`gradmerge.merge` does, whose other options ``settings`` are."""
        given = {"threads": self._threads, **self._allowed, **settings}
        return merge(recipe_with(self.recipe, setting), out, progress=progress, **given)

    def write_report(self, out: str | Path, *, force: bool = False) -> Path:
        """Write a report of all that was measured into a new folder, as `gradmerge preview` does; returns its page."""
        found, out = self.preview(), Path(out)
        with report_folder(self.recipe, out, self._sources, force) as staging:
            write_preview(staging, found, self._sources, "")
        return out / "report.html"


@checked()
def explore(
    recipe: str | Path | Recipe | Mapping[str, Any],
    data: Mapping[str, str] | None = None,
    *,
    threads: int | None = None,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    allow_code: bool = False,
    **loading: Unpack[LoadOptions],
) -> Explorer:
    """Open a recipe's models to try settings one after another: formed in memory, measured on rows of data.

    Models, their curvature and the data are read once. Use it in a ``with`` block, or close it.

    Args:
        recipe: A recipe file, a mapping with its keys, a :class:`Recipe`, or the folder of a demo.
        data: Task (the name of its model's folder, or `base`) → data, as of :func:`gradmerge.preview`; for a recipe of
            a demo, its rows for trying weights.
        threads, allow_pickle, allow_config, dequantize, allow_code: As of :func:`gradmerge.merge`.
        loading: How models and data are loaded: the keywords of :class:`gradmerge.LoadOptions`.

    Returns:
        What measures, predicts, answers and saves settings.

    >>> with explore("recipe.yml", {"yelp": "yelp.jsonl"}, limit=200) as explorer:  # doctest: +SKIP
    ...     explorer.measure(explorer.setting(weights={"yelp": 0.5})).values
    {'yelp': 0.91}
    """
    options = complete(loading, explore)
    if isinstance(recipe, str | Path):
        recipe = recipe_of_demo(Path(recipe))
        if not data and (data := data_of_demo(recipe)):
            options["batch_size"] = loading.get("batch_size", 64)
    if not data:
        raise InputError("there are no rows to measure settings on: give data={NAME: SRC}, or --data NAME=SRC")
    found = recipe_of_models(recipe, "explore", allow_code)
    check_methods(None, found)
    allowed = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    return Explorer(found, data, options, threads=threads or default_threads(), allowed=allowed)


def _every_other_row(batches: Sequence[Any]) -> TaskRows:
    count = count_rows(batches)
    return TaskRows(select_rows(batches, range(0, count, 2)), select_rows(batches, range(1, count, 2)))
