"""Arcee Fusion: the entries of one model that matter most."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .measures import Ranked
from .spec import rule


def importance(base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
    """|Δ| times the divergence of the softmax of its vector along the last axis, in the model from that in the base.

    It is of the order of Δ², which float32 loses where models are near to one another.
    """
    model, small = tuned[0], 1e-8
    if not model.dim():
        return torch.zeros_like(model)
    p, q = (x.double().softmax(-1).add_(small) for x in (model, base))
    divergence = q.div_(p).log_().neg_().mul_(p).sum(-1, keepdim=True).clamp_(min=0)  # below 0 by rounding only
    return (model - base).abs_().mul_(divergence.to(model.dtype))


def _ranks(entries: int) -> list[int]:
    """Of the lower quartile, the median and the upper quartile."""
    return [entries - int(share * (entries - 1)) for share in (0.25, 0.5, 0.75)]


@rule(
    "arcee-fusion",
    matching_form=("1", "0", "0/1 mask of the most important entries"),
    reference="Goddard et al., Arcee's MergeKit, EMNLP 2024 (arcee_fusion)",
    only_one_model=True,
    measures={"quartiles": Ranked(importance, _ranks)},
    granularity="rows",
    propagates_nonfinite=False,
)
def arcee_fusion(base: Tensor, tuned: Sequence[Tensor], quartiles: Sequence[float]) -> Tensor:
    """θ_0 + m Δ, the entries of one model whose importance stands out: above the median by 1.5 interquartile ranges.

    The importance of an entry is |Δ| · KL(softmax θ_1 ‖ softmax θ_0), the divergence of the vector along the last axis
    that it is in. Quartiles are those of the tensor, of all its entries.
    """
    lower, median, upper = torch.tensor(quartiles, dtype=base.dtype)
    taken = importance(base, tuned) >= median + 1.5 * (upper - lower)
    return torch.where(taken, tuned[0], base)
