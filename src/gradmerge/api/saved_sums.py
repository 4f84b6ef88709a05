"""Save the sums of an unfinished estimate from time to time, so that ``--resume`` can continue from them.

Each process saves the sums over its rows in a file. A resumed run first joins these files into one, estimates the rows
that are left, and adds the joined sums at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..curvature.batches import IndexedBatches
from ..curvature.curvature import Curvature, require_finite, write_sums
from ..curvature.estimate import estimate_curvature
from ..curvature.format import open_curvature
from ..curvature.kronecker import KroneckerCurvature
from ..distributed import Processes
from ..errors import InputError, MachineError
from ..io.atomic_dir import MARK
from ..progress import Progress
from ..tasks import LoadedTask

Sums = Curvature | KroneckerCurvature
Ranges = list[list[int]]
"""Ranges [first, end) of rows."""
#: The files of sums: of one process, of all earlier runs, and a file that replaces one of them once it is complete.
STEM, JOINED, NEW = "saved-sums", "saved-sums-joined", "saved-sums-new"


class SavedSums:
    """Files of sums, their rows and the request, in the unfinished folder of an estimate.

    The rows and the request are header metadata of the file with the sums, so one rename replaces all three.
    """

    def __init__(self, folder: Path, request: dict[str, Any], rank: int = 0) -> None:
        self._folder, self._request = folder, json.dumps(request, sort_keys=True)
        self._path = folder / f"{STEM}-{rank}.safetensors"
        self._joined = folder / f"{JOINED}.safetensors"
        self._new = f"{NEW}-{rank}"

    @property
    def exist(self) -> bool:
        return any(self._folder.glob(f"{STEM}*.safetensors"))

    def write(self, sums: Sums, rows: Ranges) -> None:
        """Replace this process's file; ``rows`` are the rows that the sums include."""
        self._write(sums, rows, self._path)

    def _write(self, sums: Sums, rows: Ranges, path: Path) -> None:
        require_finite(sums)
        header = {**sums.header(), "request": self._request, "rows": json.dumps(rows)}
        write_sums(self._folder, sums, header, sys.maxsize, self._new)
        new = self._folder / f"{self._new}.safetensors"
        try:
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(path)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error

    def join(self, total: int) -> Ranges:
        """Join the files of earlier runs into one file, and return its rows, of ``total`` rows."""
        rows, sums = Ranges(), None
        # The joined file comes first. Sums that it includes may be there too, if joining was interrupted.
        paths = sorted(self._folder.glob(f"{STEM}-*.safetensors"), key=lambda path: (path != self._joined, path.name))
        used = []
        for path in paths:
            if path.name.startswith(NEW):
                continue
            more = self._read_rows(path, total)
            if all(any(a <= first and end <= b for a, b in rows) for first, end in more):
                continue
            rows = merged_ranges([*rows, *more])
            used.append(path)
            if sums is None:
                sums = self._load(path)
            else:
                add_file(sums, path)
        if sums is not None and used != [self._joined]:
            self._write(sums, rows, self._joined)
        for path in paths:
            if path != self._joined:
                path.unlink(missing_ok=True)
        return rows

    def add_joined(self, sums: Sums) -> None:
        """Add the sums of earlier runs."""
        if self._joined.is_file():
            add_file(sums, self._joined)

    def remove_own(self) -> None:
        """Remove this process's file, whose sums are wrong. Raise InputError if sums of earlier runs are too."""
        self._path.unlink(missing_ok=True)
        if self._joined.is_file():
            raise InputError(
                f"{self._joined}: its sums may be wrong, because a formula does not fit. Run without --resume."
            )

    def remove(self, *, rest: bool = False) -> None:
        """Remove all saved sums; with ``rest``, instead all other files, to make room for the result."""
        for child in self._folder.iterdir():
            is_saved = child.name.startswith(STEM)
            if (not is_saved if rest else is_saved) and child.name != MARK:
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def _load(self, path: Path) -> Sums:
        with open_curvature(str(path)) as file:
            kind = file.kind
        return (KroneckerCurvature if kind == "kronecker" else Curvature).load(path)

    def _read_rows(self, path: Path, total: int) -> Ranges:
        try:
            with open_curvature(str(path)) as file:
                header, examples = file.metadata, file.examples
            rows = _parse_ranges(header["rows"])
        except (InputError, OSError, ValueError, KeyError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Run without --resume to start over.") from error
        if header.get("request") != self._request:
            raise InputError(
                f"{self._folder}: holds the unfinished estimate of another model, other data or other options. Run "
                "with the same ones, or without --resume to start over."
            )
        if not _are_disjoint(rows, total) or sum(end - first for first, end in rows) != examples:
            raise InputError(
                f"{path}: holds sums over {examples} examples, but lists other rows: {rows}. Run without --resume to "
                "start over."
            )
        return rows


def add_file(sums: Sums, path: Path) -> None:
    """Add the sums of a file in place, tensor by tensor."""
    with open_curvature(str(path)) as file:
        if {name: tuple(shape) for name, shape in file.shapes.items()} != {n: tuple(v.shape) for n, v in sums.items()}:
            raise InputError(f"{path}: holds sums of another model. Run without --resume to start over.")
        for name, value in sums.items():
            value += file.read_whole(name).to(value)
        sums.examples += file.examples
        if isinstance(sums, KroneckerCurvature):
            sums.set_tokens({name: layer.tokens + file.tokens[name] for name, layer in sums.layers.items()})


def merged_ranges(ranges: Iterable[list[int]]) -> Ranges:
    """Return sorted ranges, with adjacent ones merged."""
    merged = Ranges()
    for first, end in sorted(ranges):
        if merged and merged[-1][1] == first:
            merged[-1][1] = end
        elif first < end:
            merged.append([first, end])
    return merged


def remaining(ranges: Ranges, total: int) -> Ranges:
    """Return the rows of ``total`` that are not in the ranges."""
    rest, position = Ranges(), 0
    for first, end in [*merged_ranges(ranges), [total, total]]:
        rest += [[position, first]] if first > position else []
        position = end
    return rest


def part_of(ranges: Ranges, part: range) -> Ranges:
    """Return the rows number ``part.start`` to ``part.stop`` of those in the ranges."""
    found, before = Ranges(), 0
    for first, end in ranges:
        start, stop = max(first, first + part.start - before), min(end, first + part.stop - before)
        found += [[start, stop]] if start < stop else []
        before += end - first
    return found


def _parse_ranges(text: str) -> Ranges:
    ranges = json.loads(text)
    if not isinstance(ranges, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in ranges
    ):
        raise ValueError("its rows are not pairs of whole numbers")
    return ranges


def _are_disjoint(ranges: Ranges, total: int) -> bool:
    end_before = 0
    for first, end in sorted(ranges):
        if not end_before <= first <= end <= total:
            return False
        end_before = end
    return True


def share_of(loaded: LoadedTask, processes: Processes) -> IndexedBatches:
    """Return the batches of this process's rows."""
    rows = processes.share(loaded.examples)
    starts = range(rows.start, rows.stop, max(1, loaded.batch_size))
    return IndexedBatches(lambda: zip(starts, loaded.batches(start=rows.start, end=rows.stop), strict=True))


def estimate_with_saves(
    loaded: LoadedTask,
    likelihood: str,
    done: Ranges,
    saved: SavedSums,
    save_every: float,
    progress: Progress,
    processes: Processes,
    **options: Any,
) -> Sums:
    """Return the curvature of all rows that are not ``done``, over all processes; save every ``save_every`` seconds."""
    left = remaining(done, loaded.examples)
    count = sum(end - first for first, end in left)
    mine = part_of(left, processes.share(count))
    progress.begin("estimating", sum(end - first for first, end in mine))
    rows = Ranges()
    restarts, last_save = -1, time.monotonic()

    def batches() -> Iterator[tuple[int, Any]]:
        nonlocal restarts
        restarts += 1
        if restarts:
            saved.remove_own()
        rows.clear()
        for first, end in mine:
            rows.append([first, first])
            starts = range(first, end, max(1, loaded.batch_size))
            yield from zip(starts, loaded.batches(start=first, end=end), strict=True)

    def each_batch(so_far: Any) -> None:
        nonlocal last_save
        end = next(end for first, end in mine if first == rows[-1][0])
        size = min(loaded.batch_size, end - rows[-1][1])
        rows[-1][1] += size
        progress.advance(size)
        if time.monotonic() - last_save >= save_every:
            saved.write(so_far(), rows)
            last_save = time.monotonic()

    sums: Sums = estimate_curvature(
        loaded.model,
        IndexedBatches(batches),
        likelihood,
        output=loaded.loss,
        device=loaded.device,
        each_batch=each_batch,
        # The same examples in all processes and runs, so that all choose the same formulas.
        verify_on=next(iter(loaded.batches(2, 0, min(2, loaded.examples)))),
        allow_empty=True,
        **options,
    )
    examples = sum(end - first for first, end in mine)
    processes.all_reduce(sums.values())
    if isinstance(sums, KroneckerCurvature):
        counts = processes.all_gather({name: layer.tokens for name, layer in sums.layers.items()})
        sums.set_tokens({name: sum(one[name] for one in counts) for name in sums.layers})
    sums.examples = sum(processes.all_gather(examples))
    return sums
