"""One setting after another, measured as fast as it can be: what they share is kept in memory."""

from __future__ import annotations

import contextlib
import copy
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.summary import group_of
from ..engine.plan import Plan
from ..errors import InputError
from ..recipe import Recipe
from ..rules import METHODS
from ..tasks import Generation, LoadOptions
from ..tasks.weight_swap import WeightSwap
from ..text import size
from .candidates import Block, Candidate, KnownStatistics, look_at, plan_of
from .controls import to_read
from .evaluator import Evaluator
from .grid import Setting
from .in_memory import State, TaskData, materialise, state_of
from .predict import BASE
from .preview import Outcome
from .resident import free_memory, keep_in_memory
from .sampled_predictor import QuickPredictor

Stop = Callable[[], bool]
Share = Callable[[float], None]
"""Told the share of the work that is done, from 0 to 1."""
#: Models of fewer parameters are evaluated on one thread: others have too little to do, and where something else takes
#: the processor, a browser for one, they all wait for the last.
SMALL = 5_000_000
#: The share of a measurement that is forming the merge, for those who watch.
FORMING = 0.3


class Superseded(Exception):
    """A measurement was given up because its ``stop`` said so: something newer is asked for."""


class Moves(Evaluator):
    """Forms one setting at a time from tensors in memory, and evaluates it on batches in memory."""

    def __init__(
        self,
        recipe: Recipe,
        data: Mapping[str, str],
        loading: LoadOptions,
        *,
        generation: Generation | None = None,
        memory: int | None = None,
        threads: int = 1,
        **allowed: Any,
    ) -> None:
        self._torch_threads = torch.get_num_threads()
        super().__init__(recipe, to_read(recipe), data, loading, generation=generation, threads=threads, **allowed)
        inputs, self._recipe = self.plan.inputs, recipe
        limit = free_memory() // 2 if memory is None else memory
        whole = sum(source.nbytes for source in inputs.checkpoints)
        left_out = keep_in_memory(inputs, limit)
        self.streamed = ""
        """What is read from disk for every setting, in a sentence; empty where all is in memory."""
        if left_out:
            what = f"{len(left_out)} of {len(inputs.sources)} models and curvature files (models: {size(whole)})"
            self.streamed = f"{what} do not fit into {size(limit)} of memory: they are read from disk for every setting"
        self._model = WeightSwap(self._any.loaded.model)
        self._inside: Setting | str | None = None
        """What the model in memory is."""

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """As many threads for each evaluation, whoever asks for it: one for a small model."""
        before, parameters = torch.get_num_threads(), sum(job.info.numel for job in self.plan.jobs)
        torch.set_num_threads(self._torch_threads if parameters > SMALL else 1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def predictor(self) -> QuickPredictor | None:
        """What predicts settings on the same inputs; None without curvature of every model."""
        if not self.plan.inputs.curvature or self.plan.inputs.base is None or self._recipe.method == "fa1":
            return None
        return QuickPredictor(self._recipe, self.plan, self._threads)

    def check(self, setting: Setting) -> None:
        """Raise an InputError if a setting cannot be formed."""
        plan_of(self._candidates.plan_for(setting)[0], self._candidates.candidate(setting))

    def model(self, who: Setting | str, between: Callable[[], None] = lambda: None) -> nn.Module | None:
        """A merge, the base or a tuned model; None where the head of a tuned one does not fit the config of merges.

        A model is in memory until the next one is asked for.
        """
        if who == BASE:
            return self._any.loaded.model if self.plan.inputs.base is not None else None
        if isinstance(who, str) and who not in self.alone:
            return None
        if self._inside != who or self._inside is None:
            if isinstance(who, str):
                state = state_of(self.plan.inputs.tuned[self._names.index(who)])
            else:
                state = self._form(who, between)
            self._inside = None
            self._filled = self._model.with_state(state)
            self._inside = who
        return self._filled

    def copies(self, setting: Setting, tasks: Sequence[str], times: int) -> dict[str, nn.Module]:
        """Copies in float32 of a merge, under an empty name, and of the models of some tasks.

        Raise if ``times`` as much does not fit into the free memory.
        """
        if self._any.loaded.task == "embedding":
            raise InputError(
                "embedding models are not calibrated in memory: save the merge, and use gradmerge calibrate"
            )
        needed = times * (len(tasks) + 1) * 4 * sum(job.info.numel for job in self.plan.jobs)
        if needed > free_memory():
            raise InputError(f"calibration in memory needs {size(needed)}: save the merge, and use gradmerge calibrate")
        found: dict[str, nn.Module] = {}
        for name in ("", *tasks):
            model = self.model(name or setting)
            if model is None:
                raise InputError(
                    f"{name}: its head does not fit the merge's config: save the merge, and use gradmerge calibrate"
                )
            found[name] = copy.deepcopy(model).float().eval()
        return found

    def unlabeled(self, task: str, batches: Iterable[Mapping[str, Tensor] | Sequence[Any]]) -> list[dict[str, Tensor]]:
        """Batches without labels; text to text keeps them, as inputs of the decoder."""
        labels = self._data[task].loaded.task == "seq2seq"
        return [{name: value for name, value in dict(one).items() if labels or name != "labels"} for one in batches]

    def _form(self, setting: Setting, between: Callable[[], None]) -> State:
        plan, known, candidate = self._ready(setting)
        return materialise(plan, [candidate], self._threads, known, between)[0]

    def _ready(self, setting: Setting) -> tuple[Plan, KnownStatistics, Candidate]:
        plan, known = self._candidates.plan_for(setting)
        candidate = self._candidates.candidate(setting)
        # What other methods need is open too, and is not read for this one.
        needs = METHODS[setting.method].needs(candidate.options or {}) & plan.needs
        return replace(plan, needs=needs | {"base"}), known, candidate

    def remaining(self, setting: Setting) -> dict[str, dict[str, float]]:
        """Layer → model → ‖θ̂ − θ_t‖ / ‖θ_0 − θ_t‖ there: 0 is the tuned model, 1 as far from it as the base."""
        plan, known, candidate = self._ready(setting)
        sums: dict[tuple[str, str], list[float]] = {}
        lock = threading.Lock()

        def visit(block: Block) -> None:
            found = [
                [float((place - tuned).double().square().sum()) for place in (block.merged[0], block.base)]
                for tuned in block.tuned
            ]
            with lock:
                for name, squares in zip(self._names, found, strict=True):
                    own = sums.setdefault((group_of(block.job.name), name), [0.0, 0.0])
                    own[:] = map(operator.add, own, squares)

        look_at(plan, [candidate], visit, threads=self._threads, measured=known)
        layers: dict[str, dict[str, float]] = {}
        for (layer, name), (now, before) in sums.items():
            if before:
                layers.setdefault(layer, {})[name] = math.sqrt(now / before)
        return layers

    def measure(self, setting: Setting, stop: Stop, share: Share) -> Outcome:
        """Form a setting and evaluate it on the data of every task; the first time, the models before it."""
        blocks = sum(block.job.rule is not None for block in self.plan.blocks())
        # Answers are written in about as many batches as there are.
        every = [(2 if one.generation else 1, one.loaded) for one in self._data.values()]
        batches = sum(times * math.ceil(loaded.examples / loaded.batch_size) for times, loaded in every)
        models = 0 if self.compared else len(self._names) + (self.plan.inputs.base is not None)
        own = 1 / (models + 1)
        formed = 1 - own * (1 - FORMING)
        parts, last = _shares(0, 1 - own, models * batches), 1 - own

        def between() -> None:
            if stop():
                raise Superseded
            share(next(parts, last))

        self.check(setting)
        before = len(self._broken)
        try:
            for one in self._data.values():
                one.between = between
            self._each_alone()
            parts, last = _shares(1 - own, formed, blocks), formed
            model = self.model(setting, between)
            assert model is not None
            parts, last = _shares(formed, 1, batches), 1
            found = self._outcome(setting, model)
        finally:
            for one in self._data.values():
                one.between = lambda: None
        if len(self._broken) > before:
            raise InputError(self._broken.pop())
        share(1.0)
        return found

    def data_of(self, task: str) -> TaskData:
        return self._data[task]


def _shares(start: float, end: float, count: int) -> Iterator[float]:
    return iter([start + (end - start) * n / count for n in range(count)])
