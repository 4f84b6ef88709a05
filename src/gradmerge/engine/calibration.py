"""How fast this machine is at a merge: a little of the inputs is read and merged, and the result thrown away."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..curvature.needs import Rate
from ..errors import InputError
from ..rules.kronecker_matching import KroneckerFactors
from ..storage.bytesof import bytes_of
from ..storage.remote import stored_at
from ..storage.tensorfile import PositionalFile, close_files
from ..text import count, size
from .costs import Speeds, products_of
from .factoring import factored
from .layers import solve_layer
from .local import MergedBlock, run
from .plan import BLOCK, Job, Plan, rule_arguments
from .statistics import Counting, Statistics, ThresholdSearches, begin_search, find_statistics
from .workers import one_thread_each, run_parallel

#: Entries that are merged, and bytes that are read in pieces of so many.
ENTRIES, READ, PIECE = 1 << 23, 1 << 27, 1 << 22
#: The longer side of the matrix that stands for layers that are solved whole.
SIDE = 256
#: A connection of 10 Gbit/s.
USUAL_NETWORK = Rate(1.25e9, "assumed: 10 Gbit/s")
#: Where there is nothing to read.
USUAL_DISK = Rate(1e9, "assumed")
#: Where random matrices cannot stand for layers.
USUAL_SOLVING = Rate(5e8, "assumed")
#: Where nothing can be tried, as no tensor is merged entry by entry.
USUAL_ENTRIES = Rate(4e8, "assumed: as task arithmetic of two models on 2 cores")


def measure_speeds(
    plan: Plan,
    *,
    threads: int,
    device: str = "cpu",
    disk: Rate | None = None,
    network: Rate | None = None,
    rank: int | None = None,
) -> tuple[Speeds, Collection[str]]:
    """What is not given of the speeds of a merge, and tensors whose thresholds a sample tells ("" for all together).

    Every node is taken to be like this machine. With ``rank``, matrices are factored for an adapter.
    """
    search = begin_search(plan, threads) if rank is None else None
    entries, statistics = _entry_rates(plan, threads, device, search)
    files = plan.inputs.files()
    near = [path for path in files if stored_at(path) is None]
    if network is None:
        network = fetch_rate([path for path in files if path not in near], threads) or USUAL_NETWORK
    solving = _solving_rate(plan, threads, rank)
    told = search.guessed if search is not None else ()
    return Speeds(disk or read_rate(near, threads), network, entries, statistics, solving), told


def share_away(plan: Plan) -> float:
    """The share of the inputs' bytes that lie at URLs."""
    sizes = [(path.stat().st_size, stored_at(path) is not None) for path in plan.inputs.files()]
    return sum(nbytes for nbytes, away in sizes if away) / max(1, sum(nbytes for nbytes, _ in sizes))


def _entry_rates(plan: Plan, threads: int, device: str, search: ThresholdSearches | None) -> tuple[Rate, Rate | None]:
    """Entries a second in the merge, and in a pass for statistics if there is one."""
    jobs = [*_sample([job for job in plan.merged if not job.whole and not job.inside])]
    entries = sum(job.info.numel for job in jobs)
    if not entries:
        return USUAL_ENTRIES, None
    part = replace(plan, jobs=jobs, notes=[])
    told = search.guessed if search is not None else {}
    guess = Statistics(told) if "" in told or all(job.name in told for job in jobs) else None
    merging, asking = [], []
    for _ in range(3):  # the first time, files may come from the disk
        begun = time.perf_counter()
        statistics = guess or find_statistics(part, threads)
        asked = time.perf_counter()
        watch = Counting(search.looks_for).count if search is not None and told else None
        with _scratch() as put:
            run(part, statistics, put, threads=threads, device=device, allow_nonfinite=True, watch=watch)
        merging.append(time.perf_counter() - asked)
        asking.append(asked - begun)
    source = f"measured: {count(entries)} entries merged here with {threads} thread{'s' if threads > 1 else ''}"
    passes = len(plan.measures) + ("thresholds" in plan.needs and guess is None)
    asked_rate = Rate(passes * entries / min(asking), source) if passes else None
    return Rate(entries / min(merging), source), asked_rate


@contextlib.contextmanager
def _scratch() -> Iterator[Callable[[MergedBlock], Any]]:
    """Where blocks go: a file in memory, since writing takes the processor's time too; elsewhere nowhere."""
    if not hasattr(os, "memfd_create"):
        yield lambda _: None
        return
    handle = os.memfd_create("gradmerge-calibration")
    try:
        end = itertools.count(step=BLOCK * 4)
        yield lambda block: os.pwrite(handle, bytes_of(block.values.contiguous()), next(end))
    finally:
        os.close(handle)


def _sample(jobs: Sequence[Job]) -> Iterator[Job]:
    """Tensors of about so many entries in all, the larger ones first; the smallest if none is so small."""
    taken = 0
    falling = sorted(jobs, key=lambda job: job.info.numel, reverse=True)
    for job in [job for job in falling if job.info.numel <= ENTRIES] or falling[-1:]:
        if taken and taken + job.info.numel > ENTRIES:
            return
        taken += job.info.numel
        yield job


