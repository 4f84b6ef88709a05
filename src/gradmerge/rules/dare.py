"""DARE: keep random entries of every Δ_t."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .sparse import (
    Combine,
    Normalize,
    Probability,
    RandomRescale,
    Scale,
    Seed,
    Vote,
    combined,
    l1_norms,
    rescale_to,
)
from .spec import per_model, rule


def _dropped(base: Tensor, tuned: Sequence[Tensor], kept: Sequence[Tensor]) -> list[Tensor]:
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
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    kept: Sequence[Tensor],
    norms: Sequence[float] | None = None,
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
