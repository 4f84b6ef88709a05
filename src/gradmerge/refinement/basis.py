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

TINY = 1e-30


class Basis:
    """(S + λ)⁻¹ of several tasks, each scaled to the number of examples that it stands for."""

    def __init__(
        self, tasks: Sequence[KroneckerCurvature], scales: Sequence[float], shapes: Mapping[str, torch.Size]
    ) -> None:
        self._shapes = dict(shapes)
        self._turned = frozenset(name for task in tasks for name in task.transposed)
        self._sides: dict[str, tuple[Tensor, Tensor]] = {}
        self._values: dict[str, Tensor] = {}
        for name in dict.fromkeys(name for task in tasks for name in task.layers):
            layers = [(s, task.layers[name]) for s, task in zip(scales, tasks, strict=True) if name in task.layers]
            left = _vectors([layer.outputs / layer.outputs.trace().clamp(min=TINY) for _, layer in layers])
            right = _vectors([layer.inputs / max(layer.tokens, 1) for _, layer in layers])
            self._sides[name] = left, right
            for scale, layer in layers:
                both = torch.outer(_along(left, layer.outputs), _along(right, layer.inputs))
                self._add(name, both * (scale / max(layer.tokens, 1)))
        for scale, task in zip(scales, tasks, strict=True):
            for name, value in task.diagonal.items():
                if name not in self._sides:
                    self._add(name, scale * value)

    def _add(self, name: str, value: Tensor) -> None:
        self._values[name] = self._values[name] + value if name in self._values else value

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


def _vectors(matrices: Sequence[Tensor]) -> Tensor:
    total = torch.stack([matrix.double() for matrix in matrices]).sum(0)
    vectors: Tensor = torch.linalg.eigh(total)[1]
    return vectors.to(matrices[0].dtype)


def _along(vectors: Tensor, matrix: Tensor) -> Tensor:
    """The diagonal of Uᵀ M U; not negative but for rounding."""
    return (vectors * (matrix @ vectors)).sum(0).clamp_(min=0)
