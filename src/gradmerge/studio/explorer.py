"""Merges of a recipe's models, one setting after another, with everything they share in memory."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..api.calibrate import CalibrationResult, calibrate
from ..api.diagnose import report_folder
from ..api.merge import merge, merged_first, number_of_threads, recipe_of_models
from ..api.preview import write_preview
from ..api.recipe_yaml import recipe_documents
from ..compare.evaluate import InteractiveEvaluator, Stop, Superseded
from ..compare.ranking import (
    Outcome,
    Preview,
    are_tied,
    headline,
    higher_is_better,
    make_preview,
    set_scores,
    unbeaten,
)
from ..compare.settings import BASE, Axis, Setting, check_methods, is_removal, recipe_with, task_names, weight_keys
from ..engine.run import MergeResult
from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe
from ..refinement.rows import count_rows, select_rows
from ..report.preview import trade_off_chart
from ..tasks import LoadOptions, complete, measure
from ..tasks.evaluate import Prediction, display_rows, has_right_and_wrong, predict
from ..tasks.metrics import SHARES, Difference, difference
from ..text import one_line
from .choices import Choices

if TYPE_CHECKING:
    import altair as alt

#: Copies of a model during a calibration: one that stays as it is, and two of `gm.calibrate`.
CALIBRATION_COPIES = 3
#: Models whose predictions are kept.
KEPT_PREDICTIONS = 64

#: One for all explorers, because the number of threads of torch is a setting of the whole process.
_COMPUTING = threading.Lock()


def never() -> bool:
    return False


@dataclass(frozen=True)
class Answer:
    """One row of the data, with the predictions of the base, the task's own model and a merge."""

    row: int
    text: str | None
    image: Any
    """A PIL image, for a task on images."""
    label: str
    base: Prediction | None
    tuned: Prediction | None
    """None for the base's data, or if the model's head does not fit."""
    merged: Prediction


@dataclass(frozen=True)
class Flip:
    """A row that one model gets right and another wrong."""

    row: int
    text: str | None
    image: Any
    label: str
    before: Prediction
    after: Prediction
    change: str
    """`right` or `wrong`."""


