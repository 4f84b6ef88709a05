"""What the rules share that work on the singular values of whole matrices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def plain_mean(base: Tensor, tuned: Sequence[Tensor], weights: Sequence[float], scale: float) -> Tensor:
    """θ_0 + (scale/T) Σ w_t Δ_t: what becomes of tensors that are no matrices."""
    merged = base
    for model, weight in zip(tuned, weights, strict=True):
        merged = (model - base).mul_(weight * scale / len(tuned)).add_(merged)
    return merged


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ and Vᵀ of a matrix, without the directions in which it is 0 but for rounding; NaN if it has some."""
    finite = bool(torch.isfinite(matrix).all())
    u, sigma, vh = torch.linalg.svd(matrix if finite else torch.zeros_like(matrix), full_matrices=False)
    if not finite:
        return u.fill_(torch.nan), sigma.fill_(torch.nan), vh
    rank = int((sigma > sigma[0] * max(matrix.shape) * torch.finfo(matrix.dtype).eps).sum())
    return u[:, :rank], sigma[:rank], vh[:rank]
