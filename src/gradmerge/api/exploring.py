"""Exploring merges one after another, with all that they share kept in memory: what a page with sliders asks for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

from ..arguments import checked
from ..diagnostics.controls import Control, controls_of, is_removal, layer_groups, methods_of, weight_control
from ..diagnostics.grid import Setting, check_methods, recipe_with, takes_weights
from ..diagnostics.moves import Moves, Share, Stop, Superseded
from ..diagnostics.predict import BASE, task_names
from ..diagnostics.predictor import Predictor
from ..diagnostics.preview import Outcome, Preview, make_preview, reference_setting, score_all
from ..diagnostics.scores import headline, higher_is_better
from ..display import Displayed, View
from ..engine.to_folder import MergeResult
from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe, Varying, load_recipe
from ..tasks import Loading, complete
from ..tasks.replies import Question, Reply, questions, replies
from ..text import nearest
from .converting import recipe_documents
from .diagnosing import report_folder
from .merging import default_threads, merge, merged_first, recipe_of_models
from .previewing import _tell

Weight = float | Sequence[float]
"""A number, or one for each of the layer groups."""


@dataclass(frozen=True)
class Answer:
    """One row of the data, and what the base, the task's own tuned model and a merge say to it."""

    row: int
    """Its number in the data, from 0."""
    text: str | None
    image: Any
    """A PIL image, for a task on images."""
    truth: str
    """What would be right."""
    base: Reply | None
    tuned: Reply | None
    """Of the task's own model; None for the base's data, or where its head does not fit."""
    merged: Reply


@dataclass(frozen=True)
class Flip:
    """A row that one model gets right and another wrong."""

    row: int
    text: str | None
    image: Any
    truth: str
    before: Reply
    after: Reply
    turned: str
    """`right` or `wrong`."""