@dataclass(frozen=True)
class CalibrationComparison:
    """A merge before and after calibration, measured on rows that the calibration did not read."""

    result: CalibrationResult
    metric: dict[str, str]
    """Task → its first metric."""
    before: dict[str, dict[str, Any]]
    """Task → metrics of the merge."""
    after: dict[str, dict[str, Any]]
    """Task → metrics of the calibrated merge."""
    differences: dict[str, Difference | None]
    """Task → how much larger the metric is after calibration; None if it is not known row by row."""
    rows: dict[str, int]
    """Task → number of rows that were measured."""


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
        self.recipe: Recipe = recipe_of_models(recipe, "studio", allow_code)
        check_methods(None, self.recipe)
        options = complete(loading, Explorer)
        self._threads, self._sources = number_of_threads(threads), dict(data)
        self._allowed: dict[str, Any] = {
            "allow_pickle": allow_pickle,
            "allow_config": allow_config,
            "dequantize": dequantize,
        }
        with contextlib.ExitStack() as stack:
            ready = stack.enter_context(merged_first(self.recipe, None, self._threads, self._allowed))
            self.evaluator = InteractiveEvaluator(ready, data, options, threads=self._threads, **self._allowed)
            stack.callback(self.evaluator.close)
            self.choices = Choices(ready, self.evaluator.plan)
            self._files = stack.pop_all()
        self._predictions: OrderedDict[tuple[str | Setting, str], dict[int, Prediction]] = OrderedDict()
        self.tasks = self.evaluator.tasks
        self.models = task_names(ready)
        self.own = self.setting()
        """The recipe's own setting."""
        self.history: list[Outcome] = []
        """Every measured setting, in the order of time."""
        self.removes = [name for name in self.models if name in self.tasks] if is_removal(self.recipe) else []
        """The tasks to forget, if the recipe removes."""
        self._compared: Preview | None = None

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    @property
    def notes(self) -> list[str]:
        return self.evaluator.notes()

    @property
    def examples(self) -> dict[str, int]:
        """Task → number of rows."""
        return self.evaluator.examples

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model (`base` or a fine-tuned one) → task → metrics."""
        with contextlib.nullcontext() if self.evaluator.alone_is_known else self._computing():
            return self.evaluator.alone

    def setting(
        self,
        method: str | None = None,
        weights: Mapping[str, float] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Setting:
        """A setting of the recipe that can be merged; keys that are not given are the recipe's."""
        made = self.choices.setting(method, weights or {}, changes or {})
        self.evaluator.merge_plan(made)
        return made

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
        if (known := self._measured(setting)) is not None:
            return known
        with self._computing(stop):
            if (known := self._measured(setting)) is None:
                known = self.evaluator.measure(setting, stop, advance)
                self.history.append(known)
            return known

    def _measured(self, setting: Setting) -> Outcome | None:
        return next((row for row in self.history if row.setting == setting), None)

    def preview(self) -> Preview:
        """All measured settings, ranked as :func:`gradmerge.preview` does."""
        rows = [replace(row) for row in self.history]
        if not rows:
            raise InputError("nothing is measured yet")
        if self._compared is None or len(self._compared.rows) < len(rows):
            own = next((row for row in rows if row.setting == self.own), rows[0])
            axis = Axis("weight", tuple(weight_keys(self.recipe)))
            criterion = set_scores(rows, True)
            self._compared = make_preview(self.recipe, self.evaluator, rows, own, axis, criterion)
        return self._compared

    def best(self) -> Outcome | None:
        """The measured setting to take; None for a removal."""
        found = self.preview().best() if self.history and not self.removes else None
        return None if found is None else self._measured(found.setting)

    def tied(self, one: Outcome, other: Outcome) -> bool:
        """Whether the rows do not distinguish two settings."""
        a, b = replace(one), replace(other)
        return are_tied(a, b, set_scores([a, b], True))

    def front(self) -> list[Outcome]:
        """The settings that no other beats on every task; on tasks to forget, worse is better."""

        def gain(row: Outcome, task: str) -> float:
            better = higher_is_better(headline(row.metrics[task])) != (task in self.removes)
            return (row.values[task] or 0.0) * (1 if better else -1)

        return unbeaten([(row, [gain(row, task) for task in self.tasks]) for row in self.history])

    def shown_rows(self, task: str, count: int = 8) -> list[int]:
        """Numbers of rows that are spread evenly over the data of a task."""
        total = self.examples[task]
        return [number * total // min(count, total) for number in range(min(count, total))]

    def answers(self, task: str, rows: Sequence[int], setting: Setting) -> list[Answer]:
        """Some rows, with the predictions of the base, the task's own model and a merge."""
        with self._computing():
            shown = display_rows(self.evaluator.data[task].loaded, rows)
            base = self._predict_rows(BASE, task, rows)
            tuned = self._predict_rows(task, task, rows) if task != BASE else [None] * len(rows)
            merged = self._predict_rows(setting, task, rows)
        found = []
        for row, one, *three in zip(rows, shown, base, tuned, merged, strict=True):
            assert three[2] is not None
            found.append(Answer(row, one.text, one.image, one.label, three[0], three[1], three[2]))
        return found

    def flips(self, task: str, setting: Setting, against: str) -> list[Flip]:
        """Rows that a merge gets right and another model wrong, or the other way around.

        ``against`` is `base` or `tuned` (the task's own model). Empty for a task without right and wrong.
        """
        after, other = self.measure(setting).rows[task], BASE if against == "base" else task
        alone = self.evaluator.outcomes_alone.get(other)
        before = {} if alone is None else alone.rows.get(task, {})
        loaded = self.evaluator.data[task].loaded
        share = next((name for name in SHARES if name in before and name in after), None)
        if not before or (share is None and not has_right_and_wrong(loaded)):
            return []
        with self._computing():
            if share is not None:
                changed = (before[share] != after[share]).nonzero().flatten().tolist()
            else:
                every = range(loaded.examples)
                pairs = zip(
                    self._predict_rows(other, task, every), self._predict_rows(setting, task, every), strict=True
                )
                changed = [row for row, (a, b) in enumerate(pairs) if a and b and a.right != b.right]
            old, new = self._predict_rows(other, task, changed), self._predict_rows(setting, task, changed)
        found = []
        for row, shown, a, b in zip(changed, display_rows(loaded, changed), old, new, strict=True):
            if a is not None and b is not None:
                better = b.right if share is None else after[share][row] > before[share][row]
                found.append(Flip(row, shown.text, shown.image, shown.label, a, b, "right" if better else "wrong"))
        return found

    def _predict_rows(self, which: Setting | str, task: str, rows: Sequence[int]) -> list[Prediction | None]:
        """The predictions of a model for some rows; None for each if there is no such model."""
        known = self._predictions.setdefault((which, task), {})
        self._predictions.move_to_end((which, task))
        if len(self._predictions) > KEPT_PREDICTIONS:
            self._predictions.popitem(last=False)
        lacking = [row for row in rows if row not in known]
        if lacking:
            model = self.evaluator.model_of(which)
            if model is None:
                return [None] * len(rows)
            known |= zip(lacking, predict(self.evaluator.data[task].loaded, model, lacking), strict=True)
        return [known[row] for row in rows]

    def trade_offs(self, outcome: Outcome) -> alt.LayerChart | None:
        """All measured settings by two tasks, with one of them marked; None for a single task."""
        return trade_off_chart(self.preview(), outcome)

    def calibrate(
        self, setting: Setting, *, stop: Stop = never, progress: Progress | bool = False
    ) -> CalibrationComparison:
        """Calibrate a merge in memory on every other row, and measure it on the other half before and after.

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
        counted = {task: count_rows(some) for task, some in held_out.items()}
        if short := [task for task, number in counted.items() if number < 2]:
            raise InputError(f"{short[0]}: calibration needs at least four rows of each task")
        unlabeled = {task: self._without_labels(task, some) for task, some in fit.items()}
        result = calibrate(merged, unlabeled, teachers=models, curvature="none", progress=progress)
        assert result.model is not None
        metric, before, after, differences = {}, {}, {}, {}
        with self._computing(stop):
            for task, rows in held_out.items():
                loss = self.evaluator.data[task].loaded.loss
                one, other = (measure(model, rows, loss) for model in (merged, result.model))
                before[task], after[task] = one.summary(), other.summary()
                name = metric[task] = headline(before[task])
                known = name in one.rows() and name in other.rows()
                differences[task] = difference(other.rows()[name], one.rows()[name]) if known else None
        return CalibrationComparison(result, metric, before, after, differences, counted)

    def _without_labels(self, task: str, batches: Sequence[Any]) -> list[dict[str, Any]]:
        """Batches without labels; text to text keeps them, as inputs of the decoder."""
        keep = self.evaluator.data[task].loaded.task == "seq2seq"
        return [{name: value for name, value in dict(one).items() if keep or name != "labels"} for one in batches]

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
