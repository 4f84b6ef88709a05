"""Averages weighted by the diagonal Fisher information of each model."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from torch import Tensor

from .averages import weighted_average
from .gradient_matching import all_positive, share
from .spec import Help, Numbers, Tensors, extreme_weights, rule
from .task_arithmetic import task_arithmetic


def _precisions(
    weights: Numbers, curvature: Tensors, damping: float, prior: Tensor | None = None, include_base: bool = False
) -> list[Tensor]:
    """w_t (F_t + δ) of every model, and F_0 + δ of the base if it is included."""
    precisions = [(fisher + damping).mul_(weight) for fisher, weight in zip(curvature, weights, strict=True)]
    return [*precisions, prior + damping] if include_base and prior is not None else precisions


def _total(tuned: Tensors, precisions: Tensors) -> Tensor:
    total = torch.zeros_like(tuned[0])
    for precision in precisions:
        total += precision
    return total


def fisher_precision(
    tuned: Tensors,
    weights: Numbers,
    curvature: Tensors,
    damping: float,
    prior: Tensor | None = None,
    include_base: bool = False,
    **_: Any,
) -> Tensor:
    """H̄ = Σ w_t (F_t + δ)."""
    return _total(tuned, _precisions(weights, curvature, damping, prior, include_base))


@rule(
    "fisher-averaging",
    matching_form=("w_t", "0", "diag F_t"),
    reference="Matena and Raffel, Merging models with Fisher-weighted averaging, NeurIPS 2022",
    when={"prior": "include_base"},
    optional={"base"},
    propagates_nonfinite=False,
    precision=fisher_precision,
    needs_float64=extreme_weights,
)
def fisher_averaging(
    base: Tensor | None,
    tuned: Tensors,
    weights: Numbers,
    curvature: Tensors,
    damping: float,
    prior: Tensor | None = None,
    *,
    include_base: Annotated[bool, Help("include the base in the average, with its Fisher F_0")] = False,
) -> Tensor:
    """Σ w_t (F_t + δ) θ_t / Σ w_t (F_t + δ), an average of each entry weighted by its Fisher information.

    Where the denominator is 0 (no damping, and every Fisher 0) the entry falls back to task arithmetic, or without a
    base to the weighted average.
    """
    models = list(tuned)
    if include_base:
        if base is None or prior is None:
            raise ValueError("options.include_base: needs the base and its curvature")
        models.append(base)
    precisions = _precisions(weights, curvature, damping, prior, include_base)
    total = _total(tuned, precisions)
    # (F / total) · θ, not (F · θ) / total: the product underflows where F is tiny, the share does not.
    merged = torch.zeros_like(total)
    for model, precision in zip(models, precisions, strict=True):
        merged += (precision / total).mul_(model)
    if all_positive(total):
        return merged
    plain = weighted_average(None, tuned, weights, None) if base is None else task_arithmetic(base, tuned, weights)
    return torch.where(total == 0, plain, merged)


@rule(
    "fa1",
    matching_form=("w_t", "scaling of the base by F_0", "diag F̂_t at Δ_t"),
    reference="Daheim et al., Elastic weight removal, NAACL 2024",
    needs_float64=extreme_weights,
)
def fa1(base: Tensor, tuned: Tensors, weights: Numbers, prior: Tensor, curvature: Tensors, damping: float) -> Tensor:
    """(F_0 θ_0 + Σ w_t F_t Δ_t) / (F_0 + Σ |w_t| F_t), with F_t evaluated at Δ_t.

    F_0 includes the damping. The curvature files of the fine-tuned models must hold the Fisher estimated with the
    weights set to Δ_t = θ_t − θ_0. Where the denominator is 0 the entry falls back to task arithmetic.
    """
    scaling = prior + damping
    total = torch.zeros_like(base).add_(scaling)
    for fisher, weight in zip(curvature, weights, strict=True):
        total += fisher * abs(weight)
    merged = share(scaling, total).mul(base)
    for model, fisher, weight in zip(tuned, curvature, weights, strict=True):
        merged += share(fisher, total).mul_(weight).mul_(model - base)
    return merged
