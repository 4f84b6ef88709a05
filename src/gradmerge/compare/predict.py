"""What curvature alone says about merges, without data.

For task t with curvature H_t at θ_t, and any θ:

- predicted excess loss ½ Σ_j H_tj (θ_j − θ_tj)² − Σ_j P_tj Δ_tj (θ_j − θ_tj), where P_t is the penalty that the recipe
  says, or a record beside the model, that it was tuned under: then ∇ℓ_t(θ_t) = −P_t Δ_t. Without either it is taken
  for 0: that models were tuned under H_0 is an assumption of a merge, and nothing that is known;
- predicted gradient mismatch ‖H_t (θ − θ_t)‖, the norm of the first-order change of ∇ℓ_t.

Both are sums over entries, kept per layer group. A diagonal sees little of the loss along the path: these numbers rank
merges and layers; they are no losses in nats. With Kronecker curvature H_t acts on each layer's matrix [W b].
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from ..curvature.format import default_curvature
from ..curvature.summary import group_of
from ..engine.build_plan import open_plan
from ..engine.executor import Advance
from ..engine.plan import Plan
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Recipe
from ..rules.kronecker_matching import applied, diagonal_of
from ..text import natural
from .candidates import Block, Candidate, KnownStatistics, look_at

BASE = "base"


class _Additive:
    """Adds up field by field."""

    def __add__(self, other: Self) -> Self:
        return type(self)(*map(operator.add, vars(self).values(), vars(other).values()))


@dataclass
class Cost(_Additive):
    """What a merge costs one task in one layer group."""

    quadratic: float = 0.0
    """½ Σ H (θ̂ − θ_t)²"""
    mismatch: float = 0.0
    """Σ (H (θ̂ − θ_t))²: the square of the norm, so that groups add up."""
    first_order: float = 0.0
    """−Σ P Δ_t (θ̂ − θ_t), where P is known: below 0 where the merge goes where the penalty kept the model from."""

    @property
    def excess(self) -> float:
        return self.quadratic + self.first_order


@dataclass
class Interference(_Additive):
    """How much two tasks move the same entries, and how much of that in opposite directions."""

    overlap: float = 0.0
    """Σ √(H_s H_t) |Δ_s Δ_t|"""
    opposed: float = 0.0
    """The same over entries that the two move in opposite directions."""
    chance: float = 0.0
    """The overlap to expect if each had moved as far, but which entries had nothing to do with the other's: the mean
    over all orders of the entries, within blocks of tensors as they are read."""

    @property
    def share(self) -> float:
        """Share of the overlap that is opposed, 0 to 1; ½ is what chance gives."""
        return self.opposed / self.overlap if self.overlap else 0.0


@dataclass
class Prediction:
    """Predicted cost of every candidate for every task, per layer group."""

    candidates: list[str]
    tasks: list[str]
    """The tuned models, and the base where its curvature is known."""
    costs: dict[tuple[str, str, str], Cost] = field(default_factory=dict)
    """(candidate, task, group) → cost."""
    interference: dict[tuple[str, str, str], Interference] = field(default_factory=dict)
    """(task, other task, group), each pair once."""
    moved: dict[tuple[str, str], float] = field(default_factory=dict)
    """(task, group) → Σ H_t Δ_t²: how far fine-tuning went, in the task's own curvature."""

    @property
    def groups(self) -> list[str]:
        return sorted({group for _, group in self.moved}, key=natural)

    def cost(self, candidate: str, task: str, group: str | None = None) -> Cost:
        """Over all groups, or of one."""
        found = [c for (a, t, g), c in self.costs.items() if a == candidate and t == task and group in (None, g)]
        return sum(found, Cost())

    def excess(self, candidate: str, task: str, group: str | None = None) -> float:
        return self.cost(candidate, task, group).excess

    def mismatch(self, candidate: str, task: str, group: str | None = None) -> float:
        return math.sqrt(self.cost(candidate, task, group).mismatch)

    def worst(self, candidate: str) -> float:
        """The largest predicted excess loss of a task."""
        return max(self.excess(candidate, task) for task in self.tasks)

    def between(self, one: str, other: str) -> Interference:
        pairs = {(one, other), (other, one)}
        return sum((v for (a, b, _), v in self.interference.items() if (a, b) in pairs), Interference())


