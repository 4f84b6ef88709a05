"""How much of a gradient matching is task arithmetic, seen without data.

An entry of the merge moves by Σ_t α_t (P + H_t)/H̄ · Δ_t. Where H_0 outweighs the tasks' curvature and P = H_0, every
coefficient is near α_t. They then add up to far more than 1, which is right for models that were tuned under H_0, and
leads out of the hull of those that were not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers
from ...notes import Kind, Note
from ...recipe import Recipe
from ...text import count
from ..plan.kronecker_layers import diagonal_block, pieces_of
from ..plan.plan import Job, Plan, converted, rule_arguments
from ..run.reading import read_block
from ..run.reduce import exact_sum
from ..thread_pool import run_parallel, with_buffers

#: Coefficients that add up to more than this count as task arithmetic.
ABOVE = 1.5
#: The share of the change from which on there is a note.
NOTED = 0.5
#: A penalty far above the curvature moves entries farther than so many times task arithmetic; from which share of the
#: change on that is noted.
FAR, NOTED_FAR = 10.0, 0.01
#: A model of up to this many entries is looked at whole.
SMALL = 1 << 20
#: Of a larger one: this share of its entries, from SMALL up to MOST, in runs of RUN, at least one run per tensor.
PART = 1 / 64
MOST = 1 << 22
RUN = 1 << 13


def coefficient_notes(recipe: Recipe, plan: Plan, threads: int = 1) -> list[Note]:
    """A note if a gradient matching of several models is task arithmetic on most of what they changed.

    There is none where each model's penalty is recorded: then the coefficients are as they should be. But whatever the
    penalty, there is one if it moves entries much farther than task arithmetic would.
    """
    inputs = plan.inputs
    if "coefficients" not in plan.rule.checks:
        return []
    total = sum(job.info.numel for job in plan.merged)
    every = inputs.settings.every(job.name for job in plan.merged)
    if inputs.penalty:
        most = FAR * max(sum(map(abs, numbers.weights)) for numbers in every)
        share, looked_at = share_above(plan, threads, most)
        if share >= NOTED_FAR:
            text = (
                f"on {share:.0%} of what fine-tuning changed, weights move more than {FAR:g} times as far as task "
                f"arithmetic would: the coefficients Σ α_t (P + H_t) / H̄ add up to more than {most:g}, since the "
                "penalty P is far above the curvature H̄ there. Is it on the same scale, of a sum or of a mean? Give "
                "base.curvature as large as the penalty, a larger damping, or `base.penalty: none`."
            )
            return [Note(text, Kind.COEFFICIENTS, share=share)]
    given = recipe.base is not None and recipe.base.penalty is not None
    known = not given and bool(inputs.penalty) and None not in inputs.penalty
    if len(inputs.tuned) < 2 or known:
        return []
    share, looked_at = share_above(plan, threads)
    if not share >= NOTED:
        return []
    part = "all" if looked_at >= total else f"a sample of {count(looked_at)} of {count(total)}"
    weights = {weight for numbers in every for weight in numbers.weights}
    weight = f"weight {weights.pop():g}" if len(weights) == 1 else "the same weights"
    taken = "P is what base.penalty says." if given else "P = H_0 takes the models to be tuned under H_0."
    text = (
        f"this is task arithmetic at {weight} on {share:.0%} of what fine-tuning changed: there the coefficients "
        f"Σ α_t (P + H_t) / H̄ add up to more than {ABOVE:g} (share of Σ |α_t| (θ_t − θ_0)², on {part} entries). "
        f"{taken} If they were tuned without a penalty, as by plain AdamW, set `base.penalty: none`."
    )
    return [Note(text, Kind.COEFFICIENTS, share=share)]


def share_above(plan: Plan, threads: int = 1, above: float = ABOVE) -> tuple[float, int]:
    """The share of Σ_t |α_t| Δ_t² in entries whose coefficients add up to more than that, and how many were seen."""
    total = sum(job.info.numel for job in plan.merged)
    part = min(max(SMALL, total * PART), MOST, total) / max(1, total)
    runs = {job.name: list(_runs(job.info.numel, part)) for job in plan.entrywise if job.info.numel}
    seen = {name: sum(stop - start for start, stop in places) for name, places in runs.items()}
    found: dict[tuple[str, int], tuple[float, float]] = {}

    def work(buffers: Buffers, run: tuple[Job, int, int]) -> None:
        job, start, stop = run
        large, all_ = _changes(plan, job, converted(read_block(plan, job, start, stop, buffers), Tensor.double), above)
        times = job.info.numel / seen[job.name]
        found[job.name, start] = large * times, all_ * times

    def layer(job: Job) -> None:
        found[job.name, 0] = _changes(plan, job, diagonal_block(plan, job), above)

    every = ((job, *place) for job in plan.entrywise for place in runs.get(job.name, ()))
    run_parallel(every, with_buffers(work), threads)
    run_parallel(plan.layers, lambda: layer, threads)
    large, whole = (exact_sum(column) for column in zip(*found.values(), strict=True)) if found else (0.0, 0.0)
    return large / whole if whole > 0 and math.isfinite(large) else 0.0, sum(seen.values()) + sum(
        piece.info.numel for job in plan.layers for piece in pieces_of(job)
    )


def _changes(plan: Plan, job: Job, block: dict[str, Tensor], above: float) -> tuple[float, float]:
    """Σ |α_t| Δ_t² where the coefficients are above that, and in all."""
    base, numbers = block["base"], plan.inputs.settings.of(job.name)
    weights = numbers.weights
    change = torch.zeros_like(base)
    for model, weight in zip(block["tuned"], weights, strict=True):
        change += (model - base).square_().mul_(abs(weight))
    # A merge of models that all changed by 1 is the sum of the coefficients.
    unit = {"base": torch.zeros_like(base), "tuned": [torch.ones_like(base)] * len(weights)}
    coefficients = plan.rule(**rule_arguments(plan.rule, plan, block | unit, numbers))
    return float(change[coefficients > above].sum()), float(change.sum())


def _runs(numel: int, part: float) -> Iterator[tuple[int, int]]:
    """Where to look in a tensor: runs of entries at even distances, each in the middle of what it stands for."""
    if part == 1:
        yield from ((start, min(start + RUN, numel)) for start in range(0, numel, RUN))
        return
    number, length = max(1, math.floor(numel * part / RUN)), min(RUN, numel)
    for index in range(number):
        start = (2 * index + 1) * numel // (2 * number) - length // 2
        yield start, start + length
