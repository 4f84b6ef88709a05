"""Gradient matching: merging and removal with the curvature of every model (Daheim et al., ICLR 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from .arithmetic import positive
from .kronecker_matching import match_layer, remove_layer
from .spec import Help, rule, unusual

PAPER = "Daheim et al., Model merging by uncertainty-based gradient matching, ICLR 2024"


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 1 where whole is 0: there the entry falls back to task arithmetic."""
    ratio = part / whole
    return ratio if positive(whole) else torch.where(whole == 0, 1.0, ratio)


def merged_precision(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    prior: Tensor,
    curvature: Sequence[Tensor],
    damping: float,
) -> Tensor:
    """H̄ = H_0 + Σ α_t H_t, with H_0 = F_0 + δ: the precision of the merged posterior."""
    precision = torch.zeros_like(base).add_(prior).add_(damping)
    for hessian, weight in zip(curvature, weights, strict=True):
        precision += hessian * weight
    return precision


@rule(
    "gradient-matching",
    row=("w_t (1)", "F_0 + δ", "F_t"),
    reference=PAPER,
    precision=merged_precision,
    layers=match_layer,
    wide=unusual,
)
def gradient_matching(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    prior: Tensor,
    curvature: Sequence[Tensor],
    damping: float,
) -> Tensor:
    """θ_0 + Σ α_t H̄⁻¹ (H_0 + H_t) Δ_t, with H_0 = F_0 + δ and H̄ = H_0 + Σ α_t H_t.

    Cancels the gradient mismatch to first order, so that every weight can stay at 1. Needs the curvature of the base
    and of every tuned model. Where H̄ is 0 the entry falls back to task arithmetic.
    """
    precision = merged_precision(base, tuned, weights, prior, curvature, damping)
    prior = prior + damping
    merged = base
    for model, hessian, weight in zip(tuned, curvature, weights, strict=True):
        merged = _share(prior + hessian, precision).mul_(model - base).mul_(weight).add_(merged)
    return merged


def _rest(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    prior: Tensor,
    curvature: Sequence[Tensor],
    damping: float,
    penalty: Tensor | None = None,
    *,
    base_saw_removed: bool = False,
) -> Tensor:
    """H̄_rest: the curvature at the base of the data that stays, plus δ."""
    rest = torch.zeros_like(base).add_(prior)
    if base_saw_removed:
        for hessian, weight in zip(curvature, weights, strict=True):
            rest -= hessian * weight
        rest.clamp_(min=0)
    return rest.add_(damping)


@rule(
    "removal",
    row=("−w_t (−1)", "F_0 + δ, or the penalty", "F_t"),
    reference=PAPER,
    optional=["penalty"],
    precision=_rest,
    layers=remove_layer,
    wide=lambda weights, options: bool(options.get("base_saw_removed")) or unusual(weights, options),
)
def removal(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    prior: Tensor,
    curvature: Sequence[Tensor],
    damping: float,
    penalty: Tensor | None = None,
    *,
    base_saw_removed: Annotated[
        bool,
        Help("the base's curvature was estimated on data that held the removed part too: subtract Σ α_t F_t from it"),
    ] = False,
) -> Tensor:
    """θ_0 − Σ α_t H̄_rest⁻¹ (H_0 + H_t) Δ_t, what the tuned models learned, taken out of the base.

    H̄_rest is the base's curvature on the data that stays, plus δ. H_0 is the matrix of the penalty that the models
    were tuned under: `base.penalty` as it is if the recipe gives it, or else F_0 + δ. A weight is a strength: 1 removes
    the task, 0 leaves the base. Where H̄_rest is 0 the entry falls back to task arithmetic.
    """
    rest = _rest(base, tuned, weights, prior, curvature, damping, base_saw_removed=base_saw_removed)
    penalty = prior + damping if penalty is None else penalty
    merged = base.clone()
    for model, hessian, weight in zip(tuned, curvature, weights, strict=True):
        merged -= _share(penalty + hessian, rest).mul_(model - base).mul_(weight)
    return merged
