"""Checks of a plan before the merge: is a removal's step too long, and is gradient matching mere task arithmetic?

**Step size.** The curvature was estimated at the base and at the fine-tuned models. A removal's step much longer than
the distance between them leads to where the loss is unknown. It is long where the base's curvature is almost 0 and a
fine-tuned model's is not: there, (H_0 + H_t) / H̄_rest is very large. The check reads all entries, because a sample
would miss a few extreme ones that damage the model.

**Coefficients.** An entry of a merge moves by Σ_t α_t (P + H_t)/H̄ · Δ_t. Where H_0 is much larger than the tasks'
curvature and P = H_0, every coefficient is near α_t, and their sum is far above 1. That is right for models that were
trained under the penalty H_0. Other models are moved much too far.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers
from ..errors import InputError
from ..notes import Kind, Note
from ..progress import NOWHERE, Progress
from ..recipe import NONE
from ..rules.kronecker_matching import applied, diagonal_of
from ..text import count
from .executor import Advance, Executor, chunks, exact_sum, ignore, sample_blocks, whole_tensors
from .jobs import Block, BlockJob, LayerJob, converted, rule_arguments
from .plan import Plan
from .statistics import compute_mean_curvature

LONGEST_STEP = 2.0
"""A longer step, relative to fine-tuning's, is not trusted. Negation at strength 1 has 1; curvature may lengthen it."""
ABOVE = 1.5
"""Coefficients with a larger sum count as task arithmetic."""
NOTED = 0.5
"""The share of the change from which there is a note."""
SAMPLE, RUN = 1 << 20, 1 << 13
"""Coefficients are checked on a sample of so many entries, in runs."""


def check_step_size(
    plan: Plan, executor: Executor, progress: Progress = NOWHERE, *, refuse: bool = False
) -> list[Note]:
    """Return a note if the plan is a removal whose step is too long; with ``refuse``, raise it as an error."""
    if not checks_steps(plan):
        return []
    compute_mean_curvature(plan, executor, progress)
    progress.begin("checking the step size", plan.merged_read)
    length, weighted = amplifications(plan, executor, progress.advance)
    # Accept a step of exactly twice negation's. The merge finds and names values that are not finite.
    excess = round(max(length, weighted) / LONGEST_STEP, 9)
    if not math.isfinite(length) or excess <= 1:
        return []
    rest = "estimate the base's curvature on more data, so that fewer of its entries are almost 0."
    # The step is linear in the strength, unless the strength also reduces the base's curvature.
    if excess <= 20 and not plan.inputs.options.get("base_saw_removed"):
        rest = f"lower the strength to {1 / excess:.2g} of its value, or {rest}"
    if plan.inputs.options["cap"] == NONE:
        rest += " Without `cap: none`, no weight moves more than twice as far as under negation."
    note = Note(
        f"this removal moves the model too far: {length:.3g} times as far as fine-tuning did, and {weighted:.3g} times "
        "in the norm of the removed data's curvature (‖θ̂ − θ_0‖ / ‖Σ |θ_t − θ_0|‖, on all entries). Its quadratic "
        f"model is not trusted beyond {LONGEST_STEP:g} times. Raise the damping from "
        f"{plan.inputs.damping_of(plan.rule):g}, or {rest}",
        Kind.UNTRUSTED,
        amplification=length,
    )
    if refuse:
        raise InputError(f"{note} To write it all the same, pass accept_untrusted=True.")
    return [note]


def checks_steps(plan: Plan) -> bool:
    """Return whether a plan is a removal whose step may be too long: the cap bounds it up to some strength."""
    if "step-size" not in plan.rule.checks:
        return False
    if plan.layer_jobs:
        return True
    settings = plan.inputs.settings.distinct(plan.merged_tensors)
    caps = ((some.options["cap"], max(map(abs, some.weights))) for some in settings)
    return any(cap == NONE or (1 + cap) * strength > LONGEST_STEP for cap, strength in caps)


def amplifications(plan: Plan, executor: Executor, advance: Advance = ignore) -> tuple[float, float]:
    """Return the length of a removal's step relative to fine-tuning's, ‖θ̂ − θ_0‖ / ‖Σ |Δ_t|‖.

    Also return the same in the norm of the removed data's curvature, F = Σ_t F_t. Most entries hardly matter, and those
    that do move most.
    """
    parts = executor.reduce(plan, block_steps, chunks(plan), advance)
    step, tuning, weighted_step, weighted_tuning = map(exact_sum, zip(*parts, strict=True)) if parts else [0.0] * 4
    length = math.sqrt(step / tuning) if tuning else 0.0
    return length, math.sqrt(weighted_step / weighted_tuning) if weighted_tuning else 0.0


