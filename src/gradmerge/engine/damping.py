"""The damping δ of `damping: auto`, for rules that take the mean curvature."""

from __future__ import annotations

import math

import torch

from ..checkpoints.checkpoint import Buffers
from ..rules.kronecker_matching import mean_eigenvalue
from .jobs import Block, BlockJob, LayerJob
from .plan import Plan
from .reduce import Advance, Reduce, chunks, exact_sum, ignore


def find_damping(plan: Plan, reduce: Reduce, advance: Advance = ignore) -> None:
    """Set the mean curvature of the plan's inputs, Σ F_t over all merged entries / entries, if the rule needs it.

    A δ of that size bounds the step where the retain set has no curvature.
    """
    if plan.inputs.lacks_damping(plan.rule):
        sums = reduce(plan, curvature_sum, chunks(plan), advance)
        entries = sum(info.numel for info in plan.merged_tensors.values())
        plan.inputs.mean_curvature = exact_sum(sums) / max(1, entries)


def curvature_sum(plan: Plan, block: Block, buffers: Buffers) -> list[float]:
    """Return Σ F_t over a block, or over a layer with Kronecker curvature."""
    job, sources = block.job, plan.inputs.curvature
    if isinstance(job, LayerJob):
        means = (mean_eigenvalue([1.0], [job.read_hessian(source)], job.numel) for source in sources)
        return [math.fsum(mean * job.numel for mean in means)]
    assert isinstance(job, BlockJob)
    parts = []
    for source in sources:
        values = job.read_curvature(source, block.start, block.stop, buffers, "curvature", torch.float64)
        parts.append(float(values.sum()) if values.dim() else float(values) * (block.stop - block.start))
    return [math.fsum(parts)]
