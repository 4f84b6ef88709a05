"""δ where the recipe leaves it open."""

from __future__ import annotations

import math

import torch

from ..checkpoints.model import Buffers
from ..rules.kronecker_matching import mean_eigenvalue
from .layers import pieces_of, read_hessian
from .measuring import Advance, exact_sum
from .plan import Job, Plan
from .reading import read_curvature
from .statistics import chunks
from .workers import run_parallel, with_buffers


def find_damping(plan: Plan, threads: int = 1, advance: Advance = lambda nbytes: None) -> None:
    """Give a removal with `damping: auto` its δ: the mean over all entries that are merged of Σ F_t, reduced.

    A δ of that size bounds the step where data that stay say nothing of a weight. The sum is that of fixed chunks,
    rounded once, so that neither threads nor blocks matter, nor does it when a merge goes on.
    """
    inputs = plan.inputs
    if plan.rule.name != "removal" or not inputs.damping_is_open or inputs.mean_curvature is not None:
        return
    sums: dict[tuple[str, int], float] = {}

    def work(buffers: Buffers, chunk: tuple[Job, int, int]) -> None:
        job, start, stop = chunk
        parts = []
        for source in inputs.curvature:
            values = read_curvature(source, job, start, stop, buffers, "curvature", torch.float64)
            parts.append(float(values.sum()) if values.dim() else float(values) * (stop - start))
        sums[job.name, start] = math.fsum(parts)
        advance(sum(source.nbytes(job.name) for source in inputs.curvature) * (stop - start) // job.info.numel)

    def trace(job: Job) -> None:
        numel = sum(piece.info.numel for piece in pieces_of(job))
        found = (mean_eigenvalue([1.0], [read_hessian(source, job, {})], numel) for source in inputs.curvature)
        sums[job.name, 0] = math.fsum(mean * numel for mean in found)
        advance(sum(source.nbytes(job.name) for source in inputs.curvature))

    run_parallel(chunks(plan.entrywise), with_buffers(work), threads)
    run_parallel(plan.layers, lambda: trace, threads)
    entries = sum(job.info.numel for job in plan.merged)
    inputs.mean_curvature = exact_sum(sums.values()) / max(1, entries)
