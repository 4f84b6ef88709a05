"""What a rule must know of whole tensors or whole models before the first block: thresholds and angles."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.model import Buffers
from ..rules.spec import each
from ..rules.spherical import Geometry
from .plan import Job, Plan
from .reading import read_models
from .selection import Guess, Selection
from .workers import one_thread_each, run_parallel, with_buffers

#: Elements that are reduced at once. Fixed, so that sums do not depend on how the merge cuts its blocks.
CHUNK = 1 << 19
#: Thresholds over more entries than this are first guessed from a sample of this many runs of this many entries.
SAMPLE_FROM = 1 << 24
SAMPLE_RUNS, SAMPLE_RUN = 512, 2048
#: If this many parts of the sample have the same threshold, it is probably that of the whole.
SAMPLE_PARTS = 4

Advance = Callable[[int], None]


@dataclass
class Statistics:
    """Thresholds of the magnitude of Δ_t by tensor ("" for the whole model), and geometry by tensor."""

    thresholds: dict[str, list[float]] = field(default_factory=dict)
    geometry: dict[str, Geometry] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Any]:
        """The inputs of a rule for one tensor."""
        thresholds = self.thresholds.get(name, self.thresholds.get(""))
        return {"thresholds": thresholds, "geometry": self.geometry.get(name)}

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Statistics:
        return cls(value["thresholds"], {name: Geometry(*g) for name, g in value["geometry"].items()})


class ThresholdSearch:
    """The search for every tuned model's threshold: the k-th largest entry of |Δ| over some tensors.

    It takes passes over all of the tensors. The first may be a merge with ``guess`` for thresholds: if that ends the
    search, with the thresholds that were guessed, the merge is right.
    """

    def __init__(self, plan: Plan, jobs: list[Job]) -> None:
        total = sum(job.info.numel for job in jobs)
        shares = each(plan.inputs.settings.of(jobs[0].name).options["density"], plan.inputs.tuned)
        dtype = torch.float64 if any(job.compute == torch.float64 for job in jobs) else torch.float32
        guesses: list[Guess | None] = [None] * len(plan.inputs.tuned)
        if total > SAMPLE_FROM and dtype == torch.float32:
            guesses = [*_guesses(plan, jobs, shares)]
        exact = [guess.value for guess in guesses if guess is not None and guess.exact]
        self.guess = Statistics({"": exact}) if len(exact) == len(guesses) else None
        """The thresholds that will probably be found, if the sample gives one for every model."""
        kept = [max(1, math.floor(share * total)) for share in shares]
        self._selections = [Selection(k, dtype, guess) for k, guess in zip(kept, guesses, strict=True)]
        self._counts: list[Any] = [0] * len(guesses)
        self._lock = threading.Lock()

    def count(self, base: Tensor, tuned: list[Tensor]) -> None:
        """Take a block into account; every block once in a pass, in any order and on any thread."""
        for index, (selection, model) in enumerate(zip(self._selections, tuned, strict=True)):
            if selection.value is None:
                counts = selection.count(model - base)
                with self._lock:
                    self._counts[index] = self._counts[index] + counts

    def end_pass(self) -> None:
        for selection, counts in zip(self._selections, self._counts, strict=True):
            if selection.value is None:
                selection.narrow(counts)
        self._counts = [0] * len(self._selections)

    @property
    def thresholds(self) -> list[float] | None:
        """None until the last of them is found."""
        values = [selection.value for selection in self._selections if selection.value is not None]
        return values if len(values) == len(self._selections) else None


def begin_search(plan: Plan) -> ThresholdSearch | None:
    """The search for thresholds over the whole model, if the plan's rule needs those."""
    if "thresholds" in plan.needs and plan.inputs.options["scope"] == "model":
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
                result.thresholds[job.name] = _thresholds(plan, [job], 1, advance)

            run_parallel(plan.merged, lambda: one, threads)
    if "geometry" in plan.needs:

        def angle(job: Job) -> None:
            result.geometry[job.name] = _geometry(plan, job)
            advance(plan.bytes_read(job))

        run_parallel(plan.merged, lambda: angle, threads)
    return result


def chunks(jobs: list[Job]) -> Iterator[tuple[Job, int, int]]:
    for job in jobs:
        for start in range(0, job.info.numel, CHUNK):
            yield job, start, min(start + CHUNK, job.info.numel)


def _thresholds(
    plan: Plan, jobs: list[Job], threads: int, advance: Advance, begun: ThresholdSearch | None = None
) -> list[float]:
    """For every tuned model, the magnitude of the k-th largest entry of Δ over some tensors."""
    if not any(job.info.numel for job in jobs):
        return [0.0] * len(plan.inputs.tuned)
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


@one_thread_each()
def _guesses(plan: Plan, jobs: list[Job], shares: Sequence[float]) -> list[Guess]:
    """The thresholds of a sample: short runs at even distances over all tensors. Only the speed depends on it."""
    total = sum(job.info.numel for job in jobs)
    distance = max(SAMPLE_RUN, total // SAMPLE_RUNS)
    buffers = Buffers()
    samples: list[list[Tensor]] = [[] for _ in plan.inputs.tuned]
    position = offset = 0
    for job in jobs:
        while position < offset + job.info.numel:
            start = position - offset
            base, tuned = read_models(plan, job, start, min(start + SAMPLE_RUN, job.info.numel), buffers)
            assert base is not None
            for sample, model in zip(samples, tuned, strict=True):
                sample.append((model - base).abs().float())
            position += distance
        offset += job.info.numel
    return [_guess(runs, share) for runs, share in zip(samples, shares, strict=True)]


def _guess(runs: list[Tensor], density: float) -> Guess:
    def threshold(runs: list[Tensor]) -> float:
        values = torch.cat(runs)
        return float(values.kthvalue(len(values) - max(1, math.floor(density * len(values))) + 1).values)

    parts = {threshold(runs[first::SAMPLE_PARTS]) for first in range(SAMPLE_PARTS)}
    value = threshold(runs)
    return Guess(value, exact=parts == {value})


def _geometry(plan: Plan, job: Job) -> Geometry:
    """Inner product and norms of base and tuned model, in float64 and with exactly rounded sums of chunks."""
    buffers = Buffers()
    parts: list[list[float]] = []
    for _, start, stop in chunks([job]):
        base, tuned = read_models(plan, job, start, stop, buffers)
        assert base is not None
        a, b = base.double(), tuned[0].double()
        parts.append([float((x * y).sum()) for x, y in ((a, b), (a, a), (b, b))])
    dot, aa, bb = (exact_sum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0, 0.0)
    return Geometry(dot, math.sqrt(aa), math.sqrt(bb))


def exact_sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is larger than any number
        return math.nan
