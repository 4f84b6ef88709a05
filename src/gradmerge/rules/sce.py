"""SCE: select entries by variance, weight models by their squares, erase entries that disagree in sign."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .measures import Ranked, Sums
from .spec import Help, Numbers, Tensors, rule


def _variance(base: Tensor, tuned: Tensors) -> Tensor:
    """The variance between models, by Welford's formula in float64: 0 for equal models, faster than torch.var."""
    mean = (tuned[0] - base).double()
    total = torch.zeros_like(mean)
    for count, model in enumerate(tuned[1:], start=2):
        delta = (model - base).double()
        off = delta - mean
        mean.add_(off / count)
        total.addcmul_(off, delta.sub_(mean))
    return total.div_(len(tuned)).to(base.dtype)


def _selected(base: Tensor, tuned: Tensors, variance: Numbers) -> list[Tensor]:
    deltas = [model - base for model in tuned]
    if variance[0] == 0:
        return deltas
    mask = (_variance(base, tuned) >= variance[0]).to(base.dtype)
    return [delta.mul_(mask) for delta in deltas]


def _ranks(entries: int, varying: Numbers, select_topk: float) -> list[int]:
    return [-1 if select_topk >= 1 else int(varying[0] * select_topk)]


def _squares(base: Tensor, tuned: Tensors, variance: Numbers) -> list[Tensor]:
    squares = [delta.double().square_() for delta in _selected(base, tuned, variance)]
    return [*squares, torch.ones_like(squares[0])]


@rule(
    "sce",
    matching_form=("by Σ τ_t²", "0", "0/1 mask after selection and sign election"),
    reference="Wan et al., FuseChat: Knowledge fusion of chat models, arXiv 2408.07990",
    measures={
        "varying": Sums(lambda base, tuned: [(_variance(base, tuned) != 0).double()]),
        "variance": Ranked(_variance, _ranks),
        "squares": Sums(_squares),
    },
    propagates_nonfinite=False,
)
def sce(
    base: Tensor,
    tuned: Tensors,
    variance: Numbers,
    squares: Numbers,
    *,
    select_topk: Annotated[float, Help("share of the entries that differ between models to keep", ge=0, le=1)] = 1.0,
) -> Tensor:
    """θ_0 + Σ w_t m_t τ_t / Σ w_t m_t, where τ_t are the entries of Δ_t with the largest variance between models.

    w_t is the mean of τ_t² over the tensor, divided by the sum over models. m_t keeps the entries whose sign is that of
    Σ τ_t (+ where the sum is 0).
    """
    means = [square / max(squares[-1], 1.0) for square in squares[:-1]]
    whole = sum(means)
    weights = [1.0 / len(means) if whole < 1e-6 else mean / whole for mean in means]
    deltas = _selected(base, tuned, variance)
    positive = torch.stack(deltas).sum(0) >= 0
    total, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(deltas, weights, strict=True):
        agrees = (torch.where(positive, delta, -delta) > 0).to(base.dtype).mul_(weight)
        total += delta.mul_(agrees)
        divisor += agrees
    return total.div_(divisor.clamp_(min=1e-6)).add_(base)
