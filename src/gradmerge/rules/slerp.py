"""Interpolation on a sphere: SLERP, NuSLERP, Multi-SLERP and the Karcher mean."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from torch import Tensor

from .measures import DELTA_PRODUCTS, PRODUCTS, Sums, inner_products, normalized, spanned, square
from .spec import Help, Numbers, Tensors, negative_weights, rule

_TINY = 1e-7
_STRAIGHT = 1e-16  # of the squared sine
#: Vectors count as opposite if their cosine is this close to −1; the arc between them would be rounding error.
_OPPOSITE = 1e-7


def arc_factors(cosine: Tensor, t: float) -> tuple[Tensor, Tensor]:
    """The factors of two vectors that give the point at t on the arc between them, or on the line if there is no arc.

    There is none between parallel and opposite vectors.
    """
    straight = ~((1 - cosine.square() > _STRAIGHT) & (1 + cosine > _OPPOSITE))  # also if it is NaN
    angle = torch.where(straight, 0.0, cosine).acos_()
    first, second = ((1 - t) * angle).sin() / angle.sin(), (t * angle).sin() / angle.sin()
    return torch.where(straight, 1 - t, first), torch.where(straight, t, second)


@rule(
    "slerp",
    matching_form=("1", "on an arc", "0"),
    reference="Shoemake, Animating rotation with quaternion curves, SIGGRAPH 1985",
    only_one_model=True,
    measures={"products": PRODUCTS},
)
def slerp(
    base: Tensor,
    tuned: Tensors,
    products: Numbers,
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
    factors = [1.0 - t, t]
    if abs(cosine) <= parallel:
        factors = [float(factor) for factor in arc_factors(torch.tensor(cosine, dtype=torch.float64), t)]
    return spanned(None, [base, *tuned], factors)


def _along(first: Tensor, second: Tensor, t: float, axis: int) -> Tensor:
    """The arc between every two vectors along an axis."""
    vectors = [x.double() for x in (first, second)]
    norms = [x.norm(dim=axis, keepdim=True).clamp_(min=_TINY) for x in vectors]
    cosine = (vectors[0] * vectors[1]).sum(axis, keepdim=True).div_(norms[0] * norms[1]).clamp_(-1, 1)
    factors = arc_factors(cosine, t)
    return (vectors[0].mul_(factors[0]) + vectors[1].mul_(factors[1])).to(first.dtype)


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
    tuned: Tensors,
    weights: Numbers,
    products: Numbers | None = None,
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
    cosine = torch.tensor(products[1] / (norms[0] * norms[1]), dtype=torch.float64)
    return spanned(base, tuned, [float(factor) for factor in arc_factors(cosine, t)])


_SMALL = 1e-8
#: A shorter mean direction is rounding error.
_CANCELLED = 1e-6


def _length(factors: Tensor, inner: Tensor) -> float:
    """The length of a sum of vectors with these factors and inner products."""
    return math.sqrt(max(0.0, float(factors @ inner @ factors)))


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
    tuned: Tensors,
    weights: Numbers,
    products: Numbers,
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
        weights = normalized(weights)
    inner, shares = square(products), torch.tensor(weights, dtype=torch.float64)
    lengths = inner.diagonal().sqrt()
    factors = shares / (lengths + _SMALL)
    length = _length(factors, inner)
    if length < _CANCELLED:
        return spanned(base, tuned, weights)
    return spanned(base, tuned, (factors * (float(shares @ lengths) / length)).tolist())


def _mean_direction(inner: Tensor, shares: Tensor, steps: int, tolerance: float) -> Tensor:
    """The factors with which unit vectors with these inner products combine to their mean on the sphere."""
    start = _length(shares, inner)
    mean = torch.eye(len(shares), dtype=torch.float64)[0] if start < tolerance else shares / start
    for _ in range(steps):
        cosines = (inner @ mean).clamp_(-1, 1)
        angles = cosines.acos()
        has_direction = (angles >= tolerance) & (angles <= math.pi - 1e-6)  # none leads to the opposite point
        pulls = torch.where(has_direction, shares * angles / angles.sin(), 0.0)
        tangent = pulls - (pulls @ cosines) * mean
        step = _length(tangent, inner)
        if step < tolerance:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
        if (end := _length(mean, inner)) > tolerance:
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
    tuned: Tensors,
    weights: Numbers,
    products: Numbers,
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
