"""Rules on the singular values of whole matrices: TSV-Merge and Iso-C."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .measures import spanned
from .sparse import Scale
from .spec import Numbers, Tensors, extreme_weights, rule
from .task_arithmetic import task_arithmetic


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


@rule(
    "tsv",
    matching_form=("w_t", "I", "0, between orthogonal directions"),
    reference="Gargiulo et al., Task Singular Vectors, CVPR 2025",
    granularity="tensor",
    needs_float64=extreme_weights,
    workspace=8,
)
def tsv(base: Tensor, tuned: Tensors, weights: Numbers, *, scale: Scale = 1.0) -> Tensor:
    """θ_0 + scale · U_⊥ Σ V_⊥ᵀ for matrices: the leading 1/T of each Δ_t's singular vectors, orthogonalized together.

    U has the leading ⌊r/T⌋ (at least 1) left singular vectors of every Δ_t side by side, where r is the shorter side of
    the matrix. V has the right ones, and Σ the singular values times w_t. U_⊥ and V_⊥ are the nearest matrices with
    orthonormal columns. So tasks do not share directions, which would make them interfere. Other tensors (vectors,
    convolutions) become θ_0 + (scale/T) Σ w_t Δ_t.

    Each matrix is decomposed on one thread or the device. The time grows with the cube of the width.
    """
    if base.dim() != 2 or min(base.shape) == 0:
        return task_arithmetic(base, tuned, weights, scale=scale / len(tuned))
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


@rule(
    "iso-c",
    matching_form=("w_t", "I", "0, all directions equal"),
    reference="Marczak et al., No task left behind: isotropic model merging, ICML 2025",
    granularity="tensor",
    needs_float64=extreme_weights,
    workspace=6,
)
def iso_c(base: Tensor, tuned: Tensors, weights: Numbers, *, scale: Scale = 1.0) -> Tensor:
    """θ_0 + scale · σ̄ U Vᵀ for matrices, with U Σ Vᵀ = Σ w_t Δ_t and σ̄ the mean of its singular values.

    No direction counts more because several tasks share it. Directions where Σ w_t Δ_t is 0, such as those outside the
    rank of adapters, stay 0. Other tensors (vectors, convolutions) become θ_0 + (scale/T) Σ w_t Δ_t.

    Each matrix is decomposed on one thread or the device. The time grows with the cube of the width.
    """
    if base.dim() != 2 or min(base.shape) == 0:
        return task_arithmetic(base, tuned, weights, scale=scale / len(tuned))
    u, sigma, vh = svd(spanned(None, [model - base for model in tuned], weights), rounding(base))
    return (u @ vh).mul_(float(sigma.mean()) * scale).add_(base) if len(sigma) else base.clone()
