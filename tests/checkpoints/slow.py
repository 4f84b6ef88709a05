"""The slow rules of `tests/rules/slow.py` on whole models in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..rules import slow

State = Mapping[str, Tensor]
Rule = Callable[[State, Sequence[State]], dict[str, Tensor]]


def flat(state: State, names: Sequence[str]) -> list[float]:
    return [value for name in names for value in state[name].double().reshape(-1).tolist()]


def on_models(rule: Callable[..., list[float]], base: State, tuned: Sequence[State], *more: Any) -> dict[str, Tensor]:
    """A rule on all entries of a model at once."""
    names = list(base)
    merged = torch.tensor(rule(flat(base, names), [flat(t, names) for t in tuned], *more), dtype=torch.float64)
    parts = merged.split([base[name].numel() for name in names])
    return {name: part.reshape(base[name].shape) for name, part in zip(names, parts, strict=True)}


def task_arithmetic(base: State, tuned: Sequence[State], weights: Sequence[float]) -> dict[str, Tensor]:
    return on_models(slow.task_arithmetic, base, tuned, weights)


def gradient_matching(
    base: State,
    tuned: Sequence[State],
    weights: Sequence[float],
    prior: State,
    curvature: Sequence[State],
    damping: float,
) -> dict[str, Tensor]:
    names = list(base)
    flats = [flat(one, names) for one in curvature]
    return on_models(slow.gradient_matching, base, tuned, weights, flat(prior, names), flats, damping)
