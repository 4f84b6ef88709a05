"""What a rule must know of whole tensors or models before the first block: thresholds, and measures of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.model import Buffers
from .bracket import Bracket
from .measuring import Advance, measure
from .plan import Job, Plan
from .reading import read_models
from .selection import Guess, Selection
from .spreading import Run, Spread, chunks, here, whole
from .workers import one_thread_each, run_parallel, with_buffers

#: Thresholds over more entries than this are first guessed from a sample of this many runs of this many entries.
SAMPLE_FROM = 1 << 24
SAMPLE_RUNS, SAMPLE_RUN = 512, 2048
#: The same for the thresholds of a single tensor.
TENSOR_RUNS, TENSOR_RUN = 32, 2048
#: If this many parts of the sample have the same threshold, it is probably that of the whole.
SAMPLE_PARTS = 4


Thresholds = list[float] | list[list[float]]
"""One for every tuned model, or several for each."""


@dataclass
class Statistics:
    """Thresholds of the magnitude of Δ_t by tensor ("" for the whole model), and by tensor what the rule measures."""

    thresholds: dict[str, Thresholds] = field(default_factory=dict)
    measured: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Any]:
        """The inputs of a rule for one tensor."""
        return {"thresholds": self.thresholds.get(name, self.thresholds.get("")), **self.measured.get(name, {})}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Statistics:
        return cls(value["thresholds"], {name: {**found} for name, found in value["measured"].items()})


class Counting:
    """What one pass of a search counts, or a part of a pass: counts of parts are added up."""

    def __init__(self, models: Sequence[int], selections: Sequence[Selection]) -> None:
        self._models, self._selections = models, selections
        self.counts: list[Any] = [0] * len(selections)
        self._lock = threading.Lock()

    def count(self, base: Tensor, tuned: list[Tensor]) -> None:
        """Take a block into account; every block once in a pass, in any order and on any thread."""
        for index, (model, selection) in enumerate(zip(self._models, self._selections, strict=True)):
            if selection.value is None:
                counts = selection.count((tuned[model] - base).reshape(-1))
                with self._lock:
                    self.counts[index] = self.counts[index] + counts


class ThresholdSearch:
    """The search for every tuned model's thresholds: entries of certain ranks in |Δ|, over some tensors.

    It takes passes over all of the tensors. The first may be a merge with ``guess`` for thresholds: if that ends the
    search, with the thresholds that were guessed, the merge is right.
    """

    def __init__(self, plan: Plan, jobs: list[Job]) -> None:
        total = sum(job.info.numel for job in jobs)
        self._ranks = _ranks(plan, jobs)
        wanted = [(model, k) for model, ranks in enumerate(self._ranks) for k in ranks]
        dtype = torch.float64 if any(job.compute == torch.float64 for job in jobs) else torch.float32
        guesses: list[Guess | None] = [None] * len(wanted)
        if total > SAMPLE_FROM and dtype == torch.float32:
            guesses = [*_guesses(plan, jobs, [(model, k / total) for model, k in wanted])]
        self._models = [model for model, _ in wanted]
        self._selections = [Selection(k, dtype, guess) for (_, k), guess in zip(wanted, guesses, strict=True)]
        exact = [guess.value for guess in guesses if guess is not None and guess.exact]
        self.guess = Statistics({"": _by_model(self._ranks, exact)}) if len(exact) == len(guesses) else None
        """The thresholds that will probably be found, if the sample gives all of them."""
        self._counts: list[Any] = [0] * len(guesses)

    @property
    def looks_for(self) -> tuple[Sequence[int], Sequence[Selection]]:
        """What a :class:`Counting` of this pass is made of."""
        return self._models, self._selections

    def add(self, counts: Sequence[Any]) -> None:
        """Take what was counted in a part of the pass into account."""
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]

    def end_pass(self) -> None:
        for selection, counts in zip(self._selections, self._counts, strict=True):
            if selection.value is None:
                selection.narrow(counts)
        self._counts = [0] * len(self._selections)

    @property
    def thresholds(self) -> Thresholds | None:
        """None until the last of them is found."""
        values = [selection.value for selection in self._selections if selection.value is not None]
        return _by_model(self._ranks, values) if len(values) == len(self._selections) else None


def _ranks(plan: Plan, jobs: Sequence[Job]) -> Sequence[Sequence[int]]:
    """For every tuned model, which entries of |Δ| over some tensors are wanted: 1 is the largest."""
    assert plan.rule.ranks is not None
    one = jobs[0].name if jobs else ""
    models, options = len(plan.inputs.tuned_of(one)), plan.inputs.settings.of(one).options
    return plan.rule.ranks(sum(job.info.numel for job in jobs), models, options)


def _by_model(ranks: Sequence[Sequence[int]], values: Sequence[float]) -> Thresholds:
    left = iter(values)
    found = [[next(left) for _ in own] for own in ranks]
    return [one[0] for one in found] if all(len(one) == 1 for one in found) else found


def begin_search(plan: Plan) -> ThresholdSearch | None:
    """The search for thresholds over the whole model, if the plan's rule needs those."""
    if "thresholds" in plan.needs and plan.inputs.options["scope"] == "model" and not plan.measures:
        return ThresholdSearch(plan, plan.merged)
    return None


