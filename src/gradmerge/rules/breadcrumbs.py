"""Model Breadcrumbs: drop the smallest and the very largest entries of every Δ_t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from .sparse import Combine, Normalize, Rescale, Scale, Scope, Share, Vote, combined, l1_norms, rescale_to, trim
from .spec import Help, per_model, rule


def middle(entries: int, models: int, options: Mapping[str, Any]) -> list[list[int]]:
    """The ranks of the largest and the smallest kept entry of each Δ_t; 0 if none is kept."""
    ranks = []
    for density, gamma in zip(*(per_model(options[name], range(models)) for name in ("density", "gamma")), strict=True):
        kept = entries if density >= 1 else int(density * entries)
        above = min(int(gamma * entries), entries - kept)
        ranks.append([above + 1, above + kept] if kept else [0, 0])
    return ranks


def _kept(base: Tensor, tuned: Sequence[Tensor], thresholds: Sequence[Sequence[float]]) -> list[Tensor]:
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
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[Sequence[float]],
    norms: Sequence[float] | None = None,
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
