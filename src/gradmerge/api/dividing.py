"""Owners of rows, divided over the processes of one run; and an estimate that saves its sums now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from .._version import __version__
from ..curvature.batches import Placed
from ..curvature.curvature import Curvature
from ..curvature.estimate import estimate_curvature
from ..curvature.kronecker import KroneckerCurvature
from ..curvature.together import Together, parts, without
from ..processes import Processes
from ..progress import Progress
from ..tasks import LoadedTask
from .saved_sums import SavedSums


def what_all_see(loaded: LoadedTask) -> dict[str, Any]:
    """What must be the same in all processes, or their sums would mean nothing."""
    there = [p.detach() for p in loaded.model.parameters() if p.numel() and p.device.type != "meta"]
    weights = sum(float(p.flatten()[0]) for p in there)
    return {"version of gradmerge": __version__, "number of rows": loaded.examples, "weights": repr(weights)}


def share_of(loaded: LoadedTask, group: Processes) -> Placed:
    """The batches of this process's rows."""
    mine = group.share(loaded.examples)
    places = range(mine.start, mine.stop, max(1, loaded.batch_size))
    return Placed(lambda: zip(places, loaded.batches(start=mine.start, end=mine.stop), strict=True))


def estimate_saving(
    loaded: LoadedTask,
    likelihood: str,
    start: tuple[Curvature | KroneckerCurvature, list[list[int]]] | None,
    saved: SavedSums | None,
    every: float,
    progress: Progress,
    group: Processes,
    **options: Any,
) -> Curvature | KroneckerCurvature:
    """The curvature of all rows, each process taking its share of those that ``start`` does not have.

    ``saved`` and ``start`` are the first process's. It saves the sums of all processes about ``every`` so many seconds.
    """
    sums, before = start if start is not None else (None, [])
    before = group.gather(before)[0]
    left = without(before, loaded.examples)
    number = sum(map(len, left))
    progress.begin("estimating", loaded.examples, loaded.examples - number)
    mine = parts([(stretch.start, stretch.stop) for stretch in left], group.share(number))
    done: list[list[int]] = []
    end, last, attempts = 0, time.monotonic(), 0

    def batches() -> Iterator[tuple[int, Any]]:
        nonlocal end, attempts
        attempts += 1
        if attempts > 1 and saved is not None:
            saved.remove()  # a formula turned out wrong, maybe already for the rows that are saved
        done.clear()
        for stretch in mine:
            done.append([stretch.start, stretch.start])
            end = stretch.start
            for batch in loaded.batches(start=stretch.start, end=stretch.stop):
                first, end = end, min(end + loaded.batch_size, stretch.stop)
                yield first, batch

    def each_batch(so_far: Any) -> None:
        progress.advance(end - done[-1][1])
        done[-1][1] = end

    def facts() -> list[list[int]]:
        nonlocal last
        last = time.monotonic()
        return done

    def save(so_far: Curvature | KroneckerCurvature, rows: list[list[list[int]]]) -> None:
        assert saved is not None
        saved.write(so_far, [*before, *(stretch for one in rows for stretch in one)])

    found: Curvature | KroneckerCurvature = estimate_curvature(
        loaded.model,
        Placed(batches),
        likelihood,
        output=loaded.output,
        device=loaded.device,
        start=sums,
        each_batch=each_batch,
        together=Together(group, lambda: time.monotonic() - last >= every, save, facts),
        **options,
    )
    return found
