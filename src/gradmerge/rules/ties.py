"""TIES: trim, elect a sign, average what agrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .measures import Sums
from .sparse import Rescale, Scale, Scope, Share, Vote, elect_and_average, largest, norms_of, rescale_to, trim
from .spec import Help, rule


def _trimmed(base: Tensor, tuned: Sequence[Tensor], thresholds: Sequence[float]) -> list[Tensor]:
    return [trim(model - base, threshold) for model, threshold in zip(tuned, thresholds, strict=True)]


def _norms(base: Tensor, tuned: Sequence[Tensor], thresholds: Sequence[float]) -> list[Tensor]:
    return norms_of([model - base for model in tuned], _trimmed(base, tuned, thresholds))


@rule(
    "ties",
    matching_form=("w_t", "0", "0/1 mask after trimming and sign election"),
    reference="Yadav et al., TIES-Merging, NeurIPS 2023",
    ranks=largest,
    measures={"norms": Sums(_norms)},
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
    normalize: Annotated[bool, Help("divide by the weights of those that agree")] = True,
    rescale: Rescale = "none",
    scale: Scale = 1.0,
    vote: Vote = "strict",
) -> Tensor:
    """θ_0 + scale · (the average of what is left of each Δ_t after trimming and a vote on the sign).

    Each Δ_t is trimmed to its ⌊density · n⌋ largest entries (at least 1, and all that are as large as the last of
    them; none if the density is 0); the sign of Σ w_t τ_t is elected; the entries that agree with it are averaged with
    weights w_t.
    """
    trimmed = rescale_to(norms, _trimmed(base, tuned, thresholds))
    return elect_and_average(trimmed, weights, base, scale, normalize, vote)
