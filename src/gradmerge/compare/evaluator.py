"""Settings merged in memory and evaluated on the data of the tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..recipe import Recipe
from ..tasks import Generation, LoadOptions
from .candidates import notes_on
from .grid import Setting
from .in_memory import Rows, TaskData, load_data, match_data, materialise, state_of
from .lm_eval_data import HarnessData, HarnessTasks, harness_data
from .plans import Candidates, check_prior, open_for
from .predict import BASE, task_names
from .preview import Advance, Outcome
from .scores import headline, loss_name, loss_of

#: Bytes that merges in memory may take together, unless one alone takes more.
MEMORY = 4_000_000_000


class Evaluator:
    """Forms settings in memory, some at a time, and evaluates each on the data of every task.

    A merged model has the config, tokenizer and small files of the base, as one that is written to disk.
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
        harness: HarnessTasks | None = None,
        threads: int = 1,
        **allowed: Any,
    ) -> None:
        names = task_names(recipe)
        given = match_data(data, [*names, *([BASE] if recipe.base is not None else [])])
        self.tasks = [name for name in (*names, BASE) if name in given]
        self.plan = open_for(recipe, methods, **allowed)
        try:
            check_prior(recipe, methods, self.plan)
            if recipe.method in methods:
                self.plan.note(notes_on(recipe, self.plan, threads))
            self._data = _load(recipe, {name: given[name] for name in self.tasks}, loading)
            for one in self._data.values():
                one.generation = generation
            if harness is not None:
                self._data |= harness_data(recipe, harness, loading, self._data)
                self.tasks = [*self._data]
            self._any = next(iter(self._data.values()))
            self._names, self._threads = names, threads
            self._candidates = Candidates(
                recipe, self.plan, lambda changed: open_for(changed, [changed.method], **allowed)
            )
            self._broken: list[str] = []
            self.alone_rows: dict[str, dict[str, Rows]] = {}
            """The same as ``alone``, of every row."""
            self._metrics_alone: dict[str, dict[str, dict[str, Any]]] = {}
            self.compared = False
            """Whether ``alone`` is measured."""
            self.examples = self._numbers_of_rows()
        except BaseException:
            self.plan.inputs.close()
            raise
        nbytes = max(1, sum(job.info.nbytes for job in self.plan.jobs))
        self._at_once = max(1, min(16, MEMORY // nbytes))

    def look(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        rows = []
        self._each_alone()
        for plan, known, some in self._candidates.together(self._candidates.possible(settings), self._at_once):
            candidates = [self._candidates.candidate(setting) for setting in some]
            states = materialise(plan, candidates, self._threads, known)
            for setting in some:
                rows.append(self._outcome(setting, self._any.model_with(states.pop(0))))  # which frees its memory
                advance(1)
        return rows

    def _outcome(self, setting: Setting, model: nn.Module) -> Outcome:
        metrics: dict[str, dict[str, Any]] = {}
        rows: dict[str, Rows] = {}
        for task in self.tasks:
            try:
                metrics[task], rows[task] = self._data[task].evaluate_rows(model)
            except InputError as error:  # the data is fine, since the base could be evaluated on it
                self._broken.append(f"{setting.name} on {task}: {error}")
                metrics[task] = {}
        values = {task: found.get(headline(found)) if found else None for task, found in metrics.items()}
        costs = {task: self.lost_share(task, found) for task, found in metrics.items()}
        return Outcome(setting, values, metrics, costs, rows=rows, shares=self._row_shares(rows))

    @property
    def alone(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Model (`base`, or a tuned one) → task → metrics, measured when they are first asked for."""
        self._each_alone()
        return self._metrics_alone

    def _each_alone(self) -> None:
        """Evaluate the base and every tuned model on all data; what a call that was given up found is kept."""
        if self.compared:
            return
        inputs = self.plan.inputs
        if inputs.base is not None:
            self._alone(BASE, self._any.loaded.model)
        for name, checkpoint in zip(self._names, inputs.tuned, strict=True):
            if len(self._metrics_alone.get(name, ())) == len(self.tasks):
                continue
            try:
                model = self._any.model_with(state_of(checkpoint))
            except InputError:  # its own head does not fit the config that all merges share
                continue
            self._alone(name, model)
        self.compared = True
        self.examples = self._numbers_of_rows()  # the harness knows its own only now

    def _numbers_of_rows(self) -> dict[str, int]:
        return {name: one.loaded.examples for name, one in self._data.items()}

    def _alone(self, name: str, model: nn.Module) -> None:
        found, rows = self._metrics_alone.setdefault(name, {}), self.alone_rows.setdefault(name, {})
        for task in self.tasks:
            try:
                if task not in found:
                    found[task], rows[task] = self._data[task].evaluate_rows(model)
            except InputError as error:
                raise InputError(f"{name} on the data of {task}: {error}") from error

    def _row_shares(self, rows: Mapping[str, Rows]) -> dict[str, Tensor]:
        """Task → the lost share of every row of its data; their mean is what :meth:`lost_share` gives."""
        if BASE not in self.alone:
            return {}
        shares = {}
        for task, found in rows.items():
            if loss_name(found) not in found:
                continue
            own = self.alone_rows.get(task, {}).get(task)
            loss, best = (torch.zeros(()) if one is None else one[loss_name(one)] for one in (found, own))
            shares[task] = (loss - best) / self._scale(task)[1]
        return shares

    def lost_share(self, task: str, metrics: Mapping[str, Any]) -> float:
        """(loss − tuned model's loss) / (base's loss − tuned model's loss): 0 for the task's own model, 1 for the base.

        Losses are means over examples, in nats (squared error for a regression). On the base's data the base takes the
        place of the tuned model, and the mean over the tuned models that of the base. The denominator is at least 1 %
        of the larger loss, so that a task on which tuning gained nothing does not decide.
        """
        if not math.isfinite(loss_of(metrics)) or BASE not in self.alone:
            return math.inf
        best, gain = self._scale(task)
        return (loss_of(metrics) - best) / gain

    def _scale(self, task: str) -> tuple[float, float]:
        """The loss at which a task's share is 0, and how far it is from there to a share of 1."""
        base = loss_of(self.alone[BASE][task])
        if task == BASE:
            tuned = [loss_of(self.alone[name][task]) for name in self._names if name in self.alone] or [base]
            best, worst = base, sum(tuned) / len(tuned)
        else:
            best, worst = loss_of(self.alone[task][task]) if task in self.alone else 0.0, base
        return best, max(worst - best, 0.01 * max(abs(worst), abs(best)), 1e-12)

    def close(self) -> None:
        """Close the files of all models."""
        self._candidates.close()

    def notes(self) -> list[str]:
        of_tasks = {name for name, one in self._data.items() if not isinstance(one, HarnessData)}
        lacking = [name for name in self._names if name not in of_tasks] if of_tasks else []
        notes = [*self.plan.notes, *(note for one in self._data.values() for note in one.loaded.notes)]
        if lacking:
            them = "it" if len(lacking) == 1 else "them"
            notes.append(f"no data for {', '.join(lacking)}: what the merges do to {them} is not seen")
        different = [name for name in self._names if self.compared and name not in self.alone]
        if different:
            notes.append(f"{', '.join(different)}: not evaluated alone, its head does not fit the base's config")
        return list(dict.fromkeys([*notes, *self._candidates.notes(), *self._broken[:5]]))


def _load(recipe: Recipe, given: Mapping[str, str], loading: LoadOptions) -> dict[str, TaskData]:
    """The data of every task, with one model for all: what is merged has the base's config, or the first model's."""
    model = recipe.base.model if recipe.base is not None else recipe.models[0].model
    found: dict[str, TaskData] = {}
    for name, source in given.items():
        try:
            found[name] = load_data(name, recipe, model, source, loading)
        except InputError as error:
            raise InputError(f"--data {name}={source}: {error}") from error
        found[name].loaded.model = next(iter(found.values())).loaded.model
    return found
