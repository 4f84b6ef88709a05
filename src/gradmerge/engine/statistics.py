"""What a rule must know of whole tensors or models before the first block: thresholds, and measures of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.model import Buffers
from .bracket import Bracket
from .measuring import CHUNK, Advance, measure
from .plan import Job, Plan
from .reading import read_models
from .selection import Guess, Selection
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
        self._lock = threading.Lock()

    def count(self, base: Tensor, tuned: list[Tensor]) -> None:
        """Take a block into account; every block once in a pass, in any order and on any thread."""
        for index, (model, selection) in enumerate(zip(self._models, self._selections, strict=True)):
            if selection.value is None:
                counts = selection.count((tuned[model] - base).reshape(-1))
                with self._lock:
                    self._counts[index] = self._counts[index] + counts

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
    plan: Plan, threads: int, advance: Advance = lambda nbytes: None, search: ThresholdSearch | None = None
) -> Statistics:
    """The statistics that the plan's rule needs; ``advance`` is told how many bytes have been read.

    ``search`` is one for the thresholds of the whole model that has begun already.
    NaN and infinity pass through here, as the largest magnitudes; the merge itself finds and names them.
    """
    result = Statistics()
    if "thresholds" in plan.needs:
        if plan.inputs.options["scope"] == "model":
            result.thresholds[""] = _thresholds(plan, plan.merged, threads, advance, search)
        else:

            def one(job: Job) -> None:
                found = _in_one_pass(plan, job, advance)
                result.thresholds[job.name] = found or _thresholds(plan, [job], 1, advance)

            run_parallel(_largest_first(plan), lambda: one, threads)
    if plan.measures:

        def ask(job: Job) -> None:
            result.measured[job.name] = measure(plan, job, result.of(job.name), advance)

        run_parallel(_largest_first(plan), lambda: ask, threads)
    return result


def _largest_first(plan: Plan) -> list[Job]:
    """The merged tensors, in an order in which no thread is left alone with a large one at the end."""
    return sorted(plan.merged, key=lambda job: -job.info.numel)


def chunks(jobs: list[Job]) -> Iterator[tuple[Job, int, int]]:
    for job in jobs:
        for start in range(0, job.info.numel, CHUNK):
            yield job, start, min(start + CHUNK, job.info.numel)


def _thresholds(
    plan: Plan, jobs: list[Job], threads: int, advance: Advance, begun: ThresholdSearch | None = None
) -> Thresholds:
    """For every tuned model, the magnitudes of the entries of Δ that are wanted, over some tensors."""
    search = begun or ThresholdSearch(plan, jobs)
    first = True

    def work(buffers: Buffers, chunk: tuple[Job, int, int]) -> None:
        job, start, stop = chunk
        base, tuned = read_models(plan, job, start, stop, buffers)
        assert base is not None
        search.count(base, tuned)
        if first:
            advance(plan.bytes_read(job) * (stop - start) // job.info.numel)

    while search.thresholds is None:
        run_parallel(chunks(jobs), with_buffers(work), threads)
        search.end_pass()
        first = False
    return search.thresholds


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
