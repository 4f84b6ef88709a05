"""Answers of clients, held against the server's model before anything is made of them.

What a client sends may be wrong by accident or on purpose. A gradient can be wrong and look right; everything that
does not look right is refused here, and the client is named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..curvature.files import INPUTS, OUTPUTS
from ..curvature.formulas import is_conv1d
from ..curvature.gradients import Gradient
from ..curvature.kronecker import KroneckerCurvature, LayerFactors
from ..refinement.points import trained
from .wire import Facts, Groups, Malformed, number

#: How far a symmetric matrix may be from that, and below 0 along a direction, as a share of its largest entry.
ROUNDING = 1e-3


def gradient_of(model: nn.Module, rows: int, groups: Groups) -> Gradient:
    """Σ_i ∇ℓ_i of all parameters that are refined, and nothing else."""
    parameters, sums = trained(model), groups.get("gradient", {})
    if sums.keys() != parameters.keys():
        raise Malformed("the gradient is not of the parameters of this model")
    for name, parameter in parameters.items():
        wide = torch.promote_types(parameter.dtype, torch.float32)
        if sums[name].shape != parameter.shape or sums[name].dtype != wide:
            raise Malformed(f"the gradient of {name} has another shape or type than the parameter")
        _check_finite(f"the gradient of {name}", sums[name])
    place = next(iter(parameters.values())).device
    found = {name: sums[name].to(place) for name in parameters}
    return Gradient(found, rows, math.nan)  # losses are asked for by themselves


def curvature_of(model: nn.Module, rows: int, facts: Facts, groups: Groups) -> KroneckerCurvature:
    """Factors and diagonals that cover every parameter once, each of a shape that the model gives it."""
    parameters, sums = trained(model), groups.get("curvature", {})
    names, tokens = facts.get("factors", []), facts.get("tokens", [])
    told = int(number(facts, "curvature_rows", least=1, whole=True))
    if told > rows:
        raise Malformed(f"the curvature is of {told} rows, and the client has {rows}")
    if not isinstance(names, list) or not isinstance(tokens, list) or len(names) != len(tokens):
        raise Malformed("the curvature does not say which layers have factors")
    turned = {f"{path}.weight".lstrip(".") for path, module in model.named_modules() if is_conv1d(module)}
    place, left, layers = next(iter(parameters.values())).device, dict(sums), {}
    covered: list[str] = []
    for name, count in zip(names, tokens, strict=True):
        if name not in parameters or name in layers:
            raise Malformed("the curvature has factors of a parameter that the model does not have")
        weight = parameters[name].T if name in turned else parameters[name].flatten(1)
        inputs, outputs = (_factor(name + suffix, left.pop(name + suffix, None)) for suffix in (INPUTS, OUTPUTS))
        bias = name.removesuffix("weight") + "bias"
        wide = len(inputs) == weight.shape[1] + 1 and bias in parameters
        if len(outputs) != weight.shape[0] or (not wide and len(inputs) != weight.shape[1]):
            raise Malformed(f"the curvature's factors of {name} have another size than the layer")
        if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < 1 << 62:
            raise Malformed(f"the curvature of {name} does not say over how many tokens it is a sum")
        layers[name] = LayerFactors(inputs.to(place), outputs.to(place), count)
        covered += [name, bias] if wide else [name]
    for name, value in left.items():
        if name not in parameters or value.shape != parameters[name].shape:
            raise Malformed("the curvature has a diagonal that is not of a parameter of this model")
        _check_finite(f"the curvature of {name}", value)
        if bool((value < 0).any()):
            raise Malformed(f"the curvature of {name} has negative entries")
        covered.append(name)
    if sorted(covered) != sorted(parameters):
        raise Malformed("the curvature does not cover every parameter of the model once")
    diagonal = {name: left[name].to(place) for name in parameters if name in left}  # in the order of the model
    return KroneckerCurvature(layers, diagonal, told, transposed=turned & layers.keys())


def matrix_of(groups: Groups, size: int, *, noisy: bool) -> Tensor:
    """Vᵀ GGN V in float64; where noise was added, the nearest matrix that is not negative along any direction."""
    found = groups.get("along", {}).get("matrix")
    if found is None or found.shape != (size, size) or found.dtype != torch.float64:
        raise Malformed(f"the curvature along the directions is not a matrix of {size} by {size}")
    _check_finite("the curvature along the directions", found)
    _check_symmetric("the curvature along the directions", found)
    if not noisy:
        _check_not_negative("the curvature along the directions", found)
        return found
    values, vectors = torch.linalg.eigh((found + found.T) / 2)
    nearest: Tensor = (vectors * values.clamp(min=0)) @ vectors.T
    return nearest


def losses_of(facts: Facts, name: str, count: int) -> list[float]:
    values = facts.get(name)
    if not isinstance(values, list) or len(values) != count:
        raise Malformed(f"{name}: there should be {count} losses")
    return [number({name: value}, name) for value in values]


def score_of(facts: Facts) -> float:
    """A standard score; it is infinite where an example has no label of its own."""
    value = facts.get("score")
    if not isinstance(value, float) or value != value:
        raise Malformed("the score is not a number")
    return value


def privacy_of(facts: Mapping[str, object]) -> dict[str, float]:
    """What a client says of its differential privacy; nothing if it has none."""
    names = ("noise", "epsilon", "delta", "clip", "clip_loss", "clip_curvature")
    return {name: number(facts, name, least=0) for name in names} if facts.get("private") is True else {}


def _factor(name: str, value: Tensor | None) -> Tensor:
    if value is None or value.dim() != 2 or value.shape[0] != value.shape[1] or not len(value):
        raise Malformed("the curvature lacks a factor, or one is not square")
    _check_finite(f"the factor {name}", value)
    _check_symmetric(f"the factor {name}", value)
    _check_not_negative(f"the factor {name}", value)
    return value


def _check_finite(what: str, value: Tensor) -> None:
    if not bool(value.isfinite().all()):
        raise Malformed(f"{what} has values that are not finite (NaN or infinity)")


def _check_symmetric(what: str, value: Tensor) -> None:
    if bool((value - value.T).abs().max() > ROUNDING * value.abs().max()):
        raise Malformed(f"{what} is not symmetric")


def _check_not_negative(what: str, value: Tensor) -> None:
    """Whether a matrix is a sum of squares, up to rounding: then it has a Cholesky factor with a little added."""
    wide = value.double()
    slack = (ROUNDING * float(wide.abs().max()) + 1e-30) * torch.eye(len(wide), dtype=torch.float64)
    if bool((wide.diagonal() < 0).any()) or int(torch.linalg.cholesky_ex((wide + wide.T) / 2 + slack)[1]) > 0:
        raise Malformed(f"{what} is negative along some direction, which no curvature is")
