"""Metrics once more, example by example in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence


def f1(told: Sequence[bool], true: Sequence[bool]) -> float | None:
    hits = sum(1 for a, b in zip(told, true, strict=True) if a and b)
    if not any(told) and not any(true):
        return None
    precision = hits / sum(told) if any(told) else 0.0
    recall = hits / sum(true) if any(true) else 0.0
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def macro_f1(told: Sequence[int], true: Sequence[int], classes: int) -> float:
    each = [f1([t == c for t in told], [t == c for t in true]) for c in range(classes)]
    known = [value for value in each if value is not None]
    return sum(known) / len(known)


def cross_entropy(logits: Sequence[float], label: int) -> float:
    top = max(logits)
    return top + math.log(sum(math.exp(z - top) for z in logits)) - logits[label]


def bernoulli(logits: Sequence[float], bits: Sequence[float]) -> float:
    return sum(
        math.log1p(math.exp(-z)) if bit else math.log1p(math.exp(z)) for z, bit in zip(logits, bits, strict=True)
    )


def pearson(a: Sequence[float], b: Sequence[float]) -> float:
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    return top / math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
