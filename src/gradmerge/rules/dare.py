"""Rules that keep random entries of every Δ_t: DARE and DELLA."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from .sparse import Combine, Normalize, Probability, RandomRescale, Scale, Seed, Vote, combined, l1_norms, rescale_to
from .spec import Help, Numbers, Tensors, per_model, rule


def _dropped(base: Tensor, tuned: Tensors, kept: Tensors) -> list[Tensor]:
    return [(model - base).mul_(mask.to(base.dtype)) for model, mask in zip(tuned, kept, strict=True)]


@rule(
    "dare",
    matching_form=("w_t", "0", "0/1 mask of random entries, over density"),
    reference="Yu et al., Language models are super Mario, ICML 2024",
    measures={"norms": l1_norms(_dropped)},
    when={"norms": ("rescale", "norm")},
)
def dare(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    kept: Tensors,
    norms: Numbers | None = None,
    *,
    density: Probability = 0.5,
    combine: Combine = "task-arithmetic",
    normalize: Normalize = "auto",
    rescale: RandomRescale = "expectation",
    scale: Scale = 1.0,
    vote: Vote = "strict",
    seed: Seed = 0,
) -> Tensor:
    """θ_0 + scale · Σ w_t (m_t ∘ Δ_t) / density, where m_t keeps each entry with probability density.

    The division keeps the expected value of each entry. The random numbers depend only on the seed, the model's
    position in the recipe, the tensor's name and the entry's position, so every machine gives the same result.
    """
    deltas = rescale_to(norms, _dropped(base, tuned, kept))
    if rescale == "expectation":
        for delta, share in zip(deltas, per_model(density, tuned), strict=True):
            if share > 0:
                delta.div_(share)
    return combined(base, deltas, weights, combine, normalize, scale, vote)


def _ranks_in_rows(sizes: Tensor) -> Tensor:
    """The rank of each entry in its row, from 0, in float64; equal entries rank by column."""
    if sizes.dtype != torch.float32 or sizes.device.type != "cpu":
        return sizes.argsort(dim=1, stable=True).argsort(dim=1).double()
    # Sort integers made of the bits of a size, whose order is that of the sizes, and the column: three times as fast.
    columns = np.arange(sizes.shape[1], dtype=np.int64).reshape(1, -1, *[1] * (sizes.dim() - 2))
    keys = (sizes.numpy().view(np.int32).astype(np.int64) << 32) | columns
    keys.sort(axis=1)
    keys &= 0xFFFF_FFFF
    ranks = np.empty(keys.shape)
    np.put_along_axis(ranks, keys, columns.astype(np.float64), axis=1)
    return torch.from_numpy(ranks)


def _probabilities(delta: Tensor, density: float, epsilon: float) -> Tensor:
    """The probability of keeping each entry, in float64: linear in its rank from density − ε to density + ε."""
    if density >= 1 or density <= 0:
        return torch.full_like(delta, float(density > 0), dtype=torch.float64)
    if not 0 < density - epsilon <= density + epsilon < 1:
        raise ValueError(f"density ± epsilon is {density:g} ± {epsilon:g}, but both ends must be between 0 and 1")
    rows = delta.reshape(1, -1) if delta.dim() < 2 else delta
    ranks = _ranks_in_rows(rows.abs())
    last = rows.shape[1] - 1
    where = ranks.div_(last) if last > 0 else torch.full_like(ranks, 0.5)
    return where.mul_(2 * epsilon).add_(density - epsilon).reshape(delta.shape)


def _dropped_by_size(
    base: Tensor, tuned: Tensors, uniform: Tensors, density: float | Numbers, epsilon: float | Numbers, rescale: str
) -> list[Tensor]:
    kept = []
    for model, number, share, width in zip(
        tuned, uniform, per_model(density, tuned), per_model(epsilon, tuned), strict=True
    ):
        delta = model - base
        chance = _probabilities(delta, share, width)
        mask = number < chance
        if rescale == "expectation":
            delta = delta.div_(torch.where(mask, chance, 1.0).to(delta.dtype))
        kept.append(delta.mul_(mask.to(delta.dtype)))
    return kept


@rule(
    "della",
    matching_form=("w_t", "0", "0/1 mask of random entries, over their probability"),
    reference="Deep et al., DELLA-Merging, arXiv 2406.11617",
    measures={"norms": l1_norms(_dropped_by_size)},
    when={"norms": ("rescale", "norm")},
    granularity="rows",
)
def della(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    uniform: Tensors,
    norms: Numbers | None = None,
    *,
    density: Probability = 0.5,
    epsilon: Annotated[
        float,
        Help(
            "half the difference in probability between the largest and smallest entry of a row",
            ge=0,
            le=0.5,
            per_model=True,
        ),
    ] = 0.15,
    combine: Combine = "ties",
    normalize: Normalize = "auto",
    rescale: RandomRescale = "expectation",
    scale: Scale = 1.0,
    vote: Vote = "strict",
    seed: Seed = 0,
) -> Tensor:
    """θ_0 + scale · Σ w_t (m_t ∘ Δ_t) / p_t, where m_t keeps each entry with probability p_t.

    p_t is linear in the rank of |Δ_t| in its row, from density − epsilon to density + epsilon. A row lies along the
    second axis of a tensor; a vector is one row. By default the kept entries vote on a sign, as in TIES; the linear
    form is `combine: task-arithmetic`. The random numbers depend only on the seed, the model's position in the
    recipe, the tensor's name and the entry's position.
    """
    kept = rescale_to(norms, _dropped_by_size(base, tuned, uniform, density, epsilon, rescale))
    return combined(base, kept, weights, combine, normalize, scale, vote)
