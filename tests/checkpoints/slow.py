"""The slow rules of `tests/rules/slow.py` on whole models in float64, and the random masks a second time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
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


def ties(base: State, tuned: Sequence[State], weights: Sequence[float], density: float) -> dict[str, Tensor]:
    return on_models(slow.ties, base, tuned, weights, density)


def slerp(base: State, tuned: Sequence[State], t: float) -> dict[str, Tensor]:
    """Tensor by tensor."""
    alone = [on_models(lambda b, m: slow.slerp(b, m[0], t), {n: base[n]}, [{n: tuned[0][n]}]) for n in base]
    return {name: value for one in alone for name, value in one.items()}


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


def dare(base: State, tuned: Sequence[State], weights: Sequence[float], density: float, seed: int) -> dict[str, Tensor]:
    """Entry i of a tensor is kept where the i-th 32-bit half of the tensor's own stream is below density · 2³²."""
    result = {}
    for name in base:
        merged = base[name].clone()
        for number, (weight, model) in enumerate(zip(weights, tuned, strict=True)):
            digest = hashlib.sha256(f"{seed}/{number}/{name}".encode()).digest()[:16]
            words = np.random.PCG64DXSM(int.from_bytes(digest, "little")).random_raw(merged.numel() // 2 + 1)
            halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)], 1).reshape(-1)[: merged.numel()]
            kept = torch.from_numpy(halves.astype(np.float64) < density * 2**32).reshape(merged.shape)
            merged += weight * kept.double() * (model[name] - base[name]) / density
        result[name] = merged
    return result
