"""Spherical interpolation between two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from torch import Tensor

from .measures import PRODUCTS
from .spec import Help, rule


def arc_factors(cosine: float, t: float) -> tuple[float, float]:
    """The factors of two vectors that give the point at t on the arc between them."""
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


@rule(
    "slerp",
    matching_form=("1", "on an arc", "0"),
    reference="Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985",
    only_one_model=True,
    measures={"products": PRODUCTS},
)
def slerp(
    base: Tensor,
    tuned: Sequence[Tensor],
    products: Sequence[float],
    *,
    t: Annotated[float, Help("0 is the base, 1 the fine-tuned model", ge=0, le=1)] = 0.5,
    parallel: Annotated[float, Help("tensors with a larger |cosine| are interpolated linearly", gt=0, le=1)] = 0.9995,
    zeros: Annotated[
        Literal["line", "arc"], Help("zero tensors: interpolate linearly, or as orthogonal tensors (as mergekit does)")
    ] = "line",
) -> Tensor:
    """(sin((1−t)φ) θ_0 + sin(tφ) θ_1) / sin φ, the arc between the base and one fine-tuned model.

    φ is the angle between the two tensors, each as one vector. Tensors that are nearly parallel, opposite or 0 are
    interpolated linearly.
    """
    norms, dot = [math.sqrt(products[0]), math.sqrt(products[2])], products[1]
    if zeros == "arc":
        norms = [1.0 if norm <= 1e-8 else norm for norm in norms]
    cosine = dot / (norms[0] * norms[1]) if norms[0] * norms[1] > 0 else 1.0
    if not abs(cosine) <= parallel or abs(cosine) >= 1:  # also if it is NaN
        from_base, from_tuned = 1.0 - t, t
    else:
        from_base, from_tuned = arc_factors(cosine, t)
    return (base * from_base).add_(tuned[0], alpha=from_tuned)
