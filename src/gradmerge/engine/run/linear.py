"""Rules that are weighted sums of what the models change: told by running them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..plan.jobs import BlockJob, Job, rule_arguments
from ..plan.plan import Plan

#: What a rule may take for its result to be told from single numbers.
INPUTS = {"base", "tuned", "weights", "base_weight"}


def linear_weights(plan: Plan, job: Job) -> list[float] | None:
    """c_t with base + Σ c_t (θ_t − base) for the result of a tensor, if the rule is such a sum there; else None."""
    if not isinstance(job, BlockJob) or job.granularity == "tensor" or not plan.needs <= INPUTS:
        return None
    models, numbers = len(plan.inputs.tuned), plan.inputs.settings.of(job.name)

    def merge(base: Tensor, tuned: list[Tensor]) -> Tensor:
        return job.rule(**rule_arguments(job.rule, plan, {"base": base, "tuned": tuned}, numbers))

    return _weights(merge, models)


def _weights(merge: Callable[[Tensor, list[Tensor]], Tensor], models: int) -> list[float] | None:
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    try:
        found = [float(merge(zero, [one if i == t else zero for i in range(models)])) for t in range(models)]
        base, *tuned = _numbers(models + 1)
        got = merge(base, list(tuned))
    except (ValueError, ZeroDivisionError):
        return None
    want = base + sum(c * (model - base) for c, model in zip(found, tuned, strict=True))
    scale = 1 + sum(map(abs, found))
    return found if bool(((got - want).abs() <= 1e-9 * scale * (1 + want.abs())).all()) else None


@functools.cache
def _numbers(rows: int) -> Tensor:
    """Numbers of every size and sign, on which a rule that is no sum shows it."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 64, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-2, 2, 64).double()
