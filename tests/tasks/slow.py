"""Metrics computed a second time, example by example in plain Python."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: The label of tokens that do not count.
MASKED = -100


def f1(predicted: Sequence[Any], labels: Sequence[Any]) -> float | None:
    hits = sum(1 for a, b in zip(predicted, labels, strict=True) if a and b)
    if not any(predicted) and not any(labels):
        return None
    precision = hits / sum(map(bool, predicted)) if any(predicted) else 0.0
    recall = hits / sum(map(bool, labels)) if any(labels) else 0.0
    return 2 * precision * recall / (precision + recall) if hits else 0.0


def mean(values: Sequence[Any]) -> float:
    known = [value for value in values if value is not None]
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


def losses(loss: str, logits: Sequence[Any], labels: Sequence[Any]) -> list[float]:
    """The loss of every example."""
    if loss == "classes":
        return [cross_entropy(z, y) for z, y in zip(logits, labels, strict=True)]
    if loss == "labels":
        return [bernoulli(z, y) for z, y in zip(logits, labels, strict=True)]
    if loss == "squared":
        return [(z[0] - y) ** 2 for z, y in zip(logits, labels, strict=True)]
    return [sum(cross_entropy(z, y) for z, y in example) for example in tokens(loss, logits, labels)]


def tokens(loss: str, logits: Sequence[Any], labels: Sequence[Any]) -> list[list[tuple[Any, int]]]:
    """The logits and label of every token that counts, by example."""
    shift = 1 if loss == "next-token" else 0
    return [
        [(z, y) for z, y in zip(example, targets[shift:], strict=False) if y != MASKED]
        for example, targets in zip(logits, labels, strict=True)
    ]


def metrics(loss: str, logits: Sequence[Any], labels: Sequence[Any]) -> dict[str, Any]:
    """All metrics of a task with this loss, for logits and labels of single examples."""
    each = losses(loss, logits, labels)
    if loss == "classes":
        classes = range(len(logits[0]))
        predicted = [max(classes, key=z.__getitem__) for z in logits]
        by_class = [f1([p == c for p in predicted], [y == c for y in labels]) for c in classes]
        accuracy = mean([p == y for p, y in zip(predicted, labels, strict=True)])
        found = {"accuracy": accuracy, "macro_f1": mean(by_class), "loss_per_example": mean(each)}
        return found | ({"f1": by_class[1]} if len(classes) == 2 else {})
    if loss == "labels":
        bits = [[z > 0 for z in example] for example in logits]
        flat = [[bit for row in rows for bit in row] for rows in (bits, labels)]
        by_label = [f1(*columns) for columns in zip(zip(*bits, strict=True), zip(*labels, strict=True), strict=True)]
        exact = mean([a == [bool(x) for x in b] for a, b in zip(bits, labels, strict=True)])
        return {"micro_f1": f1(*flat), "macro_f1": mean(by_label), "exact_match": exact, "loss_per_example": mean(each)}
    if loss == "squared":
        spread = sum((y - mean(labels)) ** 2 for y in labels)
        outputs = [z[0] for z in logits]
        return {"mse": mean(each), "pearson_r": pearson(outputs, labels), "r2": 1 - sum(each) / spread}
    pairs = [pair for example in tokens(loss, logits, labels) for pair in example]
    per_token = sum(each) / len(pairs)
    right = [max(range(len(z)), key=z.__getitem__) == y for z, y in pairs]
    found = {"loss_per_token": per_token, "perplexity": math.exp(per_token), "loss_per_example": mean(each)}
    return found | {"token_accuracy": mean(right), "tokens": len(pairs)}
