"""Rules that keep the largest entries of every Δ_t: sparse fine-tuning, TIES and Model Breadcrumbs."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from .measures import Sums
from .spec import Auto, Help, Numbers, Tensors, extreme_weights, per_model, rule

Share = Annotated[float, Help("share of the entries of each Δ_t to keep", ge=0, le=1, per_model=True)]
Probability = Annotated[float, Help("probability of keeping an entry of Δ_t", ge=0, le=1, per_model=True)]
Scope = Annotated[
    Literal["model", "tensor"], Help("one threshold per model over all merged tensors, or one per tensor")
]
Combine = Annotated[
    Literal["task-arithmetic", "ties"],
    Help("add up the kept entries, or elect a sign and average the entries that agree"),
]
Normalize = Annotated[
    Auto, Help("divide by the sum of weights (after a vote, of the models that agree); auto: only after a vote")
]
Rescale = Annotated[Literal["none", "norm"], Help("norm: scale the kept entries up to the L1 norm of the tensor's Δ_t")]
RandomRescale = Annotated[
    Literal["expectation", "norm", "none"],
    Help("divide by the probability, or scale to the L1 norm of the tensor's Δ_t"),
]
Scale = Annotated[float, Help("factor of the merged change")]
Vote = Annotated[
    Literal["strict", "mergekit"],
    Help("compare τ_t with the sign of Σ w_t τ_t (none where 0); mergekit: compare w_t τ_t, and 0 counts as +"),
]
Seed = Annotated[int, Help("seed of the random masks", ge=0)]


def trim(delta: Tensor, threshold: float) -> Tensor:
    """Δ where |Δ| ≥ threshold, and 0 elsewhere. Overwrites Δ."""
    if threshold == 0:
        return delta
    # hardshrink keeps values above its limit, so the limit is the number just below the threshold.
    return torch.hardshrink(delta, _just_below(threshold, delta.dtype), out=delta)


@functools.lru_cache
def _just_below(value: float, dtype: torch.dtype) -> float:
    """The next number of a type toward 0."""
    number = torch.tensor(value, dtype=dtype)
    return float(number.nextafter(torch.zeros_like(number)))


def _weighted_sum(parts: Tensors, weights: Numbers) -> Tensor:
    """Σ w_t x_t, in a new tensor."""
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total += part if weight == 1 else part * weight  # a fused product would not cancel exactly
    return total


def _without_cancelled(count: Tensor, sizes: Tensor) -> Tensor:
    """Sums of weights as divisors: 1 where one is 0 up to rounding. ``sizes`` is the sum of the weights' sizes."""
    return count.masked_fill_(count.abs() <= sizes.mul_(4 * torch.finfo(count.dtype).eps), 1.0)


def _elect(deltas: Tensors, weights: Numbers, normalize: bool, vote: str) -> tuple[Tensor, Tensor]:
    """The elected sign of every entry, and |Σ w_t τ_t| over the τ_t that have it, divided by Σ w_t of the same.

    Overwrites ``deltas`` to use little memory.
    """
    factors = weights
    if vote == "mergekit":  # w_t τ_t has the sign, and a tie is +
        for delta, weight in zip(deltas, weights, strict=True):
            delta.mul_(weight)
        factors = [1.0] * len(weights)
    elected = _weighted_sum(deltas, factors)
    if vote == "mergekit":
        # Adding 0 turns −0 into 0, which counts as +. Where a difference is NaN, so is its product below.
        elected = torch.copysign(elected.new_ones(()), elected.add_(0.0))
    else:
        elected.sign_()
    for delta in deltas:
        delta.mul_(elected).relu_()  # |τ| where the signs agree, else 0
    average = _weighted_sum(deltas, factors)
    if normalize:
        agreeing = [
            delta.sign_() if weight == 1 else delta.sign_().mul_(weight)
            for delta, weight in zip(deltas, weights, strict=True)
        ]
        if min(weights) > 0:  # the count is 0 or at least the smallest weight, and where it is 0 the sum is 0
            count = functools.reduce(Tensor.add_, agreeing).clamp_(min=min(weights))
        else:
            sizes = functools.reduce(Tensor.add_, [weight.abs() for weight in agreeing])
            count = _without_cancelled(functools.reduce(Tensor.add_, agreeing), sizes)
        average.div_(count)
    return elected, average


def combined(
    base: Tensor, deltas: Tensors, weights: Numbers, combine: str, normalize: bool | str, scale: float, vote: str
) -> Tensor:
    """θ_0 plus the kept entries, added up or after a vote. Overwrites ``deltas``."""
    if extreme_weights(weights, {}):  # Δ keeps its rounding, because thresholds were computed with it
        base, deltas = base.double(), [delta.double() for delta in deltas]
    if combine == "ties":
        signs, total = _elect(deltas, weights, normalize is not False, vote)
    else:
        signs, total = base.new_ones(()), _weighted_sum(deltas, weights)
        scale /= summed(weights) if normalize is True else 1.0
    if scale != 1:
        total *= scale
    return torch.addcmul(base, total, signs, out=total)  # times ±1 or 0, so it rounds once, fused or not


def summed(weights: Numbers) -> float:
    """Σ w_t as a divisor; 1 if it is 0 up to rounding."""
    whole = math.fsum(weights)
    return whole if abs(whole) >= 1e-8 else 1.0


def largest(entries: int, models: int, options: Mapping[str, Any]) -> list[list[int]]:
    """The rank of the smallest kept entry of each Δ_t: ⌊density · n⌋, at least 1; 0 if density is 0."""
    shares = per_model(options["density"], range(models))
    return [[min(entries, max(1, math.floor(share * entries))) if share > 0 else 0] for share in shares]


