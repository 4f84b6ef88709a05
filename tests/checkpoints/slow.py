"""The rules once more: whole models in float64, written to be obvious."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

State = Mapping[str, Tensor]
Rule = Callable[[State, Sequence[State]], dict[str, Tensor]]


def average(base: State, tuned: Sequence[State]) -> dict[str, Tensor]:
    return {n: sum(t[n] for t in tuned) / len(tuned) for n in base}


def task_arithmetic(base: State, tuned: Sequence[State], weights: Sequence[float]) -> dict[str, Tensor]:
    return {n: base[n] + sum(w * (t[n] - base[n]) for w, t in zip(weights, tuned, strict=True)) for n in base}


def _trimmed(base: State, tuned: State, density: float) -> dict[str, Tensor]:
    delta = {n: tuned[n] - base[n] for n in base}
    every = torch.cat([d.abs().flatten() for d in delta.values()])
    k = max(1, math.floor(density * every.numel()))
    threshold = every.sort(descending=True).values[k - 1]
    return {n: torch.where(d.abs() >= threshold, d, 0.0) for n, d in delta.items()}


def sparse(base: State, tuned: Sequence[State], weights: Sequence[float], density: float) -> dict[str, Tensor]:
    kept = [_trimmed(base, t, density) for t in tuned]
    return {n: base[n] + sum(w * k[n] for w, k in zip(weights, kept, strict=True)) for n in base}


def ties(base: State, tuned: Sequence[State], weights: Sequence[float], density: float) -> dict[str, Tensor]:
    kept = [_trimmed(base, t, density) for t in tuned]
    result = {}
    for name in base:
        deltas = [k[name] for k in kept]
        sign = sum(w * d for w, d in zip(weights, deltas, strict=True)).sign()
        agree = [((d.sign() == sign) & (d != 0)).double() for d in deltas]
        total = sum(w * a * d for w, a, d in zip(weights, agree, deltas, strict=True))
        count = sum(w * a for w, a in zip(weights, agree, strict=True))
        result[name] = base[name] + torch.where(count > 0, total / count, 0.0)
    return result


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


def slerp(base: State, tuned: Sequence[State], t: float) -> dict[str, Tensor]:
    result = {}
    for name, one in base.items():
        two = tuned[0][name]
        cosine = float((one * two).sum() / (one.norm() * two.norm()))
        if abs(cosine) > 0.9995:
            result[name] = (1 - t) * one + t * two
        else:
            angle = math.acos(cosine)
            result[name] = (math.sin((1 - t) * angle) * one + math.sin(t * angle) * two) / math.sin(angle)
    return result


def gradient_matching(
    base: State,
    tuned: Sequence[State],
    weights: Sequence[float],
    prior: State,
    curvature: Sequence[State],
    damping: float,
) -> dict[str, Tensor]:
    result = {}
    for name in base:
        h0 = prior[name].double() + damping
        hs = [c[name].double() for c in curvature]
        whole = h0 + sum(w * h for w, h in zip(weights, hs, strict=True))
        step = sum(w * (h0 + h) / whole * (t[name] - base[name]) for w, h, t in zip(weights, hs, tuned, strict=True))
        result[name] = base[name] + step
    return result
