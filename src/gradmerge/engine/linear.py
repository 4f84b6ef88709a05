"""Rules that are weighted sums of what fine-tuning changed, recognized by running them on random numbers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .jobs import BlockJob, Job, rule_arguments
from .plan import Plan

#: The inputs that a rule may read for its weights to be recognized.
INPUTS = {"base", "tuned", "weights", "base_weight"}


def linear_weights(plan: Plan, job: Job) -> list[float] | None:
    """Return the c_t of a tensor's result, base + Σ c_t (θ_t − base), or None if the rule is no such sum there."""
    if not isinstance(job, BlockJob) or job.granularity == "tensor" or not plan.needs <= INPUTS:
        return None
    settings, models = plan.inputs.settings.of(job.name), len(plan.inputs.tuned)

    def merge(base: Tensor, tuned: list[Tensor]) -> Tensor:
        return job.rule(**rule_arguments(job.rule, plan, {"base": base, "tuned": tuned}, settings))

    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    base, *tuned = _random_rows(models + 1)
    try:
        weights = [float(merge(zero, [one if i == t else zero for i in range(models)])) for t in range(models)]
        merged = merge(base, list(tuned))
    except (ValueError, ZeroDivisionError):
        return None
    expected = base + sum(c * (model - base) for c, model in zip(weights, tuned, strict=True))
    scale = 1 + sum(map(abs, weights))
    return weights if bool(((merged - expected).abs() <= 1e-9 * scale * (1 + expected.abs())).all()) else None


@functools.cache
def _random_rows(rows: int) -> Tensor:
    """Random numbers of many sizes and both signs."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 64, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-2, 2, 64).double()
