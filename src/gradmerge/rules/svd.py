"""Helpers of the rules that use singular values of whole matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def plain_mean(base: Tensor, tuned: Sequence[Tensor], weights: Sequence[float], scale: float) -> Tensor:
    """θ_0 + (scale/T) Σ w_t Δ_t, for tensors that are not matrices."""
    merged = base
    for model, weight in zip(tuned, weights, strict=True):
        merged = (model - base).mul_(weight * scale / len(tuned)).add_(merged)
    return merged


def svd(matrix: Tensor, noise: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ and Vᵀ of a matrix, without directions of singular values below ``noise``; NaN if the matrix has NaN.

    For float32 it uses the eigenvectors of the smaller of M Mᵀ and Mᵀ M in float64: equally exact and several times
    faster.
    """
    if not bool(torch.isfinite(matrix).all()):
        u, sigma, vh = torch.linalg.svd(torch.zeros_like(matrix), full_matrices=False)
        return u.fill_(torch.nan), sigma.fill_(torch.nan), vh
    if matrix.dtype == torch.float64:
        u, sigma, vh = torch.linalg.svd(matrix, full_matrices=False)
        rank = int((sigma > max(noise, float(sigma[0]) * 1e-13)).sum())
        return u[:, :rank], sigma[:rank], vh[:rank]
    tall = matrix.shape[0] > matrix.shape[1]
    wide = (matrix.T if tall else matrix).double()
    squares, vectors = torch.linalg.eigh(wide @ wide.T)
    sigma = squares.clamp_(min=0).sqrt_().flip(0)
    rank = int((sigma > max(noise, float(sigma[0]) * 1e-6)).sum())
    left, sigma = vectors.flip(1)[:, :rank], sigma[:rank]
    right = (left.T @ wide).div_(sigma[:, None])
    left, right = (right.T, left.T) if tall else (left, right)
    return left.to(matrix.dtype), sigma.to(matrix.dtype), right.to(matrix.dtype)


def rounding(base: Tensor) -> float:
    """About the largest singular value that rounding alone can give Δ = θ − θ_0."""
    rows, columns = base.shape
    size = float(base.double().norm()) / math.sqrt(rows * columns)
    return 2 * torch.finfo(base.dtype).eps * size * (math.sqrt(rows) + math.sqrt(columns))
