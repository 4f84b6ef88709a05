"""Compute several merges of the same models together, block by block.

Each input is read once, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers, Checkpoint
from ..checkpoints.tied_weights import tied_copies
from ..engine.checks import check_step_size, coefficient_notes
from ..engine.executor import Advance, LocalExecutor, run_parallel
from ..engine.inputs import CONSTANT_DAMPING
from ..engine.jobs import Block, BlockJob, Job, LayerJob, random_inputs, rule_arguments
from ..engine.match_curvature import SolvedLayer, layer_option_problems
from ..engine.plan import Plan, check_rule_settings, open_plan, scope_problems
from ..engine.statistics import Statistics, compute_mean_curvature, compute_statistics
from ..errors import InputError
from ..notes import Note
from ..recipe import Recipe
from ..rules import METHODS
from ..rules.kronecker_matching import LayerHessian
from ..rules.sparse import largest
from ..rules.spec import RANDOM_INPUTS, Granularity

Candidate = Plan | Checkpoint
"""A merge to compute, from :func:`derive_plan`; or a model that is merged already."""


@dataclass(frozen=True)
class CandidateBlock:
    """One block of a tensor: the same range in every input and in every candidate."""

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
    """The merged block of each candidate, in float32 (float64 where inputs are).

    For a layer with Kronecker curvature, all tensors are matrices [W b] in float64, and ``job`` is its weight's.
    """
    number: int = 0
    """Its number among all blocks, from 0; blocks come in any order."""

    def part_of(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the same range of other tensors, such as a gradient; 0 for a missing tensor."""
        if isinstance(self.job, LayerJob):
            tensors = self.job.tensors.items()
            parts = [state[n].reshape(-1) if n in state else torch.zeros(info.numel) for n, info in tensors]
            return self.job.join_bias([part.double() for part in parts])
        if self.job.name not in state:
            return torch.zeros(self.stop - self.start, dtype=torch.float64)
        return state[self.job.name].reshape(-1)[self.start : self.stop].double()

    def tensors_of(self, merged: Tensor) -> dict[str, Tensor]:
        """Return tensor name → flat values of a candidate, from ``start`` on."""
        return self.job.split_bias(merged) if isinstance(self.job, LayerJob) else {self.job.name: merged}


Visit = Callable[[CandidateBlock], None]
Masks = dict[str, list[Tensor]]
"""Input name and seed → random masks or numbers of one block, which candidates share."""
KnownStatistics = dict[str, Statistics]
"""Rule and options → thresholds and measures. Candidates that differ only in their weights share them."""


