"""Sparse fine-tuning, and what the rules share that keep only a part of every difference."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from .spec import Auto, Help, extreme_weights, per_model, rule

Share = Annotated[float, Help("share of the entries of each Δ_t that is kept", ge=0, le=1, per_model=True)]
Probability = Annotated[float, Help("probability with which an entry of Δ_t is kept", ge=0, le=1, per_model=True)]
Scope = Annotated[
    Literal["model", "tensor"],
    Help("one threshold over all merged tensors of a model, or one per tensor"),
]
Combine = Annotated[
    Literal["task-arithmetic", "ties"],
    Help("add the kept parts up, or elect a sign and average those that agree"),
]
Normalize = Annotated[
    Auto, Help("divide by the weights that count: all, or after a vote those that agree; auto: only after a vote")
]
Rescale = Annotated[Literal["none", "norm"], Help("norm: scale what is kept up to the L1 norm of the tensor's Δ_t")]
RandomRescale = Annotated[
    Literal["expectation", "norm", "none"],
    Help("divide by the probability; or scale to the L1 norm of the tensor's Δ_t"),
]
Scale = Annotated[float, Help("factor of the merged difference")]
Vote = Annotated[
    Literal["strict", "mergekit"],
    Help("what agrees with Σ w_t τ_t: τ_t, and nothing where that is 0; or w_t τ_t, and 0 counts as +, as in mergekit"),
]
Seed = Annotated[int, Help("seed of the random masks", ge=0)]


def trim(delta: Tensor, threshold: float) -> Tensor:
    """Δ where |Δ| ≥ threshold, and 0 elsewhere. Overwrites Δ."""
    if threshold == 0:
        return delta
    # hardshrink keeps what is above its limit, so the limit is the number just below the threshold.
    return torch.hardshrink(delta, _just_below(threshold, delta.dtype), out=delta)


@functools.lru_cache
def _just_below(value: float, dtype: torch.dtype) -> float:
    """The next number of a type towards 0."""
    number = torch.tensor(value, dtype=dtype)
    return float(number.nextafter(torch.zeros_like(number)))


def _weighted_sum(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Σ w_t x_t, in a tensor of its own."""
    total: Tensor | None = None
    for part, weight in zip(parts, weights, strict=True):
        scaled = part if weight == 1 else part * weight
        if total is None:
            total = scaled
        else:
            total = total + scaled if total is parts[0] else total.add_(scaled)
    assert total is not None
    return total.clone() if total is parts[0] else total


def _cancelled(count: Tensor, sizes: Tensor) -> Tensor:
    """Where a sum of weights is 0 but for rounding, as 0.1 + 0.2 − 0.3 is. ``sizes`` is the sum of their sizes."""
    return count.abs() <= sizes.mul_(4 * torch.finfo(count.dtype).eps)


def elect_and_average(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    base: Tensor,
    scale: float = 1.0,
    normalize: bool = True,
    vote: str = "strict",
) -> Tensor:
    """θ_0 + scale times the average, with weights, of the entries whose sign is that of Σ w_t τ_t; θ_0 where none is.

    With ``normalize`` off it is their sum, not their average. Overwrites the differences, so that few blocks are in use
    at a time.
    """
    if extreme_weights(weights, {}):  # Δ itself stays as it was rounded: thresholds were found so
        base, deltas = base.double(), [delta.double() for delta in deltas]
    factors = weights
    if vote == "mergekit":  # what has a sign is w_t τ_t, and an even vote is for +
        for delta, weight in zip(deltas, weights, strict=True):
            if weight != 1:
                delta.mul_(weight)
        factors = [1.0] * len(weights)
    elected = _weighted_sum(deltas, factors)
    if vote == "mergekit":
        # Adding 0 makes −0 of it 0, which counts as +. Where a difference is NaN, so is its product below.
        elected = torch.copysign(elected.new_ones(()), elected.add_(0.0))
    else:
        elected.sign_()
    for delta in deltas:
        delta.mul_(elected).relu_()  # |τ| where the signs agree, and 0 elsewhere
    average = _weighted_sum(deltas, factors)
    if normalize:
        for delta, weight in zip(deltas, weights, strict=True):
            delta.sign_()
            if weight != 1:
                delta.mul_(weight)
        smallest = min(weights)
        if smallest > 0:  # then the count is 0 or at least that, and the sum is 0 where it is 0
            average.div_(functools.reduce(Tensor.add_, deltas).clamp_(min=smallest))
        else:
            sizes = functools.reduce(Tensor.add_, [delta.abs() for delta in deltas])
            count = functools.reduce(Tensor.add_, deltas)
            none = _cancelled(count, sizes)
            if vote == "mergekit":
                average.div_(count.masked_fill_(none, 1.0))
            else:
                average.div_(count).masked_fill_(none, 0.0)
    if scale != 1:
        average *= scale
    return torch.addcmul(base, average, elected, out=average)  # times ±1 or 0: rounded once, fused or not


