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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers
from ..curvature.summary import group_of
from ..errors import InputError
from ..notes import Kind, Note
from ..recipe import Recipe
from ..rules.kronecker_matching import KroneckerFactors, applied, diagonal_of
from ..text import count
from .executor import THIS_THREAD, Advance, Executor, chunks, exact_sum, ignore, sample_blocks, whole_tensors
from .jobs import Block, BlockJob, LayerJob, converted, rule_arguments
from .plan import Plan
from .statistics import compute_mean_curvature

LONGEST_STEP = 2.0
"""A longer step, relative to fine-tuning's, is not trusted. Negation at strength 1 has 1; curvature may lengthen it."""
LONGEST_IN_LAYER = 10.0
"""The same for one layer, which may move farther than the whole model."""
NOTICEABLE = 0.01
"""A layer counts if it has this share of the squared step."""
DAMPINGS = tuple(float(f"1e{power}") for power in range(-10, 3))
"""Dampings that are tried for a recommendation."""

ABOVE = 1.5
"""Coefficients with a larger sum count as task arithmetic."""
NOTED = 0.5
"""The share of the change from which there is a note."""
FAR, NOTED_FAR = 10.0, 0.01
"""A note also says if a penalty moves this share of the change so many times as far as task arithmetic."""
SMALL, LARGE = 1 << 20, 1 << 22
"""Models with up to SMALL entries are checked on all of them, larger ones on a sample of SMALL to LARGE entries."""
PART, RUN = 1 / 64, 1 << 13
"""The share of the entries in the sample, and the length of its runs."""


class Step(NamedTuple):
    """The squared length of a removal's step and of fine-tuning's.

    Weighted sums use the curvature of the removed data, F = Σ_t F_t: most entries hardly matter, and those that do move
    most.
    """

    step: float
    """Σ (θ̂ − θ_0)²"""
    tuning: float
    """Σ (Σ_t |Δ_t|)²"""
    weighted_step: float
    """Σ F (θ̂ − θ_0)²"""
    weighted_tuning: float
    """Σ F (Σ_t |Δ_t|)²"""

    @classmethod
    def total(cls, steps: Sequence[Step]) -> Step:
        """Return the sum of steps, which does not depend on their order."""
        return cls(*map(exact_sum, zip(*steps, strict=True))) if steps else cls(0.0, 0.0, 0.0, 0.0)

    @property
    def amplification(self) -> float:
        """‖θ̂ − θ_0‖ / ‖Σ |Δ_t|‖; 0 if nothing moves."""
        return math.sqrt(self.step / self.tuning) if self.tuning else 0.0

    @property
    def weighted_amplification(self) -> float:
        """The same in the norm of the removed data's curvature."""
        return math.sqrt(self.weighted_step / self.weighted_tuning) if self.weighted_tuning else 0.0


@dataclass
class StepSizes:
    """The steps of a removal with one damping, by group of layers."""

    damping: float
    groups: dict[str, Step]

    @functools.cached_property
    def whole(self) -> Step:
        return Step.total(list(self.groups.values()))

    @property
    def worst(self) -> str:
        """The group with the largest amplification, among those with a noticeable share of the step."""
        least = NOTICEABLE * self.whole.step
        seen = {name: step.amplification for name, step in self.groups.items() if step.step >= least}
        return max(seen, key=lambda name: seen[name])

    @property
    def excess(self) -> float:
        """The step relative to the longest one that is trusted, of the model or of a group: up to 1 is fine."""
        if not self.groups or not math.isfinite(self.whole.step):
            return 0.0  # the merge finds and names values that are not finite
        whole = max(self.whole.amplification, self.whole.weighted_amplification)
        excess = max(whole / LONGEST_STEP, self.groups[self.worst].amplification / LONGEST_IN_LAYER)
        return round(excess, 9)  # accept a step of exactly twice negation's, which cap allows


def check_step_size(
    plan: Plan, executor: Executor = THIS_THREAD, advance: Advance = ignore, *, refuse: bool = False
) -> list[Note]:
    """Return a note if the plan is a removal whose step is too long; with ``refuse``, raise it as an error."""
    if "step-size" not in plan.rule.checks:
        return []
    compute_mean_curvature(plan, executor)
    (sizes,) = step_sizes(plan, [plan.inputs.damping_of(plan.rule)], executor, advance)
    if sizes.excess <= 1:
        return []
    amplification, worst = sizes.whole.amplification, sizes.groups[sizes.worst].amplification
    larger = [damping for damping in DAMPINGS if damping > sizes.damping]
    tried = step_sizes(plan, larger, executor) if larger else []
    enough = next((other.damping for other in tried if other.excess <= 1), None)
    text = (
        f"this removal moves the model too far: {amplification:.3g} times as far as fine-tuning did, "
        f"{sizes.whole.weighted_amplification:.3g} times in the norm of the removed data's curvature, and "
        f"{sizes.worst} {worst:.3g} times (‖θ̂ − θ_0‖ / ‖Σ |θ_t − θ_0|‖, on all entries). Its quadratic model is not "
        f"trusted beyond {LONGEST_STEP:g} times, or {LONGEST_IN_LAYER:g} times in a layer. "
        f"{_advice(plan, sizes, enough)}"
    )
    note = Note(text, Kind.UNTRUSTED, amplification=amplification, damping=enough)
    if refuse:
        raise InputError(f"{note} To write it all the same, pass accept_untrusted=True.")
    return [note]


