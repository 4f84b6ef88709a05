"""Statistics of whole tensors or models that a rule needs before the first block: thresholds, measures, damping."""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers
from ..progress import NOWHERE, Progress
from ..rules.kronecker_matching import mean_eigenvalue
from ..rules.measures import Measure, Sums
from .executor import CHUNK, Executor, chunks, exact_sum, sample_blocks, whole_tensors
from .jobs import Block, BlockJob, LayerJob, read_models, rule_arguments
from .quantiles import Counts, Quantile, QuantileSearch, bracket_of

if TYPE_CHECKING:
    from .plan import Plan

RUNS, RUN = 512, 2048
"""A bracket for the thresholds of the whole model comes from a sample of so many runs of so many entries."""
TENSOR_RUNS = 32
"""The same for the thresholds of one tensor."""

Thresholds = list[float] | list[list[float]]
"""One for every tuned model, or several for each."""
MeasureValues = dict[str, list[float]]
"""Name of the measure → its numbers."""


@dataclass
class Statistics:
    """Thresholds of |Δ_t| by tensor ("" for the whole model), and what the rule measures by tensor."""

    thresholds: dict[str, Thresholds] = field(default_factory=dict)
    measured: dict[str, MeasureValues] = field(default_factory=dict)

    def inputs_of(self, name: str) -> dict[str, Any]:
        """Return the rule's inputs for one tensor."""
        return {"thresholds": self.thresholds.get(name, self.thresholds.get("")), **self.measured.get(name, {})}


def compute_statistics(plan: Plan, executor: Executor, progress: Progress = NOWHERE) -> Statistics:
    """Compute the statistics that the plan's rule needs.

    NaN and infinity count as the largest magnitudes here; the merge finds and names them.
    """
    result, tensors = Statistics(), whole_tensors(plan.merged_jobs)
    if plan.statistics_read:
        progress.begin("computing statistics", plan.statistics_read)
    if "thresholds" in plan.needs and plan.inputs.options["scope"] == "model":

        def count_all(search: QuantileSearch) -> Counts:
            function = functools.partial(count_magnitudes, search=search)
            total: Counts = executor.reduce(plan, function, chunks(plan, plan.block), progress.advance)
            return total

        result.thresholds[""] = find_thresholds(plan, plan.block_jobs, RUNS, count_all)
    elif "thresholds" in plan.needs:
        result.thresholds = dict(executor.reduce(plan, tensor_thresholds, tensors, progress.advance))
    if measures := plan.measures:
        function = functools.partial(measure_tensor, statistics=result)
        parts = executor.reduce(plan, function, tensors, lambda nbytes: progress.advance(len(measures) * nbytes))
        result.measured = dict(parts)
    return result


def compute_mean_curvature(plan: Plan, executor: Executor, progress: Progress = NOWHERE) -> None:
    """Compute the mean of Σ F_t over all merged entries, if the rule uses it as its damping δ.

    A δ of that size bounds the step where the retain set has no curvature. The plan's inputs keep the mean.
    """
    if plan.inputs.needs_mean_curvature(plan.rule):
        progress.begin("computing the damping", plan.merged_read)
        sums = executor.reduce(plan, curvature_sum, chunks(plan), progress.advance)
        entries = sum(info.numel for info in plan.merged_tensors.values())
        plan.inputs.mean_curvature = exact_sum(sums) / max(1, entries)


def curvature_sum(plan: Plan, block: Block, buffers: Buffers) -> list[float]:
    """Return Σ F_t over a block, or over a layer with Kronecker curvature."""
    job, sources = block.job, plan.inputs.curvature
    if isinstance(job, LayerJob):
        means = (mean_eigenvalue([1.0], [job.read_hessian(source)], job.numel) for source in sources)
        return [math.fsum(mean * job.numel for mean in means)]
    assert isinstance(job, BlockJob)
    parts = []
    for source in sources:
        values = source.read(job.name, block.start, block.stop, buffers, "curvature", torch.float64)
        parts.append(float(values.sum()) if values.dim() else float(values) * (block.stop - block.start))
    return [math.fsum(parts)]


