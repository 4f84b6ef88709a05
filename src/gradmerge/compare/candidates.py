"""Several merges of the same models, seen block by block together: nothing is written, every input is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers, Checkpoint
from ..checkpoints.tied_weights import tied_copies
from ..engine.build_plan import dry_check_rule, scope_problems
from ..engine.checks import check_step_size, coefficient_notes
from ..engine.executor import Advance, LocalExecutor
from ..engine.inputs import CONSTANT_DAMPING
from ..engine.jobs import Block as PlanBlock, BlockJob, Job, LayerJob, random_inputs, rule_arguments
from ..engine.match_curvature import Layer, layer_option_problems
from ..engine.plan import Plan
from ..engine.statistics import Statistics, compute_statistics, find_damping
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
        if isinstance(self.job, LayerJob):
            tensors = self.job.tensors.items()
            parts = [state[n].reshape(-1) if n in state else torch.zeros(info.numel) for n, info in tensors]
            return self.job.join_bias([part.double() for part in parts])
        if self.job.name not in state:
            return torch.zeros(self.stop - self.start, dtype=torch.float64)
        return state[self.job.name].reshape(-1)[self.start : self.stop].double()

    def tensors_of(self, merged: Tensor) -> dict[str, Tensor]:
        """The flat values of a candidate by tensor of the result, from ``start`` on."""
        return self.job.split_bias(merged) if isinstance(self.job, LayerJob) else {self.job.name: merged}


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
    cut = [replace(job, granularity=grain) if isinstance(job, BlockJob) else job for job in plan.jobs]

    def work(buffers: Buffers, item: tuple[int, PlanBlock]) -> None:
        number, unit = item
        job = unit.job
        masks: Masks = {}
        if isinstance(job, LayerJob):
            tensors = job.read(plan)
            merged = [runner.layer(job, tensors, buffers) for runner in runners]
        else:
            assert isinstance(job, BlockJob)
            tensors = job.read(plan, unit.start, unit.stop, buffers)
            merged = [runner.block(job, unit.start, unit.stop, tensors, masks, buffers) for runner in runners]
        read = (tensors["base"], tensors["tuned"], tensors.get("prior"))
        more = (tensors.get("curvature") or [], tensors.get("penalty") or [])
        visit(Block(job, unit.start, unit.stop, *read, *more, merged, number))
        advance(plan.bytes_read(job) * (unit.stop - unit.start) // max(1, job.info.numel))

    units = (unit for unit in replace(plan, jobs=cut).blocks(plan.block) if unit.job.rule is not None)
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
        inputs.damping = CONSTANT_DAMPING if candidate.damping == "auto" else candidate.damping
    weights = candidate.weights
    if weights is not None and len(weights) != len(inputs.tuned):
        raise InputError(f"{candidate.name}: {len(weights)} weights for {len(inputs.tuned)} models")
    if rule.only_one_model and len(inputs.tuned) != 1:
        raise InputError(f"{rule.name} takes the base and one model, not {len(inputs.tuned)}")
    if "prior" in rule.needs(options) and inputs.prior is None:
        raise InputError(f"{rule.name} needs the curvature of the base, which has none here")
    if plan.layers and rule.layers is None and rule.needs(options) & {"prior", "curvature"}:
        raise InputError(f"{rule.name} takes diagonals, and the curvature of these models is Kronecker")
    layers = {job.name: Layer(job.transposed, job.bias[0] if job.bias else None) for job in plan.layers}
    problems = scope_problems(inputs)
    if layers and rule.layers is not None:
        problems += layer_option_problems(candidate.options or {}, inputs, layers)
    if problems:
        raise InputError(problems[0])
    needs = frozenset(rule.needs(options)) - (set() if inputs.penalty else rule.optional & {"penalty"})

    def jobs_of(job: Job) -> list[Job]:
        if job.rule is None:
            return [job]
        if isinstance(job, LayerJob) and rule.layers is not None:
            return [replace(job, rule=rule)]
        granularity = rule.granularity_of(settings.of(job.name).options)
        return [
            BlockJob(name, info, rule=rule, compute=job.compute, granularity=granularity)
            for name, info in job.tensors.items()
        ]

    if needs & {"kept", "uniform"}:
        inputs.tied_copies = tied_copies(inputs.template)
    own = Plan(rule, inputs, [other for job in plan.jobs for other in jobs_of(job)], needs | {"base"})
    dry_check_rule(own)
    find_damping(own, LocalExecutor())
    plan.inputs.mean_curvature = own.inputs.mean_curvature  # found once for all candidates
    return own


def notes_on(recipe: Recipe, plan: Plan, threads: int = 1) -> list[Note]:
    """What is said of a merge before it is made: too long a step, or gradient matching that is task arithmetic."""
    if not recipe.rule.checks or plan.inputs.prior is None:
        return []
    own = plan_of(plan, Candidate(recipe.method, recipe.method, options=recipe.options, own=recipe.own_options))
    executor = LocalExecutor(threads)
    return [*check_step_size(own, executor), *coefficient_notes(recipe, own, executor)]


class _Runner:
    """One candidate, ready to form blocks."""

    grain: Granularity = "entries"

    def __init__(self, plan: Plan, candidate: Candidate, threads: int, measured: KnownStatistics) -> None:
        self._candidate = candidate
        if (model := candidate.model) is not None:
            there = {name: info.shape for name, info in model.tensors.items()}
            wrong = [name for name, info in plan.merged_tensors.items() if there.get(name) != info.shape]
            if wrong:
                raise InputError(
                    f"{model.label}: is no merge of these models: {wrong[0]} is missing or has another shape"
                )
            return
        self._plan = plan_of(plan, candidate)
        rule, options = self._plan.rule, self._plan.inputs.options
        self._jobs = {job.name: job for job in self._plan.block_jobs}
        self.grain = coarsest(job.granularity for job in self._jobs.values())
        own = rule.name if self._plan.measures or rule.ranks not in (None, largest) else ""
        told = options if own else {name: options.get(name) for name in ("density", "scope")}
        key = repr((own, rule.ranks is not None, sorted(told.items())))
        if key not in measured:
            measured[key] = compute_statistics(self._plan, LocalExecutor(threads))
        self._statistics = measured[key]

    def layer(self, job: LayerJob, tensors: Mapping[str, Any], buffers: Buffers) -> Tensor:
        """The matrix [W b] of a layer with Kronecker curvature; rules for entries see its tensors one by one."""
        if self._candidate.model is None and self._plan.rule.layers is not None:
            return replace(job, rule=self._plan.rule).solve(self._plan, tensors)
        split = [job.split_bias(matrix) for matrix in (tensors["base"], *tensors["tuned"])]
        parts = []
        for name, info in job.tensors.items():
            base, *tuned = (values[name] for values in split)
            piece = BlockJob(name, info, rule=job.rule, compute=job.compute)
            block = self.block(piece, 0, info.numel, {"base": base, "tuned": tuned}, {}, buffers)
            parts.append(block.double().clone())
        return job.join_bias(parts)

    def block(
        self, job: BlockJob, start: int, stop: int, tensors: Mapping[str, Any], masks: Masks, buffers: Buffers
    ) -> Tensor:
        candidate = self._candidate
        if candidate.model is not None:
            block = candidate.model.read(job.name, start, stop, buffers, f"candidate {candidate.name}")
            return block.to(job.compute)
        plan, numbers = self._plan, self._plan.inputs.settings.of(job.name)
        own: dict[str, Any] = {**tensors, **self._statistics.inputs_of(job.name)}
        for name in plan.needs & {"kept", "uniform"}:
            key = f"{name} {numbers.options['seed']} {numbers.options['density'] if name == 'kept' else ''}"
            if key not in masks:
                masks[key] = random_inputs(plan, name, job.name, start, stop)
            own[name] = masks[key]
        own = self._jobs[job.name].shaped(start, stop, own)
        merged: Tensor = plan.rule(**rule_arguments(plan.rule, plan, own, numbers))
        return merged.reshape(-1) if merged.numel() == stop - start else merged.expand(stop - start)
