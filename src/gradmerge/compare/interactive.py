"""One setting after another, as fast as possible: models, curvature and data stay in memory."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.checkpoint import Buffers, Checkpoint, View
from ..curvature.format import default_curvature
from ..engine.inputs import CurvatureInput, Inputs
from ..engine.plan import Plan
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Base, Model, Recipe
from ..rules import METHODS
from ..tasks import LoadOptions
from ..tasks.models import model_with
from ..text import size
from .candidates import Candidate, KnownStatistics
from .evaluate import DataEvaluator, merge_in_memory, state_of
from .ranking import Outcome
from .settings import BASE, Setting, is_removal

Stop = Callable[[], bool]
#: Models with fewer parameters are evaluated on one thread: more threads would mostly wait for each other.
SMALL_MODEL = 5_000_000


class Superseded(Exception):
    """A measurement ended early because its ``stop`` returned True."""


class InteractiveEvaluator(DataEvaluator):
    """Merges one setting at a time from tensors in memory, and evaluates it on batches in memory."""

    def __init__(
        self, recipe: Recipe, data: Mapping[str, str], loading: LoadOptions, *, threads: int = 1, **allowed: Any
    ) -> None:
        self._torch_threads = torch.get_num_threads()
        super().__init__(recipe, _methods_to_read(recipe), data, loading, threads=threads, **allowed)
        inputs, self.recipe = self.plan.inputs, recipe
        limit = free_memory() // 2
        self.streamed = ""
        """A note that models are read from disk for every setting; empty if all is in memory."""
        if (needed := bytes_in_memory(inputs)) <= limit:
            keep_in_memory(inputs)
        else:
            what = f"models and curvature need {size(needed)} of memory, more than half of what is free"
            self.streamed = f"{what}: they are read from disk for every setting"
        self._current: Setting | str | None = None
        """Which model is in memory."""
        self._filled: nn.Module | None = None

    def notes(self) -> list[str]:
        return [*([self.streamed] if self.streamed else []), *super().notes()]

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
        blocks = sum(block.job.rule is not None for block in self.plan.blocks())
        total, done = blocks + batches * (models + 1), 0
        lock = threading.Lock()

        def step() -> None:
            nonlocal done
            if stop():
                raise Superseded
            with lock:
                done += 1
                share(min(1.0, done / total))

        self.plans.check(setting)
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
        """A merge, the base, or a fine-tuned model; None if its head does not fit the config of the merges."""
        if which == BASE:
            return self.model if self.plan.inputs.base is not None else None
        if isinstance(which, str) and which not in self.alone:
            return None
        if self._current != which or self._current is None:
            if isinstance(which, str):
                state = state_of(self.plan.inputs.tuned[self.names.index(which)])
            else:
                plan, known, candidate = self._ready(which)
                state = merge_in_memory(plan, [candidate], self.threads, known, after_block)[0]
            self._current = self._filled = None  # frees the weights of the earlier one
            self._filled = model_with(self.model, state)
            self._current = which
        return self._filled

    def copies(self, setting: Setting, tasks: Sequence[str], times: int) -> dict[str, nn.Module]:
        """Copies in float32 of a merge, with an empty name, and of the models of some tasks.

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

    def _ready(self, setting: Setting) -> tuple[Plan, KnownStatistics, Candidate]:
        plan, known = self.plans.plan_for(setting)
        candidate = self.plans.candidate(setting)
        # The plan is open for all methods; this setting reads only what its own method needs.
        needs = METHODS[setting.method].needs(candidate.options or {}) & plan.needs
        return replace(plan, needs=needs | {"base"}), known, candidate


def _methods_to_read(recipe: Recipe) -> list[str]:
    """Methods that together read all inputs of a recipe: its own, and one that uses the curvature that there is."""

    def has_curvature(part: Base | Model) -> bool:
        inside = local_path(part.adapter or part.model, recipe.folder)
        return part.curvature is not None or default_curvature(inside) is not None

    if recipe.method == "fa1" or recipe.base is None or not all(map(has_curvature, recipe.models)):
        return [recipe.method]
    if has_curvature(recipe.base):
        return list(dict.fromkeys([recipe.method, "removal" if is_removal(recipe) else "gradient-matching"]))
    return list(dict.fromkeys([recipe.method, *([] if is_removal(recipe) else ["fisher-averaging"])]))


class _CheckpointInMemory(View):
    """A checkpoint whose tensors are in memory as it returns them; of an adapter, the sums with the base."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.absent = inner.absent
        self._tensors: dict[str, Tensor] = {}
        for name, info in inner.tensors.items():
            self._tensors[name] = inner.read(name, 0, info.numel, Buffers()).reshape(-1).clone()

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        return self._tensors[name][start:stop]


class _CurvatureInMemory(CurvatureInput):
    """Curvature whose tensors stay in memory after they are read and checked once."""

    def __init__(self, inner: CurvatureInput) -> None:
        super().__init__(**{one.name: getattr(inner, one.name) for one in fields(inner)})
        self._tensors: dict[str, Tensor] = {}
        self._checked: set[str] = set()

    def _stored(self, name: str, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        if name not in self._tensors:
            assert self._stored_shapes is not None
            numel = torch.Size(self._stored_shapes[name]).numel()
            self._tensors[name] = super()._stored(name, 0, numel, Buffers(), slot).reshape(-1).clone()
        return self._tensors[name][start:stop]

    def _check(self, values: Tensor, name: str) -> None:
        if name not in self._checked:
            super()._check(self._tensors.get(name, values), name)
            self._checked.add(name)


def bytes_in_memory(inputs: Inputs) -> int:
    """The memory that :func:`keep_in_memory` takes."""
    numbers = (torch.Size(shape).numel() for source in inputs.curvatures for shape in (source.shapes or {}).values())
    return sum(model.nbytes for model in inputs.checkpoints) + 4 * sum(numbers)


def keep_in_memory(inputs: Inputs) -> None:
    """Read all models now, and curvature when it is first used, and keep both in memory."""
    models = {model: _CheckpointInMemory(model) for model in inputs.checkpoints}
    inputs.aliases = {models.get(model, model): names for model, names in inputs.aliases.items()}
    inputs.template = models[inputs.template]
    inputs.base = None if inputs.base is None else models.get(inputs.base, inputs.base)
    inputs.tuned = [models[model] for model in inputs.tuned]
    kept = {source: _CurvatureInMemory(source) for source in inputs.curvatures}
    inputs.prior = None if inputs.prior is None else kept[inputs.prior]
    inputs.curvature = [kept[source] for source in inputs.curvature]
    inputs.penalty = [None if source is None else kept[source] for source in inputs.penalty]


def free_memory() -> int:
    """Bytes of memory that are free, approximately."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
