"""Several merges of the same models, formed block by block together: nothing is written, every input is read once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers, Checkpoint
from ..checkpoints.tied_weights import tied_copies
from ..engine.build_plan import check_rule_settings, open_plan, scope_problems
from ..engine.checks import check_step_size, coefficient_notes
from ..engine.executor import Advance, LocalExecutor
from ..engine.inputs import CONSTANT_DAMPING
from ..engine.jobs import Block as PlanBlock, BlockJob, Job, LayerJob, random_inputs, rule_arguments
from ..engine.match_curvature import Layer, layer_option_problems
from ..engine.plan import Plan
from ..engine.statistics import Statistics, compute_mean_curvature, compute_statistics
from ..engine.thread_pool import run_parallel, with_buffers
from ..errors import InputError
from ..notes import Note
from ..recipe import Recipe, Varying, check_options
from ..rules import METHODS
from ..rules.kronecker_matching import LayerHessian
from ..rules.sparse import largest
from ..rules.spec import RANDOM_INPUTS, Granularity
from .settings import Setting, changes_inputs, recipe_with

#: Plans of settings that read other inputs, open at a time.
OPEN_PLANS = 8


@dataclass
class Candidate:
    """One merge: a method with weights (None: the plan's) and options, or a ``model`` that is merged already."""

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
    """The same range of one tensor in every input and in every candidate."""

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
    """One for each candidate, in float32 (float64 where inputs are).

    For a layer with Kronecker curvature, all tensors are matrices [W b] in float64, and ``job`` is its weight's.
    """
    number: int = 0
    """Its number among all blocks, from 0; blocks come in any order."""

    def part_of(self, state: Mapping[str, Tensor]) -> Tensor:
        """The same range of tensors with these names, such as a gradient; 0 for a missing tensor."""
        if isinstance(self.job, LayerJob):
            tensors = self.job.tensors.items()
            parts = [state[n].reshape(-1) if n in state else torch.zeros(info.numel) for n, info in tensors]
            return self.job.join_bias([part.double() for part in parts])
        if self.job.name not in state:
            return torch.zeros(self.stop - self.start, dtype=torch.float64)
        return state[self.job.name].reshape(-1)[self.start : self.stop].double()

    def tensors_of(self, merged: Tensor) -> dict[str, Tensor]:
        """Tensor name → flat values of a candidate, from ``start`` on."""
        return self.job.split_bias(merged) if isinstance(self.job, LayerJob) else {self.job.name: merged}


Visit = Callable[[Block], None]
Masks = dict[str, list[Tensor]]
"""Random masks and numbers of one block, by seed and density; candidates share them."""
KnownStatistics = dict[str, Statistics]
"""Thresholds and measures, by rule and options; candidates that differ in their weights share them."""


def visit_blocks(
    plan: Plan,
    candidates: Sequence[Candidate],
    visit: Visit,
    *,
    threads: int = 1,
    advance: Advance = lambda nbytes: None,
    measured: KnownStatistics | None = None,
) -> None:
    """Call ``visit`` with every block of every candidate, from several threads, in any order.

    ``plan`` says what is read. ``measured`` keeps statistics for further calls with the same plan.
    """
    known: KnownStatistics = {} if measured is None else measured
    runners = [_Runner(plan, candidate, threads, known) for candidate in candidates]
    # Blocks are cut so that every candidate can work with them.
    granularity = coarsest(runner.granularity for runner in runners)
    cut = [replace(job, granularity=granularity) if isinstance(job, BlockJob) else job for job in plan.jobs]

    def work(buffers: Buffers, item: tuple[int, PlanBlock]) -> None:
        number, cut_block = item
        job = cut_block.job
        masks: Masks = {}
        if isinstance(job, LayerJob):
            tensors = job.read(plan)
            merged = [runner.layer(job, tensors, buffers) for runner in runners]
        else:
            assert isinstance(job, BlockJob)
            tensors = job.read(plan, cut_block.start, cut_block.stop, buffers)
            merged = [runner.block(job, cut_block.start, cut_block.stop, tensors, masks, buffers) for runner in runners]
        read = (tensors["base"], tensors["tuned"], tensors.get("prior"))
        more = (tensors.get("curvature") or [], tensors.get("penalty") or [])
        visit(Block(job, cut_block.start, cut_block.stop, *read, *more, merged, number))
        advance(plan.bytes_read(job) * (cut_block.stop - cut_block.start) // max(1, job.info.numel))

    blocks = (one for one in replace(plan, jobs=cut).blocks(plan.block) if one.job.rule is not None)
    run_parallel(enumerate(blocks), with_buffers(work), threads)


def coarsest(granularities: Iterable[Granularity]) -> Granularity:
    """The granularity that suits all rules."""
    return max(granularities, key=["entries", "rows", "tensor"].index, default="entries")


def plan_of(plan: Plan, candidate: Candidate) -> Plan:
    """The plan of a candidate with a method, on the inputs of ``plan``; raises if its weights do not suit the rule."""
    rule = METHODS[candidate.method]
    if rule.fallback is not None:
        raise InputError(
            f"{rule.name} works on whole matrices and cannot be compared block by block. Merge it first, and compare "
            "the result (merged=)."
        )
    options = check_options(rule, candidate.options or {}, candidate.own)
    settings = plan.inputs.settings.changed(candidate.weights, options)
    inputs = replace(plan.inputs, settings=settings, options=options)
    if candidate.damping is not None:
        inputs.damping_is_auto = candidate.damping == "auto"
        inputs.damping = CONSTANT_DAMPING if candidate.damping == "auto" else candidate.damping
    weights = candidate.weights
    if weights is not None and len(weights) != len(inputs.tuned):
        raise InputError(f"{candidate.name}: {len(weights)} weights for {len(inputs.tuned)} models")
    if rule.only_one_model and len(inputs.tuned) != 1:
        raise InputError(f"{rule.name} takes the base and one model, not {len(inputs.tuned)}")
    if "prior" in rule.needs(options) and inputs.prior is None:
        raise InputError(f"{rule.name} needs the curvature of the base, which has none here")
    if plan.kronecker_jobs and rule.layers is None and rule.needs(options) & {"prior", "curvature"}:
        raise InputError(f"{rule.name} takes diagonals, and the curvature of these models is Kronecker")
    layers = {job.name: Layer(job.transposed, job.bias[0] if job.bias else None) for job in plan.kronecker_jobs}
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

    if needs & RANDOM_INPUTS:
        inputs.tied_copies = tied_copies(inputs.template)
    own = Plan(rule, inputs, [other for job in plan.jobs for other in jobs_of(job)], needs | {"base"})
    check_rule_settings(own)
    compute_mean_curvature(own, LocalExecutor())
    plan.inputs.mean_curvature = own.inputs.mean_curvature  # found once for all candidates
    return own


def notes_on(recipe: Recipe, plan: Plan, threads: int = 1) -> list[Note]:
    """Warnings about a merge: steps that are too long, or gradient matching that is task arithmetic."""
    if not recipe.rule.checks or plan.inputs.prior is None:
        return []
    own = plan_of(plan, Candidate(recipe.method, recipe.method, options=recipe.options, own=recipe.own_options))
    executor = LocalExecutor(threads)
    return [*check_step_size(own, executor), *coefficient_notes(recipe, own, executor)]


class _Runner:
    """Forms the blocks of one candidate."""

    granularity: Granularity = "entries"

    def __init__(self, plan: Plan, candidate: Candidate, threads: int, measured: KnownStatistics) -> None:
        self._candidate = candidate
        if (model := candidate.model) is not None:
            shapes = {name: info.shape for name, info in model.tensors.items()}
            wrong = [name for name, info in plan.merged_tensors.items() if shapes.get(name) != info.shape]
            if wrong:
                raise InputError(
                    f"{model.label}: is not a merge of these models: {wrong[0]} is missing or has another shape"
                )
            return
        self._plan = plan_of(plan, candidate)
        rule, options = self._plan.rule, self._plan.inputs.options
        self._jobs = {job.name: job for job in self._plan.block_jobs}
        self.granularity = coarsest(job.granularity for job in self._jobs.values())
        own = rule.name if self._plan.measures or rule.ranks not in (None, largest) else ""
        relevant = options if own else {name: options.get(name) for name in ("density", "scope")}
        key = repr((own, rule.ranks is not None, sorted(relevant.items())))
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
        plan, settings = self._plan, self._plan.inputs.settings.of(job.name)
        own: dict[str, Any] = {**tensors, **self._statistics.inputs_of(job.name)}
        for name in plan.needs & RANDOM_INPUTS:
            key = f"{name} {[settings.options.get(option) for option in ('seed', 'density', 'sample')]}"
            if key not in masks:
                masks[key] = random_inputs(plan, name, job.name, start, stop)
            own[name] = masks[key]
        own = self._jobs[job.name].shaped(start, stop, own)
        merged: Tensor = plan.rule(**rule_arguments(plan.rule, plan, own, settings))
        return merged.reshape(-1) if merged.numel() == stop - start else merged.expand(stop - start)


class SettingPlans:
    """The plan of each setting of a recipe.

    Settings with other weights, options or damping use the recipe's plan. A setting that changes what is read or
    merged, such as ``reduction`` or ``exclude``, has its own plan, which ``reopen`` makes from the setting's recipe.
    """

    def __init__(self, recipe: Recipe, plan: Plan, reopen: Callable[[Recipe], Plan]) -> None:
        self.recipe, self.plan, self._reopen = recipe, plan, reopen
        self._plans: dict[tuple[Any, ...], tuple[Plan, KnownStatistics]] = {(): (plan, {})}
        self._left_out: dict[str, str] = {}

    def candidate(self, setting: Setting, name: str = "") -> Candidate:
        own = recipe_with(self.recipe, setting)
        damping = own.damping if "damping" in dict(setting.changes) else None
        return Candidate(name, setting.method, own.weights, own.options, own.own_options, damping)

    def plan_for(self, setting: Setting) -> tuple[Plan, KnownStatistics]:
        """The plan of a setting, and what is known of its statistics."""
        key = self._key(setting)
        if key not in self._plans:
            others = [other for other in self._plans if other]
            if len(others) >= OPEN_PLANS:
                self._plans.pop(others[0])[0].inputs.close()
            self._plans[key] = self._reopen(recipe_with(self.recipe, replace(setting, changes=key[1:]))), {}
        return self._plans[key]

    @staticmethod
    def _key(setting: Setting) -> tuple[Any, ...]:
        """What distinguishes the plan of one setting from another's; empty for the recipe's plan."""
        changed = [pair for pair in setting.changes if changes_inputs(pair[0])]
        return (setting.method, *changed) if changed else ()

    def check(self, setting: Setting) -> None:
        """Raise InputError if a setting cannot be merged, such as an average whose weights sum to 0."""
        plan_of(self.plan_for(setting)[0], self.candidate(setting))

    def possible(self, settings: Sequence[Setting]) -> list[Setting]:
        """The settings that can be merged; the notes name the others."""
        found = []
        for setting in settings:
            try:
                self.check(setting)
                found.append(setting)
            except InputError as error:
                self._left_out.setdefault(setting.name, str(error))
        if settings and not found:
            raise InputError(f"no setting can be merged: {next(iter(self._left_out.values()))}")
        return found

    def batches(self, settings: Sequence[Setting], size: int) -> Iterator[tuple[Plan, KnownStatistics, list[Setting]]]:
        """Settings in their order, at most ``size`` at once, that have the same plan."""
        for _, group in itertools.groupby(settings, key=self._key):
            every = list(group)
            for first in range(0, len(every), size):
                batch = every[first : first + size]
                yield *self.plan_for(batch[0]), batch

    def notes(self) -> list[str]:
        return [f"{name} is left out: {why}" for name, why in list(self._left_out.items())[:5]]

    def close(self) -> None:
        """Close the files of all plans."""
        for plan, _ in self._plans.values():
            plan.inputs.close()


def open_for_methods(recipe: Recipe, methods: Sequence[str], **allowed: Any) -> Plan:
    """A plan that reads what some methods need, and no more."""
    needs = frozenset[str]().union(*(_needs(recipe, method) for method in methods))
    reads = needs & {"prior", "curvature", "penalty"} | {"base"}
    return open_plan(recipe, reads=reads, needed_by=", ".join(methods), **allowed)


def _needs(recipe: Recipe, method: str) -> frozenset[str]:
    return METHODS[method].needs(recipe.resolved_options if method == recipe.method else {})


def check_prior(recipe: Recipe, methods: Sequence[str], plan: Plan) -> None:
    lacking = [method for method in methods if "prior" in _needs(recipe, method) and plan.inputs.prior is None]
    if lacking:
        raise InputError(
            f"{lacking[0]} needs the curvature of the base: set base.curvature, or put a folder curvature/ into the "
            "base's folder"
        )
