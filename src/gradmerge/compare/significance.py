"""Which settings the data tells apart, and which of those that it does not is the simplest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..recipe import leaves
from ..rules import METHODS
from ..tasks.standard_errors import Difference, averaged, difference, standard_error
from ..text import Measured
from .grid import Setting
from .scores import Criterion, headline

if TYPE_CHECKING:
    from .preview import Outcome

#: Draws of means, for the error of the worst of them.
DRAWS = 1000


def task_differences(row: Outcome, other: Outcome) -> dict[str, Difference]:
    """Task → how much larger its first metric is for one setting than for another: on the same rows, or by the errors
    of both where a metric of the harness, such as BLEU, is not known row by row."""
    found = {}
    for task, metrics in row.metrics.items():
        name, against = headline(metrics) if metrics else "", other.metrics.get(task, {})
        if name in row.rows.get(task, {}) and name in other.rows.get(task, {}):
            found[task] = difference(row.rows[task][name], other.rows[task][name])
        elif name in metrics and name in against:
            errors = (one["standard_errors"].get(name) or math.nan for one in (metrics, against))
            found[task] = Difference(metrics[name] - against[name], math.hypot(*errors))
    return found


def score_difference(row: Outcome, other: Outcome, criterion: Criterion) -> Difference | None:
    """How much larger the score of one setting is than that of another; the rows of tasks are independent."""
    if row.score is None or other.score is None or criterion.by_rank:
        return None
    if not criterion.shares:
        apart = list(task_differences(row, other).values())
        return averaged(apart) if apart and len(apart) == len(row.values) else None
    return share_difference(row.shares, other.shares, criterion.worst)


def share_difference(shares: Mapping[str, Tensor], others: Mapping[str, Tensor], worst: bool) -> Difference:
    """How much larger the mean of the worst task is, or the sum over tasks, of one number per row than of another.

    Which task is worst may change with the rows: the error is that of means drawn from the normal distribution that
    they have, which for both settings depends on the same rows.
    """
    if not worst:
        each = [difference(rows, others[task]) for task, rows in shares.items()]
        return Difference(sum(one.value for one in each), math.hypot(*(one.error for one in each)))
    generator = torch.Generator().manual_seed(0)
    means, drawn = [], []
    for task, rows in shares.items():
        both = torch.stack([rows, others[task]]).double()
        means.append(both.mean(1))
        noise = torch.randn(DRAWS, 2, generator=generator, dtype=torch.float64)
        if len(rows) > 1:
            sizes, axes = torch.linalg.eigh(both.cov() / len(rows))
            drawn.append(means[-1] + (noise * sizes.clamp(min=0).sqrt()) @ axes.T)
        else:
            drawn.append(noise * math.nan)

    def apart(largest: Tensor) -> Tensor:
        return largest[..., 0] - largest[..., 1]

    value, values = apart(torch.stack(means).amax(0)), apart(torch.stack(drawn).amax(0))
    return Difference(float(value), float(values.std()))


def lost_share(row: Outcome, task: str) -> float | None:
    """The share of what fine-tuning gained that a setting loses of a task, with its standard error."""
    cost, rows = row.costs.get(task), row.shares.get(task)
    return cost if cost is None or rows is None else Measured(cost, standard_error(rows))


def score_error(row: Outcome, criterion: Criterion) -> float | None:
    """Standard error of a score; None for mean ranks, and for what was not measured."""
    if row.score is None or criterion.by_rank or not row.metrics:
        return None
    if not criterion.shares:
        errors = [found["standard_errors"].get(headline(found)) or math.nan for found in row.metrics.values()]
        return math.hypot(*errors) / len(errors)
    if criterion.worst:
        return standard_error(row.shares[max(row.costs, key=lambda task: row.costs[task])])
    return math.hypot(*map(standard_error, row.shares.values()))


def are_tied(row: Outcome, other: Outcome, criterion: Criterion) -> bool:
    """Whether the rows do not tell two settings apart: by their scores, or, of mean ranks, on any task."""
    if row.score is None or other.score is None:
        return False
    if criterion.by_rank:
        apart = task_differences(row, other)
        return len(apart) == len(row.values) and all(one.tied for one in apart.values())
    found = score_difference(row, other, criterion)
    return found is not None and found.tied


def simplicity(setting: Setting) -> tuple[int, ...]:
    """Smaller is simpler: fewer keys changed beside method and weights; then a method that needs less (curvature, that
    of the base, weights); then fewer different weights."""
    inputs = METHODS[setting.method].inputs
    needs = sum(name in inputs for name in ("prior", "curvature", "penalty", "weights"))
    return (
        len(setting.changes),
        needs,
        len({leaf for weight in setting.weights for leaf in leaves(weight)}),
    )
