"""Summaries of curvature files: sums by layer, and the eigenvalues of Kronecker factors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

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
    """The layer that a parameter belongs to: its path up to the first number, or else without the last word."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1][:2]) or name


def summarize(tensors: Iterable[tuple[str, Tensor]]) -> list[GroupSummary]:
    """Groups in the order of the layers. A tensor may come in several pieces."""
    groups: dict[str, GroupSummary] = {}
    for name, values in tensors:
        group = groups.setdefault(group_of(name), GroupSummary(group_of(name)))
        group.total += float(values.double().sum())
        group.zeros += int((values == 0).sum())
        group.largest = max(group.largest, float(values.max()) if values.numel() else 0.0)
        group.entries += values.numel()
    return [groups[name] for name in sorted(groups, key=natural)]


def pieces(file: CurvatureFile) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a file, in pieces that fit into memory, and checked; of Kronecker factors, the diagonal they make.

    That is diag(G) diag(A)ᵀ / T, which is to [W b] what diagonal curvature is.
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


#: Eigenvalues of wider matrices would take minutes.
WIDEST_SPECTRUM = 4096


def layers_of(file: CurvatureFile) -> list[str]:
    """Weights with factors, in the order of the layers."""
    return sorted(file.tokens, key=natural)


def spectra(file: CurvatureFile, name: str) -> dict[str, Any]:
    """Return the spectra of a layer's A/T, a mean over tokens, and G, a sum over examples."""
    tokens = file.tokens[name]
    inputs, outputs = _read_matrix(file, name + INPUTS), _read_matrix(file, name + OUTPUTS)
    return {"name": name, "tokens": tokens, "inputs": spectrum(inputs.div_(tokens)), "outputs": spectrum(outputs)}


def spectrum(matrix: Tensor) -> dict[str, float | None]:
    """Return size, trace, eigenvalues and effective rank (Σ λ)² / Σ λ² of a symmetric matrix.

    The effective rank is the number of eigenvalues if all were equal. A wide matrix has no ``largest`` and ``median``.
    """
    scale = max(float(matrix.abs().max()), 1e-30)
    matrix = matrix / scale  # so that no square is out of range
    trace, squares = float(matrix.diagonal().double().sum()), float(matrix.double().square().sum())
    values = torch.linalg.eigvalsh(matrix) if len(matrix) <= WIDEST_SPECTRUM else None
    return {
        "size": len(matrix),
        "trace": trace * scale,
        "largest": None if values is None else float(values[-1]) * scale,
        "median": None if values is None else max(0.0, float(values.median())) * scale,
        "effective_rank": trace**2 / squares if squares else 0.0,
    }


def _read_matrix(file: CurvatureFile, name: str) -> Tensor:
    matrix = file.read_whole(name)
    if not bool(torch.isfinite(matrix).all()) or bool((matrix.diagonal() < 0).any()):
        raise InputError(
            f"{file.label}: {name} has values that are not finite, or a negative diagonal; estimate it again"
        )
    return matrix
