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
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..curvature.curvature import group_of
from ..curvature.format import default_curvature
from ..engine.executor import Advance as AdvanceBytes
from ..engine.plan import BLOCK, Plan, open_plan
from ..errors import InputError
from ..io.reader import local_path
from ..recipe import Recipe
from ..rules.kronecker_matching import applied, diagonal_of
from ..text import natural
from .candidates import Candidate, CandidateBlock, KnownStatistics, visit_blocks
from .evaluate import Evaluator
from .ranking import Advance, Outcome
from .settings import BASE, Setting, changes_inputs

#: Candidates of one pass over the files; the more there are, the smaller are their blocks.
CANDIDATES_PER_PASS = 256
#: Numbers that the blocks of all candidates hold at most, for each thread.
MAX_NUMBERS = 1 << 24


class Cost(NamedTuple):
    """The predicted cost of a merge for one task."""

    quadratic: float
    """½ Σ H (θ̂ − θ_t)²"""
    first_order: float
    """−Σ P Δ_t (θ̂ − θ_t), where P is known: below 0 where the merge moves in a direction that the penalty held back."""
    squared_mismatch: float
    """Σ (H (θ̂ − θ_t))²"""

    @property
    def excess(self) -> float:
        return self.quadratic + self.first_order


class Interference(NamedTuple):
    """How much two tasks change the same entries, and how much of that in opposite directions."""

    overlap: float
    """Σ √(H_s H_t) |Δ_s Δ_t|"""
    opposed: float
    """The same over entries that the two move in opposite directions."""

    @property
    def share(self) -> float:
        """Share of the overlap that is opposed, 0 to 1; ½ is what chance gives."""
        return self.opposed / self.overlap if self.overlap else 0.0


@dataclass
class Prediction:
    """Predicted cost of every candidate for every task, by layer group."""

    candidates: list[str]
    tasks: list[str]
    """The tuned models, and the base where its curvature is known."""
    costs: dict[str, Tensor] = field(default_factory=dict)
    """Layer group → candidates × tasks × the numbers of a :class:`Cost`."""
    interference: dict[str, Tensor] = field(default_factory=dict)
    """Layer group → tasks × tasks × the numbers of an :class:`Interference`."""

    @property
    def groups(self) -> list[str]:
        return sorted(self.costs, key=natural)

    def cost(self, candidate: str, task: str, group: str | None = None) -> Cost:
        """Return the cost over all layer groups, or of one."""
        i, j = self.candidates.index(candidate), self.tasks.index(task)
        return Cost(*_summed(self.costs, group)[i, j].tolist())

    def excess(self, candidate: str, task: str, group: str | None = None) -> float:
        return self.cost(candidate, task, group).excess

    def mismatch(self, candidate: str, task: str, group: str | None = None) -> float:
        return math.sqrt(self.cost(candidate, task, group).squared_mismatch)

    def between(self, one: str, other: str, group: str | None = None) -> Interference:
        i, j = self.tasks.index(one), self.tasks.index(other)
        return Interference(*_summed(self.interference, group)[i, j].tolist())

    def add(self, group: str, costs: Tensor, interference: Tensor) -> None:
        """Add the numbers of a block in a layer group."""
        for sums, part in ((self.costs, costs), (self.interference, interference)):
            sums[group] = sums[group] + part if group in sums else part


def _summed(parts: Mapping[str, Tensor], group: str | None = None) -> Tensor:
    return torch.stack([*parts.values()]).sum(0) if group is None else parts[group]


