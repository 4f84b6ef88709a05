"""RegMean: merge linear layers by least squares on their inputs."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .averages import weighted_average
from .spec import Help, Numbers, Tensors, rule


@rule(
    "regmean",
    matching_form=("w_t (1)", "0", "XᵀX of each linear layer's inputs"),
    reference="Jin et al., Dataless knowledge fusion by merging weights of language models, ICLR 2023",
    fallback=weighted_average,
)
def regmean(
    tuned: Tensors,
    weights: Numbers,
    grams: Tensors,
    damping: float,
    *,
    off_diagonal: Annotated[float, Help("factor of the off-diagonal entries of XᵀX", ge=0, le=1)] = 0.9,
) -> Tensor:
    """(Σ w_t G_t)⁻¹ Σ w_t G_t W_t for the weights of linear layers, G_t = XᵀX of their inputs; others are averaged.

    W_t is in × out here, the transpose of PyTorch's `Linear.weight`, which this function takes and returns. δ is added
    to the diagonal of every G_t. Weights of inputs that are always 0 are averaged, and so are input directions where
    Σ w_t G_t is 0 up to the rounding of float32. Solved in float64.
    """
    models = [model.double() for model in tuned]
    average = weighted_average(None, models, weights, None)
    # The average is the answer where the Gram matrices are 0, so solve for the difference from it.
    total, sizes = torch.zeros_like(grams[0], dtype=torch.float64), torch.zeros(len(grams[0]), dtype=torch.float64)
    pull = torch.zeros_like(average)
    for model, gram, weight in zip(models, grams, weights, strict=True):
        diagonal = gram.diagonal().double() + damping
        gram = gram.double() * (off_diagonal * weight)
        gram.diagonal().copy_(diagonal * weight)
        total += gram
        sizes += diagonal * abs(weight)
        pull.addmm_(model - average, gram)
    sure = 1.0 - off_diagonal if min(weights) >= 0 else 0.0
    return average.add_(_solve(total, sizes, pull, sure)).to(tuned[0].dtype)


def _solve(matrix: Tensor, sizes: Tensor, right: Tensor, sure: float) -> Tensor:
    """The smallest x with x · matrix = right; overwrites the matrix.

    Gram matrices come as float32. With every input in units of its size (``sizes``, 0 for an input that is always 0),
    an eigenvalue below n · ε may be rounding, and dividing by it would amplify the rounding. ``sure`` is a lower bound
    of the smallest eigenvalue, up to rounding.
    """
    units = torch.where(sizes > 0, sizes.rsqrt(), 1.0)
    matrix.mul_(units).mul_(units[:, None]).diagonal().add_(sizes == 0)
    right = right * units
    noise = len(matrix) * torch.finfo(torch.float32).eps
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if not failed and (sure > 4 * noise or _smallest(matrix, factor) > 2 * noise):
        return torch.cholesky_solve(right.T, factor).T * units
    values, vectors = torch.linalg.eigh(matrix)
    seen = values.abs() > noise
    step: Tensor = ((right @ vectors[:, seen]) / values[seen]) @ vectors[:, seen].T * units
    unseen = torch.linalg.qr(vectors[:, ~seen] * units[:, None]).Q
    step -= step @ unseen @ unseen.T
    return step


def _smallest(matrix: Tensor, factor: Tensor) -> float:
    """An upper bound near the smallest eigenvalue, by inverse iteration with the Cholesky factor."""
    start = torch.randn(len(matrix), 4, dtype=matrix.dtype, generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        start = torch.linalg.qr(torch.cholesky_solve(start, factor)).Q
    return float(torch.linalg.eigvalsh(start.T @ matrix @ start)[0])
