"""Merges of a recipe's models, one setting after another, with everything they share in memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..api.calibrate import CalibrationResult, calibrate
from ..api.diagnose import report_folder
from ..api.merge import merge, merge_named_recipes, number_of_threads, recipe_without_slices
from ..api.preview import write_preview
from ..api.recipe_yaml import recipe_documents
from ..compare.evaluate import InteractiveEvaluator, Stop, Superseded
from ..compare.ranking import Outcome, Preview, headline, make_preview, set_scores, with_error
from ..compare.settings import (
    BASE,
    Axis,
    Setting,
    check_methods,
    is_removal,
    make_setting,
    recipe_with,
    task_names,
    weight_keys,
)
from ..engine.run import MergeResult
from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe
from ..refinement.rows import count_rows, select_rows
from ..report.comparison import trade_off_chart
from ..tasks import LoadOptions, complete, measure
from ..tasks.evaluate import DisplayRow, Prediction, display_rows, predict
from ..tasks.metrics import SHARES, Difference, difference
from ..text import one_line
from .controls import controls_of, methods_of

if TYPE_CHECKING:
    import altair as alt

#: Copies of a model during a calibration: one that stays as it is, and two of `gm.calibrate`.
CALIBRATION_COPIES = 3

#: One for all explorers, because the number of threads of torch is a setting of the whole process.
_COMPUTING = threading.Lock()


def never() -> bool:
    return False


@dataclass(frozen=True)
class Answer:
    """One row of the data, with the predictions of several models: None of a model whose head does not fit."""

    row: DisplayRow
    predictions: list[Prediction | None]
    change: str = ""
    """`right` or `wrong`, where the last model differs from the first."""


@dataclass(frozen=True)
class CalibratedTask:
    """One task before and after calibration, measured on rows that the calibration did not read."""

    metric: str
    rows: int
    before: float | None
    after: float | None
    difference: Difference | None
    """How much larger the metric is after calibration; None if it is not known row by row."""


class Explorer:
    """Measures, shows and saves settings of a recipe. Threads may share it: one computes at a time.

    Args:
        recipe: A recipe file or a mapping with its keys.
        data: Task (the name of its model's folder, or `base`) → data.
        allow_code: Allow methods in Python files.
        threads, allowed: As of :func:`gradmerge.merge`: ``allow_pickle``, ``allow_config`` and ``dequantize``.
        loading: The keywords of :class:`gradmerge.LoadOptions`.
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Any],
        data: Mapping[str, str],
        *,
        threads: int | None = None,
        allow_code: bool = False,
        allow_pickle: bool = False,
        allow_config: Sequence[str] = (),
        dequantize: bool = False,
        **loading: Unpack[LoadOptions],
    ) -> None:
        if not data:
            raise InputError("data: there are no rows to measure settings on; give data NAME=SRC")
        self.recipe: Recipe = recipe_without_slices(recipe, "studio", allow_code)
        check_methods(None, self.recipe)
        options = complete(loading, Explorer)
        self._threads, self._sources = number_of_threads(threads), dict(data)
        self._allowed: dict[str, Any] = {
            "allow_pickle": allow_pickle,
            "allow_config": allow_config,
            "dequantize": dequantize,
        }
        with contextlib.ExitStack() as stack:
            ready = stack.enter_context(merge_named_recipes(self.recipe, None, self._threads, self._allowed))
            self.evaluator = InteractiveEvaluator(ready, data, options, threads=self._threads, **self._allowed)
            stack.callback(self.evaluator.close)
            methods = methods_of(ready, self.evaluator.plan)
            self._files = stack.pop_all()
        self.controls = {method: controls_of(method, ready) for method in methods}
        """Method → key → control."""
        self._predictions: dict[tuple[str, str, int], Prediction] = {}
        """Model that is no merge, task and row → prediction."""
        self.tasks, self.examples = self.evaluator.tasks, self.evaluator.examples
        """The tasks, and their numbers of rows."""
        self.models = task_names(ready)
        self.own = self.setting()
        """The recipe's own setting."""
        self.history: list[Outcome] = []
        """Every measured setting, in the order of time."""
        self.removes = [name for name in self.models if name in self.tasks] if is_removal(self.recipe) else []
        """The tasks to forget, if the recipe removes."""
        self._compared: Preview | None = None

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def setting(self, method: str | None = None, overrides: Mapping[str, Any] | None = None) -> Setting:
        """A setting that can be merged, from keys of the recipe such as `models.0.weight` and `options.density`."""
        method = method or self.recipe.method
        weights = {key: one.value for key, one in self.controls.get(method, {}).items() if one.is_weight}
        own = {} if method == self.recipe.method else weights
        made = make_setting(self.recipe, method, own | dict(overrides or {}))
        self.evaluator.setting_plan(made)
        return made

    def shared_weights(self, present: Setting, steps: int = 10) -> list[Setting]:
        """Settings with the same weight for all models, over its range; only the present one if it has no weights."""
        weights = [one for one in self.controls[present.method].values() if one.is_weight]
        if not weights:
            return [present]
        low, high = weights[0].low, weights[0].high
        values = [round(low + number * (high - low) / steps, 3) for number in range(steps + 1)]
        return [self.setting(present.method, {**present, **dict.fromkeys([w.key for w in weights], v)}) for v in values]

    @contextlib.contextmanager
    def _computing(self, stop: Stop = never) -> Iterator[None]:
        """Wait until no other thread computes."""
        while not _COMPUTING.acquire(timeout=0.02):
            if stop():
                raise Superseded
        try:
            with self.evaluator.fixed_threads():
                yield
        finally:
            _COMPUTING.release()

    def measure(
        self, setting: Setting, stop: Stop = never, advance: Callable[[float], None] = lambda share: None
    ) -> Outcome:
        """Merge a setting in memory and evaluate it; the metrics are those of the merge on disk.

        Raises Superseded once ``stop`` returns True. A setting is measured only once.
        """
        if (known := self.measured(setting)) is not None:
            return known
        with self._computing(stop):
            if (known := self.measured(setting)) is None:
                known = self.evaluator.measure(setting, stop, advance)
                self.history.append(known)
            return known

    def measured(self, setting: Setting) -> Outcome | None:
        """The outcome of a setting if it was measured."""
        return next((row for row in self.history if row.setting == setting), None)

    def preview(self) -> Preview:
        """All measured settings, ranked as :func:`gradmerge.preview` does."""
        rows = [replace(row) for row in self.history]
        if not rows:
            raise InputError("nothing is measured yet")
        if self._compared is None or len(self._compared.rows) < len(rows):
            axis = Axis("weight", tuple(weight_keys(self.recipe)))
            self._compared = make_preview(self.recipe, self.evaluator, rows, axis, set_scores(rows, True))
        return self._compared

    def best(self) -> Outcome | None:
        """The measured setting to take; None for a removal."""
        found = self.preview().best() if self.history and not self.removes else None
        return None if found is None else self.measured(found.setting)

    def answers(self, task: str, setting: Setting, count: int = 8) -> list[Answer]:
        """Rows spread evenly over a task's data, with the predictions of the base, the task's own model and a merge."""
        total = self.examples[task]
        rows = [number * total // min(count, total) for number in range(min(count, total))]
        models: list[str | Setting] = [BASE, *([task] if task != BASE else []), setting]
        with self._computing():
            shown = display_rows(self.evaluator.data[task].loaded, rows)
            predictions = [self._predict(model, task, rows) for model in models]
        return [Answer(row, list(said)) for row, *said in zip(shown, *predictions, strict=True)]

    def flips(self, task: str, setting: Setting, other: str) -> list[Answer]:
        """Rows that a merge gets right and another model (`base` or a task's) wrong, or the other way around.

        Empty for a task without right and wrong.
        """
        after = self.measure(setting).rows[task]
        alone = self.evaluator.outcomes_alone.get(other)
        before = {} if alone is None else alone.rows.get(task, {})
        share = next((name for name in SHARES if name in before and name in after), None)
        if share is None:
            return []
        rows = (before[share] != after[share]).nonzero().flatten().tolist()
        with self._computing():
            shown = display_rows(self.evaluator.data[task].loaded, rows)
            predictions = [self._predict(model, task, rows) for model in (other, setting)]
        words = ["right" if after[share][row] > before[share][row] else "wrong" for row in rows]
        return [Answer(row, [a, b], word) for row, a, b, word in zip(shown, *predictions, words, strict=True)]

    def _predict(self, which: Setting | str, task: str, rows: Sequence[int]) -> Sequence[Prediction | None]:
        """The predictions of a model for some rows; None for each if there is no such model."""
        loaded = self.evaluator.data[task].loaded
        if isinstance(which, Setting):
            model = self.evaluator.model_of(which)
            assert model is not None
            return predict(loaded, model, rows)
        lacking = [row for row in rows if (which, task, row) not in self._predictions]
        if lacking:
            model = self.evaluator.model_of(which)
            if model is None:
                return [None] * len(rows)
            for row, said in zip(lacking, predict(loaded, model, lacking), strict=True):
                self._predictions[which, task, row] = said
        return [self._predictions[which, task, row] for row in rows]

    def trade_offs(self, setting: Setting) -> alt.LayerChart | None:
        """All measured settings by two tasks, with one of them marked; None for a single task."""
        return trade_off_chart(self.preview(), self.measured(setting))

    def calibrate(
        self, setting: Setting, *, stop: Stop = never, progress: Progress | bool = False
    ) -> tuple[CalibrationResult, dict[str, CalibratedTask]]:
        """Calibrate a merge in memory on every other row, and measure each task on the other half before and after.

        Output factors are not used (``curvature="none"``). Other threads can measure settings meanwhile.
        """
        with self._computing(stop):
            models = self.evaluator.copies(setting, self.tasks, CALIBRATION_COPIES)
            batches = {task: list(self.evaluator.data[task].batches()) for task in self.tasks}
        merged = models.pop("")
        fit, held_out = (
            {task: select_rows(some, range(start, count_rows(some), 2)) for task, some in batches.items()}
            for start in (0, 1)
        )
        if short := [task for task, some in held_out.items() if count_rows(some) < 2]:
            raise InputError(f"{short[0]}: calibration needs at least four rows of each task")
        result = calibrate(merged, fit, teachers=models, curvature="none", progress=progress)
        assert result.model is not None
        tasks = {}
        with self._computing(stop):
            for task, rows in held_out.items():
                loss = self.evaluator.data[task].loaded.loss
                one, other = (measure(model, rows, loss) for model in (merged, result.model))
                before, after = one.summary(), other.summary()
                name = headline(before)
                known = name in one.rows() and name in other.rows()
                gap = difference(other.rows()[name], one.rows()[name]) if known else None
                values = with_error(before, name), with_error(after, name)
                tasks[task] = CalibratedTask(name, count_rows(rows), *values, gap)
        return result, tasks

    def recipe_text(self, setting: Setting, folder: Path | None = None) -> str:
        """A setting as YAML for `gradmerge merge`, in a file in ``folder``; by default the working folder."""
        written = recipe_documents(recipe_with(self.recipe, setting), folder or Path())
        return f"# {one_line(setting.name)}\n# gradmerge merge recipe.yml -o merged\n{written}"

    def save(self, setting: Setting, out: str | Path, *, progress: Progress | bool = False) -> MergeResult:
        """Merge a setting to disk."""
        given = {"threads": self._threads, **self._allowed}
        return merge(recipe_with(self.recipe, setting), out, progress=progress, **given)

    def write_report(self, out: str | Path) -> Path:
        """Write a report of all that was measured into a new folder, as `gradmerge preview` does."""
        found, out = self.preview(), Path(out)
        with report_folder(self.recipe, out, self._sources, False) as folder:
            write_preview(folder, found, self._sources, "")
        return out / "report.html"
