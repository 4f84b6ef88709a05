"""Work over all tensors in parts: one part on this machine, many on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from ..plan.plan import Job, Plan
from .reduce import CHUNK, Advance

Run = tuple[str, int, int]
"""A tensor's name, its first entry and one past the last."""
Part = Callable[[Plan, Sequence[Run], Any, int, Advance], Any]
"""What is found in some runs of the plan's tensors, given what is known already, on so many threads."""
Spread = Callable[[Plan, Part, Sequence[Run], Any, Advance], Iterable[Any]]
"""Does a part on all runs, somewhere and in any order: what is found in each share of them."""


def here(threads: int) -> Spread:
    """All of it as one part on this machine."""

    def spread(plan: Plan, part: Part, runs: Sequence[Run], known: Any, advance: Advance) -> Iterator[Any]:
        yield part(plan, runs, known, threads, advance)

    return spread


def whole(jobs: Iterable[Job]) -> list[Run]:
    """Whole tensors, the largest first: no thread is left alone with one of them at the end."""
    return sorted(((job.name, 0, job.info.numel) for job in jobs), key=lambda run: -run[2])


def chunks(jobs: Iterable[Job]) -> Iterator[Run]:
    for job in jobs:
        for start in range(0, job.info.numel, CHUNK):
            yield job.name, start, min(start + CHUNK, job.info.numel)