def open_to_look(recipe: Recipe, **allowed: Any) -> Plan:
    """A plan that reads the curvature of every tuned model, and the base's where there is one, for any method.

    ``allowed`` is what may be read, as of :func:`open_plan`.
    """
    if recipe.base is None:
        raise InputError(
            "the recipe names no base; what fine-tuning changed, and so what a merge costs, is not known without it"
        )
    inside = default_curvature(local_path(recipe.base.adapter or recipe.base.model, recipe.folder))
    known = recipe.base.curvature is not None or inside is not None
    reads = {"base", "curvature", "penalty"}
    if known or recipe.base.penalty is not None:
        reads.add("prior")
    plan = open_plan(
        recipe,
        reads=frozenset(reads),
        wanted_by="looking at a merge",
        **allowed,
    )
    if not known:
        plan.note(["the base has no curvature: what the merge costs on the base's own data is not known"])
    return plan


def task_names(recipe: Recipe) -> list[str]:
    """A short name for each tuned model: the last part of its path, or all of it where that is not unique."""
    paths = [model.adapter or model.model for model in recipe.models]
    short = [Path(path.partition("@")[0]).name or path for path in paths]
    return [path if short.count(name) > 1 or name == BASE else name for path, name in zip(paths, short, strict=True)]


def predict(
    plan: Plan,
    tasks: Sequence[str],
    candidates: Sequence[Candidate],
    *,
    threads: int = 1,
    advance: Advance = lambda nbytes: None,
    measured: KnownStatistics | None = None,
    group_by: Callable[[str], str] = group_of,
) -> Prediction:
    """Predict the cost of the candidates from the curvature of the tasks, which ``plan`` reads for every model.

    Costs are kept for groups of tensors, which ``group_by`` makes of their names.
    """
    names = [*tasks, *([BASE] if plan.inputs.prior is not None else [])]
    result = Prediction([c.name for c in candidates], names)
    # Sums are added up in the order of the blocks, so that they do not depend on which thread is first.
    waiting: dict[int, Prediction] = {}
    following = 0
    lock = threading.Lock()

    def visit(block: Block) -> None:
        nonlocal following
        found = _look_at_block(block, names, result.candidates, group_by(block.job.name))
        with lock:
            waiting[block.number] = found
            while following in waiting:
                part = waiting.pop(following)
                _add(result.costs, part.costs)
                _add(result.interference, part.interference)
                _add(result.moved, part.moved)
                following += 1

    look_at(plan, candidates, visit, threads=threads, advance=advance, measured=measured)
    return result


def _look_at_block(block: Block, tasks: list[str], candidates: list[str], group: str) -> Prediction:
    """The sums over one block."""
    found = Prediction(candidates, tasks)
    curvature = [*block.curvature, *([block.prior] if block.prior is not None else [])]
    places = [*block.tuned, block.base]
    # The base is where it is, under no penalty that is known.
    held = [
        None if penalty is None else applied(penalty, place - block.base)
        for place, penalty in zip(places, (*(block.penalty or [None] * len(block.tuned)), None), strict=True)
    ]
    for candidate, merged in zip(candidates, block.merged, strict=True):
        for task, h, place, slope in zip(tasks, curvature, places, held, strict=False):
            off = merged - place
            pull = applied(h, off)
            first = -float((slope.double() * off).sum()) if slope is not None else 0.0
            found.costs[candidate, task, group] = Cost(0.5 * _dot(pull, off), _dot(pull, pull), first)
    scaled = []
    for task, h, place in zip(tasks, block.curvature, block.tuned, strict=False):
        strength = (place - block.base).mul_(diagonal_of(h).sqrt())
        scaled.append(strength)
        found.moved[task, group] = _dot(strength, strength)
    sizes = [float(one.abs().sum(dtype=torch.float64)) for one in scaled]
    for i, one in enumerate(scaled):
        for j in range(i):
            product = one * scaled[j]
            overlap = float(product.abs().sum(dtype=torch.float64))
            signed = float(product.sum(dtype=torch.float64))
            opposed = max(0.0, (overlap - signed) / 2)
            chance = sizes[i] * sizes[j] / one.numel()
            found.interference[tasks[j], tasks[i], group] = Interference(overlap, opposed, chance)
    if BASE in tasks:
        found.moved[BASE, group] = 0.0
    return found


def _add(sums: dict[Any, Any], more: Mapping[Any, Any]) -> None:
    for key, value in more.items():
        sums[key] = sums[key] + value if key in sums else value


def _dot(a: Tensor, b: Tensor) -> float:
    if a.dim() == 1 and a.shape == b.shape:
        value = float(torch.dot(a, b))
        # Below this, products may have been too small for float32.
        if value > 1e-30 or not bool(a.any()):
            return value
    return float((a.double() * b).sum())
