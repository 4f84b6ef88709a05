"""Predict from curvature what merges cost each task, without data.

For task t with curvature H_t at θ_t, and any θ:

- predicted excess loss ½ Σ_j H_tj (θ_j − θ_tj)² − Σ_j P_tj Δ_tj (θ_j − θ_tj). P_t is the training penalty that the
  recipe gives or that is recorded beside the model: then ∇ℓ_t(θ_t) = −P_t Δ_t. Without either, P_t = 0;
- predicted gradient mismatch ‖H_t (θ − θ_t)‖, the norm of the first-order change of ∇ℓ_t.

Both are sums over entries, kept for each layer group. These numbers rank merges and layers. They are not losses in
nats, because a diagonal ignores most of the loss along the path. With Kronecker curvature H_t acts on each matrix [W
b].
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from ..curvature.format import default_curvature
from ..curvature.summary import group_of
from ..engine.build_plan import open_plan
from ..engine.executor import Advance as AdvanceBytes
from ..engine.plan import BLOCK, Plan
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Recipe
from ..rules.kronecker_matching import applied, diagonal_of
from ..text import natural
from .candidates import Block, Candidate, KnownStatistics, visit_blocks
from .evaluate import Evaluator
from .ranking import Advance, Outcome
from .settings import BASE, Setting, changes_inputs

#: Candidates of one pass over the files; the more there are, the smaller are their blocks.
CANDIDATES_PER_PASS = 256
#: Numbers that the blocks of all candidates hold at most, for each thread.
MAX_NUMBERS = 1 << 24


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

    @property
    def groups(self) -> list[str]:
        return sorted({group for _, _, group in self.costs}, key=natural)

    def cost(self, candidate: str, task: str, group: str | None = None) -> Cost:
        """Over all groups, or of one."""
        found = [c for (a, t, g), c in self.costs.items() if a == candidate and t == task and group in (None, g)]
        return sum(found, Cost())

    def excess(self, candidate: str, task: str, group: str | None = None) -> float:
        return self.cost(candidate, task, group).excess

    def mismatch(self, candidate: str, task: str, group: str | None = None) -> float:
        return math.sqrt(self.cost(candidate, task, group).mismatch)

    def between(self, one: str, other: str) -> Interference:
        pairs = {(one, other), (other, one)}
        return sum((v for (a, b, _), v in self.interference.items() if (a, b) in pairs), Interference())


def open_for_prediction(recipe: Recipe, **allowed: Any) -> Plan:
    """A plan that reads the curvature of every tuned model, and the base's where there is one, for any method.

    ``allowed`` is what may be read, as of :func:`open_plan`.
    """
    if recipe.base is None:
        raise InputError(
            "the recipe has no base; without it nothing is known of what fine-tuning changed, and so of what a merge "
            "costs"
        )
    inside = default_curvature(local_path(recipe.base.adapter or recipe.base.model, recipe.folder))
    known = recipe.base.curvature is not None or inside is not None
    reads = {"base", "curvature", "penalty"}
    if known or recipe.base.penalty is not None:
        reads.add("prior")
    plan = open_plan(
        recipe,
        reads=frozenset(reads),
        needed_by="predicting what a merge costs",
        **allowed,
    )
    if not known:
        plan.note(["the base has no curvature: the cost on the base's own data is not predicted"])
    return plan


def predict(
    plan: Plan,
    tasks: Sequence[str],
    candidates: Sequence[Candidate],
    *,
    threads: int = 1,
    advance: AdvanceBytes = lambda nbytes: None,
    measured: KnownStatistics | None = None,
    group_by: Callable[[str], str] = group_of,
) -> Prediction:
    """Predict the cost of candidates from the curvature of the tasks, which ``plan`` reads for every model.

    Costs are kept for groups of tensors; ``group_by`` maps a tensor's name to its group.
    """
    names = [*tasks, *([BASE] if plan.inputs.prior is not None else [])]
    result = Prediction([c.name for c in candidates], names)
    # Sums are added in the order of the blocks, so that they do not depend on the threads.
    waiting: dict[int, Prediction] = {}
    following = 0
    lock = threading.Lock()

    def visit(block: Block) -> None:
        nonlocal following
        found = _block_costs(block, names, result.candidates, group_by(block.job.name))
        with lock:
            waiting[block.number] = found
            while following in waiting:
                part = waiting.pop(following)
                _add(result.costs, part.costs)
                _add(result.interference, part.interference)
                following += 1

    visit_blocks(plan, candidates, visit, threads=threads, advance=advance, measured=measured)
    return result


def _block_costs(block: Block, tasks: list[str], candidates: list[str], group: str) -> Prediction:
    """The sums over one block."""
    found = Prediction(candidates, tasks)
    curvature = [*block.curvature, *([block.prior] if block.prior is not None else [])]
    models = [*block.tuned, block.base]
    slopes = [
        None if penalty is None else applied(penalty, model - block.base)
        for model, penalty in zip(models, (*(block.penalty or [None] * len(block.tuned)), None), strict=True)
    ]
    for candidate, merged in zip(candidates, block.merged, strict=True):
        for task, h, model, slope in zip(tasks, curvature, models, slopes, strict=False):
            distance = merged - model
            change = applied(h, distance)
            first = -float((slope.double() * distance).sum()) if slope is not None else 0.0
            found.costs[candidate, task, group] = Cost(0.5 * _dot(change, distance), _dot(change, change), first)
    scaled = [
        (model - block.base).mul_(diagonal_of(h).sqrt()) for h, model in zip(block.curvature, block.tuned, strict=True)
    ]
    for i, one in enumerate(scaled):
        for j in range(i):
            product = one * scaled[j]
            overlap = float(product.abs().sum(dtype=torch.float64))
            opposed = max(0.0, (overlap - float(product.sum(dtype=torch.float64))) / 2)
            found.interference[tasks[j], tasks[i], group] = Interference(overlap, opposed)
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


class Predictor(Evaluator):
    """Predicts the costs of settings from the curvature of the tasks, many in one pass over the files."""

    def __init__(
        self, recipe: Recipe, methods: Sequence[str], *, threads: int = 1, plan: Plan | None = None, **allowed: Any
    ) -> None:
        """``plan`` is an open plan as of :func:`open_for_prediction`; by default a new one."""
        if "fa1" in methods:
            raise InputError(
                "fa1: its curvature is estimated at the differences to the base, and does not predict the loss of a "
                "merge. Give data of the tasks (data NAME=SRC)"
            )

        def reopen(changed: Recipe) -> Plan:
            return open_for_prediction(changed, **allowed)

        super().__init__(recipe, methods, reopen(recipe) if plan is None else plan, reopen, threads)
        self.tasks = [*self.names, *([BASE] if self.plan.inputs.prior is not None else [])]
        self.group_by: Callable[[str], str] = lambda name: ""
        """Maps a tensor's name to the part of the model whose costs each outcome keeps."""

    def evaluate(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        rows: list[Outcome] = []
        _check_comparable(settings)
        for plan, known, batch in self.plans.batches(self.plans.possible(settings), CANDIDATES_PER_PASS):
            rows += self._one_pass(plan, known, batch, advance)
        return rows

    def _one_pass(
        self, plan: Plan, known: KnownStatistics, settings: Sequence[Setting], advance: Advance
    ) -> list[Outcome]:
        plan.block = max(1 << 14, min(BLOCK, MAX_NUMBERS // len(settings)))
        lock, total, read, reported = threading.Lock(), max(1, plan.total_read), 0, 0

        def count(nbytes: int) -> None:
            """Convert bytes that were read to merges that are done."""
            nonlocal read, reported
            with lock:
                read += nbytes
                done = min(len(settings), len(settings) * read // total)
                if done > reported:
                    advance(done - reported)
                    reported = done

        candidates = [self.plans.candidate(setting, str(number)) for number, setting in enumerate(settings)]
        options: dict[str, Any] = {"threads": self.threads, "measured": known, "group_by": self.group_by}
        found = predict(plan, self.names, candidates, advance=count, **options)
        advance(len(settings) - reported)
        sources = [*plan.inputs.curvature, *([plan.inputs.prior] if plan.inputs.prior is not None else [])]
        per_example = {
            task: 1.0 / (source.examples * source.factor) if source.examples else 1.0
            for task, source in zip(self.tasks, sources, strict=True)
        }
        parts: list[dict[str, dict[str, float]]] = [{} for _ in settings]
        for (name, task, group), cost in found.costs.items():
            parts[int(name)].setdefault(group, {})[task] = cost.excess * per_example[task]
        rows = []
        for setting, groups in zip(settings, parts, strict=True):
            costs = {task: sum(group[task] for group in groups.values()) for task in self.tasks}
            rows.append(Outcome(setting, costs=costs, parts=groups))
        return rows


def _check_comparable(settings: Sequence[Setting]) -> None:
    """Raise InputError if settings change the curvature, or the tensors, that losses are predicted from."""
    changed = {key: setting.name for setting in settings for key, _ in setting.changes if changes_inputs(key)}
    for key, name in changed.items():
        if key.partition(".")[0] != "reduction" and key not in ("options.include_base", "base.examples"):
            raise InputError(
                f"{name}: another {key} changes what losses are predicted from, so predictions cannot be compared. "
                "Give data of the tasks (data NAME=SRC)"
            )
