"""Evaluate settings on data: each is merged in memory, and evaluated on the rows of every task."""

from __future__ import annotations

import abc
import contextlib
import copy
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint, View
from ..curvature.checkpoint_names import stored_tensors
from ..curvature.estimate import estimate_gradient
from ..curvature.format import default_curvature
from ..engine.inputs import CurvatureInput, Inputs
from ..engine.jobs import rounded, torch_type
from ..engine.plan import Plan
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Base, Model, Recipe
from ..tasks import LoadedTask, LoadOptions, load_task, measure
from ..tasks.models import model_with
from ..text import nearest, size
from .candidates import (
    Candidate,
    CandidateBlock,
    KnownStatistics,
    derive_plan,
    notes_on,
    open_for_methods,
    visit_blocks,
)
from .ranking import Advance, Outcome, Rows, headline, loss_name, loss_of
from .settings import BASE, Setting, changes_inputs, is_removal, recipe_with, task_names

StateDict = dict[str, Tensor]
Stop = Callable[[], bool]
OpenPlan = Callable[[Recipe, Sequence[str]], Plan]
#: Bytes of batches that are kept from one model to the next.
MAX_KEPT = 1_000_000_000
#: Bytes that merges in memory may take together, unless a single one takes more.
MAX_MEMORY = 4_000_000_000
#: Models with fewer parameters are evaluated on one thread: more threads would mostly wait for each other.
SMALL_MODEL = 5_000_000


class Superseded(Exception):
    """A measurement ended early because its ``stop`` returned True."""


class Evaluator(abc.ABC):
    """Evaluates settings. `Predictor` predicts costs from curvature, and `DataEvaluator` measures them on data."""

    measured = False

    def __init__(
        self, recipe: Recipe, methods: Sequence[str], open_plan: OpenPlan, threads: int, plan: Plan | None = None
    ) -> None:
        """``open_plan`` opens a plan that suits all methods. ``plan`` is used instead of opening one."""
        self.recipe, self.threads, self._open_plan = recipe, threads, open_plan
        self.plan = open_plan(recipe, methods) if plan is None else plan
        """The open plan that settings share if they read and merge the same tensors as the recipe."""
        self._statistics: KnownStatistics = {}
        self._other: tuple[tuple[Any, ...], Plan, KnownStatistics] | None = None
        """Key, plan and statistics of the last settings that read or merge other tensors, such as with `exclude`."""
        self._left_out: dict[str, str] = {}
        """Setting that cannot be merged → why."""
        self.names = task_names(recipe)
        self.tasks: list[str] = []
        """The tasks that settings are compared on."""
        self.examples: dict[str, int] = {}
        """Task → number of rows, where there is data."""
        try:
            if recipe.method in methods:
                self.plan.note(notes_on(recipe, self.plan, threads))
        except BaseException:
            self.close()
            raise

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model (`base` or a fine-tuned one) → task → metrics, where there is data."""
        return {}

    @abc.abstractmethod
    def evaluate(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        """Return the outcomes in the order of the settings. Settings that cannot be merged are left out."""

    def shared_plan(self, setting: Setting) -> tuple[Plan, KnownStatistics]:
        """Return the open plan whose inputs a setting reads, and its statistics.

        For a setting that reads other tensors than the recipe, it opens a plan, and closes the last such plan.
        """
        key = _plan_key(setting)
        if not key:
            return self.plan, self._statistics
        if self._other is None or self._other[0] != key:
            self._close_other()
            self._other = key, self._open_plan(recipe_with(self.recipe, setting), [setting.method]), {}
        return self._other[1:]

    def setting_plan(self, setting: Setting) -> Plan:
        """Return the plan of a setting's merge. Raise InputError if it cannot be merged, such as with weights of 0."""
        return derive_plan(self.shared_plan(setting)[0], recipe_with(self.recipe, setting))

    def batches(
        self, settings: Sequence[Setting], size: int
    ) -> Iterator[tuple[Plan, KnownStatistics, dict[Setting, Plan]]]:
        """Yield batches of at most ``size`` settings that read the same tensors.

        A batch has the shared plan, its statistics, and setting → plan. Settings that cannot be merged are left out.
        """
        found = False
        for _, group in itertools.groupby(settings, key=_plan_key):
            possible = filter(None, map(self._with_plan, group))
            while batch := dict(itertools.islice(possible, size)):
                found = True
                yield *self.shared_plan(next(iter(batch))), batch
        if settings and not found:
            raise InputError(f"no setting can be merged: {next(iter(self._left_out.values()))}")

    def _with_plan(self, setting: Setting) -> tuple[Setting, Plan] | None:
        """Return a setting with its plan. If it cannot be merged, return None, and keep the reason for a note."""
        try:
            return setting, self.setting_plan(setting)
        except InputError as error:
            self._left_out.setdefault(setting.name, str(error))
            return None

    def notes(self) -> list[str]:
        left_out = [f"{name} is left out: {why}" for name, why in list(self._left_out.items())[:5]]
        return [*self.plan.notes, *left_out]

    def _close_other(self) -> None:
        if self._other is not None:
            self._other[1].inputs.close()
            self._other = None

    def close(self) -> None:
        """Close the files of all models."""
        self._close_other()
        self.plan.inputs.close()