def l1_norms(keep: Callable[..., list[Tensor]]) -> Sums:
    """The L1 norms of the Δ_t, then of the entries of them that ``keep`` returns."""

    @functools.wraps(keep)  # the engine reads its parameters
    def norms(**inputs: Any) -> list[Tensor]:
        deltas = [model - inputs["base"] for model in inputs["tuned"]]
        return [values.double().abs_() for values in (*deltas, *keep(**inputs))]

    return Sums(norms)


def rescale_to(norms: Numbers | None, kept: list[Tensor]) -> list[Tensor]:
    """Scale the kept entries of every Δ_t to the L1 norm of Δ_t, unless a norm is 0."""
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
    tuned: Tensors,
    weights: Numbers,
    thresholds: Numbers,
    *,
    density: Annotated[float, Help("share of the entries of each Δ_t to keep", gt=0, le=1, per_model=True)] = 0.1,
    scope: Scope = "model",
    normalize: Annotated[bool, Help("divide by Σ w_t m_t where it is not 0")] = False,
) -> Tensor:
    """θ_0 + Σ w_t m_t Δ_t, the sum of the most changed entries of each model.

    The mask m_t keeps the k = ⌊density · n⌋ entries of Δ_t (at least 1) with the largest magnitude, and all that equal
    the k-th in magnitude.
    """
    dtype = torch.float64 if extreme_weights(weights, {}) else base.dtype
    total = torch.zeros_like(base, dtype=dtype)
    count = sizes = total.new_zeros(())
    for model, weight, threshold in zip(tuned, weights, thresholds, strict=True):
        delta = model - base
        if normalize:
            kept = (delta.abs() >= threshold).to(dtype).mul_(weight)
            count, sizes = count + kept, sizes + kept.abs()
        total += trim(delta, threshold).to(dtype).mul_(weight)
    if normalize:
        total.div_(_without_cancelled(count, sizes))
    return total.add_(base)


def _trimmed(base: Tensor, tuned: Tensors, thresholds: Numbers) -> list[Tensor]:
    return [trim(model - base, threshold) for model, threshold in zip(tuned, thresholds, strict=True)]


@rule(
    "ties",
    matching_form=("w_t", "0", "0/1 mask after trimming and sign election"),
    reference="Yadav et al., TIES-Merging, NeurIPS 2023",
    ranks=largest,
    measures={"norms": l1_norms(_trimmed)},
    when={"norms": ("rescale", "norm")},
)
def ties(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    thresholds: Numbers,
    norms: Numbers | None = None,
    *,
    density: Share = 0.2,
    scope: Scope = "model",
    normalize: Annotated[bool, Help("divide by the sum of the weights that agree")] = True,
    rescale: Rescale = "none",
    scale: Scale = 1.0,
    vote: Vote = "strict",
) -> Tensor:
    """θ_0 + scale · the weighted average of the trimmed Δ_t whose sign wins a vote.

    Each Δ_t is trimmed to τ_t: its ⌊density · n⌋ largest entries (at least 1, with all that equal the smallest of
    them; none if the density is 0). For each entry the sign of Σ w_t τ_t is elected, and the entries with this sign are
    averaged with weights w_t.
    """
    trimmed = rescale_to(norms, _trimmed(base, tuned, thresholds))
    return combined(base, trimmed, weights, "ties", normalize, scale, vote)


def middle(entries: int, models: int, options: Mapping[str, Any]) -> list[list[int]]:
    """The ranks of the largest and the smallest kept entry of each Δ_t; 0 if none is kept."""
    ranks = []
    for density, gamma in zip(*(per_model(options[name], range(models)) for name in ("density", "gamma")), strict=True):
        kept = entries if density >= 1 else int(density * entries)
        above = min(int(gamma * entries), entries - kept)
        ranks.append([above + 1, above + kept] if kept else [0, 0])
    return ranks


def _kept(base: Tensor, tuned: Tensors, thresholds: Sequence[Numbers]) -> list[Tensor]:
    kept = []
    for model, (high, low) in zip(tuned, thresholds, strict=True):
        delta = trim(model - base, low)
        # hardshrink keeps what is above its limit: the outliers, which are subtracted.
        kept.append(delta.sub_(torch.hardshrink(delta, high)) if high < math.inf else delta)
    return kept


@rule(
    "breadcrumbs",
    matching_form=("w_t", "0", "0/1 mask of medium-sized entries"),
    reference="Davari and Belilovsky, Model Breadcrumbs, ECCV 2024",
    ranks=middle,
    measures={"norms": l1_norms(_kept)},
    when={"norms": ("rescale", "norm")},
    propagates_nonfinite=False,
)
def breadcrumbs(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    thresholds: Sequence[Numbers],
    norms: Numbers | None = None,
    *,
    density: Share = 0.15,
    gamma: Annotated[
        float, Help("share of the entries of each Δ_t to drop as outliers, the largest", ge=0, le=1, per_model=True)
    ] = 0.01,
    scope: Scope = "tensor",
    combine: Combine = "task-arithmetic",
    normalize: Normalize = "auto",
    rescale: Rescale = "none",
    scale: Scale = 1.0,
    vote: Vote = "strict",
) -> Tensor:
    """θ_0 + scale · Σ w_t m_t Δ_t, where m_t keeps large entries of Δ_t except the outliers.

    m_t drops the ⌊gamma · n⌋ largest entries of Δ_t (fewer if density + gamma > 1). It keeps the next ⌊density · n⌋
    entries, and all that equal the first or the last of them in size. A density of 1 keeps everything.
    """
    kept = rescale_to(norms, _kept(base, tuned, thresholds))
    return combined(base, kept, weights, combine, normalize, scale, vote)