def visit_blocks(
    plan: Plan,
    candidates: Sequence[Candidate],
    visit: Visit,
    *,
    threads: int = 1,
    advance: Advance = lambda nbytes: None,
    known: KnownStatistics | None = None,
) -> None:
    """Call ``visit`` with every block of every candidate, from several threads, in any order.

    ``plan`` says what is read. ``known`` keeps statistics for further calls with the same plan.
    """
    statistics: KnownStatistics = {} if known is None else known
    runners = [_Runner(plan, candidate, threads, statistics) for candidate in candidates]
    # Blocks are cut so that every candidate can work with them.
    granularity = coarsest(runner.granularity for runner in runners)
    jobs = [replace(job, granularity=granularity) if isinstance(job, BlockJob) else job for job in plan.merged_jobs]

    def work(block: Block, buffers: Buffers) -> None:
        job, start, stop = block.job, block.start, block.stop
        masks: Masks = {}
        if isinstance(job, LayerJob):
            tensors = job.read(plan)
            merged = [runner.layer(job, tensors, buffers) for runner in runners]
        else:
            assert isinstance(job, BlockJob)
            tensors = job.read(plan, start, stop, buffers)
            merged = [runner.block(job, start, stop, tensors, masks, buffers) for runner in runners]
        curvature, penalty = tensors.get("curvature") or [], tensors.get("penalty") or []
        models = tensors["base"], tensors["tuned"]
        visit(CandidateBlock(job, start, stop, *models, tensors.get("prior"), curvature, penalty, merged, block.number))
        advance(job.bytes_read(plan) * (stop - start) // max(1, job.info.numel))

    run_parallel(plan.blocks(plan.block, jobs), work, threads)


def coarsest(granularities: Iterable[Granularity]) -> Granularity:
    """Return the granularity that suits all rules."""
    return max(granularities, key=["entries", "rows", "tensor"].index, default="entries")


def derive_plan(plan: Plan, recipe: Recipe) -> Plan:
    """Return the plan of another recipe that shares the open inputs of ``plan``. Raise if its rule cannot use them.

    It computes the mean curvature if the rule needs it, and keeps it in ``plan`` for other recipes."""
    rule = recipe.rule
    if rule.fallback is not None:
        raise InputError(
            f"{rule.name} works on whole matrices and cannot be compared block by block. Merge it first, and compare "
            "the result (merged=)."
        )
    options, automatic = recipe.resolved_options, recipe.damping == "auto"
    settings = plan.inputs.settings.changed(recipe.weights, options)
    inputs = replace(plan.inputs, settings=settings, options=options, damping_is_auto=automatic)
    inputs.damping = CONSTANT_DAMPING if recipe.damping == "auto" else recipe.damping
    if rule.only_one_model and len(inputs.tuned) != 1:
        raise InputError(f"{rule.name} takes the base and one model, not {len(inputs.tuned)}")
    if "prior" in rule.needs(options) and inputs.prior is None:
        raise InputError(
            f"{rule.name} needs the curvature of the base: set base.curvature, or put a folder curvature/ into the "
            "base's folder"
        )
    if plan.layer_jobs and rule.layers is None and rule.needs(options) & {"prior", "curvature"}:
        raise InputError(f"{rule.name} takes diagonals, and the curvature of these models is Kronecker")
    layers = {job.name: SolvedLayer(job.transposed, job.bias[0] if job.bias else None) for job in plan.layer_jobs}
    problems = scope_problems(inputs)
    if layers and rule.layers is not None:
        problems += layer_option_problems(recipe.options, inputs, layers)
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

    if needs & RANDOM_INPUTS:
        inputs.tied_copies = tied_copies(inputs.template)
    derived = Plan(plan.recipe, rule, inputs, [other for job in plan.jobs for other in jobs_of(job)], needs | {"base"})
    check_rule_settings(derived)
    compute_mean_curvature(derived, LocalExecutor())
    plan.inputs.mean_curvature = derived.inputs.mean_curvature
    return derived


def notes_on(recipe: Recipe, plan: Plan, threads: int = 1) -> list[Note]:
    """Return warnings about a merge: steps that are too long, or gradient matching that equals task arithmetic."""
    if not recipe.rule.checks or plan.inputs.prior is None:
        return []
    derived = derive_plan(plan, recipe)
    executor = LocalExecutor(threads)
    return [*check_step_size(derived, executor), *coefficient_notes(derived, executor)]


class _Runner:
    """Computes the blocks of one candidate."""

    def __init__(self, plan: Plan, candidate: Candidate, threads: int, known: KnownStatistics) -> None:
        self._candidate, self.granularity = candidate, coarsest(())
        if isinstance(candidate, Checkpoint):
            shapes = {name: info.shape for name, info in candidate.tensors.items()}
            wrong = [name for name, info in plan.merged_tensors.items() if shapes.get(name) != info.shape]
            if wrong:
                raise InputError(
                    f"{candidate.label}: is not a merge of these models: {wrong[0]} is missing or has another shape"
                )
            return
        rule, options = candidate.rule, candidate.inputs.options
        self._jobs = {job.name: job for job in candidate.block_jobs}
        self.granularity = coarsest(job.granularity for job in self._jobs.values())
        own = rule.name if candidate.measures or rule.ranks not in (None, largest) else ""
        relevant = options if own else {name: options.get(name) for name in ("density", "scope")}
        key = repr((own, rule.ranks is not None, sorted(relevant.items())))
        if key not in known:
            known[key] = compute_statistics(candidate, LocalExecutor(threads))
        self._statistics = known[key]

    def layer(self, job: LayerJob, tensors: Mapping[str, Any], buffers: Buffers) -> Tensor:
        """Return the merged matrix [W b] of a layer with Kronecker curvature.

        A rule without a form for layers merges the weight and the bias separately."""
        candidate = self._candidate
        if isinstance(candidate, Plan) and candidate.rule.layers is not None:
            return replace(job, rule=candidate.rule).solve(candidate, tensors)
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
        plan = self._candidate
        if isinstance(plan, Checkpoint):
            return plan.read(job.name, start, stop, buffers, f"candidate {id(plan)}").to(job.compute)
        settings = plan.inputs.settings.of(job.name)
        own: dict[str, Any] = {**tensors, **self._statistics.inputs_of(job.name)}
        for name in plan.needs & RANDOM_INPUTS:
            key = f"{name} {[settings.options.get(option) for option in ('seed', 'density', 'sample')]}"
            if key not in masks:
                masks[key] = random_inputs(plan, name, job.name, start, stop)
            own[name] = masks[key]
        own = self._jobs[job.name].shaped(start, stop, own)
        merged: Tensor = plan.rule(**rule_arguments(plan.rule, plan, own, settings))
        return merged.reshape(-1) if merged.numel() == stop - start else merged.expand(stop - start)


def open_for_methods(recipe: Recipe, methods: Sequence[str], **reading: Any) -> Plan:
    """Open a plan that reads only what some methods need."""
    needs = frozenset[str]()
    for method in methods:
        needs |= METHODS[method].needs(recipe.resolved_options if method == recipe.method else {})
    reads = needs & {"prior", "curvature", "penalty"} | {"base"}
    return open_plan(recipe, reads=reads, needed_by=", ".join(methods), **reading)
