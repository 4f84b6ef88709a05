"""Settings judged by the curvature of the tasks."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..engine.plan import BLOCK, Plan
from ..errors import InputError
from ..recipe import Recipe
from .candidates import KnownStatistics, notes_on
from .grid import Setting
from .plans import Candidates, check_prior
from .predict import BASE, open_to_look, predict, task_names
from .preview import Advance, Outcome
from .sweeps import changes_files

#: Candidates of one pass over the files; their blocks are cut smaller as they become more.
PASS = 256
#: Numbers that the blocks of all candidates hold at most, per thread.
BLOCKS = 1 << 24


class Predictor:
    """Predicts the cost of settings from the curvature of the tasks, many in one pass over the files."""

    measured = False

    def __init__(
        self,
        recipe: Recipe,
        methods: Sequence[str],
        *,
        threads: int = 1,
        plan: Plan | None = None,
        **allowed: Any,
    ) -> None:
        """``plan`` is one that reads what :func:`open_to_look` does, and is open already."""
        if "fa1" in methods:
            raise InputError(
                "fa1: its curvature is estimated at the differences to the base, and says nothing about the loss of a "
                "merge. Give data of the tasks: --data NAME=SRC"
            )
        self.plan = open_to_look(recipe, **allowed) if plan is None else plan
        try:
            check_prior(recipe, methods, self.plan)
            if recipe.method in methods:
                self.plan.note(notes_on(recipe, self.plan, threads))
        except BaseException:
            self.plan.inputs.close()
            raise
        inputs = self.plan.inputs
        self._names = task_names(recipe)
        self.tasks = [*self._names, *([BASE] if inputs.prior is not None else [])]
        self.alone: dict[str, dict[str, dict[str, Any]]] = {}
        self.examples: dict[str, int] = {}
        self.group_by: Callable[[str], str] = lambda name: ""
        """Parts of the model, by the names of their tensors, that each outcome keeps the costs of."""
        self._threads, self._allowed = threads, allowed
        self._candidates = Candidates(recipe, self.plan, self._open)

    def _open(self, recipe: Recipe) -> Plan:
        return open_to_look(recipe, **self._allowed)

    def look(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        rows: list[Outcome] = []
        _check_comparable(settings)
        for plan, known, some in self._candidates.together(self._candidates.possible(settings), PASS):
            rows += self._one_pass(plan, known, some, advance)
        return rows

    def _one_pass(
        self, plan: Plan, known: KnownStatistics, settings: Sequence[Setting], advance: Advance
    ) -> list[Outcome]:
        plan.block = max(1 << 14, min(BLOCK, BLOCKS // len(settings)))
        lock, total, read, told = threading.Lock(), max(1, plan.total_read), 0, 0

        def count(nbytes: int) -> None:
            """Bytes that were read, as merges that are done."""
            nonlocal read, told
            with lock:
                read += nbytes
                done = min(len(settings), len(settings) * read // total)
                if done > told:
                    advance(done - told)
                    told = done

        found = predict(
            plan,
            self._names,
            [self._candidates.candidate(setting, str(place)) for place, setting in enumerate(settings)],
            threads=self._threads,
            advance=count,
            measured=known,
            group_by=self.group_by,
        )
        advance(len(settings) - told)
        sources = [*plan.inputs.curvature, *([plan.inputs.prior] if plan.inputs.prior is not None else [])]
        per_example = {
            task: 1.0 / (source.examples * source.factor) if source.examples else 1.0
            for task, source in zip(self.tasks, sources, strict=True)
        }
        parts: list[dict[str, dict[str, float]]] = [{} for _ in settings]
        for (name, task, group), cost in found.costs.items():
            parts[int(name)].setdefault(group, {})[task] = cost.excess * per_example[task]
        rows = []
        for setting, groups in zip(settings, parts, strict=True):
            costs = {task: sum(group[task] for group in groups.values()) for task in self.tasks}
            values = {task: value if math.isfinite(value) else None for task, value in costs.items()}
            rows.append(Outcome(setting, values, costs=costs, parts=groups))
        return rows

    def close(self) -> None:
        """Close the files of all models."""
        self._candidates.close()

    def notes(self) -> list[str]:
        return [*self.plan.notes, *self._candidates.notes()]


def _check_comparable(settings: Sequence[Setting]) -> None:
    """Predictions compare merges by the same curvature on the same tensors, as far as those are merged."""
    changed = {key: setting.name for setting in settings for key, _ in setting.changes if changes_files(key)}
    for key, name in changed.items():
        if key.partition(".")[0] != "reduction" and key not in ("options.include_base", "base.examples"):
            raise InputError(
                f"{name}: another {key} changes what losses are predicted from, so that predictions do not compare. "
                "Give data of the tasks: --data NAME=SRC"
            )
