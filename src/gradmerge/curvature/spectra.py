"""Spectra of Kronecker factors: how large their eigenvalues are, and how many of them count."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..text import natural
from .format import INPUTS, OUTPUTS, CurvatureFile

#: Of wider matrices only the largest eigenvalue is found: all of them would take minutes.
WIDEST_SPECTRUM = 4096


@dataclass(frozen=True)
class Spectrum:
    """The eigenvalues of one factor."""

    size: int
    trace: float
    largest: float
    median: float | None
    """None where the matrix is too wide."""
    effective_rank: float
    """(Σ λ)² / Σ λ²: how many eigenvalues there would be if all were equal."""


@dataclass(frozen=True)
class LayerSpectra:
    """Spectra of A/T, a mean over tokens, and of G, a sum over examples; their products are those of G ⊗ A / T."""

    name: str
    tokens: int
    inputs: Spectrum
    outputs: Spectrum

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def spectra(file: CurvatureFile, name: str) -> LayerSpectra:
    """Of the layer with this weight."""
    tokens = file.tokens[name]
    inputs, outputs = _read(file, name + INPUTS), _read(file, name + OUTPUTS)
    return LayerSpectra(name, tokens, spectrum(inputs.div_(tokens)), spectrum(outputs))


def layers_of(file: CurvatureFile) -> list[str]:
    """Weights with factors, in the order of the layers."""
    return sorted(file.tokens, key=natural)


def spectrum(matrix: Tensor) -> Spectrum:
    """Of a symmetric matrix without negative eigenvalues but for rounding."""
    scale = max(float(matrix.abs().max()), 1e-30)
    matrix = matrix / scale  # so that no square is out of range
    trace, squares = float(matrix.diagonal().double().sum()), float(matrix.double().square().sum())
    median = None
    if len(matrix) <= WIDEST_SPECTRUM:
        values = torch.linalg.eigvalsh(matrix)
        largest, median = float(values[-1]), max(0.0, float(values.median())) * scale
    else:
        largest = _largest(matrix)
    return Spectrum(len(matrix), trace * scale, largest * scale, median, trace**2 / squares if squares else 0.0)


def _largest(matrix: Tensor, steps: int = 64) -> float:
    vector = matrix.diagonal().clone()
    for _ in range(steps):
        vector = matrix @ (vector / vector.norm().clamp(min=1e-30))
    return float(vector.norm())


def _read(file: CurvatureFile, name: str) -> Tensor:
    matrix = file.read_whole(name)
    if not bool(torch.isfinite(matrix).all()) or bool((matrix.diagonal() < 0).any()):
        raise InputError(
            f"{file.label}: {name} has values that are not finite, or a negative diagonal; estimate it again"
        )
    return matrix
