"""Evaluate settings on data: each is merged in memory, and evaluated on the rows of every task."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import Buffers, Checkpoint
from ..curvature.checkpoint_names import stored_tensors
from ..curvature.estimate import estimate_gradient
from ..engine.jobs import torch_type
from ..engine.plan import Plan
from ..engine.rounding import rounded
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Recipe
from ..tasks import Generation, LoadedTask, LoadOptions, load_task, measure
from ..tasks.evaluate import with_generation_metrics
from ..tasks.generation import generation_rows
from ..tasks.models import model_with
from ..text import nearest
from .candidates import (
    Block,
    Candidate,
    KnownStatistics,
    SettingPlans,
    check_prior,
    notes_on,
    open_for_methods,
    visit_blocks,
)
from .ranking import Advance, Outcome, Rows, headline, loss_name, loss_of
from .settings import BASE, Setting, task_names

State = dict[str, Tensor]
#: Bytes of batches that are kept from one model to the next.
MAX_KEPT = 1_000_000_000
#: Bytes that merges in memory may take together, unless a single one takes more.
MAX_MEMORY = 4_000_000_000


class Evaluator(abc.ABC):
    """Finds out what settings are worth: `Predictor` from curvature, `DataEvaluator` on rows of data."""

    measured = False

    def __init__(
        self, recipe: Recipe, methods: Sequence[str], plan: Plan, reopen: Callable[[Recipe], Plan], threads: int
    ) -> None:
        """``reopen`` opens the plan of a recipe that reads other files than ``plan``."""
        self.plan, self.threads = plan, threads
        self.plans = SettingPlans(recipe, plan, reopen)
        self.names = task_names(recipe)
        self.tasks: list[str] = []
        """The tasks that settings are compared on."""
        self.examples: dict[str, int] = {}
        """Task → number of rows, where there is data."""
        try:
            check_prior(recipe, methods, plan)
            if recipe.method in methods:
                plan.note(notes_on(recipe, plan, threads))
        except BaseException:
            plan.inputs.close()
            raise

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model (`base` or a fine-tuned one) → task → metrics, where there is data."""
        return {}

    @abc.abstractmethod
    def evaluate(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        """The outcomes in the order of the settings, without settings that cannot be merged."""

    def notes(self) -> list[str]:
        return [*self.plan.notes, *self.plans.notes()]

    def close(self) -> None:
        """Close the files of all models."""
        self.plans.close()


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
        generation: Generation | None = None,
        threads: int = 1,
        plan: Plan | None = None,
        **allowed: Any,
    ) -> None:
        """``plan`` is an open plan that reads what the methods need; by default a new one."""
        given = match_data(data, [*task_names(recipe), *([BASE] if recipe.base is not None else [])])
        plan = open_for_methods(recipe, methods, **allowed) if plan is None else plan
        super().__init__(
            recipe, methods, plan, lambda changed: open_for_methods(changed, [changed.method], **allowed), threads
        )
        try:
            self.data = _load(recipe, given, loading)
            for one in self.data.values():
                one.generation = generation
        except BaseException:
            self.close()
            raise
        self.tasks = [*self.data]
        self.model = next(iter(self.data.values())).loaded.model
        """The base's model, whose config and dtype all merges have."""
        self.examples = {name: one.loaded.examples for name, one in self.data.items()}
        self.outcomes_alone: dict[str, Outcome] = {}
        """The results behind ``alone``, also for every row."""
        self.alone_is_known = False
        self.failures: list[str] = []
        """Merges that could not be evaluated."""

    def evaluate(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        self.evaluate_models_alone()
        nbytes = max(1, sum(job.info.nbytes for job in self.plan.jobs))
        at_once = max(1, min(16, MAX_MEMORY // nbytes))
        rows = []
        for plan, known, batch in self.plans.batches(self.plans.possible(settings), at_once):
            candidates = [self.plans.candidate(setting) for setting in batch]
            states = merge_in_memory(plan, candidates, self.threads, known)
            for setting in batch:
                # Popping a state frees its memory.
                rows.append(self.outcome(setting, self.model_with(states.pop(0))))
                advance(1)
        return rows

    def model_with(self, state: Mapping[str, Tensor], name: str | None = None) -> nn.Module:
        """The model with other weights, by their names in files; ``name`` is for error messages."""
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
        """Evaluate the base and every fine-tuned model on all data, once. An interrupted call keeps its results."""
        if self.alone_is_known:
            return
        inputs = self.plan.inputs
        if inputs.base is not None:
            self._evaluate_alone(BASE, self.model)
        for name, checkpoint in zip(self.names, inputs.tuned, strict=True):
            if name in self.outcomes_alone and len(self.outcomes_alone[name].metrics) == len(self.tasks):
                continue
            try:
                model = self.model_with(state_of(checkpoint))
            except InputError:  # its head does not fit the config of the merges
                continue
            self._evaluate_alone(name, model)
        self.alone_is_known = True

    def _evaluate_alone(self, name: str, model: nn.Module) -> None:
        found = self.outcomes_alone.setdefault(name, Outcome(Setting(name)))
        for task in self.tasks:
            try:
                if task not in found.metrics:
                    found.metrics[task], found.rows[task] = self.data[task].evaluate(model)
            except InputError as error:
                raise InputError(f"{name} on the data of {task}: {error}") from error

    def _lost_shares(
        self, metrics: Mapping[str, Mapping[str, Any]], rows: Mapping[str, Rows]
    ) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Task → (loss − loss of the task's model) / (loss of the base − loss of the task's model); and of every row.

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
        lacking = [name for name in self.names if name not in self.data]
        notes = [*self.plan.notes, *(note for one in self.data.values() for note in one.loaded.notes)]
        if lacking:
            notes.append(f"no data for {', '.join(lacking)}: the effect on these tasks is not measured")
        unfit = [name for name in self.names if self.alone_is_known and name not in self.outcomes_alone]
        if unfit:
            notes.append(f"{', '.join(unfit)}: not evaluated alone, since its head does not fit the base's config")
        return list(dict.fromkeys([*notes, *self.plans.notes(), *self.failures[:5]]))


@dataclass
class TaskData:
    """The data of one task."""

    name: str
    loaded: LoadedTask
    generation: Generation | None = None
    """Answers are generated and scored too."""
    before_batch: Callable[[], None] = lambda: None
    """Called before every batch; an exception ends the evaluation."""
    _kept: list[dict[str, Tensor]] | None = field(default=None, init=False, repr=False)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The batches of the data, which are kept from one model to the next unless they are too large."""
        if self._kept is not None:
            for batch in self._kept:
                self.before_batch()
                yield batch
            return
        kept: list[dict[str, Tensor]] = []
        nbytes = 0
        for batch in self.loaded.batches():
            self.before_batch()
            nbytes += sum(value.nbytes for value in batch.values())
            if nbytes <= MAX_KEPT:
                kept.append(batch)
            else:
                kept.clear()
            yield batch
        if nbytes <= MAX_KEPT:
            self._kept = kept

    def evaluate(self, model: nn.Module) -> tuple[dict[str, Any], Rows]:
        """The task's metrics, and for every row its first metric and the loss."""
        found = measure(model, self.batches(), self.loaded.loss)
        metrics, rows = found.summary(), found.rows()
        if self.generation is not None:
            written = generation_rows(self.loaded, model, self.generation, lambda done: self.before_batch())
            metrics, rows = with_generation_metrics(metrics, written), rows | written
        return metrics, {name: rows[name] for name in (headline(metrics), loss_name(metrics)) if name in rows}

    def gradient(self, model: nn.Module) -> State:
        """∇Σ_i ℓ_i over the data, by the names of files, in float32 (float64 if the model is)."""
        sums = estimate_gradient(model, self.batches(), output=self.loaded.loss)
        return {name: value.cpu() for name, value in stored_tensors(model, sums).items()}


def merge_in_memory(
    plan: Plan,
    candidates: Sequence[Candidate],
    threads: int = 1,
    measured: KnownStatistics | None = None,
    after_block: Callable[[], None] = lambda: None,
) -> list[State]:
    """The weights of every candidate, by the names and in the dtypes of a merge on disk.

    ``after_block`` is called from several threads; an exception ends the work.
    """
    states: list[State] = [{} for _ in candidates]
    merged_tensors = plan.merged_tensors
    infos = {name: info for job in plan.jobs for name, info in job.tensors.items()}
    for name, info in infos.items():
        copied = None if name in merged_tensors else _read_tensor(plan.inputs.template, name)
        for state in states:
            state[name] = torch.empty(info.shape, dtype=torch_type(info)) if copied is None else copied

    def visit(block: Block) -> None:
        for state, merged in zip(states, block.merged, strict=True):
            for name, values in block.tensors_of(merged).items():
                stored = rounded(values, torch_type(infos[name]))
                state[name].view(-1)[block.start : block.start + len(stored)] = stored
        after_block()

    visit_blocks(plan, candidates, visit, threads=threads, measured=measured)
    return states


def state_of(checkpoint: Checkpoint) -> State:
    """All weights of a checkpoint."""
    return {name: _read_tensor(checkpoint, name) for name in checkpoint.tensors}


def _read_tensor(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    values = checkpoint.read(name, 0, info.numel, Buffers(), "whole").clone()
    return values.to(torch_type(info)).reshape(info.shape)


def match_data(given: Mapping[str, str], tasks: Sequence[str]) -> dict[str, str]:
    """The data in the order of the tasks; raises InputError if a name of the data is not a task."""
    for name in given:
        if name not in tasks:
            hint = f"{nearest(name, tasks)}\n  Tasks are {', '.join(tasks)}."
            raise InputError(f"data {name}=…: no task of the recipe has this name{hint}")
    return {name: given[name] for name in tasks if name in given}


def _load(recipe: Recipe, given: Mapping[str, str], loading: LoadOptions) -> dict[str, TaskData]:
    """The data of every task, with one model for all: that of the base, or of the first model if there is no base."""
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
