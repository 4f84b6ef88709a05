"""One setting after another, measured as fast as it can be: what they share is kept in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from ..engine.resident import free_memory, keep_in_memory
from ..errors import InputError
from ..recipe import Recipe
from ..rules import RULES
from ..tasks import Loading
from ..text import size
from .controls import to_read
from .evaluator import Evaluator
from .grid import Setting
from .in_memory import State, TaskData, materialise, state_of
from .preview import Outcome

Stop = Callable[[], bool]
Share = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""


class Superseded(Exception):
    """A measurement was given up, since its ``stop`` said so: something newer is asked for."""


class Moves(Evaluator):
    """Forms one setting at a time from tensors in memory, and evaluates it on batches in memory."""

    def __init__(
        self,
        recipe: Recipe,
        data: Mapping[str, str],
        loading: Loading,
        *,
        memory: int | None = None,
        threads: int = 1,
        **allowed: Any,
    ) -> None:
        super().__init__(recipe, to_read(recipe), data, loading, by_row=True, threads=threads, **allowed)
        limit = free_memory() // 2 if memory is None else memory
        left_out = keep_in_memory(self.plan.inputs, limit)
        self.streamed = ""
        """What is read from disk for every setting, in a sentence; empty where all is in memory."""
        if left_out:
            what = f"{len(left_out)} of {len(self.plan.inputs.sources)} inputs"
            self.streamed = f"{what} do not fit into {size(limit)} of memory: they are read from disk for every setting"

    def form(self, setting: Setting, between: Callable[[], None] = lambda: None) -> State:
        """The weights of a setting."""
        candidate = self._candidates.candidate(setting)
        needs = RULES[setting.method].needs(candidate.options or {}) & {"prior", "curvature", "penalty"}
        plan = replace(self.plan, needs=needs | {"base"})
        return materialise(plan, [candidate], self._threads, self._candidates.known)[0]

    def measure(self, setting: Setting, stop: Stop, share: Share) -> Outcome:
        """Form a setting and evaluate it on the data of every task."""
        if stop():
            raise Superseded
        state = self.form(setting)
        share(0.5)
        if stop():
            raise Superseded
        before = len(self._broken)
        found = self._outcome(setting, state)
        if len(self._broken) > before:
            raise InputError(self._broken.pop())
        share(1.0)
        return found

    def data_of(self, task: str) -> TaskData:
        return self._data[task]

    def base_model(self) -> nn.Module:
        return self._any.loaded.model

    def tuned_model(self, name: str) -> nn.Module | None:
        """A tuned model alone; None where its head does not fit the config that merges have."""
        if name not in self.alone:
            return None
        return self._any.model_with(state_of(self.plan.inputs.tuned[self._names.index(name)]))

    def model_of(self, state: State) -> nn.Module:
        return self._any.model_with(state)