def find_statistics(
    plan: Plan,
    threads: int,
    advance: Advance = lambda nbytes: None,
    search: ThresholdSearch | None = None,
    spread: Spread | None = None,
) -> Statistics:
    """The statistics that the plan's rule needs; ``advance`` is told how many bytes have been read.

    ``search`` is one for the thresholds of the whole model that has begun already; ``spread`` is who looks.
    NaN and infinity pass through here, as the largest magnitudes; the merge itself finds and names them.
    """
    result, spread = Statistics(), spread or here(threads)
    if "thresholds" in plan.needs:
        if plan.inputs.options["scope"] == "model":
            result.thresholds[""] = _thresholds(plan, plan.merged, spread, advance, search)
        else:
            for thresholds in spread(plan, tensor_thresholds, whole(plan.merged), None, advance):
                result.thresholds |= thresholds
    if plan.measures:
        for measures in spread(plan, tensor_measures, whole(plan.merged), result, advance):
            result.measured |= measures
    return result


def tensor_thresholds(
    plan: Plan, runs: Sequence[Run], known: None, threads: int, advance: Advance
) -> dict[str, Thresholds]:
    """The thresholds of some tensors, each for itself."""
    jobs, found = plan.by_name, {}

    def one(run: Run) -> None:
        job = jobs[run[0]]
        found[job.name] = _in_one_pass(plan, job, advance) or _thresholds(plan, [job], here(1), advance)

    run_parallel(runs, lambda: one, threads)
    return found


def tensor_measures(
    plan: Plan, runs: Sequence[Run], known: Statistics, threads: int, advance: Advance
) -> dict[str, dict[str, list[float]]]:
    """What the rule measures on some tensors, whose thresholds are known."""
    jobs, found = plan.by_name, {}

    def one(run: Run) -> None:
        found[run[0]] = measure(plan, jobs[run[0]], known.of(run[0]), advance)

    run_parallel(runs, lambda: one, threads)
    return found


def count_magnitudes(
    plan: Plan,
    runs: Sequence[Run],
    known: tuple[Sequence[int], Sequence[Selection]],
    threads: int,
    advance: Advance,
) -> list[Any]:
    """What a pass of a search counts in some runs."""
    jobs, counting = plan.by_name, Counting(*known)

    def work(buffers: Buffers, run: Run) -> None:
        job, start, stop = jobs[run[0]], run[1], run[2]
        base, tuned = read_models(plan, job, start, stop, buffers)
        assert base is not None
        counting.count(base, tuned)
        advance(plan.bytes_read(job) * (stop - start) // job.info.numel)

    run_parallel(runs, with_buffers(work), threads)
    return counting.counts


def _thresholds(
    plan: Plan, jobs: list[Job], spread: Spread, advance: Advance, begun: ThresholdSearch | None = None
) -> Thresholds:
    """For every tuned model, the magnitudes of the entries of Δ that are wanted, over some tensors."""
    search = begun or ThresholdSearch(plan, jobs)
    while search.thresholds is None:
        for counts in spread(plan, count_magnitudes, list(chunks(jobs)), search.looks_for, advance):
            search.add(counts)
        search.end_pass()
        advance = _ignored  # the total is that of one pass
    return search.thresholds


def _ignored(nbytes: int) -> None:
    return


def _in_one_pass(plan: Plan, job: Job, advance: Advance) -> Thresholds | None:
    """The thresholds of one tensor, if they lie between values of a sample that they are likely to lie between."""
    ranks, total = _ranks(plan, [job]), job.info.numel
    if not total:
        return None
    samples = [torch.cat(runs).numpy() for runs in _sample(plan, [job], TENSOR_RUNS, TENSOR_RUN)]
    brackets = [[Bracket(k, total, sample) for k in own] for own, sample in zip(ranks, samples, strict=True)]
    buffers = Buffers()
    for start in range(0, total, plan.block):
        base, tuned = read_models(plan, job, start, min(start + plan.block, total), buffers)
        assert base is not None
        for model, own in zip(tuned, brackets, strict=True):
            magnitudes = (model - base).abs_().reshape(-1).numpy()
            for bracket in own:
                bracket.add(magnitudes)
    values = [bracket.value for own in brackets for bracket in own]
    found = [value for value in values if value is not None]
    if len(found) < len(values):
        return None
    advance(plan.bytes_read(job))
    return _by_model(ranks, found)


@one_thread_each()
def _guesses(plan: Plan, jobs: list[Job], wanted: Sequence[tuple[int, float]]) -> list[Guess]:
    """The thresholds of a sample: short runs at even distances over all tensors. Only the speed depends on it.

    ``wanted`` are models, and the shares of their entries that are as large as the threshold.
    """
    samples = _sample(plan, jobs, SAMPLE_RUNS, SAMPLE_RUN)
    return [_guess(samples[model], share) for model, share in wanted]


def _sample(plan: Plan, jobs: list[Job], number: int, length: int) -> list[list[Tensor]]:
    """|Δ| of every tuned model in short runs at even distances over some tensors."""
    total = sum(job.info.numel for job in jobs)
    distance = max(length, total // number)
    buffers = Buffers()
    samples: list[list[Tensor]] = [[] for _ in plan.inputs.tuned_of(jobs[0].name)]
    position = offset = 0
    for job in jobs:
        while position < offset + job.info.numel:
            start = position - offset
            base, tuned = read_models(plan, job, start, min(start + length, job.info.numel), buffers)
            assert base is not None
            for sample, model in zip(samples, tuned, strict=True):
                sample.append((model - base).abs_().reshape(-1))
            position += distance
        offset += job.info.numel
    return samples


def _guess(runs: list[Tensor], density: float) -> Guess:
    def threshold(runs: list[Tensor]) -> float:
        values = torch.cat(runs)
        return float(values.kthvalue(len(values) - max(1, math.floor(density * len(values))) + 1).values)

    parts = {threshold(runs[first::SAMPLE_PARTS]) for first in range(SAMPLE_PARTS)}
    value = threshold(runs)
    return Guess(value, exact=parts == {value})
