"""Spherical interpolation between several models: their mean direction with their mean length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from .measures import DELTA_PRODUCTS, spanned, square
from .spec import Help, negative_weights, rule

_TINY = 1e-8
#: A shorter mean direction is rounding error.
_CANCELLED = 1e-6


@rule(
    "multislerp",
    matching_form=("w_t, and by length", "on a sphere", "0"),
    reference="Goddard, Multi-SLERP, in MergeKit 2025",
    optional={"base"},
    needs_float64=negative_weights,
    measures={"products": DELTA_PRODUCTS},
)
def multislerp(
    base: Tensor | None,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    products: Sequence[float],
    *,
    normalize: Annotated[bool, Help("divide the weights by their sum")] = True,
) -> Tensor:
    """θ_0 + (Σ w_t ‖Δ_t‖) · m / ‖m‖ with m = Σ w_t Δ_t / ‖Δ_t‖, the mean direction of the Δ_t.

    Lengths and angles are those of whole tensors. Without a base, Δ_t are the models themselves. This interpolates on
    the sphere in the tangent space at the mean direction. If the directions cancel, the result is θ_0 + Σ w_t Δ_t. A
    single model is returned unchanged.
    """
    if len(tuned) == 1:
        return tuned[0].clone()
    if normalize:
        whole = math.fsum(weights)
        if abs(whole) <= 1e-12 * math.fsum(map(abs, weights)):
            raise ValueError("the weights sum to 0; change them, or set options.normalize: false")
        weights = [weight / whole for weight in weights]
    inner, shares = square(products), torch.tensor(weights, dtype=torch.float64)
    lengths = inner.diagonal().sqrt()
    factors = shares / (lengths + _TINY)
    length = math.sqrt(max(0.0, float(factors @ inner @ factors)))
    if length < _CANCELLED:
        return spanned(base, tuned, weights)
    return spanned(base, tuned, (factors * (float(shares @ lengths) / length)).tolist())
