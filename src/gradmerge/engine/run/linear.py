"""Rules that are weighted sums of the models' changes, recognized by running them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..plan.jobs import BlockJob, Job, rule_arguments
from ..plan.plan import Plan

INPUTS = {"base", "tuned", "weights", "base_weight"}
"""Rules with other inputs are not tried."""


def linear_weights(plan: Plan, job: Job) -> list[float] | None:
    """Return c_t if the result for a tensor is base + Σ c_t (θ_t − base); None for other rules."""
    if not isinstance(job, BlockJob) or job.granularity == "tensor" or not plan.needs <= INPUTS:
        return None
    models, settings = len(plan.inputs.tuned), plan.inputs.settings.of(job.name)

    def merge(base: Tensor, tuned: list[Tensor]) -> Tensor:
        return job.rule(**rule_arguments(job.rule, plan, {"base": base, "tuned": tuned}, settings))

    return _weights(merge, models)


def _weights(merge: Callable[[Tensor, list[Tensor]], Tensor], models: int) -> list[float] | None:
    """Return the weights of a rule that passes a test on random numbers, from its results on unit changes."""
    zero, unit = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    try:
        weights = [float(merge(zero, [unit if i == t else zero for i in range(models)])) for t in range(models)]
        base, *tuned = _numbers(models + 1)
        merged = merge(base, list(tuned))
    except (ValueError, ZeroDivisionError):
        return None
    expected = base + sum(weight * (model - base) for weight, model in zip(weights, tuned, strict=True))
    scale = 1 + sum(map(abs, weights))
    return weights if bool(((merged - expected).abs() <= 1e-9 * scale * (1 + expected.abs())).all()) else None


@functools.cache
def _numbers(rows: int) -> Tensor:
    """Return numbers of many sizes and signs, on which other rules differ from a weighted sum."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 64, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-2, 2, 64).double()
