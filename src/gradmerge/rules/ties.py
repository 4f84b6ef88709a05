"""TIES: trim, elect a sign, average the entries that agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .sparse import Rescale, Scale, Scope, Share, Vote, elect_and_average, l1_norms, largest, rescale_to, trim
from .spec import Help, rule


def _trimmed(base: Tensor, tuned: Sequence[Tensor], thresholds: Sequence[float]) -> list[Tensor]:
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
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    thresholds: Sequence[float],
    norms: Sequence[float] | None = None,
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
    return elect_and_average(trimmed, weights, base, scale, normalize, vote)
