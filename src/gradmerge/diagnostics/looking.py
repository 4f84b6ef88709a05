"""Finding out about settings: through the curvature of the tasks, or on their data."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..engine.candidates import Candidate, KnownStatistics, plan_of
from ..engine.plan import BLOCK, Plan
from ..engine.planning import open_plan
from ..errors import InputError
from ..recipe import Recipe
from ..rules import RULES
from ..storage.tensorfile import local_path
from ..tasks import LoadedTask, evaluate_model, load_task
from .grid import Setting
from .models import State, TaskData, match_data, materialise, state_of
from .predict import BASE, open_to_look, predict, task_names
from .preview import Advance, Row
from .scores import headline, loss_of

#: Candidates of one pass over the files; their blocks are cut smaller as they become more.
PASS = 256
#: Numbers that the blocks of all candidates hold at most, a thread.
BLOCKS = 1 << 24
#: Bytes that merges in memory may take together, unless one alone takes more.
MEMORY = 4_000_000_000
#: Bytes of batches that are kept from one merge to the next.
KEPT = 1_000_000_000


class _Candidates:
    """Settings as candidates of the engine."""

    def __init__(self, recipe: Recipe, plan: Plan) -> None:
        self.recipe, self.plan = recipe, plan
        self.known: KnownStatistics = {}
        self.left_out: dict[str, str] = {}

    def candidate(self, setting: Setting, name: str = "") -> Candidate:
        own = self.recipe.options if setting.method == self.recipe.method else {}
        weights = list(setting.weights) or [1.0] * len(self.recipe.models)
        return Candidate(name, setting.method, weights, own)

    def possible(self, settings: Sequence[Setting]) -> list[Setting]:
        """Without those that the rule refuses, such as an average whose weights sum to 0."""
        found = []
        for setting in settings:
            try:
                plan_of(self.plan, self.candidate(setting))
                found.append(setting)
            except InputError as error:
                self.left_out.setdefault(setting.name, str(error))
        if settings and not found:
            raise InputError(f"no setting can be merged: {next(iter(self.left_out.values()))}")
        return found

    def notes(self) -> list[str]:
        return [f"{name} is left out: {why}" for name, why in list(self.left_out.items())[:5]]


class Predictor:
    """Looks at settings through the curvature of the tasks, many in one pass over the files."""

    measured = False

    def __init__(
        self,
        recipe: Recipe,
        methods: Sequence[str],
        *,
        threads: int = 1,
        allow_pickle: bool = False,
        allow_config: Sequence[str] = (),
    ) -> None:
        if "fa1" in methods:
            raise InputError(
                "fa1: its curvature is measured at the differences to the base, and says nothing about the loss of a merge. "
                "Give data of the tasks: --data NAME=SRC"
            )
        self.plan = open_to_look(recipe, allow_pickle=allow_pickle, allow_config=allow_config)
        try:
            _check_prior(recipe, methods, self.plan)
        except InputError:
            self.plan.inputs.close()
            raise
        inputs = self.plan.inputs
        self._names = task_names(recipe)
        self.tasks = [*self._names, *([BASE] if inputs.prior is not None else [])]
        self.alone: dict[str, dict[str, dict[str, Any]]] = {}
        self.examples: dict[str, int] = {}
        sources = [*inputs.curvature, *([inputs.prior] if inputs.prior is not None else [])]
        self._per_example = {
            task: 1.0 / (source.examples * source.factor) if source.examples else 1.0
            for task, source in zip(self.tasks, sources, strict=True)
        }
        self._threads = threads
        self._candidates = _Candidates(recipe, self.plan)

    def look(self, settings: Sequence[Setting], advance: Advance) -> list[Row]:
        rows: list[Row] = []
        possible = self._candidates.possible(settings)
        for first in range(0, len(possible), PASS):
            rows += self._one_pass(possible[first : first + PASS], advance)
        return rows

    def _one_pass(self, settings: Sequence[Setting], advance: Advance) -> list[Row]:
        self.plan.block = max(1 << 14, min(BLOCK, BLOCKS // len(settings)))
        merges = _Merges(len(settings), self.plan.total_read, advance)
        found = predict(
            self.plan,
            self._names,
            [self._candidates.candidate(setting, str(place)) for place, setting in enumerate(settings)],
            threads=self._threads,
            advance=merges.read,
            measured=self._candidates.known,
        )
        merges.finish()
        totals: dict[tuple[str, str], float] = {}
        for (name, task, _), cost in found.costs.items():
            totals[name, task] = totals.get((name, task), 0.0) + cost.excess
        rows = []
        for place, setting in enumerate(settings):
            costs = {task: totals[str(place), task] * self._per_example[task] for task in self.tasks}
            known = {task: value if math.isfinite(value) else None for task, value in costs.items()}
            rows.append(Row(setting, known, costs=costs))
        return rows

    def notes(self) -> list[str]:
        return [*self.plan.notes, *self._candidates.notes()]


class _Merges:
    """Bytes that were read, as merges that are done."""

    def __init__(self, merges: int, total: int, advance: Advance) -> None:
        self._merges, self._total, self._advance = merges, max(1, total), advance
        self._bytes = self._told = 0
        self._lock = threading.Lock()

    def read(self, nbytes: int) -> None:
        with self._lock:
            self._bytes += nbytes
            self._tell(self._merges * self._bytes // self._total)

    def finish(self) -> None:
        self._tell(self._merges)

    def _tell(self, done: int) -> None:
        done = min(done, self._merges)
        if done > self._told:
            self._advance(done - self._told)
            self._told = done


class Measurer:
    """Forms settings in memory, some at a time, and evaluates each on the data of every task.

    A merged model has the config, tokenizer and small files of the base, as one that is written to disk.
    """

    measured = True

    def __init__(
        self,
        recipe: Recipe,
        methods: Sequence[str],
        data: Mapping[str, str],
        loading: Mapping[str, Any],
        *,
        batch_size: int = 8,
        threads: int = 1,
        allow_pickle: bool = False,
        allow_config: Sequence[str] = (),
    ) -> None:
        names = task_names(recipe)
        given = match_data(data, [*names, *([BASE] if recipe.base is not None else [])])
        self.tasks = [name for name in (*names, BASE) if name in given]
        self.plan = _open_for(recipe, methods, allow_pickle, allow_config)
        try:
            _check_prior(recipe, methods, self.plan)
            self._data = _load(recipe, {name: given[name] for name in self.tasks}, loading, batch_size)
            self.examples = {name: one.loaded.examples for name, one in self._data.items()}
            self._batches = {name: _Batches(one.loaded, batch_size) for name, one in self._data.items()}
            self._names, self._threads = names, threads
            self._candidates = _Candidates(recipe, self.plan)
            self._broken: list[str] = []
            self.alone = self._each_alone()
        except BaseException:
            self.plan.inputs.close()
            raise
        self._nbytes = max(1, sum(job.info.nbytes for job in self.plan.jobs))

    def look(self, settings: Sequence[Setting], advance: Advance) -> list[Row]:
        rows = []
        possible = self._candidates.possible(settings)
        for first in range(0, len(possible), self._at_once):
            some = possible[first : first + self._at_once]
            candidates = [self._candidates.candidate(setting) for setting in some]
            states = materialise(self.plan, candidates, self._threads, self._candidates.known)
            while states:
                setting = some[len(some) - len(states)]
                rows.append(self._row(setting, states.pop(0)))
                advance(1)
        return rows

    @property
    def _at_once(self) -> int:
        return max(1, min(16, MEMORY // self._nbytes))

    def _row(self, setting: Setting, state: State) -> Row:
        metrics: dict[str, dict[str, Any]] = {}
        model = self._any.model_with(state)
        for task in self.tasks:
            try:
                metrics[task] = self._evaluate(task, model)
            except InputError as error:  # the data is fine, since the base could be evaluated on it
                self._broken.append(f"{setting.name} on {task}: {error}")
                metrics[task] = {}
        values = {task: found.get(headline(found)) if found else None for task, found in metrics.items()}
        costs = {task: self.lost_share(task, found) for task, found in metrics.items()}
        return Row(setting, values, metrics, costs)

    @property
    def _any(self) -> TaskData:
        return next(iter(self._data.values()))

    def _evaluate(self, task: str, model: nn.Module) -> dict[str, Any]:
        return dict(evaluate_model(model, self._batches[task], self._data[task].loaded.output))

    def _each_alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """The base and every tuned model, each on all data."""
        inputs = self.plan.inputs
        found: dict[str, dict[str, dict[str, Any]]] = {}
        if inputs.base is not None:
            found[BASE] = {}
            for task in self.tasks:
                try:
                    found[BASE][task] = self._evaluate(task, self._any.loaded.model)
                except InputError as error:
                    raise InputError(f"data of {task}: {error}") from error
        for name, checkpoint in zip(self._names, inputs.tuned, strict=True):
            try:
                model = self._any.model_with(state_of(checkpoint))
            except InputError:  # it has a head of its own, which its merge does not
                continue
            found[name] = {task: self._evaluate(task, model) for task in self.tasks}
        return found

    def lost_share(self, task: str, metrics: Mapping[str, Any]) -> float:
        """(loss − tuned model's loss) / (base's loss − tuned model's loss): 0 is as good as the task's own model, 1 as bad as the base.

        Losses are means over examples, in nats (squared error for a regression). On the base's data the base takes the place of the
        tuned model, and the mean over the tuned models that of the base. The denominator is at least 1 % of the larger loss, so that a
        task on which tuning gained nothing does not decide.
        """
        if not metrics or BASE not in self.alone:
            return math.inf
        base = loss_of(self.alone[BASE][task])
        tuned = [loss_of(self.alone[name][task]) for name in self._names if name in self.alone]
        if task == BASE:
            best, worst = base, sum(tuned) / len(tuned) if tuned else base
        elif task in self.alone:
            best, worst = loss_of(self.alone[task][task]), base
        else:
            best, worst = 0.0, base
        gain = max(worst - best, 0.01 * max(abs(worst), abs(best)), 1e-12)
        return (loss_of(metrics) - best) / gain

    def notes(self) -> list[str]:
        lacking = [name for name in self._names if name not in self.tasks]
        notes = [*self.plan.notes, *(note for one in self._data.values() for note in one.loaded.notes)]
        if lacking:
            notes.append(
                f"no data for {', '.join(lacking)}: what the merges do to {'it' if len(lacking) == 1 else 'them'} is not seen"
            )
        different = [name for name in self._names if name not in self.alone]
        if different:
            notes.append(f"{', '.join(different)}: not evaluated alone, its head does not fit the base's config")
        return list(dict.fromkeys([*notes, *self._candidates.notes(), *self._broken[:5]]))


def _open_for(recipe: Recipe, methods: Sequence[str], allow_pickle: bool, allow_config: Sequence[str]) -> Plan:
    """A plan that reads what some methods need, and no more."""
    needs = frozenset[str]().union(*(_needs(recipe, method) for method in methods))
    reads = needs & {"prior", "curvature", "penalty"} | {"base"}
    who = ", ".join(methods)
    return open_plan(recipe, reads=reads, wanted_by=who, allow_pickle=allow_pickle, allow_config=allow_config)


def _needs(recipe: Recipe, method: str) -> frozenset[str]:
    return RULES[method].needs(recipe.resolved_options if method == recipe.method else {})


def _check_prior(recipe: Recipe, methods: Sequence[str], plan: Plan) -> None:
    lacking = [method for method in methods if "prior" in _needs(recipe, method) and plan.inputs.prior is None]
    if lacking:
        raise InputError(
            f"{lacking[0]} needs the curvature of the base, the recipe names none (base.curvature), and the base's "
            "folder has no curvature/ folder"
        )


def _load(recipe: Recipe, given: Mapping[str, str], loading: Mapping[str, Any], batch_size: int) -> dict[str, TaskData]:
    """The data of every task, with one model for all: what is merged has the base's config, or the first model's."""
    stated = recipe.base.model if recipe.base is not None else recipe.models[0].model
    path = local_path(stated, recipe.folder)
    reference = str(path) if path.exists() else stated
    found: dict[str, TaskData] = {}
    for name, source in given.items():
        try:
            loaded = load_task(reference, source, **loading)
        except InputError as error:
            raise InputError(f"--data {name}={source}: {error}") from error
        if found:
            loaded.model = next(iter(found.values())).loaded.model
        found[name] = TaskData(name, loaded, batch_size)
    return found


class _Batches:
    """The batches of a task, kept from one model to the next if they are not too large."""

    def __init__(self, loaded: LoadedTask, batch_size: int) -> None:
        self._loaded, self._batch_size = loaded, batch_size
        self._kept: list[dict[str, Tensor]] | None = None

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[dict[str, Tensor]] = []
        nbytes = 0
        for batch in self._loaded.batches(self._batch_size):
            nbytes += sum(value.nbytes for value in batch.values())
            if nbytes <= KEPT:
                kept.append(batch)
            yield batch
        if nbytes <= KEPT:
            self._kept = kept
