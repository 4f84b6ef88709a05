"""The check that a removal does not move the model too far. It looks at all entries: a sample would miss a few extreme
ones that damage the model.

The curvature was estimated at the base and at the fine-tuned models. A step much longer than the distance between them
leads to where the loss is unknown. It is long where the base's curvature is almost 0 and a fine-tuned model's is not:
there, (H_0 + H_t) / H̄_rest is very large.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..checkpoints.checkpoint import Buffers
from ..curvature.summary import group_of
from ..errors import InputError
from ..notes import Kind, Note
from ..rules.kronecker_matching import applied
from .damping import find_damping
from .jobs import Block, BlockJob, LayerJob, converted, rule_arguments
from .plan import Plan
from .reduce import Advance, Reduce, chunks, exact_sum, ignore

WHOLE = 2.0
"""A longer step, relative to fine-tuning's, is not trusted. Negation at strength 1 has 1; curvature may lengthen it."""
GROUP = 10.0
"""The same for one layer, which may move farther than the whole model."""
NOTICEABLE = 0.01
"""A layer counts if it has this share of the squared step."""
DAMPINGS = tuple(float(f"1e{power}") for power in range(-10, 3))
"""Dampings that are tried for a recommendation."""


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
        excess = max(whole / WHOLE, self.groups[self.worst].amplification / GROUP)
        return round(excess, 9)  # accept a step of exactly twice negation's, which cap allows


def check_step_size(plan: Plan, reduce: Reduce, advance: Advance = ignore, *, refuse: bool = False) -> list[Note]:
    """Return a note if the plan is a removal whose step is too long; with ``refuse``, raise it as an error."""
    if "step-size" not in plan.rule.checks:
        return []
    find_damping(plan, reduce)
    (sizes,) = step_sizes(plan, [plan.inputs.damping_of(plan.rule)], reduce, advance)
    if sizes.excess <= 1:
        return []
    amplification, worst = sizes.whole.amplification, sizes.groups[sizes.worst].amplification
    larger = [damping for damping in DAMPINGS if damping > sizes.damping]
    tried = step_sizes(plan, larger, reduce) if larger else []
    enough = next((other.damping for other in tried if other.excess <= 1), None)
    text = (
        f"this removal moves the model too far: {amplification:.3g} times as far as fine-tuning did, "
        f"{sizes.whole.weighted_amplification:.3g} times in the norm of the removed data's curvature, and "
        f"{sizes.worst} {worst:.3g} times (‖θ̂ − θ_0‖ / ‖Σ |θ_t − θ_0|‖, on all entries). Its quadratic model is not "
        f"trusted beyond {WHOLE:g} times, or {GROUP:g} times in a layer. {_advice(plan, sizes, enough)}"
    )
    note = Note(text, Kind.UNTRUSTED, amplification=amplification, damping=enough)
    if refuse:
        raise InputError(f"{note} To write it all the same, set accept_untrusted (--accept-untrusted).")
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


def step_sizes(plan: Plan, dampings: Sequence[float], reduce: Reduce, advance: Advance = ignore) -> list[StepSizes]:
    """Return the steps of a removal with each damping."""
    parts = reduce(plan, functools.partial(block_steps, dampings=tuple(dampings)), chunks(plan), advance)
    result = []
    for number, damping in enumerate(dampings):
        groups: dict[str, list[Step]] = {group_of(job.name): [] for job in plan.merged}
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
