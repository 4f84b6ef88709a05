"""NearSwap: take the other model's entries where the two models are nearly equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .spec import Help, rule


@rule(
    "nearswap",
    matching_form=("1", "0", "min(1, t/|Δ|)"),
    reference="alchemonaut, QuartetAnemoi-70B-t0.0001, Hugging Face 2024",
    only_one_model=True,
)
def nearswap(
    base: Tensor,
    tuned: Sequence[Tensor],
    *,
    t: Annotated[float, Help("entries that differ by at most t are replaced", ge=0)] = 1e-4,
) -> Tensor:
    """θ_0 + min(1, t/|Δ|) Δ, which moves every entry of the base toward one model by at most t.

    Differences below 1e-6 count as 1e-6.
    """
    delta = tuned[0] - base
    return delta.mul_((t / delta.abs().clamp_(min=1e-6)).clamp_(max=1.0)).add_(base)
