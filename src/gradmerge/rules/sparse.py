"""Rules that keep only a part of every difference: the largest entries, or random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from .spec import Help, rule

Density = Annotated[float, Help("share of the entries of each Δ_t that is kept", gt=0, le=1)]
Scope = Annotated[
    Literal["model", "tensor"],
    Help("one threshold over all merged tensors of a model, or one a tensor"),
]


def keep_largest(delta: Tensor, threshold: float) -> Tensor:
    """The mask m: 1 where |Δ| ≥ threshold."""
    return (delta.abs() >= threshold).to(delta.dtype)


def elect_and_average(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The average, with weights, of the entries whose sign is that of Σ w_t τ_t; 0 where none is left."""
    weighted = [delta * weight for delta, weight in zip(deltas, weights, strict=True)]
    elected = torch.zeros_like(deltas[0])
    for part in weighted:
        elected += part
    elected.sign_()
    total, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for delta, part, weight in zip(deltas, weighted, weights, strict=True):
        agrees = (delta.sign() == elected).to(delta.dtype)
        total += part.mul_(agrees)
        count += agrees.mul_(weight)
    return total.div_(count).masked_fill_(count == 0, 0.0)


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
    total, count = torch.zeros_like(base), torch.zeros_like(base)
    for model, weight, threshold in zip(tuned, weights, thresholds, strict=True):
        delta = model - base
        mask = keep_largest(delta, threshold).mul_(weight)
        total += delta.mul_(mask)
        if normalize:
            count += mask
    if normalize:
        total.div_(count.masked_fill_(count == 0, 1.0))
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
    trimmed = []
    for model, threshold in zip(tuned, thresholds, strict=True):
        delta = model - base
        trimmed.append(delta.mul_(keep_largest(delta, threshold)))
    return elect_and_average(trimmed, weights).mul_(scale).add_(base)


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
    density: Annotated[float, Help("probability with which an entry of Δ_t is kept", gt=0, le=1)] = 0.5,
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
    for model, mask in zip(tuned, kept, strict=True):
        deltas.append((model - base).mul_(mask.to(base.dtype)).div_(density))
    if combine == "ties":
        return elect_and_average(deltas, weights).add_(base)
    total = torch.zeros_like(base)
    for delta, weight in zip(deltas, weights, strict=True):
        total += delta.mul_(weight)
    return total.add_(base)
