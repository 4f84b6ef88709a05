"""The Karcher mean: the point of a sphere with the smallest sum of squared distances along the sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from .measures import Sums, inner_products, spanned, square
from .spec import Help, rule


def _mean_direction(inner: Tensor, shares: Tensor, steps: int, tolerance: float) -> Tensor:
    """The factors with which unit vectors with these inner products combine to their mean on the sphere."""

    def length(factors: Tensor) -> float:
        return math.sqrt(max(0.0, float(factors @ inner @ factors)))

    mean, start = shares, length(shares)
    mean = torch.eye(len(shares), dtype=torch.float64)[0] if start < tolerance else shares / start
    for _ in range(steps):
        tangent = torch.zeros_like(mean)
        for i, (cosine, share) in enumerate(zip((inner @ mean).tolist(), shares.tolist(), strict=True)):
            angle = math.acos(max(-1.0, min(1.0, cosine)))
            if tolerance <= angle <= math.pi - 1e-6:  # no direction leads to the opposite point
                pull = share * angle / math.sin(angle)
                tangent -= pull * cosine * mean
                tangent[i] += pull
        step = length(tangent)
        if step < tolerance:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
        if (end := length(mean)) > tolerance:
            mean = mean / end
    return mean


@rule(
    "karcher",
    matching_form=("w_t, and by length", "on a sphere", "0"),
    reference="Karcher, Riemannian center of mass, 1977; Buss and Fillmore, Spherical averages, 2001",
    measures={"products": Sums(lambda tuned: inner_products(tuned))},
    propagates_nonfinite=False,
)
def karcher(
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    products: Sequence[float],
    *,
    steps: Annotated[int, Help("maximum number of iterations", ge=0)] = 10,
    tolerance: Annotated[float, Help("steps and angles below it count as 0", gt=0, le=1)] = 1e-5,
) -> Tensor:
    """(Σ w_t ‖θ_t‖) · u, where the unit vector u minimizes Σ w_t · angle(u, θ_t)² and the weights sum to 1.

    Lengths and angles are those of whole tensors. Gradient steps from the mean direction find u. The base takes part
    only if it is one of the models. Tensors shorter than the tolerance have no direction.
    """
    if len(tuned) == 1:
        return tuned[0].clone()
    whole = math.fsum(weights)
    if min(weights) < 0 or whole == 0:
        raise ValueError("weights must not be negative or all 0: the mean is then not defined")
    shares = torch.tensor(weights, dtype=torch.float64) / whole
    inner = square(products)
    lengths = inner.diagonal().sqrt()
    seen = (lengths > tolerance) & (shares != 0)
    factors = torch.zeros_like(lengths)
    if bool(seen.any()):
        units = inner[seen][:, seen] / (lengths[seen] * lengths[seen, None])
        mean = _mean_direction(units, shares[seen] / shares[seen].sum(), steps, tolerance)
        factors[seen] = mean / lengths[seen] * float(shares @ lengths)
    return spanned(None, tuned, factors.tolist())
