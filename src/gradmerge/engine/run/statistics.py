"""What a rule must know of whole tensors or models before the first block: thresholds, and measures of its own."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers
from ..plan.plan import Job, Plan
from ..thread_pool import one_thread_each, run_parallel, with_buffers
from .bracket import Bracket, ends_of
from .reading import read_models
from .reduce import Advance, measure
from .selection import Guess, Selection
from .spreading import Run, Spread, chunks, here, whole

#: Thresholds over more entries than this are first guessed from a sample of this many runs of this many entries.
SAMPLE_FROM = 1 << 24
SAMPLE_RUNS, SAMPLE_RUN = 512, 2048
#: The same for the thresholds of a single tensor.
TENSOR_RUNS, TENSOR_RUN = 32, 2048
#: A value of the sample is probably the threshold if its rank is so many standard errors from either end of the ranks
#: of its equals. A guess that is right saves half a pass, and a wrong one costs a merge: 1 is right five times of six.
SURE = 1.0


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


LooksFor = Mapping[str, tuple[Sequence[int], Sequence[Selection]]]
"""By tensor ("" for the whole model): what is counted, each in the differences of a model, by its number."""


class Counting:
    """What one pass of a search counts, or a part of a pass: counts of parts are added up."""

    def __init__(self, looks_for: LooksFor) -> None:
        self._looks_for = looks_for
        self.counts: dict[str, list[Any]] = {name: [0] * len(sought) for name, (_, sought) in looks_for.items()}
        self._lock = threading.Lock()

    def count(self, name: str, base: Tensor, tuned: list[Tensor]) -> None:
        """Take a block of a tensor into account; every block once in a pass, in any order and on any thread."""
        group = name if name in self._looks_for else ""
        for index, (model, selection) in enumerate(zip(*self._looks_for.get(group, ((), ())), strict=True)):
            if selection.value is None:
                counts = selection.count((tuned[model] - base).reshape(-1))
                with self._lock:
                    self.counts[group][index] = self.counts[group][index] + counts


class ThresholdSearch:
    """The search for every tuned model's thresholds: entries of certain ranks in |Δ|, over some tensors.

    It takes passes over all of the tensors. The first may be a merge with ``guess`` for thresholds: if that ends the
    search, with the thresholds that were guessed, the merge is right.
    """

    def __init__(self, plan: Plan, jobs: list[Job], guesses: Sequence[Guess] | None = None) -> None:
        self._ranks = _ranks(plan, jobs)
        wanted = [(model, k) for model, ranks in enumerate(self._ranks) for k in ranks]
        self._models = [model for model, _ in wanted]
        dtype = _dtype(jobs)
        told: Sequence[Guess | None] = guesses or [None] * len(wanted)
        self._selections = [Selection(k, dtype, guess) for (_, k), guess in zip(wanted, told, strict=True)]
        exact = dtype == torch.float32 and all(guess is not None and guess.exact for guess in told)
        values = [g.value if s.value is None and g else s.value for s, g in zip(self._selections, told, strict=True)]
        self.guess = _by_model(self._ranks, [v for v in values if v is not None]) if exact else None
        """The thresholds that will probably be found, if the sample gives all of them."""
        self._counts: list[Any] = [0] * len(wanted)

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


class ThresholdSearches:
    """The thresholds of the whole model, under the name "", or of every tensor: what is found, and what is guessed.

    A merge may begin with the guesses. It counts on the way (``looks_for``, ``add``), and ``end_pass`` then says which
    of them were right: those are found.
    """

    def __init__(self, plan: Plan, guesses: Mapping[str, Sequence[Guess] | None]) -> None:
        self._plan, self._guesses = plan, guesses
        jobs = plan.by_name
        self._begun = {n: ThresholdSearch(plan, [jobs[n]] if n else plan.merged, g) for n, g in guesses.items()}
        self.found: dict[str, Thresholds] = {}
        self.guessed = {name: begun.guess for name, begun in self._begun.items() if begun.guess is not None}

    @property
    def left(self) -> list[Job]:
        """Tensors whose thresholds are neither found nor guessed."""
        told = self.found.keys() | self.guessed.keys()
        return [] if "" in told else [job for job in self._plan.merged if job.name not in told]

    @property
    def looks_for(self) -> LooksFor:
        """What a :class:`Counting` of a merge with the guesses is made of."""
        return {name: self._begun[name].looks_for for name in self.guessed}

    def add(self, counts: Mapping[str, Sequence[Any]]) -> None:
        """Take what was counted in a part of the merge into account."""
        for name, own in counts.items():
            self._begun[name].add(own)

    def end_pass(self) -> None:
        for name in self.guessed:
            self._begun[name].end_pass()
            if (thresholds := self._begun[name].thresholds) is not None:
                self.found[name] = thresholds
        self.guessed = {}

    def find(self, spread: Spread, advance: Advance) -> None:
        """Look for what is left."""
        plan, left = self._plan, self.left
        if plan.inputs.options["scope"] != "model":
            guesses = {job.name: self._guesses.get(job.name) for job in left}
            for thresholds in spread(plan, tensor_thresholds, whole(left), guesses, advance) if left else ():
                self.found |= thresholds
        elif "" not in self.found | self.guessed:
            self.found[""] = _thresholds(plan, left, spread, advance, self._begun[""])


def _dtype(jobs: Sequence[Job]) -> torch.dtype:
    return torch.float64 if any(job.compute == torch.float64 for job in jobs) else torch.float32


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


def begin_search(plan: Plan, threads: int = 1, spread: Spread | None = None) -> ThresholdSearches | None:
    """The search for thresholds, with what a sample says, if a merge may begin with it."""
    if "thresholds" in plan.needs and not plan.measures:
        return _sampled(plan, spread or here(threads))
    return None


def _sampled(plan: Plan, spread: Spread) -> ThresholdSearches:
    guesses: dict[str, Sequence[Guess] | None] = {}
    if plan.inputs.options["scope"] == "model":
        many = sum(job.info.numel for job in plan.merged) > SAMPLE_FROM and _dtype(plan.merged) == torch.float32
        with one_thread_each():
            guesses[""] = _guesses(plan, plan.merged, SAMPLE_RUNS, SAMPLE_RUN) if many else None
    elif large := [job for job in plan.merged if job.info.numel > TENSOR_RUNS * TENSOR_RUN]:
        for some in spread(plan, tensor_guesses, whole(large), None, _ignored):
            guesses |= some
    return ThresholdSearches(plan, guesses)


def find_statistics(
    plan: Plan,
    threads: int,
    advance: Advance = lambda nbytes: None,
    search: ThresholdSearches | None = None,
    spread: Spread | None = None,
) -> Statistics:
    """The statistics that the plan's rule needs; ``advance`` is told how many bytes have been read.

    ``search`` is one for thresholds that has begun already: what it has guessed is taken as it is. ``spread`` is who
    looks. NaN and infinity pass through here, as the largest magnitudes; the merge itself finds and names them.
    """
    result, spread = Statistics(), spread or here(threads)
    if "thresholds" in plan.needs:
        if search is None:
            search = _sampled(plan, spread)
            search.guessed = {}
        search.find(spread, advance)
        result.thresholds = search.found | search.guessed
    if plan.measures:
        for measures in spread(plan, tensor_measures, whole(plan.merged), result, advance):
            result.measured |= measures
    return result


def tensor_guesses(
    plan: Plan, runs: Sequence[Run], known: None, threads: int, advance: Advance
) -> dict[str, list[Guess]]:
    """What a sample of some tensors says about the thresholds of each."""
    jobs, found = plan.by_name, {}

    def one(run: Run) -> None:
        found[run[0]] = _guesses(plan, [jobs[run[0]]], TENSOR_RUNS, TENSOR_RUN)

    run_parallel(runs, lambda: one, threads)
    return found


def tensor_thresholds(
    plan: Plan, runs: Sequence[Run], known: Mapping[str, Sequence[Guess] | None], threads: int, advance: Advance
) -> dict[str, Thresholds]:
    """The thresholds of some tensors, each for itself; ``known`` is what samples have said about them."""
    jobs, found = plan.by_name, {}

    def one(run: Run) -> None:
        job, thresholds = jobs[run[0]], None
        if job.info.numel:
            guesses = known[job.name] or _guesses(plan, [job], TENSOR_RUNS, TENSOR_RUN)
            thresholds = _in_one_pass(plan, job, guesses, advance)
        found[job.name] = thresholds or _thresholds(plan, [job], here(1), advance)

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
    jobs, counting = plan.by_name, Counting({"": known})

    def work(buffers: Buffers, run: Run) -> None:
        job, start, stop = jobs[run[0]], run[1], run[2]
        base, tuned = read_models(plan, job, start, stop, buffers)
        assert base is not None
        counting.count("", base, tuned)
        advance(plan.bytes_read(job) * (stop - start) // job.info.numel)

    run_parallel(runs, with_buffers(work), threads)
    return counting.counts[""]


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


def _in_one_pass(plan: Plan, job: Job, guesses: Sequence[Guess], advance: Advance) -> Thresholds | None:
    """The thresholds of one tensor, if they lie between values of a sample that they are likely to lie between."""
    ranks, total, told = _ranks(plan, [job]), job.info.numel, iter(guesses)
    brackets = [[Bracket(k, total, next(told).ends) for k in own] for own in ranks]
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


def _guesses(plan: Plan, jobs: list[Job], number: int, length: int) -> list[Guess]:
    """What a sample says about the thresholds over some tensors: short runs at even distances over all of them.

    Only the speed depends on it.
    """
    samples, total = _sample(plan, jobs, number, length), sum(job.info.numel for job in jobs)
    return [
        _guess(sample, k / max(1, total)) for sample, own in zip(samples, _ranks(plan, jobs), strict=True) for k in own
    ]


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


def _guess(runs: list[Tensor], share: float) -> Guess:
    """What runs of |Δ| say about the number that such a share of all entries reaches."""
    arrays = [run.numpy() for run in runs]
    # NaN comes last, as the largest. With equal numbers, np.partition takes longer.
    ordered = np.sort(np.concatenate(arrays))
    value = float(ordered[len(ordered) - max(1, math.floor(share * len(ordered)))])
    # Entries near one another are of a size, so that errors are those of a mean over runs, not over entries.
    above, equal = (
        np.array([np.count_nonzero(compare(run, value)) / len(run) for run in arrays])
        for compare in (np.greater, np.greater_equal)
    )

    def error(shares: np.ndarray) -> float:
        return float(shares.std()) / math.sqrt(len(shares) - 1) if len(shares) > 1 else math.inf

    exact = above.mean() + SURE * error(above) < share <= equal.mean() - SURE * error(equal)
    return Guess(value, bool(exact), ends_of(share, ordered))
