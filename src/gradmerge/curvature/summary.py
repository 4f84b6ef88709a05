"""Summaries of curvature: sums by layer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..text import natural
from .format import INPUTS, OUTPUTS, CurvatureFile

_CHUNK = 1 << 20


@dataclass
class GroupSummary:
    """Curvature of the parameters of one layer, as sums over examples; ``total`` is the sum over its entries."""

    name: str
    entries: int = 0
    total: float = 0.0
    zeros: int = 0
    largest: float = 0.0

    @property
    def per_entry(self) -> float:
        return self.total / max(1, self.entries)

    @property
    def share_of_zeros(self) -> float:
        return self.zeros / max(1, self.entries)

    def as_dict(self) -> dict[str, float | int | str]:
        return asdict(self) | {"mean_per_entry": self.per_entry, "share_of_zeros": self.share_of_zeros}


def group_of(name: str) -> str:
    """Return a parameter's layer: its path up to the first number, or else without the last word."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1][:2]) or name


def summarize(tensors: Iterable[tuple[str, Tensor]]) -> list[GroupSummary]:
    """Return groups in the order of the layers. A tensor may come in several pieces."""
    groups: dict[str, GroupSummary] = {}
    for name, values in tensors:
        group = groups.setdefault(group_of(name), GroupSummary(group_of(name)))
        group.total += float(values.double().sum())
        group.zeros += int((values == 0).sum())
        group.largest = max(group.largest, float(values.max()) if values.numel() else 0.0)
        group.entries += values.numel()
    return [groups[name] for name in sorted(groups, key=natural)]


def pieces(file: CurvatureFile) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file in pieces that fit into memory, and check them.

    For Kronecker factors it yields the diagonal of G ⊗ A / T, which is diag(G) diag(A)ᵀ / T.
    """
    factors = {name + suffix for name in file.tokens for suffix in (INPUTS, OUTPUTS)}
    made: Iterable[Tensor]
    for name in sorted((file.shapes.keys() - factors) | file.tokens.keys(), key=natural):
        if name in file.tokens:
            inputs, outputs = (file.read_whole(name + suffix).diagonal().double() for suffix in (INPUTS, OUTPUTS))
            step = max(1, _CHUNK // len(inputs))
            made = (part[:, None] * (inputs / file.tokens[name]) for part in outputs.split(step))
        else:
            made = _read(file, name)
        for values in made:
            if not bool(torch.isfinite(values).all()) or (file.kind != "gram" and bool((values < 0).any())):
                raise InputError(f"{file.label}: {name} has values that are negative or not finite; estimate it again")
            yield name, values


def _read(file: CurvatureFile, name: str) -> Iterator[Tensor]:
    numel = math.prod(file.shapes[name])
    for start in range(0, numel, _CHUNK):
        yield file.read(name, start, min(start + _CHUNK, numel), lambda n: torch.empty(n, dtype=torch.uint8))
