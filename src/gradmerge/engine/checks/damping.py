"""δ where the recipe leaves it open."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ...checkpoints.checkpoint import Buffers
from ...rules.kronecker_matching import mean_eigenvalue
from ..plan.kronecker_layers import pieces_of, read_hessian
from ..plan.plan import Plan
from ..run.reading import read_curvature
from ..run.reduce import Advance, exact_sum
from ..run.spreading import Run, Spread, chunks, here, whole
from ..thread_pool import run_parallel, with_buffers


def find_damping(
    plan: Plan, threads: int = 1, advance: Advance = lambda nbytes: None, spread: Spread | None = None
) -> None:
    """Give a removal with `damping: auto` its δ: the mean over all entries that are merged of Σ F_t, reduced.

    A δ of that size bounds the step where data that stay say nothing of a weight. The sum is that of fixed chunks,
    rounded once, so that neither threads nor blocks matter, nor does it when a merge goes on.
    """
    inputs = plan.inputs
    if plan.rule.auto_damping != "mean-curvature" or not inputs.damping_is_open or inputs.mean_curvature is not None:
        return
    runs = [*chunks(plan.entrywise), *whole(plan.layers)]
    sums = [one for part in (spread or here(threads))(plan, curvature_sums, runs, None, advance) for one in part]
    entries = sum(job.info.numel for job in plan.merged)
    inputs.mean_curvature = exact_sum(sums) / max(1, entries)


def curvature_sums(plan: Plan, runs: Sequence[Run], known: None, threads: int, advance: Advance) -> list[float]:
    """Σ F_t over each of some runs; a layer with Kronecker curvature is a run."""
    inputs, jobs = plan.inputs, plan.by_name
    sums: list[float] = []

    def work(buffers: Buffers, run: Run) -> None:
        job, start, stop = jobs[run[0]], run[1], run[2]
        read = sum(source.nbytes(job.name) for source in inputs.curvature)
        if job.layer is not None:
            numel = sum(piece.info.numel for piece in pieces_of(job))
            found = (mean_eigenvalue([1.0], [read_hessian(source, job)], numel) for source in inputs.curvature)
            sums.append(math.fsum(mean * numel for mean in found))
            advance(read)
            return
        parts = []
        for source in inputs.curvature:
            values = read_curvature(source, job, start, stop, buffers, "curvature", torch.float64)
            parts.append(float(values.sum()) if values.dim() else float(values) * (stop - start))
        sums.append(math.fsum(parts))
        advance(read * (stop - start) // job.info.numel)

    run_parallel(runs, with_buffers(work), threads)
    return sums
