"""The gauge: whether models were tuned under the penalty that a merge takes for granted, seen from their data.

A model that was tuned to the end under ½‖θ − θ_0‖²_P is where loss and penalty balance, ∇ℓ_t(θ_t) + P Δ_t = 0. The
gauge is ‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖: 0 there, and about 1 or more for a model that was tuned without it, whose
gradient is small or points elsewhere.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..engine.inputs import Inputs
from ..engine.jobs import LayerJob
from ..engine.plan import Plan
from ..recipe import Recipe, reduction_factor
from ..rules.kronecker_matching import applied
from .candidates import Block, look_at

#: Below the first a model counts as tuned under the penalty, from the second on as not tuned under it.
NEAR, FAR = 0.3, 0.7


@dataclass
class Gauge:
    """How far loss and penalty are from balance where fine-tuning ended."""

    penalty: str
    """P: `recipe` (base.penalty), `recorded` (beside the model), or `H_0` (neither)."""
    gauge: float | None
    """‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖; None where P Δ_t is 0, as with `penalty: none`."""
    pull: float
    """‖P Δ_t‖"""
    gradient: float
    """‖∇ℓ_t(θ_t)‖, scaled to the examples that the penalty goes with."""


def gradient_scale(recipe: Recipe, inputs: Inputs, place: int, examples: int, whole: bool = False) -> float:
    """What a gradient summed over ``examples`` of a task is multiplied by, to go with its curvature as it is reduced.

    ``whole``: to be the sum over all its examples, whatever the reduction.
    """
    curvature = inputs.curvature[place]
    if not curvature.examples:
        return 1.0 if whole else reduction_factor(recipe.reduction, examples)
    factor = 1.0 if whole and recipe.reduction == "mean" else curvature.factor
    return curvature.examples * factor / examples


def find_gauges(
    recipe: Recipe,
    plan: Plan,
    tasks: Mapping[str, int],
    gradients: Mapping[str, Mapping[str, Tensor]],
    examples: Mapping[str, int],
    threads: int = 1,
) -> dict[str, Gauge]:
    """The gauge of every task with a gradient, by the place of its model.

    ``gradients`` are sums over the ``examples`` of a task's data, at its own model. Tensors that are not merged do not
    count.
    """
    inputs = plan.inputs
    origins = {task: _origin(recipe, inputs, place) for task, place in tasks.items() if task in gradients}
    origins = {task: origin for task, origin in origins.items() if origin != "H_0" or inputs.prior is not None}
    scales = {
        task: gradient_scale(recipe, inputs, tasks[task], examples[task], whole=origin == "recorded")
        for task, origin in origins.items()
    }
    sums = {task: torch.zeros(3, dtype=torch.float64) for task in origins}
    lock = threading.Lock()

    def visit(block: Block) -> None:
        for task in origins:
            if block.job.name not in gradients[task]:  # tied to a tensor that has its gradient
                continue
            change = block.tuned[tasks[task]].double() - block.base.double()
            penalty = block.penalty[tasks[task]] if block.penalty else None
            if penalty is None:
                assert block.prior is not None
                pull = applied(block.prior, change) + _damping(plan, block) * change
            else:
                pull = applied(penalty, change)
            slope = scales[task] * block.part_of(gradients[task])
            found = torch.stack([v.square().sum() for v in (pull + slope, pull, slope)])
            with lock:
                sums[task] += found

    if origins:
        look_at(plan, [], visit, threads=threads)
    result = {}
    for task, origin in origins.items():
        off, pull, slope = (math.sqrt(value) for value in sums[task].tolist())
        result[task] = Gauge(origin, off / pull if pull else None, pull, slope)
    return result


def _damping(plan: Plan, block: Block) -> float:
    """δ of H_0; a layer with Kronecker curvature may have one of its own."""
    own = None
    if isinstance(block.job, LayerJob):
        own = block.job.damping(plan, plan.rule, {"curvature": block.curvature, "base": block.base})
    return plan.inputs.damping_of(plan.rule) if own is None else own


def _origin(recipe: Recipe, inputs: Inputs, place: int) -> str:
    if recipe.base is not None and recipe.base.penalty is not None:
        return "recipe"
    return "recorded" if inputs.penalty and inputs.penalty[place] is not None else "H_0"
