"""Statistics of whole tensors or models that a rule needs before the first block: thresholds, measures, damping."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoints.checkpoint import Buffers
from ..rules.kronecker_matching import mean_eigenvalue
from ..rules.measures import Measure, Sums
from .executor import CHUNK, Advance, Executor, add_up, chunks, exact_sum, ignore, whole_tensors
from .jobs import Block, BlockJob, LayerJob, rule_arguments
from .plan import Plan
from .quantiles import Counts, Quantile, bracket_of
from .thread_pool import one_thread_each

RUNS, RUN = 512, 2048
"""A bracket for the thresholds of the whole model comes from a sample of so many runs of so many entries."""
TENSOR_RUNS = 32
"""The same for the thresholds of one tensor."""

Thresholds = list[float] | list[list[float]]
"""One for every tuned model, or several for each."""
Measured = dict[str, list[float]]
"""Name of the measure → its numbers."""


@dataclass
class Statistics:
    """Thresholds of |Δ_t| by tensor ("" for the whole model), and what the rule measures by tensor."""

    thresholds: dict[str, Thresholds] = field(default_factory=dict)
    measured: dict[str, Measured] = field(default_factory=dict)

    def inputs_of(self, name: str) -> dict[str, Any]:
        """Return the rule's inputs for one tensor."""
        return {"thresholds": self.thresholds.get(name, self.thresholds.get("")), **self.measured.get(name, {})}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compute_statistics(plan: Plan, executor: Executor, advance: Advance = ignore) -> Statistics:
    """Compute the statistics that the plan's rule needs.

    NaN and infinity count as the largest magnitudes here; the merge finds and names them.
    """
    result = Statistics()
    if "thresholds" in plan.needs:
        if plan.inputs.options["scope"] == "model":
            result.thresholds[""] = model_thresholds(plan, executor, advance)
        else:
            result.thresholds = dict(executor.reduce(plan, tensor_thresholds, whole_tensors(plan.merged), advance))
    if measures := plan.measures:
        function = functools.partial(measure_tensor, statistics=result)
        result.measured = dict(
            executor.reduce(plan, function, whole_tensors(plan.merged), lambda nbytes: advance(len(measures) * nbytes))
        )
    return result


def find_damping(plan: Plan, executor: Executor, advance: Advance = ignore) -> None:
    """Set the mean curvature of the plan's inputs, Σ F_t over all merged entries / entries, if the rule needs it.

    A δ of that size bounds the step where the retain set has no curvature.
    """
    if plan.inputs.lacks_damping(plan.rule):
        sums = executor.reduce(plan, curvature_sum, chunks(plan), advance)
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
        values = job.read_curvature(source, block.start, block.stop, buffers, "curvature", torch.float64)
        parts.append(float(values.sum()) if values.dim() else float(values) * (block.stop - block.start))
    return [math.fsum(parts)]


def model_thresholds(plan: Plan, executor: Executor, advance: Advance) -> Thresholds:
    """Return the thresholds over all merged tensors: a bracket from a sample, then usually one counting pass."""
    with one_thread_each():
        search = ThresholdSearch(plan, plan.block_jobs, RUNS)
    while search.thresholds is None:
        function = functools.partial(count_magnitudes, search=search)
        search.end_pass(executor.reduce(plan, function, chunks(plan, plan.block), advance))
        advance = ignore  # the total is that of one pass
    return search.thresholds


def tensor_thresholds(plan: Plan, block: Block, buffers: Buffers) -> list[tuple[str, Thresholds]]:
    """Return the thresholds of one tensor."""
    job = block.job
    assert isinstance(job, BlockJob)
    search = ThresholdSearch(plan, [job], TENSOR_RUNS)
    while search.thresholds is None:
        starts = range(0, job.info.numel, plan.block)
        parts = (Block(-1, job, start, min(start + plan.block, job.info.numel)) for start in starts)
        search.end_pass(add_up(count_magnitudes(plan, part, buffers, search=search) for part in parts))
    return [(job.name, search.thresholds)]


class QuantileCounts(list[Counts]):
    """The counts of every quantile of a search. ``+=`` adds those of other blocks."""

    def __iadd__(self, other: Iterable[Counts]) -> QuantileCounts:  # type: ignore[override,misc]
        for counts, more in zip(self, other, strict=True):
            counts += more
        return self