def combined(
    base: Tensor,
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    combine: str,
    normalize: bool | str,
    scale: float,
    vote: str,
) -> Tensor:
    """θ_0 plus what is left of the differences, added up or after a vote. Overwrites the differences."""
    if combine == "ties":
        return elect_and_average(deltas, weights, base, scale, normalize is not False, vote)
    total = torch.zeros_like(base, dtype=torch.float64 if extreme_weights(weights, {}) else base.dtype)
    for delta, weight in zip(deltas, weights, strict=True):
        total += delta.to(total.dtype).mul_(weight)
    factor = scale / (summed(weights) if normalize is True else 1.0)
    return (total if factor == 1 else total.mul_(factor)).add_(base)


def summed(weights: Sequence[float]) -> float:
    """Σ w_t as a divisor: 1 where it is 0 but for rounding."""
    whole = math.fsum(weights)
    return whole if abs(whole) >= 1e-8 else 1.0


def largest(entries: int, models: int, options: Mapping[str, Any]) -> list[list[int]]:
    """The rank of the smallest entry of each Δ_t that is kept: ⌊density · n⌋, at least 1, or none if density is 0."""
    shares = per_model(options["density"], range(models))
    return [[min(entries, max(1, math.floor(share * entries))) if share > 0 else 0] for share in shares]


def norms_of(deltas: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
    """The terms of the L1 norms of whole differences, and then of what is kept of them."""
    return [values.double().abs_() for values in (*deltas, *kept)]


def rescale_to(norms: Sequence[float] | None, kept: list[Tensor]) -> list[Tensor]:
    """What is kept of every difference, with the L1 norm that the whole of it has; norms of 0 are left alone."""
    if norms is not None:
        for delta, before, after in zip(kept, norms, norms[len(kept) :], strict=False):
            if not min(before, after) < 1e-7:
                delta.mul_(before / after)
    return kept


@rule(
    "sparse-finetuning",
    matching_form=("w_t", "0", "0/1 mask of the most changed entries"),
    reference="Ansell et al., Composable sparse fine-tuning, ACL 2022",
    ranks=largest,
)
def sparse_finetuning(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[float],
    *,
    density: Annotated[float, Help("share of the entries of each Δ_t that is kept", gt=0, le=1, per_model=True)] = 0.1,
    scope: Scope = "model",
    normalize: Annotated[bool, Help("divide by Σ w_t m_t where that is not 0")] = False,
) -> Tensor:
    """θ_0 + Σ w_t m_t Δ_t, only the most changed entries of each model, added up.

    The mask m_t keeps the k = ⌊density · n⌋ entries of Δ_t (at least 1) with the largest magnitude, and all that are
    as large as the k-th.
    """
    wide = torch.float64 if extreme_weights(weights, {}) else base.dtype
    total = torch.zeros_like(base, dtype=wide)
    count = sizes = total.new_zeros(())
    for model, weight, threshold in zip(tuned, weights, thresholds, strict=True):
        delta = model - base
        if normalize:
            kept = (delta.abs() >= threshold).to(wide).mul_(weight)
            count, sizes = count + kept, sizes + kept.abs()
        total += trim(delta, threshold).to(wide).mul_(weight)
    if normalize:
        total.div_(count.masked_fill_(_cancelled(count, sizes), 1.0))
    return total.add_(base)
