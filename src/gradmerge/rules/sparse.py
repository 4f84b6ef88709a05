"""Rules that keep only a part of every difference: the largest entries, or random ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from .spec import Help, each, rule, unusual

Density = Annotated[float, Help("share of the entries of each Δ_t that is kept", gt=0, le=1, per_model=True)]
Scope = Annotated[
    Literal["model", "tensor"],
    Help("one threshold over all merged tensors of a model, or one per tensor"),
]


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


def elect_and_average(deltas: Sequence[Tensor], weights: Sequence[float], base: Tensor, scale: float = 1.0) -> Tensor:
    """θ_0 + scale times the average, with weights, of the entries whose sign is that of Σ w_t τ_t; θ_0 where none is.

    Overwrites the differences, so that few blocks are in use at a time.
    """
    if unusual(weights, {}):  # Δ itself stays as it was rounded: thresholds were found so
        base, deltas = base.double(), [delta.double() for delta in deltas]
    elected = _weighted_sum(deltas, weights).sign_()
    for delta in deltas:
        delta.mul_(elected).relu_()  # |τ| where the signs agree, and 0 elsewhere
    average = _weighted_sum(deltas, weights)
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
        average.div_(count).masked_fill_(_cancelled(count, sizes), 0.0)
    if scale != 1:
        average *= scale
    return torch.addcmul(base, average, elected, out=average)  # times ±1 or 0: rounded once, fused or not


@rule(
    "sparse-finetuning",
    row=("w_t", "0", "0/1 mask of the most changed entries"),
    reference="Ansell et al., Composable sparse fine-tuning, ACL 2022",
)
def sparse_finetuning(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[float],
    *,
    density: Density = 0.1,
    scope: Scope = "model",
    normalize: Annotated[bool, Help("divide by Σ w_t m_t where that is not 0")] = False,
) -> Tensor:
    """θ_0 + Σ w_t m_t Δ_t, only the most changed entries of each model, added up.

    The mask m_t keeps the k = ⌊density · n⌋ entries of Δ_t (at least 1) with the largest magnitude, and all that are
    as large as the k-th.
    """
    wide = torch.float64 if unusual(weights, {}) else base.dtype
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


@rule(
    "ties",
    row=("w_t", "0", "0/1 mask after trimming and sign election"),
    reference="Yadav et al., TIES-Merging, NeurIPS 2023",
)
def ties(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[float],
    *,
    density: Density = 0.2,
    scope: Scope = "model",
    scale: Annotated[float, Help("factor of the merged difference")] = 1.0,
) -> Tensor:
    """θ_0 + scale · (the average of what is left of each Δ_t after trimming and a vote on the sign).

    Each Δ_t is trimmed to its ⌊density · n⌋ largest entries (at least 1, and all that are as large as the last of
    them); the sign of Σ w_t τ_t is elected; the entries that agree with it are averaged with weights w_t.
    """
    trimmed = [trim(model - base, threshold) for model, threshold in zip(tuned, thresholds, strict=True)]
    return elect_and_average(trimmed, weights, base, scale)


@rule(
    "dare",
    row=("w_t", "0", "0/1 mask of random entries, over density"),
    reference="Yu et al., Language models are super Mario, ICML 2024",
)
def dare(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    kept: Sequence[Tensor],
    *,
    density: Annotated[float, Help("probability with which an entry of Δ_t is kept", gt=0, le=1, per_model=True)] = 0.5,
    combine: Annotated[
        Literal["task-arithmetic", "ties"],
        Help("add the kept parts up, or elect a sign and average those that agree"),
    ] = "task-arithmetic",
    seed: Annotated[int, Help("seed of the random masks", ge=0)] = 0,
) -> Tensor:
    """θ_0 + Σ w_t (m_t ∘ Δ_t) / density, random entries of each difference, scaled up to keep its mean.

    The random numbers depend on the seed, the place of the model in the recipe, the tensor's name and the entry's
    position alone, so that the result is the same on any machine.
    """
    deltas = []
    for model, mask, share in zip(tuned, kept, each(density, tuned), strict=True):
        deltas.append((model - base).mul_(mask.to(base.dtype)).div_(share))
    if combine == "ties":
        return elect_and_average(deltas, weights, base)
    total = torch.zeros_like(base)
    for delta, weight in zip(deltas, weights, strict=True):
        total += delta.mul_(weight)
    return total.add_(base)
