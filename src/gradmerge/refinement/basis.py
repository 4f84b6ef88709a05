"""Solving with the summed Kronecker curvature of several tasks: S + λ in a basis in which all of it is nearly diagonal.

Per layer, U_A are the eigenvectors of Σ_t A_t/T_t and U_G those of Σ_t G_t/tr G_t. In their basis the curvature of all
tasks together is taken as diagonal, S = Σ_t diag(U_Gᵀ G_t U_G) diag(U_Aᵀ A_t U_A)ᵀ / T_t. Other parameters have their
summed diagonals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..curvature.kronecker import KroneckerCurvature


class Basis:
    """(S + λ)⁻¹ of several tasks, each scaled to the number of examples that it stands for."""

    def __init__(self, tasks: Sequence[KroneckerCurvature], scales: Sequence[float], shapes: Mapping[str, torch.Size]):
        first = tasks[0]
        self._shapes = dict(shapes)
        self._turned = first.transposed
        self._sides: dict[str, tuple[Tensor, Tensor]] = {}
        self._values: dict[str, Tensor] = {}
        for name in first.layers:
            layers = [task.layers[name] for task in tasks]
            left = _vectors(sum(layer.outputs / layer.outputs.trace().clamp(min=1e-30) for layer in layers))
            right = _vectors(sum(layer.inputs / layer.tokens for layer in layers))
            self._sides[name] = left, right
            self._values[name] = sum(
                scale * torch.outer(_along(left, layer.outputs), _along(right, layer.inputs)) / layer.tokens
                for scale, layer in zip(scales, layers, strict=True)
            )
        for name in first.diagonal:
            self._values[name] = sum(s * task.diagonal[name] for s, task in zip(scales, tasks, strict=True))

    def summary(self, function: Callable[[Tensor], Tensor]) -> float:
        """The median or mean of S over all entries of all tensors."""
        return float(function(torch.cat([value.flatten() for value in self._values.values()])))

    def solve(self, gradient: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
        """(S + λ)⁻¹ g, by the names of the parameters."""
        found: dict[str, Tensor] = {}
        for name, values in self._values.items():
            if name not in self._sides:
                found[name] = gradient[name] / (values + damping)
                continue
            (left, right), bias = self._sides[name], name.removesuffix("weight") + "bias"
            matrix = gradient[name].T if name in self._turned else gradient[name].flatten(1)
            wide = len(right) > matrix.shape[1]
            if wide:
                matrix = torch.cat([matrix, gradient[bias][:, None]], 1)
            matrix = left @ ((left.T @ matrix @ right) / (values + damping)) @ right.T
            if wide:
                matrix, found[bias] = matrix[:, :-1], matrix[:, -1].contiguous()
            found[name] = (matrix.T if name in self._turned else matrix).reshape(self._shapes[name])
        return found


def _vectors(matrix: Tensor) -> Tensor:
    return torch.linalg.eigh(matrix.double())[1].to(matrix.dtype)


def _along(vectors: Tensor, matrix: Tensor) -> Tensor:
    """The diagonal of Uᵀ M U; not negative but for rounding."""
    return (vectors * (matrix @ vectors)).sum(0).clamp_(min=0)
