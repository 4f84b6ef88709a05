"""What a rule must know of whole tensors or whole models before the first block: thresholds and angles."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.model import Buffers
from ..rules.spherical import Geometry
from .plan import Job, Plan
from .reading import read_models
from .selection import Guess, Selection
from .workers import run_parallel

#: Elements that are reduced at once. Fixed, so that sums do not depend on how the merge cuts its blocks.
CHUNK = 1 << 19
#: Thresholds over more entries than this are first guessed from a sample of this many runs of this many entries.
SAMPLE_FROM = 1 << 24
SAMPLE_RUNS, SAMPLE_RUN = 512, 2048
#: From this share on, a value of the sample is taken for the threshold itself.
MANY = 0.005

Advance = Callable[[int], None]


@dataclass
class Statistics:
    """Thresholds of the magnitude of Δ_t by tensor ("" for the whole model), and geometry by tensor."""

    thresholds: dict[str, list[float]] = field(default_factory=dict)
    geometry: dict[str, Geometry] = field(default_factory=dict)

    def of(self, name: str) -> dict[str, Any]:
        """The inputs of a rule for one tensor."""
        return {
            "thresholds": self.thresholds.get(name, self.thresholds.get("")),
            "geometry": self.geometry.get(name),
        }

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Statistics:
        return cls(value["thresholds"], {name: Geometry(*g) for name, g in value["geometry"].items()})


def measure(plan: Plan, threads: int, advance: Advance) -> Statistics:
    """Whatever the plan's rule needs to know beforehand; ``advance`` is told how many bytes have been read.

    NaN and infinity pass through here, as the largest magnitudes; the merge itself finds and names them.
    """
    result = Statistics()
    if "thresholds" in plan.needs:
        density = plan.inputs.options["density"]
        if plan.inputs.options["scope"] == "model":
            result.thresholds[""] = _thresholds(plan, plan.merged, density, threads, advance)
        else:

            def one(job: Job) -> None:
                result.thresholds[job.name] = _thresholds(plan, [job], density, 1, advance)

            run_parallel(plan.merged, lambda: one, threads)
    if "geometry" in plan.needs:

        def angle(job: Job) -> None:
            result.geometry[job.name] = _geometry(plan, job)
            advance(plan.bytes_read(job))

        run_parallel(plan.merged, lambda: angle, threads)
    return result


def _chunks(jobs: list[Job]) -> Iterator[tuple[Job, int, int]]:
    for job in jobs:
        for start in range(0, job.info.numel, CHUNK):
            yield job, start, min(start + CHUNK, job.info.numel)


def _thresholds(plan: Plan, jobs: list[Job], density: float, threads: int, advance: Advance) -> list[float]:
    """For every tuned model, the magnitude of the k-th largest entry of Δ over some tensors."""
    total = sum(job.info.numel for job in jobs)
    if total == 0:
        return [0.0] * len(plan.inputs.tuned)
    k = max(1, math.floor(density * total))
    dtype = torch.float64 if any(job.compute == torch.float64 for job in jobs) else torch.float32
    guesses: list[Guess | None] = [None] * len(plan.inputs.tuned)
    if total > SAMPLE_FROM:
        guesses = [*_guesses(plan, jobs, density)]
    searches = [Selection(k, dtype, guess) for guess in guesses]
    first = True
    lock = threading.Lock()
    while any(search.value is None for search in searches):
        totals: list[Any] = [0] * len(searches)

        def worker(totals: list[Any] = totals, first: bool = first) -> Callable[[tuple[Job, int, int]], None]:
            buffers = Buffers()

            def work(chunk: tuple[Job, int, int]) -> None:
                job, start, stop = chunk
                base, tuned = read_models(plan, job, start, stop, buffers)
                assert base is not None
                for index, (search, model) in enumerate(zip(searches, tuned, strict=True)):
                    if search.value is None:
                        counts = search.count(model - base)
                        with lock:
                            totals[index] = totals[index] + counts
                if first:
                    advance(plan.bytes_read(job) * (stop - start) // job.info.numel)

            return work

        run_parallel(_chunks(jobs), worker, threads)
        for search, total_counts in zip(searches, totals, strict=True):
            if search.value is None:
                search.narrow(total_counts)
        first = False
    return [search.value for search in searches if search.value is not None]


def _guesses(plan: Plan, jobs: list[Job], density: float) -> list[Guess]:
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
    return [_guess(torch.cat(sample), density) for sample in samples]


def _guess(sample: Tensor, density: float) -> Guess:
    value = sample.kthvalue(sample.numel() - max(1, math.floor(density * sample.numel())) + 1).values
    return Guess(float(value), exact=float((sample == value).double().mean()) > MANY)


def _geometry(plan: Plan, job: Job) -> Geometry:
    """Inner product and norms of base and tuned model, in float64 and with exactly rounded sums of chunks."""
    buffers = Buffers()
    parts: list[tuple[float, float, float]] = []
    for _, start, stop in _chunks([job]):
        base, tuned = read_models(plan, job, start, stop, buffers)
        assert base is not None
        a, b = base.double(), tuned[0].double()
        parts.append((_dot(a, b), _dot(a, a), _dot(b, b)))
    dot, aa, bb = (_exact_sum(column) for column in zip(*parts, strict=True)) if parts else (0.0, 0.0, 0.0)
    return Geometry(dot, math.sqrt(aa), math.sqrt(bb))


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a * b).sum())


def _exact_sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is larger than any number
        return math.nan
