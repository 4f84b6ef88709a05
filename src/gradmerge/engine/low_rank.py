"""Matrices as products B (out × rank) · A (rank × in), and the error of that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .rounding import rounded

#: Entries of a matrix that are converted to float64 at once.
PANEL = 1 << 20
#: Singular values below this share of the largest are rounding errors.
NEGLIGIBLE = 1e-7


@dataclass(frozen=True)
class LowRank:
    """B and A, with the squared Frobenius norms of the matrix and of its difference from BA."""

    b: Tensor
    a: Tensor
    norm: float
    lost: float


def factorize(matrix: Tensor, rank: int, dtype: torch.dtype) -> LowRank:
    """Return the nearest product of at most this rank, stored in ``dtype``.

    The singular vectors of the shorter side are the eigenvectors of its Gram matrix, in float64. The loss is measured
    on the stored factors. Singular values that are rounding errors are left out.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for _, panel in _panels(tall):
        gram.addmm_(panel.T, panel)
    norm = float(gram.trace())
    values, vectors = torch.linalg.eigh(gram)
    roots, vectors = _largest(values.clamp_(min=0).sqrt_(), vectors, rank)
    short = rounded((vectors * roots.sqrt()).T.contiguous(), dtype)
    directions = vectors / roots.sqrt()
    long = torch.empty(tall.shape[0], len(roots), dtype=dtype)
    lost, short64 = 0.0, short.double()
    for row, panel in _panels(tall):
        part = long[row : row + len(panel)] = rounded(panel @ directions, dtype)
        lost += float((panel - part.double() @ short64).square_().sum())
    b, a = (long, short) if tall is matrix else (short.T.contiguous(), long.T.contiguous())
    return LowRank(b, a, norm, lost)


def truncate(b: Tensor, a: Tensor, rank: int | None, dtype: torch.dtype) -> LowRank:
    """Return the nearest product of at most ``rank`` to BA, whose factors are in float64; None keeps their rank."""
    norm, lost = float(((b.T @ b) * (a @ a.T)).sum()), 0.0
    if rank is not None and a.shape[0] > rank:
        left, left_core = torch.linalg.qr(b)
        right, right_core = torch.linalg.qr(a.T)
        u, roots, v = torch.linalg.svd(left_core @ right_core.T)
        lost = float(roots[rank:].square().sum())
        b, a = left @ (u[:, :rank] * roots[:rank].sqrt()), (roots[:rank].sqrt()[:, None] * v[:rank]) @ right.T
    return LowRank(rounded(b.contiguous(), dtype), rounded(a.contiguous(), dtype), norm, lost)


def _largest(roots: Tensor, vectors: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest singular values with their vectors, in falling order; each vector's largest entry is positive."""
    roots, vectors = roots.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = int((roots > NEGLIGIBLE * roots[0]).sum()) if len(roots) else 0
    roots, vectors = roots[:kept], vectors[:, :kept]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) if kept else vectors[:1]
    return roots, vectors * largest.sign()


def _panels(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A few rows at a time in float64, each with the number of its first."""
    step = max(1, PANEL // max(1, matrix.shape[1]))
    for row in range(0, matrix.shape[0], step):
        yield row, matrix[row : row + step].double()
