"""RAM: keep entries that a single model changed, average entries that several changed."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .measures import Sums
from .spec import Help, Numbers, Tensors, rule


def _changed(base: Tensor, tuned: Tensors, epsilon: float) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Every Δ_t, the masks |Δ_t| > ε, and the number of models that changed each entry."""
    deltas = [model - base for model in tuned]
    masks = [delta.abs() > epsilon for delta in deltas]
    return deltas, masks, torch.stack(masks).sum(0)


def _overlap(base: Tensor, tuned: Tensors, epsilon: float) -> list[Tensor]:
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
    tuned: Tensors,
    overlap: Numbers | None = None,
    *,
    epsilon: Annotated[float, Help("an entry counts as changed if |Δ_t| exceeds it", ge=0)] = 1e-5,
    r: Annotated[float, Help("extra factor of entries that a single model changed (RAM+); 0 is RAM", ge=0)] = 0.0,
    alpha: Annotated[float, Help("upper limit of the ratio of shared to own entries", ge=0)] = 0.2,
) -> Tensor:
    """θ_0 + Σ λ_t Δ_t where a single model changed an entry, and θ_0 + the mean of the Δ_t where several did.

    λ_t = 1 + r · min(ratio, alpha). The ratio is the number of entries of the tensor that model t changed together with
    others, divided by the number it changed alone.
    """
    deltas, masks, count = _changed(base, tuned, epsilon)
    total, alone, several = torch.zeros_like(base), count == 1, count.clamp(min=1).to(base.dtype)
    for i, (delta, mask) in enumerate(zip(deltas, masks, strict=True)):
        factor = 1.0
        if overlap is not None:
            ratio = overlap[i] / max(overlap[len(tuned) + i], 1e-5)
            factor = 1.0 + r * min(ratio, alpha)
        total += torch.where(mask, torch.where(alone, delta * factor, delta / several), 0.0)
    return total.add_(base)
