"""Rules that look at rows or whole tensors a second time: entry by entry in float64, as their definitions read.

Every function takes one whole tensor of the base and of each model, as numpy arrays, and gives the merged one.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from . import slow


def deltas_of(base, tuned):
    return [model - base for model in tuned]


def flat(array):
    return [float(x) for x in np.asarray(array).reshape(-1)]


def combined(base, parts, weights, combine, normalize, scale, vote="strict"):
    """What is kept of each difference, added up or after a vote, one entry at a time."""
    result = np.empty(base.shape)
    flats = [flat(part) for part in parts]
    for place, b in enumerate(flat(base)):
        values = [part[place] for part in flats]
        pairs = list(zip(weights, values, strict=True))
        total = math.fsum(w * x for w, x in pairs)
        if combine == "task-arithmetic":
            whole = math.fsum(weights)
            step = total / whole if normalize is True and abs(whole) >= 1e-8 else total
        else:
            if vote == "mergekit":
                sign = 1 if total >= 0 else -1
                agreeing = [(w, x) for w, x in pairs if w * x * sign > 0]
            else:
                sign = (total > 0) - (total < 0)
                agreeing = [(w, x) for w, x in pairs if x * sign > 0]
            step, whole = math.fsum(w * x for w, x in agreeing), math.fsum(w for w, _ in agreeing)
            if normalize is not False and abs(whole) > 1e-12 * math.fsum(abs(w) for w, _ in agreeing):
                step /= whole
        result.reshape(-1)[place] = b + scale * step
    return result


def rescaled(deltas, parts, rescale):
    """Every part with the L1 norm of its difference."""
    if rescale != "norm":
        return parts
    result = []
    for delta, part in zip(deltas, parts, strict=True):
        before, after = math.fsum(abs(x) for x in flat(delta)), math.fsum(abs(x) for x in flat(part))
        result.append(part if before < 1e-7 or after < 1e-7 else part * (before / after))
    return result


def task_arithmetic(base, tuned, weights, normalize=False, scale=1.0):
    return combined(base, deltas_of(base, tuned), weights, "task-arithmetic", normalize, scale)


def ties(base, tuned, weights, density, normalize=True, rescale="none", scale=1.0, vote="strict"):
    deltas, parts = deltas_of(base, tuned), []
    for delta, share in zip(deltas, density, strict=True):
        order = sorted((abs(x) for x in flat(delta)), reverse=True)
        limit = math.inf if share == 0 or not order else order[max(1, math.floor(share * len(order))) - 1]
        parts.append(np.where(np.abs(delta) >= limit, delta, 0.0))
    return combined(base, rescaled(deltas, parts, rescale), weights, "ties", normalize, scale, vote)


def dare(base, tuned, weights, kept, density, combine, normalize, rescale, scale):
    deltas = deltas_of(base, tuned)
    parts = [np.where(mask, delta, 0.0) for delta, mask in zip(deltas, kept, strict=True)]
    if rescale == "expectation":
        parts = [part / share if share else part for part, share in zip(parts, density, strict=True)]
    return combined(base, rescaled(deltas, parts, rescale), weights, combine, normalize, scale)


def breadcrumbs(base, tuned, weights, density, gamma, combine, normalize, rescale, scale=1.0, vote="strict"):
    deltas, parts = deltas_of(base, tuned), []
    for delta, share, top in zip(deltas, density, gamma, strict=True):
        order = sorted(range(delta.size), key=lambda i: abs(flat(delta)[i]))
        kept = int(share * delta.size) if share < 1 else delta.size
        below = max(0, delta.size - kept - int(top * delta.size))
        part = np.zeros(delta.size)
        for i in order[below : below + kept]:
            part[i] = flat(delta)[i]
        parts.append(part.reshape(delta.shape))
    return combined(base, rescaled(deltas, parts, rescale), weights, combine, normalize, scale, vote)


def della(base, tuned, weights, uniform, density, epsilon, combine, normalize, rescale, scale=1.0):
    deltas, parts = deltas_of(base, tuned), []
    for delta, number, share, width in zip(deltas, uniform, density, epsilon, strict=True):
        rows = delta.reshape(1, -1) if delta.ndim < 2 else delta
        draws, part = number.reshape(rows.shape), np.zeros(rows.shape)
        for place in np.ndindex(*(n for axis, n in enumerate(rows.shape) if axis != 1)):
            where = (place[0], slice(None), *place[1:])
            row, chances = rows[where], draws[where]
            order = sorted(range(len(row)), key=lambda i: abs(row[i]))
            for rank, i in enumerate(order):
                step = rank / (len(row) - 1) if len(row) > 1 else 0.5
                p = 1.0 if share >= 1 else 0.0 if share <= 0 else share - width + 2 * width * step
                if chances[i] < p:
                    part[where][i] = row[i] / p if rescale == "expectation" else row[i]
        parts.append(part.reshape(delta.shape))
    return combined(base, rescaled(deltas, parts, rescale), weights, combine, normalize, scale)


def vectors(shape, axis):
    """The places of the entries of every vector along an axis."""
    if not shape:
        return [[()]]
    axis %= len(shape)
    rest = [range(n) for i, n in enumerate(shape) if i != axis]
    return [[(*place[:axis], i, *place[axis:]) for i in range(shape[axis])] for place in itertools.product(*rest)]


def groups(shape, axis):
    """All places together, or those of every vector."""
    return [list(np.ndindex(*shape))] if axis == "all" else vectors(shape, {"last": -1, "first": 0}[axis])


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def nuslerp(base, tuned, weights, axis="all"):
    start = np.zeros(tuned[0].shape) if base is None else base
    t = 0.5 if abs(sum(weights)) < 1e-6 else weights[1] / sum(weights)
    result = np.array(start)
    for places in groups(start.shape, axis):
        a, b = ([float(m[p] - start[p]) for p in places] for m in tuned)
        cosine = dot(a, b) / (max(math.sqrt(dot(a, a)), 1e-7) * max(math.sqrt(dot(b, b)), 1e-7))
        if 1 - cosine**2 <= 1e-16:
            f, g = 1 - t, t
        else:
            angle = math.acos(cosine)
            f, g = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
        for place, x, y in zip(places, a, b, strict=True):
            result[place] = start[place] + f * x + g * y
    return result


def multislerp(base, tuned, weights, normalize=True):
    """With the tangent space and the exponential map, as it was thought out."""
    start = np.zeros(tuned[0].shape) if base is None else base
    if len(tuned) == 1:
        return tuned[0]
    ws = [w / math.fsum(weights) for w in weights] if normalize else list(weights)
    points = [flat(model - start) for model in tuned]
    norms = [math.sqrt(dot(x, x)) for x in points]
    units = [[v / (n + 1e-8) for v in x] for x, n in zip(points, norms, strict=True)]
    mean = [math.fsum(w * u[i] for w, u in zip(ws, units, strict=True)) for i in range(start.size)]
    size = math.sqrt(dot(mean, mean))
    if size < 1e-8:
        step = [math.fsum(w * x[i] for w, x in zip(ws, points, strict=True)) for i in range(start.size)]
        return start + np.array(step).reshape(start.shape)
    mean = [v / size for v in mean]
    tangents = [[v - dot(u, mean) * m for v, m in zip(u, mean, strict=True)] for u in units]
    tangent = [math.fsum(w * x[i] for w, x in zip(ws, tangents, strict=True)) for i in range(start.size)]
    length = math.sqrt(dot(tangent, tangent)) + 1e-8
    radius = math.fsum(w * n for w, n in zip(ws, norms, strict=True))
    point = [m * math.cos(length) + v * math.sin(length) / length for m, v in zip(mean, tangent, strict=True)]
    return start + radius * np.array(point).reshape(start.shape)


def karcher(tuned, weights, steps=10, tolerance=1e-5):
    """In the full space: no inner products."""
    shares = [w / math.fsum(weights) for w in weights]
    points = [flat(model) for model in tuned]
    norms = [math.sqrt(dot(x, x)) for x in points]
    seen = [i for i, n in enumerate(norms) if n > tolerance]
    if not seen:
        return np.zeros(tuned[0].shape)
    own = {i: shares[i] / math.fsum(shares[j] for j in seen) for i in seen}
    units = {i: [v / norms[i] for v in points[i]] for i in seen}
    mean = [math.fsum(own[i] * units[i][k] for i in seen) for k in range(tuned[0].size)]
    size = math.sqrt(dot(mean, mean))
    mean = units[seen[0]] if size < tolerance else [v / size for v in mean]
    for _ in range(steps):
        tangent = [0.0] * len(mean)
        for i in seen:
            cosine = max(-1.0, min(1.0, dot(mean, units[i])))
            angle = math.acos(cosine)
            if angle >= tolerance:
                pull = own[i] * angle / math.sin(angle)
                tangent = [t + pull * (u - cosine * m) for t, u, m in zip(tangent, units[i], mean, strict=True)]
        length = math.sqrt(dot(tangent, tangent))
        if length < tolerance:
            break
        mean = [math.cos(length) * m + math.sin(length) * t / length for m, t in zip(mean, tangent, strict=True)]
        size = math.sqrt(dot(mean, mean))
        mean = [v / size for v in mean]
    return dot(shares, norms) * np.array(mean).reshape(tuned[0].shape)


def model_stock(base, tuned, filter_wise=False):
    result, count = np.array(base), len(tuned)
    for places in groups(base.shape, "last" if filter_wise else "all"):
        parts = [[float(m[p] - base[p]) for p in places] for m in tuned]
        cosines = [
            max(-1.0, min(1.0, dot(a, b) / max(math.sqrt(dot(a, a)) * math.sqrt(dot(b, b)), 1e-6)))
            for a, b in itertools.combinations(parts, 2)
        ]
        cosine = math.fsum(cosines) / len(cosines)
        below = 1 + (count - 1) * cosine
        t = 0.0 if abs(below) < 1e-6 else count * cosine / below
        for place in places:
            result[place] = t * math.fsum(m[place] for m in tuned) / count + (1 - t) * base[place]
    return result


def nearswap(base, tuned, t):
    result = np.array(base)
    for place in np.ndindex(*base.shape):
        weight = min(1.0, t / max(abs(base[place] - tuned[0][place]), 1e-6))
        result[place] = weight * tuned[0][place] + (1 - weight) * base[place]
    return result


def arcee_fusion(base, tuned):
    score = np.zeros(base.shape)
    for places in groups(base.shape, "last"):
        rows = [[math.exp(m[p]) for p in places] for m in (tuned[0], base)]
        p, q = ([x / math.fsum(row) + 1e-8 for x in row] for row in rows)
        divergence = max(0.0, math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True)))
        for place in places:
            score[place] = abs(tuned[0][place] - base[place]) * divergence
    order = sorted(flat(score))
    lower, median, upper = (order[int(share * (len(order) - 1))] for share in (0.25, 0.5, 0.75))
    return np.where(score >= median + 1.5 * (upper - lower), tuned[0], base)


def sce(base, tuned, select_topk=1.0):
    parts = [flat(d) for d in deltas_of(base, tuned)]
    columns = list(zip(*parts, strict=True))
    variance = []
    for column in columns:
        mean = math.fsum(column) / len(column)
        variance.append(math.fsum((x - mean) ** 2 for x in column) / len(column))
    if select_topk < 1:
        k = int(sum(v != 0 for v in variance) * select_topk)
        limit = sorted(variance, reverse=True)[k - 1] if k else math.inf
        parts = [[x if v >= limit else 0.0 for x, v in zip(part, variance, strict=True)] for part in parts]
    squares = [math.fsum(x * x for x in part) / len(part) for part in parts]
    whole = math.fsum(squares)
    weights = [1 / len(parts) if whole < 1e-6 else s / whole for s in squares]
    step = []
    for column in zip(*parts, strict=True):
        sign = 1 if math.fsum(column) >= 0 else -1
        agreeing = [(w, x) for w, x in zip(weights, column, strict=True) if x * sign > 0]
        step.append(math.fsum(w * x for w, x in agreeing) / max(math.fsum(w for w, _ in agreeing), 1e-6))
    return base + np.array(step).reshape(base.shape)


def ram(base, tuned, epsilon=1e-5, r=0.0, alpha=0.2):
    parts = [flat(d) for d in deltas_of(base, tuned)]
    counts = [sum(abs(x) > epsilon for x in column) for column in zip(*parts, strict=True)]
    result = flat(base)
    for part in parts:
        own = sum(abs(x) > epsilon and n == 1 for x, n in zip(part, counts, strict=True))
        shared = sum(abs(x) > epsilon and n > 1 for x, n in zip(part, counts, strict=True))
        factor = 1 + r * min(shared / max(own, 1e-5), alpha)
        for i, (x, n) in enumerate(zip(part, counts, strict=True)):
            if abs(x) > epsilon:
                result[i] += factor * x if n == 1 else x / n
    return np.array(result).reshape(base.shape)


def mean_of_changes(base, tuned, weights, scale):
    return base + scale * sum(w * (m - base) for w, m in zip(weights, tuned, strict=True)) / len(tuned)


def tsv(base, tuned, weights, scale=1.0):
    """One rank-one matrix at a time; the orthogonal factors are found as X (XᵀX)^(−1/2)."""
    if base.ndim != 2:
        return mean_of_changes(base, tuned, weights, scale)
    kept, left, values, right = max(1, min(base.shape) // len(tuned)), [], [], []
    for model, weight in zip(tuned, weights, strict=True):
        u, s, vh = np.linalg.svd(model - base)
        for i in range(kept):
            left.append(u[:, i])
            values.append(weight * s[i])
            right.append(vh[i])

    def orthogonal(columns):
        matrix = np.array(columns).T
        powers, turns = np.linalg.eigh(matrix.T @ matrix)
        return matrix @ turns @ np.diag([p**-0.5 if p > 1e-10 else 0.0 for p in powers]) @ turns.T

    outputs, inputs = orthogonal(left), orthogonal(right)
    return base + scale * sum(v * np.outer(outputs[:, i], inputs[:, i]) for i, v in enumerate(values))


def iso_c(base, tuned, weights, scale=1.0):
    if base.ndim != 2:
        return mean_of_changes(base, tuned, weights, scale)
    total = sum(w * (m - base) for w, m in zip(weights, tuned, strict=True))
    u, s, vh = np.linalg.svd(total)
    mean = math.fsum(s) / len(s)
    return base + scale * sum(mean * np.outer(u[:, i], vh[i]) for i in range(len(s)))


def slerp(base, tuned, t, zeros="line"):
    a, b = flat(base), flat(tuned[0])
    if zeros == "line" or min(dot(a, a), dot(b, b)) > 1e-16:
        return np.array(slow.slerp(a, b, t)).reshape(base.shape)
    return math.sin((1 - t) * math.pi / 2) * base + math.sin(t * math.pi / 2) * tuned[0]


def passthrough(tuned, scale):
    return scale * tuned[0]