def block_steps(plan: Plan, block: Block, buffers: Buffers) -> list[tuple[float, float, float, float]]:
    """Return Σ (θ̂ − θ_0)² and Σ (Σ_t |Δ_t|)² over a block, and both weighted with F."""
    job, tensors = block.job, read_in_float64(plan, block, buffers)
    assert isinstance(job, BlockJob | LayerJob)
    changes = [model - tensors["base"] for model in tensors["tuned"]]
    tuning: Tensor = sum(change.abs() for change in changes)
    step = job.solve(plan, tensors) - tensors["base"]

    def weighted(x: Tensor) -> float:
        return max(0.0, sum(float((applied(hessian, x) * x).sum()) for hessian in tensors["curvature"]))

    is_layer = isinstance(job, LayerJob)
    weighted_tuning = sum(math.sqrt(weighted(change)) for change in changes) ** 2 if is_layer else weighted(tuning)
    return [(float(step.square().sum()), float(tuning.square().sum()), weighted(step), weighted_tuning)]


def read_in_float64(plan: Plan, block: Block, buffers: Buffers) -> dict[str, Any]:
    """Read a block in float64, so that a step that overflows in the merge is still a number."""
    if isinstance(block.job, LayerJob):
        return block.job.read(plan)
    assert isinstance(block.job, BlockJob)
    return converted(block.job.read(plan, block.start, block.stop, buffers), Tensor.double)


def coefficient_notes(plan: Plan, executor: Executor) -> list[Note]:
    """Return a note if a gradient matching of several models is task arithmetic on most of what they changed.

    With a recorded penalty for every model the coefficients are right.
    """
    inputs, base = plan.inputs, plan.recipe.base
    from_recipe = base is not None and base.penalty is not None
    recorded = not from_recipe and bool(inputs.penalty) and None not in inputs.penalty
    if "coefficients" not in plan.rule.checks or len(inputs.tuned) < 2 or recorded:
        return []
    share, seen = share_above(plan, executor)
    if not share >= NOTED:
        return []
    total = sum(info.numel for info in plan.merged_tensors.values())
    part = "all" if seen >= total else f"a sample of {count(seen)} of {count(total)}"
    weights = {weight for some in inputs.settings.distinct(plan.merged_tensors) for weight in some.weights}
    weight = f"weight {weights.pop():g}" if len(weights) == 1 else "the same weights"
    penalty = "P comes from base.penalty." if from_recipe else "P = H_0 assumes models that were trained under H_0."
    text = (
        f"this is task arithmetic at {weight} on {share:.0%} of what fine-tuning changed: there the coefficients "
        f"Σ α_t (P + H_t) / H̄ add up to more than {ABOVE:g} (share of Σ |α_t| (θ_t − θ_0)², on {part} entries). "
        f"{penalty} If they were trained without a penalty, for example with plain AdamW, set `base.penalty: none`."
    )
    return [Note(text, Kind.COEFFICIENTS, share=share)]


def share_above(plan: Plan, executor: Executor) -> tuple[float, int]:
    """Return the share of Σ_t |α_t| Δ_t² in entries whose coefficients add up to more than ``ABOVE``.

    Also return how many entries were checked.
    """
    entries = sum(job.info.numel for job in plan.block_jobs)
    blocks = list(sample_blocks(plan.block_jobs, RUN, math.ceil(RUN * entries / SAMPLE)))
    seen = sum(block.stop - block.start for block in blocks)
    # A sampled block represents other blocks too; a layer is always whole.
    function = functools.partial(block_change, scale=entries / max(1, seen))
    changes = executor.reduce(plan, function, [*blocks, *whole_tensors(plan.layer_jobs)])
    large, whole = (exact_sum(column) for column in zip(*changes, strict=True)) if changes else (0.0, 0.0)
    seen += sum(job.numel for job in plan.layer_jobs)
    return large / whole if whole > 0 and math.isfinite(large) else 0.0, seen


def block_change(plan: Plan, block: Block, buffers: Buffers, *, scale: float) -> list[tuple[float, float]]:
    """Return Σ |α_t| Δ_t² of a block: in entries above the limit, and in all. A layer is not scaled."""
    job, tensors = block.job, read_in_float64(plan, block, buffers)
    if isinstance(job, LayerJob):
        # The rule for entries takes the diagonals of the curvature, with the damping of the layer.
        damping, scale = job.damping(plan, plan.rule, tensors), 1.0
        sources = {name: tensors[name] for name in ("prior", "penalty", "curvature") if name in tensors}
        tensors |= {name: _diagonals(value) for name, value in sources.items()}
        tensors |= {} if damping is None else {"damping": damping}
    base, settings = tensors["base"], plan.inputs.settings.of(job.name)
    change = torch.zeros_like(base)
    for model, weight in zip(tensors["tuned"], settings.weights, strict=True):
        change += (model - base).square_().mul_(abs(weight))
    # If every model changes an entry by 1, its merge is the sum of the coefficients.
    unit = {"base": torch.zeros_like(base), "tuned": [torch.ones_like(base)] * len(settings.weights)}
    coefficients = plan.rule(**rule_arguments(plan.rule, plan, tensors | unit, settings))
    return [(scale * float(change[coefficients > ABOVE].sum()), scale * float(change.sum()))]


def _diagonals(value: Any) -> Any:
    if isinstance(value, list):
        return [_diagonals(item) for item in value]
    return None if value is None else diagonal_of(value)
