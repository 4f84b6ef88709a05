"""Inputs of a merge that are read from disk once and then kept in memory, so that many merges can be formed of them."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers, Checkpoint, View
from ..engine.inputs import CurvatureInput, Inputs


class ResidentCheckpoint(View):
    """A checkpoint whose tensors are kept as it gives them: of an adapter the sums, which need no computing again."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self.absent = inner.absent
        self._whole: dict[str, Tensor] = {}
        for name, info in inner.tensors.items():
            self._whole[name] = inner.read(name, 0, info.numel, Buffers()).reshape(-1).clone()

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        return self._whole[name][start:stop]


class ResidentCurvature(CurvatureInput):
    """Curvature whose tensors are kept as its file gives them, once they are read, and are checked once."""

    def __init__(self, inner: CurvatureInput) -> None:
        super().__init__(**{one.name: getattr(inner, one.name) for one in fields(inner)})
        self._whole: dict[str, Tensor] = {}
        self._checked: set[str] = set()

    def _stored(self, name: str, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        if name not in self._whole:
            assert self._stored_shapes is not None
            numel = torch.Size(self._stored_shapes[name]).numel()
            self._whole[name] = super()._stored(name, 0, numel, Buffers(), slot).reshape(-1).clone()
        return self._whole[name][start:stop]

    def _check(self, values: Tensor, name: str) -> None:
        if name not in self._checked:
            super()._check(self._whole.get(name, values), name)
            self._checked.add(name)


def keep_in_memory(inputs: Inputs, limit: int) -> list[str]:
    """Keep the models and then the curvature of a merge in memory, as far as ``limit`` bytes go.

    What does not fit is read from disk each time; returned are its labels.
    """
    left_out: list[str] = []
    models: dict[Checkpoint, Checkpoint] = {}
    for model in inputs.checkpoints:
        if model.nbytes <= limit:
            limit -= model.nbytes
            models[model] = ResidentCheckpoint(model)
        else:
            left_out.append(model.label)
    inputs.aliases = {models.get(model, model): names for model, names in inputs.aliases.items()}
    inputs.template = models.get(inputs.template, inputs.template)
    inputs.base = None if inputs.base is None else models.get(inputs.base, inputs.base)
    inputs.tuned = [models.get(model, model) for model in inputs.tuned]
    kept: dict[CurvatureInput, CurvatureInput] = {}
    for source in inputs.curvatures:
        nbytes = 4 * sum(torch.Size(shape).numel() for shape in (source.shapes or {}).values())
        if nbytes <= limit:
            limit -= nbytes
            kept[source] = ResidentCurvature(source)
        else:
            left_out.append(source.label)
    inputs.prior = None if inputs.prior is None else kept.get(inputs.prior, inputs.prior)
    inputs.curvature = [kept.get(source, source) for source in inputs.curvature]
    inputs.penalty = [None if source is None else kept.get(source, source) for source in inputs.penalty]
    return left_out


def free_memory() -> int:
    """Bytes of memory that can be taken, about."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
