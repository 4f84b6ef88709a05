"""Gradient matching and removal with whole matrices, where both are exact for quadratic losses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradmerge.rules.gradient_matching import Penalty
from gradmerge.rules.kronecker_matching import penalty_of_each


def gradient_matching_full(
    base: Tensor,
    tuned: Sequence[Tensor],
    prior: Tensor,
    curvature: Sequence[Tensor],
    weights: Sequence[float] | None = None,
    penalty: Penalty = None,
) -> Tensor:
    """θ_0 + Σ α_t H̄⁻¹ (P_t + H_t) Δ_t with matrices H_0 (``prior``), P_t and H_t, and H̄ = H_0 + Σ α_t H_t.

    ``penalty`` is the penalty matrix used in training: one P for all models, a list with one per model, or None for
    H_0. For quadratic losses the result is exactly argmin Σ α_t ℓ_t(θ) + ½‖θ − θ_0‖²_{H_0}, the jointly trained model.
    """
    weights = [1.0] * len(tuned) if weights is None else weights
    precision, pull = prior.clone(), torch.zeros_like(base)
    every = penalty_of_each(penalty, len(tuned), prior)
    for model, hessian, weight, p in zip(tuned, curvature, weights, every, strict=True):
        precision += weight * hessian
        pull += weight * (p + hessian) @ (model - base)
    step: Tensor = torch.linalg.solve(precision, pull)
    return base + step


def removal_full(
    base: Tensor,
    tuned: Sequence[Tensor],
    rest: Tensor,
    penalty: Tensor,
    curvature: Sequence[Tensor],
    weights: Sequence[float] | None = None,
) -> Tensor:
    """θ_0 − Σ α_t H̄_rest⁻¹ (H_0 + H_t) Δ_t with matrices H̄_rest (``rest``), H_0 (``penalty``) and H_t.

    For linear regression this is the model retrained without the removed data (Cook's influence formula).
    """
    weights = [1.0] * len(tuned) if weights is None else weights
    pull = torch.zeros_like(base)
    for model, hessian, weight in zip(tuned, curvature, weights, strict=True):
        pull += weight * (penalty + hessian) @ (model - base)
    step: Tensor = torch.linalg.solve(rest, pull)
    return base - step
