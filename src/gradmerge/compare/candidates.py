"""Several merges of the same models, seen block by block together: nothing is written, every input is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers, Checkpoint
from ..engine.checks.coefficients import coefficient_notes
from ..engine.checks.damping import find_damping
from ..engine.checks.step_size import trust_notes
from ..engine.plan.build import problems_of_layers, problems_of_scope, rehearse
from ..engine.plan.inputs import USUAL_DAMPING
from ..engine.plan.kronecker_layers import joined, parted, pieces_of, read_layer, solve_layer
from ..engine.plan.plan import Job, Plan, Unit, rule_arguments
from ..engine.run.reading import random_inputs, read_block, shaped
from ..engine.run.reduce import Advance
from ..engine.run.statistics import Statistics, find_statistics
from ..engine.thread_pool import run_parallel, with_buffers
from ..errors import InputError
from ..notes import Note
from ..recipe import Recipe, Varying, check_options
from ..rules import METHODS
from ..rules.kronecker_matching import LayerHessian
from ..rules.sparse import largest
from ..rules.spec import Granularity


@dataclass
class Candidate:
    """One merge to look at: a method with weights (None: the plan's) and options, or a ``model`` merged already."""

    name: str
    method: str = ""
    weights: Sequence[Varying] | None = None
    options: Mapping[str, Any] | None = None
    own: Sequence[Mapping[str, Any]] = ()
    """Options of single models."""
    damping: float | Literal["auto"] | None = None
    """δ as a recipe gives it; None: the plan's."""
    model: Checkpoint | None = None


@dataclass(frozen=True)
class Block:
    """The same stretch of one tensor in everything that was read, and in every candidate."""

    job: Job
    start: int
    stop: int
    base: Tensor
    tuned: Sequence[Tensor]
    prior: LayerHessian | None
    curvature: Sequence[LayerHessian]
    penalty: Sequence[LayerHessian | None]
    """P_t of every tuned model, None where it is H_0; empty if it is H_0 for all of them."""
    merged: Sequence[Tensor]
    """One per candidate, in float32 (float64 where inputs are).

    Of a layer with Kronecker curvature all of these are matrices [W b], in float64, and ``job`` is its weight's.
    """
    number: int = 0
    """Its place among all blocks that are handed over, from 0; they come in any order."""

    def part_of(self, state: Mapping[str, Tensor]) -> Tensor:
        """The same stretch of other tensors by these names, such as a gradient; 0 where there are none."""
        parts = []
        for job in pieces_of(self.job):
            whole = state[job.name].reshape(-1) if job.name in state else torch.zeros(job.info.numel)
            parts.append(whole[self.start : self.stop if job is self.job else None].double())
        return parts[0] if self.job.layer is None else joined(self.job, parts)

    def tensors_of(self, merged: Tensor) -> list[tuple[Job, int, int, Tensor]]:
        """What a candidate has in the tensors that are stored: job, start, stop and flat values."""
        if self.job.layer is None:
            return [(self.job, self.start, self.stop, merged)]
        return [(job, 0, job.info.numel, values) for job, values in parted(self.job, merged)]


Visit = Callable[[Block], None]
Masks = dict[str, list[Tensor]]
"""Random masks and numbers of one block, by seed and density: candidates share them."""
KnownStatistics = dict[str, Statistics]
"""Thresholds and measures, by rule and options: they do not depend on weights, and many candidates share them."""


def look_at(
    plan: Plan,
    candidates: Sequence[Candidate],
    visit: Visit,
    *,
    threads: int = 1,
    advance: Advance = lambda nbytes: None,
    measured: KnownStatistics | None = None,
) -> None:
    """Form every block of every candidate and hand it over, from several threads, in any order.

    ``plan`` says what is read. ``measured`` keeps statistics for further looks at the same plan.
    """
    known: KnownStatistics = {} if measured is None else measured
    runners = [_Runner(plan, candidate, threads, known) for candidate in candidates]
    # Blocks are cut so that every candidate can work with them.
    grain = coarsest(runner.grain for runner in runners)
    cut = [job if job.rule is None or job.layer or job.inside else replace(job, grain=grain) for job in plan.jobs]

    def work(buffers: Buffers, item: tuple[int, Unit]) -> None:
        number, unit = item
        job = unit.job
        masks: Masks = {}
        if job.layer is not None:
            tensors = read_layer(plan, job)
            merged = [runner.layer(unit, tensors, buffers) for runner in runners]
        else:
            tensors = read_block(plan, job, unit.start, unit.stop, buffers)
            merged = [runner.block(unit, tensors, masks, buffers) for runner in runners]
        read = (tensors["base"], tensors["tuned"], tensors.get("prior"))
        more = (tensors.get("curvature") or [], tensors.get("penalty") or [])
        visit(Block(job, unit.start, unit.stop, *read, *more, merged, number))
        advance(plan.bytes_read(job) * (unit.stop - unit.start) // max(1, job.info.numel))

    units = (unit for unit in replace(plan, jobs=cut).units() if unit.job.rule is not None)
    run_parallel(enumerate(units), with_buffers(work), threads)


def coarsest(grains: Iterable[Granularity]) -> Granularity:
    """The cut that suits all of these."""
    return max(grains, key=["entries", "rows", "tensor"].index, default="entries")


def plan_of(plan: Plan, candidate: Candidate) -> Plan:
    """The plan of a candidate with a method, on the inputs of ``plan``; raises if its weights do not suit the rule."""
    rule = METHODS[candidate.method]
    if rule.fallback is not None:
        raise InputError(
            f"{rule.name} works on whole matrices and cannot be looked at block by block. Merge it first, and give the "
            "result as --merged."
        )
    options = check_options(rule, candidate.options or {}, candidate.own)
    settings = plan.inputs.settings.changed(candidate.weights, options)
    inputs = replace(plan.inputs, settings=settings, options=options)
    if candidate.damping is not None:
        inputs.damping_is_open = candidate.damping == "auto"
        inputs.damping = USUAL_DAMPING if candidate.damping == "auto" else candidate.damping
    weights = candidate.weights
    if weights is not None and len(weights) != len(inputs.tuned):
        raise InputError(f"{candidate.name}: {len(weights)} weights for {len(inputs.tuned)} models")
    if rule.only_one_model and len(inputs.tuned) != 1:
        raise InputError(f"{rule.name} takes the base and one model, not {len(inputs.tuned)}")
    if "prior" in rule.needs(options) and inputs.prior is None:
        raise InputError(f"{rule.name} needs the curvature of the base, which has none here")
    if plan.layers and rule.layers is None and rule.needs(options) & {"prior", "curvature"}:
        raise InputError(f"{rule.name} takes diagonals, and the curvature of these models is Kronecker")
    layers = {
        job.name: (job.layer.transposed, job.layer.bias.name if job.layer.bias else None)
        for job in plan.layers
        if job.layer
    }
    problems = problems_of_scope(inputs)
    if layers and rule.layers is not None:
        problems += problems_of_layers(candidate.options or {}, inputs, layers)
    if problems:
        raise InputError(problems[0])
    needs = frozenset(rule.needs(options)) - (set() if inputs.penalty else rule.optional & {"penalty"})
    jobs = [
        job if job.rule is None else replace(job, rule=rule, grain=rule.granularity_of(settings.of(job.name).options))
        for job in plan.jobs
    ]
    own = Plan(rule, inputs, jobs, needs | {"base"})
    rehearse(own)
    find_damping(own)
    plan.inputs.mean_curvature = own.inputs.mean_curvature  # found once for all candidates
    return own


def notes_on(recipe: Recipe, plan: Plan, threads: int = 1) -> list[Note]:
    """What is said of a merge before it is made: too long a step, or gradient matching that is task arithmetic."""
    if not recipe.rule.checks or plan.inputs.prior is None:
        return []
    own = plan_of(plan, Candidate(recipe.method, recipe.method, options=recipe.options, own=recipe.own_options))
    return [*trust_notes(own, threads), *coefficient_notes(recipe, own, threads)]


class _Runner:
    """One candidate, ready to form blocks."""

    grain: Granularity = "entries"

    def __init__(self, plan: Plan, candidate: Candidate, threads: int, measured: KnownStatistics) -> None:
        self._candidate = candidate
        if (model := candidate.model) is not None:
            there = {name: info.shape for name, info in model.tensors.items()}
            wrong = [job.name for job in plan.merged if there.get(job.name) != job.info.shape]
            if wrong:
                raise InputError(
                    f"{model.label}: is no merge of these models: {wrong[0]} is missing or has another shape"
                )
            return
        self._plan = plan_of(plan, candidate)
        rule, options = self._plan.rule, self._plan.inputs.options
        self._jobs = {job.name: job for job in self._plan.merged}
        self.grain = coarsest(job.grain for job in self._jobs.values())
        own = rule.name if self._plan.measures or rule.ranks not in (None, largest) else ""
        told = options if own else {name: options.get(name) for name in ("density", "scope")}
        key = repr((own, rule.ranks is not None, sorted(told.items())))
        if key not in measured:
            measured[key] = find_statistics(self._plan, threads)
        self._statistics = measured[key]

    def layer(self, unit: Unit, tensors: Mapping[str, Any], buffers: Buffers) -> Tensor:
        """The matrix [W b] of a layer with Kronecker curvature; rules for entries see its tensors one by one."""
        job = unit.job
        if self._candidate.model is None and self._plan.rule.layers is not None:
            return solve_layer(self._plan, self._plan.rule, tensors, job.name)
        split = [parted(job, matrix) for matrix in (tensors["base"], *tensors["tuned"])]
        parts = []
        for place, piece in enumerate(pieces_of(job)):
            base, *tuned = (matrix[place][1] for matrix in split)
            block = self.block(Unit(0, piece, 0, piece.info.numel), {"base": base, "tuned": tuned}, {}, buffers)
            parts.append(block.double().clone())
        return joined(job, parts)

    def block(self, unit: Unit, tensors: Mapping[str, Any], masks: Masks, buffers: Buffers) -> Tensor:
        candidate, job = self._candidate, unit.job
        if candidate.model is not None:
            block = candidate.model.read(job.name, unit.start, unit.stop, buffers, f"candidate {candidate.name}")
            return block.to(job.compute)
        plan, numbers = self._plan, self._plan.inputs.settings.of(job.name)
        own: dict[str, Any] = {**tensors, **self._statistics.of(job.name)}
        for name in plan.needs & {"kept", "uniform"}:
            key = f"{name} {numbers.options['seed']} {numbers.options['density'] if name == 'kept' else ''}"
            if key not in masks:
                masks[key] = random_inputs(plan, name, job.name, unit.start, unit.stop)
            own[name] = masks[key]
        own = shaped(self._jobs[job.name], unit.start, unit.stop, own)
        merged: Tensor = plan.rule(**rule_arguments(plan.rule, plan, own, numbers))
        return merged.reshape(-1) if merged.numel() == unit.stop - unit.start else merged.expand(unit.stop - unit.start)