def _plan_key(setting: Setting) -> tuple[Any, ...]:
    """Return the key of the shared plan of a setting: the changes that it depends on; empty for the recipe's plan."""
    changed = [(key, value) for key, value in setting.items() if changes_inputs(key)]
    return (setting.method, *changed) if changed else ()


class DataEvaluator(Evaluator):
    """Merges settings in memory, several at a time, and evaluates each on the rows of every task.

    A merge has the config, tokenizer and small files of the base, as a merge on disk has.
    """

    measured = True

    def __init__(
        self,
        recipe: Recipe,
        methods: Sequence[str],
        data: Mapping[str, str],
        loading: LoadOptions,
        *,
        threads: int = 1,
        plan: Plan | None = None,
        **reading: Any,
    ) -> None:
        """``plan`` is an open plan that reads what the methods need. By default a new one is opened."""
        given = match_data(data, [*task_names(recipe), *([BASE] if recipe.base is not None else [])])

        def open_plan(changed: Recipe, methods: Sequence[str]) -> Plan:
            return open_for_methods(changed, methods, **reading)

        super().__init__(recipe, methods, open_plan, threads, plan)
        try:
            self.data = _load(recipe, given, loading)
        except BaseException:
            self.close()
            raise
        self.tasks = [*self.data]
        self.model = next(iter(self.data.values())).loaded.model
        """The base model. All merges are evaluated with its config and dtype."""
        self.examples = {name: one.loaded.examples for name, one in self.data.items()}
        self.outcomes_alone: dict[str, Outcome] = {}
        """The same as ``alone``, with the values of every row."""
        self.alone_is_known = False
        self.failures: list[str] = []
        """Merges that could not be evaluated."""

    def evaluate(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        self.evaluate_models_alone()
        nbytes = max(1, sum(job.info.nbytes for job in self.plan.jobs))
        at_once = max(1, min(16, MAX_MEMORY // nbytes))
        rows = []
        for plan, known, batch in self.batches(settings, at_once):
            states = merge_in_memory(plan, list(batch.values()), self.threads, known)
            for setting in batch:
                # Popping a state frees its memory.
                rows.append(self.outcome(setting, self.model_with(states.pop(0))))
                advance(1)
        return rows

    def model_with(self, state: Mapping[str, Tensor], name: str | None = None) -> nn.Module:
        """Return the model with other weights, named as in files. ``name`` is for error messages."""
        model: nn.Module = model_with(self.model, state, name)
        return model

    def outcome(self, setting: Setting, model: nn.Module) -> Outcome:
        """Evaluate a merge on the data of every task."""
        metrics: dict[str, dict[str, Any]] = {}
        rows: dict[str, Rows] = {}
        for task in self.tasks:
            try:
                metrics[task], rows[task] = self.data[task].evaluate(model)
            except InputError as error:  # of the merge, since the base could be evaluated on the same data
                self.failures.append(f"{setting.name} on {task}: {error}")
                metrics[task] = {}
        costs, shares = self._lost_shares(metrics, rows)
        return Outcome(setting, metrics, costs, rows=rows, shares=shares)

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        self.evaluate_models_alone()
        return {name: found.metrics for name, found in self.outcomes_alone.items()}

    def evaluate_models_alone(self) -> None:
        """Evaluate the base and every fine-tuned model on all data. Later calls only do what is missing."""
        if self.alone_is_known:
            return
        models = dict(zip(self.names, self.plan.inputs.tuned, strict=True))
        for name in [*([BASE] if self.plan.inputs.base is not None else []), *models]:
            known = self.outcomes_alone.get(name)
            if known is not None and len(known.metrics) == len(self.tasks):
                continue
            try:
                model = self.model if name == BASE else self.model_with(state_dict_of(models[name]))
            except InputError:  # its head does not fit the config of the merges
                continue
            found = self.outcomes_alone.setdefault(name, Outcome(Setting({})))
            for task in self.tasks:
                try:
                    if task not in found.metrics:
                        found.metrics[task], found.rows[task] = self.data[task].evaluate(model)
                except InputError as error:
                    raise InputError(f"{name} on the data of {task}: {error}") from error
        self.alone_is_known = True

    def _lost_shares(
        self, metrics: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Rows]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Return the lost share of each task, and of each row.

        It is (loss − loss of the task's model) / (loss of the base − loss of the task's model).

        Losses are means over examples, in nats (squared error for a regression). On the base's own data, the base
        replaces the task's model, and the mean over the fine-tuned models replaces the base. The denominator is at
        least 1 % of the larger loss, so that a task on which fine-tuning gained nothing does not decide.
        """
        alone, shares = self.outcomes_alone, {}
        costs = dict.fromkeys(metrics, math.inf)
        for task, found in metrics.items() if BASE in alone else ():
            if not math.isfinite(loss_of(found)):
                continue
            best = loss_of(alone[task].metrics[task]) if task in alone else 0.0
            others = [BASE] if task != BASE else [name for name in self.names if name in alone] or [BASE]
            worst = sum(loss_of(alone[name].metrics[task]) for name in others) / len(others)
            gain = max(worst - best, 0.01 * max(abs(worst), abs(best)), 1e-12)
            costs[task] = (loss_of(found) - best) / gain
            if (name := loss_name(rows[task])) in rows[task]:
                own = alone[task].rows[task][name] if task in alone else 0.0
                shares[task] = (rows[task][name] - own) / gain
        return costs, shares

    def notes(self) -> list[str]:
        notes = [*super().notes(), *(note for one in self.data.values() for note in one.loaded.notes)]
        if lacking := [name for name in self.names if name not in self.data]:
            notes.append(f"no data for {', '.join(lacking)}: the effect on these tasks is not measured")
        unfit = [name for name in self.names if self.alone_is_known and name not in self.outcomes_alone]
        if unfit:
            notes.append(f"{', '.join(unfit)}: not evaluated alone, since its head does not fit the base's config")
        return list(dict.fromkeys([*notes, *self.failures[:5]]))


class InteractiveEvaluator(DataEvaluator):
    """Merges and evaluates one setting at a time, from models and batches in memory."""

    def __init__(
        self, recipe: Recipe, data: Mapping[str, str], loading: LoadOptions, *, threads: int = 1, **reading: Any
    ) -> None:
        self._torch_threads = torch.get_num_threads()
        super().__init__(recipe, _methods_to_read(recipe), data, loading, threads=threads, **reading)
        inputs = self.plan.inputs
        needed = sum(model.nbytes for model in inputs.checkpoints)
        needed += 4 * sum(math.prod(shape) for one in inputs.curvatures for shape in (one.shapes or {}).values())
        if needed <= free_memory() // 2:
            keep_in_memory(inputs)
        else:
            self.plan.note([f"models and curvature need {size(needed)} of memory: each setting reads them from disk"])
        self._current: Setting | str | None = None
        """The model that ``_filled`` holds the weights of."""
        self._filled: nn.Module | None = None

    @contextlib.contextmanager
    def fixed_threads(self) -> Iterator[None]:
        """Use the same number of threads for each evaluation, so that results do not depend on the caller."""
        before, parameters = torch.get_num_threads(), sum(job.info.numel for job in self.plan.jobs)
        torch.set_num_threads(self._torch_threads if parameters > SMALL_MODEL else 1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def measure(self, setting: Setting, stop: Stop, share: Callable[[float], None]) -> Outcome:
        """Merge a setting and evaluate it; the first call also evaluates the models alone.

        Raises Superseded once ``stop`` returns True. ``share`` is called with the share of the work that is done.
        """
        batches = sum(math.ceil(one.loaded.examples / one.loaded.batch_size) for one in self.data.values())
        models = 0 if self.alone_is_known else len(self.names) + (self.plan.inputs.base is not None)
        blocks = sum(1 for _ in self.plan.blocks(jobs=self.plan.merged_jobs))
        total, done = blocks + batches * (models + 1), 0
        lock = threading.Lock()

        def step() -> None:
            nonlocal done
            if stop():
                raise Superseded
            with lock:
                done += 1
                share(min(1.0, done / total))

        failures = len(self.failures)
        try:
            for one in self.data.values():
                one.before_batch = step
            self.evaluate_models_alone()
            model = self.model_of(setting, step)
            assert model is not None
            found = self.outcome(setting, model)
        finally:
            for one in self.data.values():
                one.before_batch = lambda: None
        if len(self.failures) > failures:
            raise InputError(self.failures.pop())
        share(1.0)
        return found

    def model_of(self, which: Setting | str, after_block: Callable[[], None] = lambda: None) -> nn.Module | None:
        """Return a merge, the base or a fine-tuned model; None if its head does not fit the config of the merges.

        Only the last merge or fine-tuned model is kept.
        """
        if which == BASE:
            return self.model if self.plan.inputs.base is not None else None
        if isinstance(which, str) and which not in self.alone:
            return None
        if self._current != which or self._filled is None:
            if isinstance(which, str):
                state = state_dict_of(self.plan.inputs.tuned[self.names.index(which)])
            else:
                merge, (plan, known) = self.setting_plan(which), self.shared_plan(which)
                # The plan is open for all methods; this setting reads only what its own method needs.
                plan = replace(plan, needs=plan.needs & merge.needs)
                state = merge_in_memory(plan, [merge], self.threads, known, after_block)[0]
            self._current = self._filled = None  # frees the weights of the earlier one
            self._filled = model_with(self.model, state)
            self._current = which
        return self._filled

    def copies(self, setting: Setting, tasks: Sequence[str], times: int) -> dict[str, nn.Module]:
        """Return copies in float32 of a merge (under an empty name) and of the models of some tasks.

        Raises InputError if ``times`` as much memory is not free.
        """
        instead = "save the merge, and use gradmerge calibrate"
        if next(iter(self.data.values())).loaded.task == "embedding":
            raise InputError(f"embedding models cannot be calibrated in memory: {instead}")
        needed = times * (len(tasks) + 1) * 4 * sum(job.info.numel for job in self.plan.jobs)
        if needed > free_memory():
            raise InputError(f"calibration in memory needs {size(needed)}: {instead}")
        found: dict[str, nn.Module] = {}
        for name in ("", *tasks):
            model = self.model_of(name or setting)
            if model is None:
                raise InputError(f"{name}: its head does not fit the merge's config: {instead}")
            found[name] = copy.deepcopy(model).float().eval()
        return found


def _methods_to_read(recipe: Recipe) -> list[str]:
    """Return methods that together read all inputs of a recipe: its own, and one that reads all available curvature."""

    def has_curvature(part: Base | Model) -> bool:
        inside = local_path(part.adapter or part.model, recipe.folder)
        return part.curvature is not None or default_curvature(inside) is not None

    methods = [recipe.method]
    if recipe.method != "fa1" and recipe.base is not None and all(map(has_curvature, recipe.models)):
        if has_curvature(recipe.base):
            methods.append("removal" if is_removal(recipe) else "gradient-matching")
        elif not is_removal(recipe):
            methods.append("fisher-averaging")
    return list(dict.fromkeys(methods))


class _CheckpointInMemory(View):
    """A checkpoint whose tensors are kept in memory; for an adapter, the sums with its base."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self._memory = {name: inner.read_whole(name).reshape(-1).clone() for name in inner.tensors}

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        return self._memory[name][start:stop]


def keep_in_memory(inputs: Inputs) -> None:
    """Replace the models and curvature of ``inputs`` by copies in memory."""
    models = {model: _CheckpointInMemory(model) for model in inputs.checkpoints}
    inputs.template = models[inputs.template]
    inputs.base = None if inputs.base is None else models.get(inputs.base, inputs.base)
    inputs.tuned = [models[model] for model in inputs.tuned]
    kept = {source: _in_memory(source) for source in inputs.curvatures}
    inputs.prior = None if inputs.prior is None else kept[inputs.prior]
    inputs.curvature = [kept[source] for source in inputs.curvature]
    inputs.penalty = [None if source is None else kept[source] for source in inputs.penalty]


def _in_memory(source: CurvatureInput) -> CurvatureInput:
    file = source.file
    if file is None:
        return source
    memory = {name: file.read_whole(name) for name in file.shapes}
    file.close()
    return replace(source, file=None, memory=memory)


def free_memory() -> int:
    """Return the approximate free memory in bytes."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclass
class TaskData:
    """The data of one task."""

    name: str
    loaded: LoadedTask
    before_batch: Callable[[], None] = lambda: None
    """Called before every batch; an exception ends the evaluation."""
    _kept: list[dict[str, Tensor]] = field(default_factory=list, init=False, repr=False)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield the batches of the data, and keep them for the next model unless they are too large."""
        kept: list[dict[str, Tensor]] = []
        nbytes = 0
        for batch in self._kept or self.loaded.batches():
            self.before_batch()
            kept.append(batch)
            nbytes += sum(value.nbytes for value in batch.values())
            if nbytes > MAX_KEPT:
                kept.clear()
            yield batch
        self._kept = kept

    def evaluate(self, model: nn.Module) -> tuple[dict[str, Any], Rows]:
        """Return the task's metrics, and its first metric and loss for every row."""
        found = measure(model, self.batches(), self.loaded.loss)
        metrics, rows = found.summary(), found.rows()
        return metrics, {name: rows[name] for name in (headline(metrics), loss_name(metrics)) if name in rows}

    def gradient(self, model: nn.Module) -> StateDict:
        """Return ∇Σ_i ℓ_i over the data, named as in files, in float32 (float64 if the model is)."""
        sums = estimate_gradient(model, self.batches(), output=self.loaded.loss)
        return {name: value.cpu() for name, value in stored_tensors(model, sums).items()}


def merge_in_memory(
    plan: Plan,
    candidates: Sequence[Candidate],
    threads: int = 1,
    known: KnownStatistics | None = None,
    after_block: Callable[[], None] = lambda: None,
) -> list[StateDict]:
    """Return the weights of every candidate, with the names and dtypes of a merge on disk.

    ``after_block`` is called from several threads; an exception ends the work.
    """
    merged_tensors, states = plan.merged_tensors, [StateDict() for _ in candidates]
    infos = {name: info for job in plan.jobs for name, info in job.tensors.items()}
    for name, info in infos.items():
        copied = None if name in merged_tensors else _read_tensor(plan.inputs.template, name)
        for state in states:
            state[name] = torch.empty(info.shape, dtype=torch_type(info)) if copied is None else copied

    def visit(block: CandidateBlock) -> None:
        for state, merged in zip(states, block.merged, strict=True):
            for name, values in block.tensors_of(merged).items():
                stored = rounded(values, torch_type(infos[name]))
                state[name].view(-1)[block.start : block.start + len(stored)] = stored
        after_block()

    visit_blocks(plan, candidates, visit, threads=threads, known=known)
    return states


def state_dict_of(checkpoint: Checkpoint) -> StateDict:
    """Read all weights of a checkpoint."""
    return {name: _read_tensor(checkpoint, name) for name in checkpoint.tensors}


def _read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    return checkpoint.read_whole(name).clone().to(TORCH_TYPES[checkpoint.tensors[name].dtype])


def match_data(given: Mapping[str, str], tasks: Sequence[str]) -> dict[str, str]:
    """Return the data in the order of the tasks. Raise InputError if a name of the data is not a task."""
    for name in given:
        if name not in tasks:
            hint = f"{nearest(name, tasks)}\n  Tasks are {', '.join(tasks)}."
            raise InputError(f"data {name}=…: no task of the recipe has this name{hint}")
    return {name: given[name] for name in tasks if name in given}


def _load(recipe: Recipe, given: Mapping[str, str], loading: LoadOptions) -> dict[str, TaskData]:
    """Load the data of every task, with one model for all: the base, or the first model if there is no base."""
    if recipe.tokenizer is not None:
        raise InputError(
            "tokenizer: a merge with a new vocabulary cannot be evaluated in memory. Merge it, and use "
            "`gradmerge evaluate` on the result"
        )
    model = recipe.base.model if recipe.base is not None else recipe.models[0].model
    path = local_path(model, recipe.folder)
    reference = str(path) if path.exists() else model
    found: dict[str, TaskData] = {}
    for name, source in given.items():
        try:
            found[name] = TaskData(name, load_task(reference, source, **loading))
        except InputError as error:
            raise InputError(f"data {name}={source}: {error}") from error
        found[name].loaded.model = next(iter(found.values())).loaded.model
    return found