class Explorer(Displayed):
    """Merges of a recipe's models, one setting after another. See :func:`gradmerge.explore`, which makes it.

    All of it may be called from several threads: one computes at a time, and the others wait.
    """

    def __init__(
        self,
        recipe: Recipe,
        data: Mapping[str, str],
        loading: Loading,
        *,
        memory: int | None,
        threads: int,
        allowed: Mapping[str, Any],
    ) -> None:
        self._stack = contextlib.ExitStack()
        self._lock = threading.RLock()
        self._threads, self._allowed, self._sources = threads, dict(allowed), dict(data)
        with self._stack:
            self.recipe = recipe
            ready = self._stack.enter_context(merged_first(recipe, None, threads, allowed))
            self._moves = Moves(ready, data, loading, memory=memory, threads=threads, **allowed)
            self._stack.callback(self._moves.plan.inputs.close)
            self._predictor: Predictor | None = None
            with contextlib.suppress(InputError):  # no curvature of every model
                self._predictor = Predictor(ready, [recipe.method], threads=threads, **allowed)
                self._stack.callback(self._predictor.plan.inputs.close)
            self.methods = methods_of(ready, self._moves.plan)
            """The methods that can be formed here, the recipe's own first."""
            self._stack = self._stack.pop_all()
        self.tasks = self._moves.tasks
        """The tasks with data, `base` for the base's own."""
        self.models = task_names(recipe)
        """The tuned models, in the order of the recipe."""
        self.own = reference_setting(recipe, [recipe.method])
        """The recipe's own setting."""
        self.history: list[Outcome] = []
        """What was measured, in the order of time; each setting once."""
        self.layer_groups = layer_groups([job.name for job in self._moves.plan.merged])
        """What the numbers of a weight that is a list are called, from first to last; empty without layers."""
        self.removes = list(self.models) if is_removal(recipe) else []
        """The tasks that are to be forgotten, where the recipe removes."""
        self._own_cost: dict[str, float] = {}

    def __enter__(self) -> Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, and let the memory go."""
        self._stack.close()

    def _line(self) -> list[str]:
        return [f"{len(self.models)} models", f"{len(self.tasks)} tasks", f"{len(self.history)} settings measured"]

    def _view(self) -> View:
        rows = [[row.setting.name, *(row.values.get(task) for task in self.tasks)] for row in self.history]
        return ["setting", *self.tasks], rows, self.notes

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        return [*([self._moves.streamed] if self._moves.streamed else []), *self._moves.notes()]

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model (`base`, or a tuned one) → task → metrics."""
        return self._moves.alone

    @property
    def examples(self) -> dict[str, int]:
        """Task → rows of its data."""
        return self._moves.examples

    def controls(self, method: str) -> list[Control]:
        """What can be moved beside the weights: the damping, and the method's options."""
        self._check_method(method)
        return controls_of(method, self.recipe)

    def weight_control(self, method: str) -> Control | None:
        """The range of a model's weight; None for a method that takes none."""
        self._check_method(method)
        return weight_control(method, self.recipe)

    def _check_method(self, method: str) -> None:
        if method not in self.methods:
            hint = f"{nearest(method, self.methods)}\n  Methods here are {', '.join(self.methods)}."
            raise InputError(f"{method}: cannot be formed of these models{hint}")

    @checked("weights", "changes")
    def setting(
        self,
        method: str | None = None,
        weights: Mapping[str, Weight] | None = None,
        changes: Mapping[str, Any] | None = None,
    ) -> Setting:
        """A setting of the recipe, checked.

        Args:
            method: One of ``methods``; by default the recipe's own.
            weights: Model → a number, or a list with one for each of ``layer_groups``; those that are not named have
                the recipe's.
            changes: Keys of ``controls`` with their values, as `{"damping": 1e-3, "options.density": 0.2}`.

        Returns:
            What :meth:`measure` and the others take.

        >>> explorer.setting("ties", {"yelp": 0.5}, {"options.density": 0.2})  # doctest: +SKIP
        """
        method = method or self.recipe.method
        self._check_method(method)
        given = dict(weights or {})
        for name in given:
            if name not in self.models:
                hint = f"{nearest(name, self.models)}\n  Models are {', '.join(self.models)}."
                raise InputError(f"weights: no model is called {name!r}{hint}")
        own = zip(self.models, self.recipe.weights, strict=True)
        chosen = tuple(self._weight(name, given[name]) if name in given else weight for name, weight in own)
        made = Setting(method, chosen if takes_weights(method) else ())
        if changes:
            made = replace(made, changes=tuple((key, _frozen(value)) for key, value in changes.items()))  # type: ignore[call-arg]
        self._recipe_of(made)
        return made

    def _weight(self, name: str, value: Weight) -> Varying:
        if isinstance(value, str) or not isinstance(value, Sequence):
            return float(value)
        if len(value) != len(self.layer_groups):
            groups = f"the models have {len(self.layer_groups)} groups of layers ({', '.join(self.layer_groups)})"
            raise InputError(f"weights: {name} has {len(value)} numbers, but {groups}")
        values = tuple(float(one) for one in value)
        return values if len(set(values)) > 1 else values[0]

    def _recipe_of(self, setting: Setting) -> Recipe:
        return recipe_with(self.recipe, setting.method, setting.weights)

    def predict(self, setting: Setting) -> dict[str, float] | None:
        """What a setting is predicted to cost each task, from curvature alone; None without curvature of every model.

        Args:
            setting: Of :meth:`setting`.

        Returns:
            Task → predicted excess loss, as a multiple of the recipe's own.

        >>> explorer.predict(explorer.own)["yelp"]  # doctest: +SKIP
        1.0
        """
        if self._predictor is None:
            return None
        with self._lock:
            if not self._own_cost:
                self._own_cost = self._predictor.look([self.own], lambda done: None)[0].costs
            costs = self._predictor.look([setting], lambda done: None)[0].costs
        return {task: cost / own for task, cost in costs.items() if (own := self._own_cost[task]) > 0}

    def measure(self, setting: Setting, stop: Stop = lambda: False, advance: Share | None = None) -> Outcome:
        """Form a setting in memory and evaluate it on the data of every task: the numbers of a merge on disk.

        Args:
            setting: Of :meth:`setting`.
            stop: Asked again and again; once it says True, :class:`gradmerge.Superseded` is raised.
            advance: Told the share of the work that is done, from 0 to 1.

        Returns:
            Metrics of every task. What was measured before is not measured again.

        >>> explorer.measure(explorer.setting(weights={"yelp": 0.5})).values  # doctest: +SKIP
        {'yelp': 0.91, 'sst2': 0.88}
        """
        while not self._lock.acquire(timeout=0.02):
            if stop():
                raise Superseded
        try:
            known = self._measured(setting)
            if known is None:
                known = self._moves.measure(setting, stop, advance or (lambda share: None))
                self.history.append(known)
            return known
        finally:
            self._lock.release()

    def _measured(self, setting: Setting) -> Outcome | None:
        return next((row for row in self.history if row.setting.same(setting)), None)

    def preview(self) -> Preview:
        """All that was measured, compared and ranked, as :func:`gradmerge.preview` does."""
        if not self.history:
            raise InputError("nothing is measured yet")
        with self._lock:
            rows = list(self.history)
            own = self._measured(self.own) or rows[0]
            return make_preview(self.recipe, self._moves, rows, own, "weight", score_all(rows, True, "worst"))

    def best(self) -> Outcome | None:
        """The best so far; of those that are as good within noise the recipe's own, or the simplest. None if nothing
        is measured, and for a removal: what goes and what stays pull against each other."""
        return self.preview().best() if self.history and not self.removes else None

    def front(self) -> list[Outcome]:
        """The settings that no other is better than on every task; on what is to be forgotten, worse is better."""

        def goods(row: Outcome) -> list[float]:
            signs = [higher_is_better(headline(row.metrics[task])) != (task in self.removes) for task in self.tasks]
            values = [row.values[task] for task in self.tasks]
            return [value if sign else -value for value, sign in zip(values, signs, strict=True) if value is not None]

        every = [(row, goods(row)) for row in self.history]
        return [row for row, own in every if not any(_dominates(other, own) for _, other in every)]

    def shown_rows(self, task: str, n: int = 8) -> list[int]:
        """Rows of a task to show: spread evenly over its data."""
        self._check_task(task)
        total = self.examples[task]
        return [number * total // min(n, total) for number in range(min(n, total))]

    def _check_task(self, task: str) -> None:
        if task not in self.tasks:
            raise InputError(
                f"{task}: has no data here{nearest(task, self.tasks)}\n  Tasks are {', '.join(self.tasks)}."
            )

    def _replies(self, who: str | Setting, task: str, rows: Sequence[int]) -> list[Reply] | None:
        with self._lock:
            data = self._moves.data_of(task)
            if who == BASE:
                return replies(data.loaded, self._moves.base_model(), rows)
            if isinstance(who, str):
                model = self._moves.tuned_model(who)
                return None if model is None else replies(data.loaded, model, rows)
            return replies(data.loaded, self._moves.model_of(self._moves.form(who)), rows)

    def answers(self, task: str, rows: Sequence[int], setting: Setting) -> list[Answer]:
        """Some rows, and what the base, the task's own model and a merge say to them.

        Args:
            task: One of ``tasks``.
            rows: Their numbers, from 0; :meth:`shown_rows` gives some.
            setting: The merge.

        Returns:
            For each row the input, what would be right, and three replies.

        >>> explorer.answers("yelp", [0], explorer.own)[0].merged.text  # doctest: +SKIP
        'positive'
        """
        self._check_task(task)
        asked = questions(self._moves.data_of(task).loaded, rows)
        base = self._replies(BASE, task, rows) if BASE in self.alone else None
        tuned = self._replies(task, task, rows) if task != BASE else None
        merged = self._replies(setting, task, rows) or []
        return [
            Answer(row, q.text, q.image, q.truth, base and base[i], tuned and tuned[i], merged[i])
            for i, (row, q) in enumerate(zip(rows, asked, strict=True))
        ]

    def flips(self, task: str, setting: Setting, against: str = "base") -> list[Flip]:
        """Which rows a merge gets right and another model wrong, or the other way round.

        Args:
            task: One of ``tasks``.
            setting: The merge.
            against: `base`, `tuned` (the task's own model), `best` (so far) or `own` (the recipe's).

        Returns:
            The rows that turned, with both replies; none for a task without right and wrong.

        >>> [flip.row for flip in explorer.flips("yelp", setting, "best")]  # doctest: +SKIP
        [3, 17]
        """
        self._check_task(task)
        best = self.best()
        others: dict[str, str | Setting | None]
        others = {"base": BASE, "tuned": task, "own": self.own, "best": best and best.setting}
        if against not in others:
            raise InputError(
                f"against {against!r}: not known{nearest(against, others)}\n  Known are {', '.join(others)}."
            )
        other = others[against]
        rows = list(range(self.examples[task]))
        before = self._replies(other, task, rows) if other is not None else None
        after = self._replies(setting, task, rows) or []
        turned = [row for row in rows if before and before[row].right != after[row].right]
        found = []
        for row, asked in zip(turned, questions(self._moves.data_of(task).loaded, turned), strict=True):
            assert before is not None
            how = "right" if after[row].right else "wrong"
            found.append(Flip(row, asked.text, asked.image, asked.truth, before[row], after[row], how))
        return found

    def tied(self, one: Outcome, other: Outcome) -> bool:
        """Whether two settings are as good within noise, compared on the same rows."""
        return one.values == other.values

    def write_report(self, out: str | Path, *, force: bool = False) -> Path:
        """Write a report of all that was measured into a new folder, as `gradmerge preview` does."""
        found, out = self.preview(), Path(out)
        with report_folder(self.recipe, out, self._sources, force) as staging:
            _tell(staging, found, None, self._sources, "")
        return out / "report.html"

    def recipe_text(self, setting: Setting, folder: str | Path | None = None) -> str:
        """A setting as YAML that `gradmerge merge` runs from a file in a folder, by default the working folder."""
        written = recipe_documents(self._recipe_of(setting), Path(folder) if folder is not None else Path.cwd())
        return f"# {setting.name}\n# gradmerge merge recipe.yml -o merged\n{written}"

    def save(
        self, setting: Setting, out: str | Path, *, progress: bool | Progress = True, **settings: Any
    ) -> MergeResult:
        """Merge a setting to disk, as `gradmerge merge` does; ``settings`` are those of :func:`gradmerge.merge`."""
        return merge(
            self._recipe_of(setting), out, progress=progress, threads=self._threads, **self._allowed, **settings
        )


def _dominates(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True)) and list(one) != list(other)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def _data_of_demo(recipe: Path) -> dict[str, str]:
    """The rows of a demo that weights are tried on, for a recipe of its `recipes/`: those of its models, and the base's.

    A model NAME, or joint-NAME, was tuned on data/NAME.npz; the base on upright.npz, or, where NAME is removed, on it
    and on rest.npz.
    """
    folder = recipe.parent.parent / "data"
    if recipe.parent.name != "recipes" or not (folder / "upright.npz").is_file():
        return {}
    found, base = {}, "upright"
    for name in task_names(load_recipe(recipe)):
        if name.startswith("joint-"):
            base = "rest"
        found[name] = f"{folder / name.removeprefix('joint-')}.npz:valid"
    return found | {BASE: f"{folder / base}.npz:valid"}