def find_thresholds(
    plan: Plan, jobs: Sequence[BlockJob], runs: int, count_all: Callable[[QuantileSearch], Counts]
) -> Thresholds:
    """Return every tuned model's thresholds over some tensors: entries of certain ranks in |Δ_t|.

    A bracket comes from a sample of ``runs``. Then ``count_all`` usually makes one pass over all entries.
    """
    assert plan.rule.ranks is not None
    name = jobs[0].name if jobs else ""
    models, options = len(plan.inputs.tuned_of(name)), plan.inputs.settings.of(name).options
    total = sum(job.info.numel for job in jobs)
    dtype = torch.float64 if any(job.compute == torch.float64 for job in jobs) else torch.float32
    buffers = Buffers()
    parts = [magnitudes(plan, block, buffers) for block in sample_blocks(jobs, RUN, total // runs)]
    samples = list(zip(*parts, strict=True)) or [()] * models
    search = QuantileSearch(
        [Quantile(k, dtype, bracket_of(k / total, sample) if sample else None) for k in ranks]
        for sample, ranks in zip(samples, plan.rule.ranks(total, models, options), strict=True)
    )
    while search.unknown:
        search.narrow(count_all(search))
    values = search.values
    return [some[0] for some in values] if all(len(some) == 1 for some in values) else values


def tensor_thresholds(plan: Plan, block: Block, buffers: Buffers) -> list[tuple[str, Thresholds]]:
    """Return the thresholds of one tensor."""
    job = block.job
    assert isinstance(job, BlockJob)

    def count_all(search: QuantileSearch) -> Counts:
        parts = (count_magnitudes(plan, part, buffers, search=search) for part in job.split(plan.block))
        return functools.reduce(operator.iadd, parts)

    return [(job.name, find_thresholds(plan, [job], TENSOR_RUNS, count_all))]


def count_magnitudes(plan: Plan, block: Block, buffers: Buffers, *, search: QuantileSearch) -> Counts:
    """Return what one pass of a search counts in a block."""
    return search.count(magnitudes(plan, block, buffers))


def magnitudes(plan: Plan, block: Block, buffers: Buffers) -> list[np.ndarray]:
    """Return |Δ_t| of every tuned model in a block."""
    job = block.job
    assert isinstance(job, BlockJob)
    base, tuned = read_models(plan, job.name, job.compute, block.start, block.stop, buffers)
    assert base is not None
    return [(model - base).abs_().numpy() for model in tuned]


def measure_tensor(
    plan: Plan, block: Block, buffers: Buffers, *, statistics: Statistics
) -> list[tuple[str, MeasureValues]]:
    """Return the measures of one tensor, whose thresholds are known."""
    job = block.job
    assert isinstance(job, BlockJob)
    rule, settings, known = job.rule, plan.inputs.settings.of(job.name), statistics.inputs_of(job.name)

    def blocks() -> Iterator[dict[str, Any]]:
        for part in job.split(job.block_size(CHUNK)):
            tensors = job.read(plan, part.start, part.stop, buffers) | known
            yield rule_arguments(rule, plan, job.shaped(part.start, part.stop, tensors), settings)

    numbers = rule_arguments(rule, plan, known, settings)
    return [
        (job.name, compute_measures(rule.measures_of(settings.options), blocks, numbers, job.info.numel, job.compute))
    ]


def compute_measures(
    measures: Mapping[str, Measure],
    blocks: Callable[[], Iterator[dict[str, Any]]],
    numbers: Mapping[str, Any],
    entries: int,
    dtype: torch.dtype,
) -> MeasureValues:
    """Return every measure of a tensor, each of which may use those before it.

    ``blocks`` makes one pass over the arguments of the rule for the tensor's blocks. ``numbers`` are the arguments that
    do not depend on the block.
    """
    result: MeasureValues = {}
    for name, rule_measure in measures.items():
        if isinstance(rule_measure, Sums):
            parts = [[_total(terms) for terms in _call(rule_measure.of, block | result)] for block in blocks()]
            result[name] = [exact_sum(column) for column in zip(*parts, strict=True)]
            continue
        ranks = _call(rule_measure.ranks, {**numbers, **result, "entries": entries})
        search = QuantileSearch([[Quantile(k, dtype) for k in ranks]])
        while search.unknown:
            values = (_call(rule_measure.of, block | result).reshape(-1).to(dtype).abs().numpy() for block in blocks())
            search.narrow(functools.reduce(operator.iadd, (search.count([some]) for some in values)))
        (result[name],) = search.values
    return result


def _total(terms: Tensor | float) -> float:
    return float(terms.sum(dtype=torch.float64)) if isinstance(terms, Tensor) else terms


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return function(**{name: arguments[name] for name in _parameters(function)})


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
