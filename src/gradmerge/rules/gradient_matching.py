"""Gradient matching: merging and removal with the curvature of every model (Daheim et al., ICLR 2024)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from .kronecker_matching import match_layer, penalty_of_each
from .spec import Help, Numbers, OrNone, Tensors, extreme_weights, rule

PAPER = "Daheim et al., Model merging by uncertainty-based gradient matching, ICLR 2024"
Penalty = Sequence[Tensor | None] | Tensor | None
"""P_t of every model, None for H_0; or one P for all models."""


def all_positive(values: Tensor) -> bool:
    """Return whether every value is above 0. The minimum is ten times faster than a comparison of every value."""
    return values.numel() == 0 or float(values.amin()) > 0


def share(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole, and 1 where whole is 0, so that the entry falls back to task arithmetic."""
    ratio = part / whole
    return ratio if all_positive(whole) else torch.where(whole == 0, 1.0, ratio)


def merged_precision(
    base: Tensor, weights: Numbers, prior: Tensor, curvature: Tensors, damping: float, **_: Any
) -> Tensor:
    """H̄ = H_0 + Σ α_t H_t, with H_0 = F_0 + δ: the precision of the merged posterior."""
    precision = torch.zeros_like(base).add_(prior).add_(damping)
    for hessian, weight in zip(curvature, weights, strict=True):
        precision += hessian * weight
    return precision


@rule(
    "gradient-matching",
    matching_form=("w_t (1)", "F_0 + δ", "F_t"),
    reference=PAPER,
    optional={"penalty"},
    precision=merged_precision,
    layers=match_layer,
    needs_float64=extreme_weights,
    checks={"coefficients", "positive-weights"},
)
def gradient_matching(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    prior: Tensor,
    curvature: Tensors,
    damping: float,
    penalty: Penalty = None,
) -> Tensor:
    """θ_0 + Σ α_t H̄⁻¹ (P + H_t) Δ_t, with H_0 = F_0 + δ and H̄ = H_0 + Σ α_t H_t.

    Cancels the gradient mismatch to first order, so all weights can stay at 1. Needs the curvature of the base and of
    every fine-tuned model. P is the penalty matrix used in training: `base.penalty` (0 if it is `none`), by default the
    one recorded beside each model, else H_0. Where H̄ is 0 the entry falls back to task arithmetic. With Kronecker
    curvature the weight and bias of a linear layer are solved for together.
    """
    precision = merged_precision(base, weights, prior, curvature, damping)
    penalties = penalty_of_each(penalty, len(tuned), default=prior + damping)
    merged = base
    for model, hessian, weight, p in zip(tuned, curvature, weights, penalties, strict=True):
        merged = share(p + hessian, precision).mul_(model - base).mul_(weight).add_(merged)
    return merged


def rest_precision(
    base: Tensor,
    weights: Numbers,
    prior: Tensor,
    curvature: Tensors,
    damping: float,
    base_saw_removed: bool = False,
    **_: Any,
) -> Tensor:
    """H̄_rest: the curvature of the retain set at the base, plus δ."""
    rest = torch.zeros_like(base).add_(prior)
    if base_saw_removed:
        for hessian, weight in zip(curvature, weights, strict=True):
            rest -= hessian * weight
        rest.clamp_(min=0)
    return rest.add_(damping)


@rule(
    "removal",
    matching_form=("−w_t (−1)", "F_0 + δ, or P", "F_t"),
    reference=PAPER,
    optional={"penalty"},
    precision=rest_precision,
    layers=functools.partial(match_layer, removes=True),
    needs_float64=lambda weights, options: bool(options.get("base_saw_removed")) or extreme_weights(weights, options),
    auto_damping="mean-curvature",
    checks={"step-size"},
    removes=True,
)
def removal(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    prior: Tensor,
    curvature: Tensors,
    damping: float,
    penalty: Penalty = None,
    *,
    base_saw_removed: Annotated[
        bool,
        Help("the base's curvature was estimated on data that include the removed data: subtract Σ α_t F_t from it"),
    ] = False,
    cap: Annotated[
        OrNone, Help("limit (P + H_t) / H̄_rest to 1 + cap; with 0 no weight moves farther than under negation", ge=0)
    ] = 1.0,
) -> Tensor:
    """θ_0 − Σ α_t H̄_rest⁻¹ (P + H_t) Δ_t, the base without what the fine-tuned models learned.

    H̄_rest is the base's curvature on the retain set, plus δ. P is the penalty matrix used in training: `base.penalty`
    (0 if it is `none`), by default the one recorded beside each model, else H_0 = F_0 + δ. A weight is a strength: 1
    removes the task, 0 keeps the base. Where the retain set has no curvature, the ratio (P + H_t) / H̄_rest is
    unbounded. So by default δ is the mean over all entries of Σ F_t, and the ratio is at most 2: no weight moves more
    than twice as far as under negation. `cap: none` with a `damping` gives the paper's formula. Where H̄_rest is 0 the
    entry falls back to task arithmetic. With Kronecker curvature the weight and bias of a linear layer are solved for
    together, and only δ bounds their step.
    """
    rest = rest_precision(base, weights, prior, curvature, damping, base_saw_removed)
    penalties = penalty_of_each(penalty, len(tuned), default=prior + damping)
    merged = base.clone()
    for model, hessian, weight, p in zip(tuned, curvature, weights, penalties, strict=True):
        ratio = share(p + hessian, rest)
        if cap != "none":
            ratio = ratio.clamp_(max=1 + cap)
        merged -= ratio.mul_(model - base).mul_(weight)
    return merged
