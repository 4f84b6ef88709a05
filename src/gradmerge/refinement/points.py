"""Weights, gradients and directions: values by the names of a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import InputError

Point = Mapping[str, Tensor]
"""Values by the names of a model's parameters: weights, a gradient, or a direction."""


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters with ``requires_grad=True``."""
    found = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not found:
        raise InputError("the model has no parameter with requires_grad=True: there is nothing to change")
    return found


def copied(values: Point) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def set_weights(weights: Point, values: Point) -> None:
    """Have weights, such as parameters, take on other values."""
    with torch.no_grad():
        for name, value in values.items():
            weights[name].copy_(value)


@contextmanager
def moving(model: nn.Module, directions: Sequence[Point]) -> Iterator[Callable[[Tensor], None]]:
    """A function that puts the model at θ + Σ_k c_k v_k; at the end it is at θ again, bit for bit.

    However many points, one copy of what the directions touch is kept.
    """
    parameters = dict(model.named_parameters())
    names = list(directions[0]) if directions else []
    kept = copied({name: parameters[name] for name in names})

    def move(point: Tensor) -> None:
        with torch.no_grad():
            for name in names:
                parameters[name].copy_(kept[name])
                for c, direction in zip(point.tolist(), directions, strict=True):
                    parameters[name].add_(direction[name].to(parameters[name]), alpha=c)

    try:
        yield move
    finally:
        set_weights(parameters, kept)


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model without dropout inside."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def dot(a: Point, b: Point) -> float:
    """The product of two points, summed in float64."""
    return sum(float(torch.dot(a[name].flatten().double(), b[name].flatten().double())) for name in a)


def norm(a: Point) -> float:
    return math.sqrt(dot(a, a))


def unit(a: Point) -> dict[str, Tensor]:
    """A direction of length 1."""
    length = norm(a) or 1.0
    return {name: value / length for name, value in a.items()}


def weighted(scales: Sequence[float], points: Sequence[Point]) -> dict[str, Tensor]:
    """Σ_k c_k v_k."""
    total = {name: value * scales[0] for name, value in points[0].items()}
    for scale, point in zip(scales[1:], points[1:], strict=True):
        for name, into in total.items():
            into.add_(point[name], alpha=scale)
    return total
