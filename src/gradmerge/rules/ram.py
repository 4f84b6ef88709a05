"""RAM: what one model alone changed is kept whole, what several changed is averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from .measures import Sums
from .spec import Help, rule


def _changed(base: Tensor, tuned: Sequence[Tensor], epsilon: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Every Δ_t, where it is above ε, and how many are."""
    deltas = [model - base for model in tuned]
    masks = [delta.abs() > epsilon for delta in deltas]
    return deltas, masks, torch.stack(masks).sum(0)


def _overlap(base: Tensor, tuned: Sequence[Tensor], epsilon: float) -> list[Tensor]:
    _, masks, count = _changed(base, tuned, epsilon)
    alone = count == 1
    return [*((mask & ~alone).double() for mask in masks), *((mask & alone).double() for mask in masks)]


@rule(
    "ram",
    matching_form=("λ_t", "0", "0/1 mask of the changed entries"),
    reference="RAM: Reinforced Agent Merging, arXiv 2601.13572",
    measures={"overlap": Sums(_overlap)},
    when={"overlap": "r"},
    propagates_nonfinite=False,
)
def ram(
    base: Tensor,
    tuned: Sequence[Tensor],
    overlap: Sequence[float] | None = None,
    *,
    epsilon: Annotated[float, Help("an entry counts as changed if |Δ_t| is above this", ge=0)] = 1e-5,
    r: Annotated[float, Help("how much more counts what one model alone changed (RAM+); 0 is RAM", ge=0)] = 0.0,
    alpha: Annotated[float, Help("the largest ratio of shared to own entries that counts", ge=0)] = 0.2,
) -> Tensor:
    """θ_0 + Σ λ_t Δ_t where one model alone changed an entry, θ_0 + the mean of their Δ_t where several did.

    λ_t = 1 + r · min(ratio of the entries that model t changed with others to those it changed alone, alpha), counted
    over the tensor.
    """
    deltas, masks, count = _changed(base, tuned, epsilon)
    total, alone, several = torch.zeros_like(base), count == 1, count.clamp(min=1).to(base.dtype)
    for place, (delta, mask) in enumerate(zip(deltas, masks, strict=True)):
        factor = 1.0
        if overlap is not None:
            ratio = overlap[place] / max(overlap[len(tuned) + place], 1e-5)
            factor = 1.0 + r * min(ratio, alpha)
        total += torch.where(mask, torch.where(alone, delta * factor, delta / several), 0.0)
    return total.add_(base)
