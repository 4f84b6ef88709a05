"""Spherical interpolation between two models, or between their changes, by weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor

from .measures import DELTA_PRODUCTS, spanned
from .slerp import arc_factors
from .spec import Help, negative_weights, rule

_TINY = 1e-7
_STRAIGHT = 1e-16  # of the squared sine
#: Vectors count as opposite if their cosine is this close to −1; the arc between them would be rounding error.
_OPPOSITE = 1e-7


def _along(first: Tensor, second: Tensor, t: float, axis: int) -> Tensor:
    """The arc between every two vectors along an axis."""
    vectors = [x.double() for x in (first, second)]
    norms = [x.norm(dim=axis, keepdim=True).clamp_(min=_TINY) for x in vectors]
    cosine = (vectors[0] * vectors[1]).sum(axis, keepdim=True).div_(norms[0] * norms[1]).clamp_(-1, 1)
    straight = (1 - cosine.square() <= _STRAIGHT) | (1 + cosine <= _OPPOSITE)
    angle = torch.where(straight, 0.0, cosine).acos_()
    factors = [((1 - t) * angle).sin() / angle.sin(), (t * angle).sin() / angle.sin()]
    a, b = (torch.where(straight, line, factor) for line, factor in zip((1 - t, t), factors, strict=True))
    return (vectors[0].mul_(a) + vectors[1].mul_(b)).to(first.dtype)


@rule(
    "nuslerp",
    matching_form=("w_t / Σ w", "on an arc", "0"),
    reference="Goddard et al., Arcee's MergeKit, EMNLP 2024; Shoemake, SIGGRAPH 1985",
    optional={"base"},
    needs_float64=negative_weights,
    measures={"products": DELTA_PRODUCTS},
    when={"products": ("axis", "all")},
    granularity=lambda options: {"last": "rows", "first": "tensor"}.get(options["axis"], "entries"),
)
def nuslerp(
    base: Tensor | None,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    products: Sequence[float] | None = None,
    *,
    axis: Annotated[
        Literal["all", "last", "first"],
        Help("compute the angle between whole tensors, or between vectors along their last or first axis"),
    ] = "all",
) -> Tensor:
    """θ_0 + (sin((1−t)φ) Δ_1 + sin(tφ) Δ_2) / sin φ, the arc between the changes of two models, t = w_2 / (w_1 + w_2).

    φ is the angle between Δ_1 and Δ_2. Without a base it is the arc between the two models themselves. Parallel and
    opposite vectors are interpolated linearly. A zero vector counts as orthogonal. With `axis: first` each tensor is
    read into memory as a whole.
    """
    if len(tuned) != 2:
        raise ValueError(f"needs two fine-tuned models, not {len(tuned)}; multislerp and karcher take more")
    whole = sum(weights)
    t = 0.5 if abs(whole) < 1e-6 else weights[1] / whole
    if axis != "all":
        first, second = (model if base is None else model - base for model in tuned)
        if first.dim() == 0:
            first, second = first.reshape(1), second.reshape(1)
        merged = _along(first, second, t, -1 if axis == "last" else 0).reshape(tuned[0].shape)
        return merged if base is None else merged.add_(base)
    assert products is not None
    norms = [max(math.sqrt(product), _TINY) for product in (products[0], products[2])]
    cosine = products[1] / (norms[0] * norms[1])
    straight = 1 - cosine * cosine <= _STRAIGHT or not _OPPOSITE - 1 < cosine < 1  # also if it is NaN
    return spanned(base, tuned, (1.0 - t, t) if straight else arc_factors(cosine, t))
