"""Notes on a gradient matching that equals task arithmetic on most entries, computed without data.

An entry of the merge moves by Σ_t α_t (P + H_t)/H̄ · Δ_t. Where H_0 is much larger than the tasks' curvature and
P = H_0, every coefficient is near α_t, and their sum is far above 1. That is right for models that were trained under
the penalty H_0. Other models are moved much too far.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers
from ..notes import Kind, Note
from ..recipe import Recipe
from ..rules.kronecker_matching import KroneckerFactors, diagonal_of
from ..text import count
from .jobs import Block, BlockJob, LayerJob, converted, rule_arguments
from .plan import Plan
from .reduce import Reduce, exact_sum, whole_tensors

ABOVE = 1.5
"""Coefficients with a larger sum count as task arithmetic."""
NOTED = 0.5
"""The share of the change from which there is a note."""
FAR, NOTED_FAR = 10.0, 0.01
"""A note also says if a penalty moves this share of the change so many times as far as task arithmetic."""
SMALL, LARGE = 1 << 20, 1 << 22
"""Models with up to SMALL entries are checked on all of them, larger ones on a sample of SMALL to LARGE entries."""
PART, RUN = 1 / 64, 1 << 13
"""The share of the entries in the sample, and the length of its runs; at least one run for each tensor."""


def coefficient_notes(recipe: Recipe, plan: Plan, reduce: Reduce) -> list[Note]:
    """Return a note if a gradient matching of several models is task arithmetic on most of what they changed.

    With a recorded penalty for every model the coefficients are right. There is then only a note if the penalty moves
    entries much farther than task arithmetic would.
    """
    inputs = plan.inputs
    if "coefficients" not in plan.rule.checks:
        return []
    settings = inputs.settings.distinct(plan.merged_tensors)
    if inputs.penalty:
        limit = FAR * max(sum(map(abs, some.weights)) for some in settings)
        share, _ = share_above(plan, reduce, limit)
        if share >= NOTED_FAR:
            text = (
                f"on {share:.0%} of what fine-tuning changed, weights move more than {FAR:g} times as far as task "
                f"arithmetic would: the coefficients Σ α_t (P + H_t) / H̄ add up to more than {limit:g}, because the "
                "penalty P is much larger than the curvature H̄ there. Check that both are sums, or both means. Or set "
                "base.curvature to the penalty, a larger damping, or `base.penalty: none`."
            )
            return [Note(text, Kind.COEFFICIENTS, share=share)]
    from_recipe = recipe.base is not None and recipe.base.penalty is not None
    recorded = not from_recipe and bool(inputs.penalty) and None not in inputs.penalty
    if len(inputs.tuned) < 2 or recorded:
        return []
    share, seen = share_above(plan, reduce)
    if not share >= NOTED:
        return []
    total = sum(info.numel for info in plan.merged_tensors.values())
    part = "all" if seen >= total else f"a sample of {count(seen)} of {count(total)}"
    weights = {weight for some in settings for weight in some.weights}
    weight = f"weight {weights.pop():g}" if len(weights) == 1 else "the same weights"
    penalty = "P comes from base.penalty." if from_recipe else "P = H_0 assumes models that were trained under H_0."
    text = (
        f"this is task arithmetic at {weight} on {share:.0%} of what fine-tuning changed: there the coefficients "
        f"Σ α_t (P + H_t) / H̄ add up to more than {ABOVE:g} (share of Σ |α_t| (θ_t − θ_0)², on {part} entries). "
        f"{penalty} If they were trained without a penalty, for example with plain AdamW, set `base.penalty: none`."
    )
    return [Note(text, Kind.COEFFICIENTS, share=share)]


def share_above(plan: Plan, reduce: Reduce, above: float = ABOVE) -> tuple[float, int]:
    """Return the share of Σ_t |α_t| Δ_t² in entries whose coefficients add up to more than ``above``.

    Also return how many entries were checked.
    """
    total = sum(info.numel for info in plan.merged_tensors.values())
    part = min(max(SMALL, total * PART), LARGE, total) / max(1, total)
    blocks = [*_sample(plan, part), *whole_tensors(plan.layers)]
    seen: dict[str, int] = {}
    for block in blocks:
        seen[block.job.name] = seen.get(block.job.name, 0) + block.stop - block.start
    changes = reduce(plan, functools.partial(block_change, above=above), blocks)
    # A block of the sample stands for other entries of its tensor.
    scaled = [(numel / seen[name] * large, numel / seen[name] * all_) for name, numel, large, all_ in changes]
    large, whole = (exact_sum(column) for column in zip(*scaled, strict=True)) if scaled else (0.0, 0.0)
    biases = sum(job.numel - job.info.numel for job in plan.layers)
    return large / whole if whole > 0 and math.isfinite(large) else 0.0, sum(seen.values()) + biases


def block_change(plan: Plan, block: Block, buffers: Buffers, *, above: float) -> list[tuple[str, int, float, float]]:
    """Return name and size of a tensor, and Σ |α_t| Δ_t² of the block: in entries above the limit, and in all."""
    job = block.job
    if isinstance(job, LayerJob):
        tensors = diagonal_inputs(plan, job)
    else:
        assert isinstance(job, BlockJob)
        tensors = converted(job.read(plan, block.start, block.stop, buffers), Tensor.double)
    base, settings = tensors["base"], plan.inputs.settings.of(job.name)
    change = torch.zeros_like(base)
    for model, weight in zip(tensors["tuned"], settings.weights, strict=True):
        change += (model - base).square_().mul_(abs(weight))
    # If every model changes an entry by 1, its merge is the sum of the coefficients.
    unit = {"base": torch.zeros_like(base), "tuned": [torch.ones_like(base)] * len(settings.weights)}
    coefficients = plan.rule(**rule_arguments(plan.rule, plan, tensors | unit, settings))
    return [(job.name, job.info.numel, float(change[coefficients > above].sum()), float(change.sum()))]


def diagonal_inputs(plan: Plan, job: LayerJob) -> dict[str, Any]:
    """Read a layer with the diagonals of its curvature only, as the rule for entries takes them."""

    def diagonal(value: Any) -> Any:
        if isinstance(value, list):
            return [diagonal(item) for item in value]
        return diagonal_of(value) if isinstance(value, KroneckerFactors) else value

    tensors = job.read(plan)
    damping = job.damping(plan, plan.rule, tensors)
    return {name: diagonal(value) for name, value in tensors.items()} | (
        {} if damping is None else {"damping": damping}
    )


def _sample(plan: Plan, part: float) -> Iterator[Block]:
    """Yield runs of entries at even distances, each in the middle of the entries that it stands for."""
    for job in plan.block_jobs:
        numel = job.info.numel
        if part == 1:
            yield from (Block(-1, job, start, min(start + RUN, numel)) for start in range(0, numel, RUN))
        elif numel:
            number, length = max(1, math.floor(numel * part / RUN)), min(RUN, numel)
            for index in range(number):
                start = (2 * index + 1) * numel // (2 * number) - length // 2
                yield Block(-1, job, start, start + length)