def open_for_prediction(recipe: Recipe, **reading: Any) -> Plan:
    """Open a plan that reads the curvature of every fine-tuned model, and of the base if there is one.

    ``reading`` are the keywords of :func:`open_plan` about reading models.
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
        **reading,
    )
    if not known:
        plan.note(["the base has no curvature: the cost on the base's own data is not predicted"])
    return plan


def predict(
    plan: Plan,
    tasks: Sequence[str],
    candidates: Mapping[str, Candidate],
    *,
    threads: int = 1,
    advance: AdvanceBytes = lambda nbytes: None,
    known: KnownStatistics | None = None,
) -> Prediction:
    """Predict the cost of candidates from the curvature of the tasks, which ``plan`` reads for every model."""
    names = [*tasks, *([BASE] if plan.inputs.prior is not None else [])]
    result = Prediction([*candidates], names)
    # Blocks come in any order. They are added in order of their numbers, so that sums do not depend on the threads.
    waiting: dict[int, tuple[str, Tensor, Tensor]] = {}
    following = 0
    lock = threading.Lock()

    def visit(block: CandidateBlock) -> None:
        nonlocal following
        found = group_of(block.job.name), _block_costs(block, len(names)), _block_interference(block, len(names))
        with lock:
            waiting[block.number] = found
            while following in waiting:
                result.add(*waiting.pop(following))
                following += 1

    visit_blocks(plan, [*candidates.values()], visit, threads=threads, advance=advance, known=known)
    return result


def _block_costs(block: CandidateBlock, tasks: int) -> Tensor:
    """Return the costs over one block: candidates × tasks × the numbers of a :class:`Cost`."""
    curvature = [*block.curvature, *([block.prior] if block.prior is not None else [])]
    models, penalties = [*block.tuned, block.base], [*(block.penalty or [None] * len(block.tuned)), None]
    slopes = [
        None if penalty is None else applied(penalty, model - block.base)
        for model, penalty in zip(models, penalties, strict=True)
    ]
    found = torch.zeros(len(block.merged), tasks, len(Cost._fields), dtype=torch.float64)
    for i, merged in enumerate(block.merged):
        for j, (h, model, slope) in enumerate(zip(curvature, models, slopes, strict=False)):
            distance = merged - model
            change = applied(h, distance)
            first = -float((slope.double() * distance).sum()) if slope is not None else 0.0
            cost = Cost(0.5 * _dot(change, distance), first, _dot(change, change))
            found[i, j] = torch.tensor(cost, dtype=torch.float64)
    return found


def _block_interference(block: CandidateBlock, tasks: int) -> Tensor:
    """Return the interference over one block: tasks × tasks × the numbers of an :class:`Interference`."""
    found = torch.zeros(tasks, tasks, len(Interference._fields), dtype=torch.float64)
    scaled = [
        (model - block.base).mul_(diagonal_of(h).sqrt()) for h, model in zip(block.curvature, block.tuned, strict=True)
    ]
    for i, one in enumerate(scaled):
        for j in range(i):
            product = one * scaled[j]
            overlap = float(product.abs().sum(dtype=torch.float64))
            opposed = max(0.0, (overlap - float(product.sum(dtype=torch.float64))) / 2)
            found[i, j] = found[j, i] = torch.tensor([overlap, opposed], dtype=torch.float64)
    return found


def _dot(a: Tensor, b: Tensor) -> float:
    if a.dim() == 1 and a.shape == b.shape:
        value = float(torch.dot(a, b))
        # Below this, products may have been too small for float32.
        if value > 1e-30 or not bool(a.any()):
            return value
    return float((a.double() * b).sum())


class Predictor(Evaluator):
    """Predicts the costs of settings from the curvature of the tasks, many in one pass over the files."""

    def __init__(self, recipe: Recipe, methods: Sequence[str], *, threads: int = 1, **reading: Any) -> None:
        if "fa1" in methods:
            raise InputError(
                "fa1: its curvature is estimated at the differences to the base, and does not predict the loss of a "
                "merge. Give data of the tasks (data NAME=SRC)"
            )

        def open_plan(changed: Recipe, methods: Sequence[str]) -> Plan:
            return open_for_prediction(changed, **reading)

        super().__init__(recipe, methods, open_plan, threads)
        self.tasks = [*self.names, *([BASE] if self.plan.inputs.prior is not None else [])]

    def evaluate(self, settings: Sequence[Setting], advance: Advance) -> list[Outcome]:
        rows: list[Outcome] = []
        _check_comparable(settings)
        for plan, known, batch in self.batches(settings, CANDIDATES_PER_PASS):
            plan.block = max(1 << 14, min(BLOCK, MAX_NUMBERS // len(batch)))
            candidates = {str(number): merge for number, merge in enumerate(batch.values())}
            done = _MergesDone(len(batch), plan.total_read, advance)
            found = predict(plan, self.names, candidates, threads=self.threads, advance=done, known=known)
            done(plan.total_read)
            sources = [*plan.inputs.curvature, *([plan.inputs.prior] if plan.inputs.prior is not None else [])]
            examples = [source.examples * source.factor if source.examples else 1.0 for source in sources]
            total = _summed(found.costs)
            excess = (total[..., 0] + total[..., 1]) / torch.tensor(examples, dtype=torch.float64)
            for setting, costs in zip(batch, excess.tolist(), strict=True):
                rows.append(Outcome(setting, costs=dict(zip(self.tasks, costs, strict=True))))
        return rows


class _MergesDone:
    """Converts progress in bytes to progress in merges."""

    def __init__(self, merges: int, total: int, advance: Advance) -> None:
        self._merges, self._total, self._advance = merges, max(1, total), advance
        self._read = self._reported = 0
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._read += nbytes
            done = min(self._merges, self._merges * self._read // self._total)
            self._advance(done - self._reported)
            self._reported = done


def _check_comparable(settings: Sequence[Setting]) -> None:
    """Raise InputError if settings change the curvature, or the tensors, that losses are predicted from."""
    changed = {key: setting.name for setting in settings for key in setting.changes if changes_inputs(key)}
    for key, name in changed.items():
        if key.partition(".")[0] != "reduction" and key not in ("options.include_base", "base.examples"):
            raise InputError(
                f"{name}: another {key} changes what losses are predicted from, so predictions cannot be compared. "
                "Give data of the tasks (data NAME=SRC)"
            )
