"""RegMean: linear layers merged by least squares on their inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from .averages import weighted_average
from .spec import Help, rule


@rule(
    "regmean",
    row=("w_t (1)", "0", "XᵀX of each linear layer's inputs"),
    reference="Jin et al., Dataless knowledge fusion by merging weights of language models, ICLR 2023",
    otherwise=weighted_average,
)
def regmean(
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    grams: Sequence[Tensor],
    damping: float,
    *,
    off_diagonal: Annotated[float, Help("factor of the off-diagonal entries of XᵀX", ge=0, le=1)] = 0.9,
) -> Tensor:
    """(Σ w_t G_t)⁻¹ Σ w_t G_t W_t for the weights of linear layers, G_t = XᵀX of their inputs; the rest is averaged.

    W_t is in × out here, the transpose of PyTorch's `Linear.weight`, which this function takes and returns. δ is added
    to the diagonal of every G_t, so that inputs that never occurred are averaged. Solved in float64.
    """
    total: Tensor | None = None
    target: Tensor | None = None
    for weight_matrix, gram, weight in zip(tuned, grams, weights, strict=True):
        gram = gram.double()
        gram = gram * off_diagonal + torch.diag(gram.diagonal() * (1.0 - off_diagonal) + damping)
        gram = gram * weight
        product = weight_matrix.double() @ gram
        total = gram if total is None else total + gram
        target = product if target is None else target + product
    assert total is not None and target is not None
    factor, failed = torch.linalg.cholesky_ex(total)
    if failed:
        solved: Tensor = target @ torch.linalg.pinv(total, hermitian=True)
    else:
        solved = torch.cholesky_solve(target.T, factor).T
    return solved.to(tuned[0].dtype)