class ThresholdSearch:
    """The search for every tuned model's thresholds: entries of certain ranks in |Δ_t| over some tensors."""

    def __init__(self, plan: Plan, jobs: Sequence[BlockJob], runs: int) -> None:
        assert plan.rule.ranks is not None
        name = jobs[0].name if jobs else ""
        models, options = len(plan.inputs.tuned_of(name)), plan.inputs.settings.of(name).options
        total = sum(job.info.numel for job in jobs)
        dtype = torch.float64 if any(job.compute == torch.float64 for job in jobs) else torch.float32
        self.quantiles: list[list[Quantile]] = []
        whole = total <= runs * RUN
        samples = sample_magnitudes(plan, jobs, total, None if whole else runs)
        for sample, ranks in zip(samples, plan.rule.ranks(total, models, options), strict=True):
            brackets = [None if whole else bracket_of(k / total, sample) for k in ranks]
            self.quantiles.append([Quantile(k, dtype, bracket) for k, bracket in zip(ranks, brackets, strict=True)])
            if whole:
                ordered = np.sort(np.concatenate(sample)) if total else np.zeros(1)  # NaN comes last, as the largest
                for quantile in self.quantiles[-1]:
                    if quantile.value is None:
                        value = float(ordered[len(ordered) - quantile.k])
                        quantile.value = math.inf if math.isnan(value) else value

    @property
    def open(self) -> list[tuple[int, Quantile]]:
        """The quantiles that are not known yet, with the numbers of their models."""
        return [(model, q) for model, some in enumerate(self.quantiles) for q in some if q.value is None]

    def end_pass(self, counts: Sequence[Counts]) -> None:
        """Use the counts of a pass over all blocks."""
        for (_, quantile), some in zip(self.open, counts, strict=True):
            quantile.narrow(some)

    @property
    def thresholds(self) -> Thresholds | None:
        """The thresholds, or None while some are not known."""
        if self.open:
            return None
        values = [[quantile.value or 0.0 for quantile in some] for some in self.quantiles]
        return [some[0] for some in values] if all(len(some) == 1 for some in values) else values


def count_magnitudes(plan: Plan, block: Block, buffers: Buffers, *, search: ThresholdSearch) -> QuantileCounts:
    """Return what one pass of a search counts in a block."""
    magnitudes = block_magnitudes(plan, block, buffers)
    return QuantileCounts(quantile.count(magnitudes[model]) for model, quantile in search.open)


def block_magnitudes(plan: Plan, block: Block, buffers: Buffers) -> list[np.ndarray]:
    """Return |Δ_t| of every tuned model in a block."""
    job = block.job
    assert isinstance(job, BlockJob)
    base, tuned = job.read_models(plan, block.start, block.stop, buffers)
    assert base is not None
    return [(model - base).abs_().numpy() for model in tuned]


def sample_magnitudes(plan: Plan, jobs: Sequence[BlockJob], total: int, runs: int | None) -> list[list[np.ndarray]]:
    """Return |Δ_t| of every tuned model in ``runs`` short runs at even distances over some tensors.

    With None, the runs are all entries.
    """
    samples: list[list[np.ndarray]] = [[] for _ in plan.inputs.tuned_of(jobs[0].name if jobs else "")]
    buffers, position, offset = Buffers(), 0, 0
    for job in jobs:
        while position < offset + job.info.numel:
            start = position - offset
            block = Block(-1, job, start, min(start + RUN, job.info.numel))
            for sample, magnitudes in zip(samples, block_magnitudes(plan, block, buffers), strict=True):
                sample.append(magnitudes)
            position += block.stop - start if runs is None else total // runs
        offset += job.info.numel
    return samples


def measure_tensor(plan: Plan, block: Block, buffers: Buffers, *, statistics: Statistics) -> list[tuple[str, Measured]]:
    """Return the measures of one tensor, whose thresholds are known."""
    job = block.job
    assert isinstance(job, BlockJob)
    rule, settings, known = job.rule, plan.inputs.settings.of(job.name), statistics.inputs_of(job.name)

    def blocks() -> Iterator[dict[str, Any]]:
        step = job.step(CHUNK)
        for start in range(0, max(job.info.numel, 1), step):
            stop = min(start + step, job.info.numel)
            tensors = job.read(plan, start, stop, buffers) | known
            yield rule_arguments(rule, plan, job.shaped(start, stop, tensors), settings)

    numbers = rule_arguments(rule, plan, known, settings)
    return [(job.name, measure(rule.measures_of(settings.options), blocks, numbers, job.info.numel, job.compute))]


def measure(
    measures: Mapping[str, Measure],
    blocks: Callable[[], Iterator[dict[str, Any]]],
    numbers: Mapping[str, Any],
    entries: int,
    dtype: torch.dtype,
) -> Measured:
    """Return every measure of a tensor, each of which may use those before it.

    ``blocks`` makes one pass over the arguments of the rule for the tensor's blocks. ``numbers`` are the arguments that
    do not depend on the block.
    """
    result: Measured = {}
    for name, rule_measure in measures.items():
        if isinstance(rule_measure, Sums):
            parts = [[_total(terms) for terms in _call(rule_measure.of, block | result)] for block in blocks()]
            result[name] = [exact_sum(column) for column in zip(*parts, strict=True)]
            continue
        quantiles = [Quantile(k, dtype) for k in _call(rule_measure.ranks, {**numbers, **result, "entries": entries})]
        while left := [quantile for quantile in quantiles if quantile.value is None]:
            values = (_call(rule_measure.of, block | result).reshape(-1).to(dtype).abs().numpy() for block in blocks())
            counts = add_up(QuantileCounts(quantile.count(some) for quantile in left) for some in values)
            for quantile, some in zip(left, counts, strict=True):
                quantile.narrow(some)
        result[name] = [quantile.value for quantile in quantiles if quantile.value is not None]
    return result


def _total(terms: Tensor | float) -> float:
    return float(terms.sum(dtype=torch.float64)) if isinstance(terms, Tensor) else terms


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return function(**{name: arguments[name] for name in _parameters(function)})


@functools.cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
