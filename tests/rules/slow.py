"""Every rule a second time: one entry at a time, in Python's own float64, as the definitions read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Vector = Sequence[float]


def average(base: Vector, tuned: Sequence[Vector], include_base: bool = False) -> list[float]:
    models = [*tuned, base] if include_base else list(tuned)
    return [math.fsum(m[i] for m in models) / len(models) for i in range(len(base))]


def weighted_average(base, tuned, weights, base_weight=None, normalize=True):
    models, ws = list(tuned), list(weights)
    if base_weight is not None:
        models.append(base)
        ws.append(base_weight)
    whole = math.fsum(ws) if normalize else 1.0
    return [math.fsum(w * m[i] for w, m in zip(ws, models, strict=True)) / whole for i in range(len(base))]


def task_arithmetic(base, tuned, weights):
    return [b + math.fsum(w * (m[i] - b) for w, m in zip(weights, tuned, strict=True)) for i, b in enumerate(base)]


def fisher_averaging(base, tuned, weights, curvature, damping, prior=None, include_base=False):
    result = []
    fallback = task_arithmetic(base, tuned, weights)
    for i in range(len(base)):
        above = math.fsum(w * (f[i] + damping) * m[i] for w, f, m in zip(weights, curvature, tuned, strict=True))
        below = math.fsum(w * (f[i] + damping) for w, f in zip(weights, curvature, strict=True))
        if include_base:
            above += (prior[i] + damping) * base[i]
            below += prior[i] + damping
        result.append(fallback[i] if below == 0 else above / below)
    return result


def fa1(base, tuned, weights, prior, curvature, damping):
    result = []
    fallback = task_arithmetic(base, tuned, weights)
    for i, b in enumerate(base):
        f0 = prior[i] + damping
        above = f0 * b + math.fsum(w * f[i] * (m[i] - b) for w, f, m in zip(weights, curvature, tuned, strict=True))
        below = f0 + math.fsum(abs(w) * f[i] for w, f in zip(weights, curvature, strict=True))
        result.append(fallback[i] if below == 0 else above / below)
    return result


def threshold(delta: Vector, density: float) -> float:
    k = max(1, math.floor(density * len(delta)))
    return sorted((abs(d) for d in delta), reverse=True)[k - 1]


def sparse_finetuning(base, tuned, weights, density, normalize=False):
    total, count = [0.0] * len(base), [0.0] * len(base)
    for model, weight in zip(tuned, weights, strict=True):
        delta = [m - b for m, b in zip(model, base, strict=True)]
        limit = threshold(delta, density)
        for i, d in enumerate(delta):
            if abs(d) >= limit:
                total[i] += weight * d
                count[i] += weight
    return [b + (t / c if normalize and c != 0 else t) for b, t, c in zip(base, total, count, strict=True)]


def elect_and_average(deltas, weights):
    result = []
    for i in range(len(deltas[0])):
        vote = math.fsum(w * d[i] for w, d in zip(weights, deltas, strict=True))
        sign = (vote > 0) - (vote < 0)
        agreeing = [
            (w, d[i]) for w, d in zip(weights, deltas, strict=True) if d[i] != 0 and (d[i] > 0) - (d[i] < 0) == sign
        ]
        whole = math.fsum(w for w, _ in agreeing)
        result.append(math.fsum(w * d for w, d in agreeing) / whole if whole != 0 else 0.0)
    return result


def ties(base, tuned, weights, density, scale=1.0):
    trimmed = []
    for model in tuned:
        delta = [m - b for m, b in zip(model, base, strict=True)]
        limit = threshold(delta, density)
        trimmed.append([d if abs(d) >= limit else 0.0 for d in delta])
    return [b + scale * d for b, d in zip(base, elect_and_average(trimmed, weights), strict=True)]


def dare(base, tuned, weights, kept, density, combine="task-arithmetic"):
    deltas = [
        [(m - b) / density if k else 0.0 for m, b, k in zip(model, base, mask, strict=True)]
        for model, mask in zip(tuned, kept, strict=True)
    ]
    if combine == "ties":
        return [b + d for b, d in zip(base, elect_and_average(deltas, weights), strict=True)]
    return [b + math.fsum(w * d[i] for w, d in zip(weights, deltas, strict=True)) for i, b in enumerate(base)]


def slerp(base, tuned, t, parallel=0.9995):
    norm0, norm1 = math.sqrt(math.fsum(x * x for x in base)), math.sqrt(math.fsum(x * x for x in tuned))
    if norm0 == 0 or norm1 == 0:
        cosine = 1.0
    else:
        cosine = math.fsum(a * b for a, b in zip(base, tuned, strict=True)) / (norm0 * norm1)
    if abs(cosine) > parallel:
        return [(1 - t) * a + t * b for a, b in zip(base, tuned, strict=True)]
    angle = math.acos(cosine)
    return [
        (math.sin((1 - t) * angle) * a + math.sin(t * angle) * b) / math.sin(angle)
        for a, b in zip(base, tuned, strict=True)
    ]


def regmean(weights_out_in, grams, weights, damping=0.0, off_diagonal=0.9):
    """One column of the solution at a time, with an explicit inverse."""
    size = grams[0].shape[0]
    total = np.zeros((size, size))
    target = np.zeros((size, weights_out_in[0].shape[0]))
    for matrix, gram, weight in zip(weights_out_in, grams, weights, strict=True):
        scaled = np.array(
            [[gram[i][j] * (1.0 if i == j else off_diagonal) for j in range(size)] for i in range(size)]
        ) + damping * np.eye(size)
        total += weight * scaled
        target += weight * scaled @ matrix.T
    return (np.linalg.inv(total) @ target).T


def regmean_of_inputs(weights_out_in, inputs, weights):
    """From the inputs X_t themselves: least squares in the directions that occur, the average in those that do not."""
    average = sum(w * m for w, m in zip(weights, weights_out_in, strict=True)) / sum(weights)
    stacked = np.vstack([np.sqrt(w) * x for w, x in zip(weights, inputs, strict=True)])
    outputs = np.vstack(
        [np.sqrt(w) * x @ (m - average).T for w, x, m in zip(weights, inputs, weights_out_in, strict=True)]
    )
    step, *_ = np.linalg.lstsq(stacked, outputs, rcond=1e-9)  # the shortest of all solutions
    return average + step.T


def gradient_matching(base, tuned, weights, prior, curvature, damping, penalties=None):
    """``penalties`` holds a vector for each model, or None where it is H_0."""
    result = []
    for i, b in enumerate(base):
        h0 = prior[i] + damping
        whole = h0 + math.fsum(w * h[i] for w, h in zip(weights, curvature, strict=True))
        step = 0.0
        for t, (w, h, m) in enumerate(zip(weights, curvature, tuned, strict=True)):
            p = h0 if penalties is None or penalties[t] is None else penalties[t][i]
            step += w * (m[i] - b) * (1.0 if whole == 0 else (p + h[i]) / whole)
        result.append(b + step)
    return result


def removal(base, tuned, weights, prior, curvature, damping, penalties=None, base_saw_removed=False, cap="none"):
    result = []
    for i, b in enumerate(base):
        rest = prior[i]
        if base_saw_removed:
            rest = max(rest - math.fsum(w * h[i] for w, h in zip(weights, curvature, strict=True)), 0.0)
        rest += damping
        step = 0.0
        for t, (w, h, m) in enumerate(zip(weights, curvature, tuned, strict=True)):
            p = prior[i] + damping if penalties is None or penalties[t] is None else penalties[t][i]
            ratio = 1.0 if rest == 0 else (p + h[i]) / rest
            step += w * (m[i] - b) * (ratio if cap == "none" else min(ratio, 1 + cap))
        result.append(b - step)
    return result
