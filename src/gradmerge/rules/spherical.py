"""Spherical interpolation between two models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from torch import Tensor

from .spec import Help, rule


class Geometry(NamedTuple):
    """Inner product and norms of two whole tensors, in float64."""

    dot: float
    base_norm: float
    tuned_norm: float


def slerp_factors(geometry: Geometry, t: float, parallel: float) -> tuple[float, float]:
    """The factors of base and tuned model: of an arc, or of a line where no arc is defined."""
    norms = geometry.base_norm * geometry.tuned_norm
    cosine = geometry.dot / norms if norms > 0 else 1.0
    if not abs(cosine) <= parallel or abs(cosine) >= 1:  # also where it is NaN
        return 1.0 - t, t
    angle = math.acos(max(-1.0, min(1.0, cosine)))
    return math.sin((1.0 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)


@rule(
    "slerp",
    row=("1", "on an arc", "0"),
    reference="Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985",
    only_one_model=True,
)
def slerp(
    base: Tensor,
    tuned: Sequence[Tensor],
    geometry: Geometry,
    *,
    t: Annotated[float, Help("0 is the base, 1 the tuned model", ge=0, le=1)] = 0.5,
    parallel: Annotated[float, Help("from this |cosine| on a tensor is interpolated linearly", gt=0, le=1)] = 0.9995,
) -> Tensor:
    """(sin((1−t)φ) θ_0 + sin(tφ) θ_1) / sin φ, the arc between the base and one tuned model.

    φ is the angle between the two tensors, each taken whole. Tensors that are nearly parallel, opposite or 0 are
    interpolated linearly instead.
    """
    from_base, from_tuned = slerp_factors(geometry, t, parallel)
    return (base * from_base).add_(tuned[0] * from_tuned)