@checked()
def explore(
    recipe: str | Path | Recipe | Mapping[str, Any],
    data: Mapping[str, str] | None = None,
    *,
    memory: int | None = None,
    threads: int | None = None,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    **loading: Unpack[Loading],
) -> Explorer:
    """Open a recipe's models to try settings one after another: formed in memory, measured on rows of data.

    Models, their curvature and the data are read once. Use it in a ``with`` block, or close it.

    Args:
        recipe: A recipe file, a mapping with its keys, a :class:`Recipe`, or the folder of a demo.
        data: Task (the name of its model's folder, or `base`) → data, as of :func:`gradmerge.preview`.
        memory: Bytes that models and curvature may take in memory, by default half of what is free; what does not fit
            is read from disk for every setting.
        threads, allow_pickle, allow_config, dequantize: As of :func:`gradmerge.merge`.
        loading: How models and data are loaded: the keywords of :class:`gradmerge.Loading`.

    Returns:
        What measures, predicts, answers and saves settings.

    >>> with explore("recipe.yml", {"yelp": "yelp.jsonl"}, limit=200) as explorer:  # doctest: +SKIP
    ...     explorer.measure(explorer.setting(weights={"yelp": 0.5})).values
    {'yelp': 0.91}
    """
    options = complete(loading, explore)
    if isinstance(recipe, str | Path) and Path(recipe).is_dir():
        recipe = Path(recipe) / "recipes" / "gradient-matching.yml"
    if not data and isinstance(recipe, str | Path):
        data = _data_of_demo(Path(recipe))
    if not data:
        raise InputError("explore needs data of the tasks: data={NAME: SRC}, --data NAME=SRC on the command line")
    found = recipe_of_models(recipe, "explore")
    check_methods(None, found)
    allowed = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    return Explorer(found, data or {}, options, memory=memory, threads=threads or default_threads(), allowed=allowed)
