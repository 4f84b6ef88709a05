"""Solve with Kronecker curvature: (S + λ)⁻¹ g in the eigenbasis of every layer's factors.

S is the curvature of a layer, G ⊗ A / T. In the eigenvectors of G and A it is diagonal, so that adding λ and dividing
are exact. Parameters without factors have a diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..curvature.curvature import Curvature


class KroneckerBasis:
    """The eigenvalues of a curvature, multiplied by ``scale``, and the eigenvectors of its layers."""

    def __init__(self, curvature: Curvature, scale: float = 1.0) -> None:
        self._transposed = curvature.transposed
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}
        self._values = {name: scale * value for name, value in curvature.diagonal.items()}
        for name, layer in curvature.layers.items():
            out_values, out_vectors = torch.linalg.eigh(layer.outputs.double())
            in_values, in_vectors = torch.linalg.eigh(layer.inputs.double())
            values = torch.outer(out_values.clamp(min=0), in_values.clamp(min=0)) * (scale / max(layer.tokens, 1))
            self._vectors[name] = out_vectors.to(layer.outputs), in_vectors.to(layer.inputs)
            self._values[name] = values.to(layer.outputs)

    def mean(self) -> float:
        """The mean eigenvalue."""
        total = sum(float(values.double().sum()) for values in self._values.values())
        return total / sum(values.numel() for values in self._values.values())

    def solve(self, gradient: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
        """Return (S + λ)⁻¹ g by parameter name."""
        solution: dict[str, Tensor] = {}
        for name, values in self._values.items():
            if name not in self._vectors:
                solution[name] = gradient[name] / (values + damping)
                continue
            out_vectors, in_vectors = self._vectors[name]
            bias = name.removesuffix("weight") + "bias"
            transposed, shape = name in self._transposed, gradient[name].shape
            matrix = gradient[name].T if transposed else gradient[name].flatten(1)
            with_bias = len(in_vectors) > matrix.shape[1]
            if with_bias:
                matrix = torch.cat([matrix, gradient[bias][:, None]], 1)
            matrix = out_vectors @ ((out_vectors.T @ matrix @ in_vectors) / (values + damping)) @ in_vectors.T
            if with_bias:
                matrix, solution[bias] = matrix[:, :-1], matrix[:, -1].contiguous()
            solution[name] = (matrix.T if transposed else matrix).reshape(shape)
        return solution