def _solving_rate(plan: Plan, threads: int, rank: int | None) -> Rate | None:
    """Multiplications a second where layers are solved whole, or factored: of the costliest one, made smaller."""
    whole = [job for job in plan.merged if len(job.info.shape) > 1 and (job.whole or rank is not None)]
    if not whole:
        return None
    job = max(whole, key=products_of)
    rows = job.info.shape[0]
    columns = job.info.numel // max(1, rows)
    shrink = min(1.0, SIDE / max(rows, columns, 1))
    small = max(2, round(rows * shrink)), max(2, round(columns * shrink))
    solve = _solver(plan, job, small)
    seconds = []
    try:
        with one_thread_each():
            for _ in range(2):
                begun = time.perf_counter()
                matrix = solve()
                if rank is not None:
                    factored(matrix, rank, torch.float32)
                seconds.append(time.perf_counter() - begun)
    except (InputError, ValueError):  # such weights have no merge of random matrices, but may have one of the models
        return USUAL_SOLVING
    stand_in = replace(job, info=replace(job.info, shape=small))
    source = f"measured: a layer of {small[0]} × {small[1]} solved here, for {threads} of them at a time"
    return Rate(threads * products_of(stand_in) / min(seconds), source)


def _solver(plan: Plan, job: Job, shape: tuple[int, int]) -> Callable[[], Tensor]:
    """The rule on random matrices that stand for a layer."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = shape
    numbers, inputs = plan.inputs.settings.of(job.name), plan.inputs

    def matrix() -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    def square(side: int) -> Tensor:
        values = torch.randn(side, side, generator=generator, dtype=torch.float64)
        return values @ values.T / side + torch.eye(side, dtype=torch.float64)

    def hessian(source: Any) -> Any:
        if source.tokens is not None and job.name in source.tokens:
            return KroneckerFactors(square(rows), square(columns), 1.0)
        return matrix().square_() if source.constant is None else torch.tensor(source.constant, dtype=torch.float64)

    if not job.whole:  # only factored
        return matrix
    assert job.rule is not None
    rule = job.rule
    models = len(inputs.tuned_of(job.name))
    tensors: dict[str, Any] = {"base": matrix(), "tuned": [matrix() for _ in range(models)]}
    tensors["grams"] = [square(columns) for _ in inputs.grams]
    if job.layer is None:
        return lambda: rule(**rule_arguments(rule, plan, tensors, numbers))
    tensors["curvature"] = [hessian(source) for source in inputs.curvature]
    tensors |= {"prior": hessian(inputs.prior)} if inputs.prior is not None else {}
    if inputs.penalty:
        tensors["penalty"] = [None if source is None else hessian(source) for source in inputs.penalty]
    return lambda: solve_layer(plan, rule, tensors, job.name)


def read_rate(files: Sequence[Path], threads: int) -> Rate:
    """Bytes a second that the inputs can be read at, past the page cache where the system allows it."""
    sizes = {path: path.stat().st_size for path in files}
    total = sum(sizes.values())
    distance = max(PIECE, total * PIECE // READ // PIECE * PIECE)
    places, offset = [], 0
    for path, length in sizes.items():
        places += [(path, start) for start in range((-offset) % distance // PIECE * PIECE, length, distance)]
        offset += length
    direct = getattr(os, "O_DIRECT", 0)
    try:
        read, seconds = _read(places, threads, direct)
    except OSError:  # such as a file system in memory
        direct = 0
        read, seconds = _read(places, threads, 0)
    if not read:
        return USUAL_DISK
    cache = "past the page cache" if direct else "some of it may have been in the page cache"
    return Rate(read / max(seconds, 1e-9), f"measured: {size(read)} of the inputs, {cache}")


def fetch_rate(files: Sequence[Path], threads: int) -> Rate | None:
    """Bytes a second that come from files at URLs; None if there are none."""
    pieces = [(path, start) for path in files for start in range(0, path.stat().st_size - PIECE, READ)][: READ // PIECE]
    if not pieces:
        return None
    opened = {path: PositionalFile(path) for path, _ in pieces}

    def reader() -> Callable[[tuple[Path, int]], None]:
        buffer = memoryview(bytearray(PIECE))
        return lambda place: opened[place[0]].read_into(buffer, place[1])

    begun = time.perf_counter()
    try:
        run_parallel(pieces, reader, threads)
    finally:
        close_files(opened.values())
    read = PIECE * len(pieces)
    return Rate(read / (time.perf_counter() - begun), f"measured: {size(read)} of the inputs at URLs")


def _read(places: Sequence[tuple[Path, int]], threads: int, flags: int) -> tuple[int, float]:
    """Read pieces of files on some threads: bytes and seconds."""
    lengths: list[int] = []

    def reader() -> Callable[[tuple[Path, int]], None]:
        buffer = mmap.mmap(-1, PIECE)  # begins at a page, as reading past the cache demands

        def read(place: tuple[Path, int]) -> None:
            handle = os.open(place[0], os.O_RDONLY | flags)
            try:
                lengths.append(os.preadv(handle, [buffer], place[1]))
            finally:
                os.close(handle)

        return read

    begun = time.perf_counter()
    run_parallel(places, reader, threads)
    return sum(lengths), time.perf_counter() - begun
