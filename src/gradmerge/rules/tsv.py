"""TSV-Merge: make the leading singular vectors of all Δ_t orthogonal to each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .sparse import Scale
from .spec import extreme_weights, rule
from .svd import plain_mean, rounding, svd


@rule(
    "tsv",
    matching_form=("w_t", "I", "0, between orthogonal directions"),
    reference="Gargiulo et al., Task Singular Vectors, CVPR 2025",
    granularity="tensor",
    needs_float64=extreme_weights,
    workspace=8,
)
def tsv(base: Tensor, tuned: Sequence[Tensor], weights: Sequence[float], *, scale: Scale = 1.0) -> Tensor:
    """θ_0 + scale · U_⊥ Σ V_⊥ᵀ for matrices: the leading 1/T of each Δ_t's singular vectors, orthogonalized together.

    U has the leading ⌊r/T⌋ (at least 1) left singular vectors of every Δ_t side by side, where r is the shorter side of
    the matrix. V has the right ones, and Σ the singular values times w_t. U_⊥ and V_⊥ are the nearest matrices with
    orthonormal columns. So tasks do not share directions, which would make them interfere. Other tensors (vectors,
    convolutions) become θ_0 + (scale/T) Σ w_t Δ_t.

    Each matrix is decomposed on one thread or the device. The time grows with the cube of the width.
    """
    if base.dim() != 2 or min(base.shape) == 0:
        return plain_mean(base, tuned, weights, scale)
    kept = max(1, min(base.shape) // len(tuned))
    noise, left, values, right = rounding(base), [], [], []
    for model, weight in zip(tuned, weights, strict=True):
        u, sigma, vh = svd(model - base, noise)
        left.append(u[:, :kept])
        values.append(sigma[:kept] * weight)
        right.append(vh[:kept])
    if not sum(map(len, values)):
        return base.clone()
    outputs, inputs = _orthogonal(torch.cat(left, 1)), _orthogonal(torch.cat(right).T)
    return (outputs * torch.cat(values)).matmul(inputs.T).mul_(scale).add_(base)


def _orthogonal(vectors: Tensor) -> Tensor:
    """The nearest matrix with orthonormal columns, or rows if it has more columns than rows."""
    u, _, vh = svd(vectors)
    return u @ vh