def _advice(plan: Plan, sizes: StepSizes, enough: float | None) -> str:
    rest = "estimate the base's curvature on more data, so that fewer of its entries are almost 0."
    # The step is linear in the strength, unless the strength also reduces the base's curvature.
    if sizes.excess <= 20 and not plan.inputs.options.get("base_saw_removed"):
        rest = f"lower the strength to {1 / sizes.excess:.2g} of its value, or {rest}"
    if plan.inputs.options["cap"] == "none":
        rest += " Without `cap: none`, no weight moves more than twice as far as under negation."
    if enough is None:
        return f"No damping up to {DAMPINGS[-1]:g} is enough: {rest}"
    return (
        f"Raise the damping from {sizes.damping:g} to {enough:g}, the smallest power of ten that is enough, or {rest} "
        "Either way, evaluate the result on the retain set."
    )


def step_sizes(
    plan: Plan, dampings: Sequence[float], executor: Executor = THIS_THREAD, advance: Advance = ignore
) -> list[StepSizes]:
    """Return the steps of a removal with each damping."""
    parts = executor.reduce(plan, functools.partial(block_steps, dampings=tuple(dampings)), chunks(plan), advance)
    result = []
    for number, damping in enumerate(dampings):
        groups: dict[str, list[Step]] = {group_of(job.name): [] for job in plan.merged_jobs}
        for group, steps in parts:
            groups[group].append(steps[number])
        result.append(StepSizes(damping, {group: Step.total(steps) for group, steps in groups.items() if steps}))
    return result


def block_steps(
    plan: Plan, block: Block, buffers: Buffers, *, dampings: Sequence[float]
) -> list[tuple[str, list[Step]]]:
    """Return the group of a block, and its steps with each damping."""
    job = block.job
    if isinstance(job, LayerJob):
        return [(group_of(job.name), list(_layer_steps(plan, job, dampings)))]
    assert isinstance(job, BlockJob)
    # In float64, so that a step that overflows in the merge is still a number here.
    tensors = converted(job.read(plan, block.start, block.stop, buffers), Tensor.double)
    base, settings = tensors["base"], plan.inputs.settings.of(job.name)
    squares = sum((model - base).abs_() for model in tensors["tuned"]).square()
    curvature = sum(tensors["curvature"])
    tuning, weighted_tuning = float(squares.sum()), float((squares * curvature).sum())
    steps = []
    for damping in dampings:
        arguments = rule_arguments(plan.rule, plan, tensors, settings) | {"damping": damping}
        step = (plan.rule(**arguments) - base).square_()
        steps.append(Step(float(step.sum()), tuning, float((step * curvature).sum()), weighted_tuning))
    return [(group_of(job.name), steps)]


def _layer_steps(plan: Plan, job: LayerJob, dampings: Sequence[float]) -> Iterator[Step]:
    """Yield the steps of a layer with Kronecker curvature, whose weighted sums are ⟨X, H X⟩."""
    tensors = job.read(plan)
    base, changes = tensors["base"], [model - tensors["base"] for model in tensors["tuned"]]

    def weighted(x: Tensor) -> float:
        return sum(float((applied(hessian, x) * x).sum()) for hessian in tensors["curvature"])

    tuning = float(sum(change.abs() for change in changes).square().sum())
    weighted_tuning = sum(math.sqrt(max(0.0, weighted(change))) for change in changes) ** 2
    for damping in dampings:
        step = job.solve(plan, {**tensors, "damping": damping}) - base
        yield Step(float(step.square().sum()), tuning, max(0.0, weighted(step)), weighted_tuning)


def coefficient_notes(recipe: Recipe, plan: Plan, executor: Executor = THIS_THREAD) -> list[Note]:
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
        share, _ = share_above(plan, executor, limit)
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
    share, seen = share_above(plan, executor)
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


def share_above(plan: Plan, executor: Executor = THIS_THREAD, above: float = ABOVE) -> tuple[float, int]:
    """Return the share of Σ_t |α_t| Δ_t² in entries whose coefficients add up to more than ``above``.

    Also return how many entries were checked.
    """
    total = sum(info.numel for info in plan.merged_tensors.values())
    sampled = min(max(SMALL, total * PART), LARGE, total)
    blocks = list(sample_blocks(plan.block_jobs, RUN, math.ceil(RUN * total / max(1, sampled))))
    seen = sum(block.stop - block.start for block in blocks)
    # A sampled block represents other blocks too; a layer is always whole.
    scale = sum(job.info.numel for job in plan.block_jobs) / max(1, seen)
    changes = executor.reduce(
        plan, functools.partial(block_change, above=above), [*blocks, *whole_tensors(plan.kronecker_jobs)]
    )
    scaled = [(large, all_) if is_layer else (scale * large, scale * all_) for is_layer, large, all_ in changes]
    large, whole = (exact_sum(column) for column in zip(*scaled, strict=True)) if scaled else (0.0, 0.0)
    seen += sum(job.numel for job in plan.kronecker_jobs)
    return large / whole if whole > 0 and math.isfinite(large) else 0.0, seen


def block_change(plan: Plan, block: Block, buffers: Buffers, *, above: float) -> list[tuple[bool, float, float]]:
    """Return whether a block is a layer, and its Σ |α_t| Δ_t²: in entries above the limit, and in all."""
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
    return [(isinstance(job, LayerJob), float(change[coefficients > above].sum()), float(change.sum()))]


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
