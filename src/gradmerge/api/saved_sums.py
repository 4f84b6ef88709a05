"""Save the sums of an unfinished estimate from time to time, so that ``resume=True`` can continue from them.

Each process saves the sums over its rows in a file. A resumed run first joins these files into one, estimates the rows
that are left, and adds the joined sums at the end.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..curvature.batches import IndexedBatches
from ..curvature.curvature import Curvature, require_finite, write_sums
from ..curvature.estimate import estimate_curvature
from ..curvature.format import open_curvature
from ..distributed import Processes
from ..errors import InputError, MachineError
from ..io.atomic_dir import MARK
from ..progress import Progress
from ..tasks import LoadedTask
from ..urls import redact

#: The files of sums: of one process, of all earlier runs, and a file that replaces one of them once it is complete.
SUMS_STEM, JOINED_STEM, NEW_STEM = "saved-sums", "saved-sums-joined", "saved-sums-new"


class SavedSums:
    """Files of sums, their rows and the request, in the unfinished folder of an estimate.

    The rows and the request are header metadata of the file with the sums, so one rename replaces all three.
    """

    def __init__(self, folder: Path, request: dict[str, Any], rank: int = 0) -> None:
        self._folder, self._request = folder, redact(json.dumps(request, sort_keys=True))
        self._path = folder / f"{SUMS_STEM}-{rank}.safetensors"
        self._joined = folder / f"{JOINED_STEM}.safetensors"
        self._new = f"{NEW_STEM}-{rank}"

    @property
    def exist(self) -> bool:
        return any(self._folder.glob(f"{SUMS_STEM}*.safetensors"))

    def write(self, sums: Curvature, rows: np.ndarray, path: Path | None = None) -> None:
        """Replace this process's file by sums over these rows."""
        require_finite(sums)
        header = {**sums.header(), "request": self._request, "rows": json.dumps(ranges_of(rows))}
        write_sums(self._folder, sums, header, sys.maxsize, self._new)
        new = self._folder / f"{self._new}.safetensors"
        path = path or self._path
        try:
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(path)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error

    def join(self, total: int) -> np.ndarray:
        """Join the files of earlier runs into one file, and return the rows that are left, of ``total`` rows."""
        done = np.zeros(total, bool)
        sums: Curvature | None = None
        # The joined file comes first. Sums that it includes may be there too, if joining was interrupted.
        paths = sorted(
            self._folder.glob(f"{SUMS_STEM}-*.safetensors"), key=lambda path: (path != self._joined, path.name)
        )
        paths = [path for path in paths if not path.name.startswith(NEW_STEM)]
        for path in paths:
            rows = self._read_rows(path, total)
            if not done[rows].all():
                done[rows] = True
                if sums is None:
                    sums = Curvature.load(path)
                else:
                    add_file(sums, path)
        if sums is not None and paths != [self._joined]:
            self.write(sums, np.flatnonzero(done), self._joined)
        for path in paths:
            if path != self._joined:
                path.unlink(missing_ok=True)
        return np.flatnonzero(~done)

    def add_joined(self, sums: Curvature) -> None:
        """Add the sums of earlier runs."""
        if self._joined.is_file():
            add_file(sums, self._joined)

    def remove(self, *, rest: bool = False) -> None:
        """Remove all saved sums; with ``rest``, instead all other files, to make room for the result."""
        for child in self._folder.iterdir():
            is_saved = child.name.startswith(SUMS_STEM)
            if (not is_saved if rest else is_saved) and child.name != MARK:
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def _read_rows(self, path: Path, total: int) -> np.ndarray:
        try:
            with open_curvature(str(path)) as file:
                header, examples = file.metadata, file.examples
            if header["request"] != self._request:
                raise InputError(
                    f"{self._folder}: holds the unfinished estimate of another model, other data or other options. "
                    "Run with the same ones, or without resume to start over."
                )
            ranges = [range(first, end) for first, end in json.loads(header["rows"])]
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Run without resume to start over.") from error
        if all(0 <= part.start < part.stop <= total for part in ranges):
            rows = np.concatenate([np.arange(0), *map(np.array, ranges)])
            if len(np.unique(rows)) == len(rows) == examples:
                return rows
        raise InputError(
            f"{path}: holds sums over {examples} examples, but lists other rows: {header['rows'][:80]}. Run without "
            "resume to start over."
        )


def add_file(sums: Curvature, path: Path) -> None:
    """Add the sums of a file in place."""
    with open_curvature(str(path)) as file:
        sums.add_file(file)


def ranges_of(rows: np.ndarray) -> list[list[int]]:
    """Return sorted rows as ranges [first, end)."""
    parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [[int(part[0]), int(part[-1]) + 1] for part in parts if len(part)]


def estimate_with_saves(
    loaded: LoadedTask,
    likelihood: str,
    rows: np.ndarray,
    saved: SavedSums,
    save_every: float,
    progress: Progress,
    processes: Processes,
    **options: Any,
) -> Curvature:
    """Return the curvature of some rows over all processes. Each saves its sums every ``save_every`` seconds."""
    share = processes.share(len(rows))
    own_rows = rows[share.start : share.stop]
    size = max(1, loaded.batch_size)
    steps = [(a, min(a + size, end)) for first, end in ranges_of(own_rows) for a in range(first, end, size)]
    done, last_save = 0, time.monotonic()
    progress.begin("estimating", len(own_rows))

    def each_batch(so_far: Any) -> None:
        nonlocal done, last_save
        first, end = next(following)
        done += end - first
        progress.advance(end - first)
        if time.monotonic() - last_save >= save_every:
            saved.write(so_far(), own_rows[:done])
            last_save = time.monotonic()

    following = iter(steps)
    sums = estimate_curvature(
        loaded.model,
        IndexedBatches(lambda: ((a, batch) for a, end in steps for batch in loaded.batches(start=a, end=end))),
        likelihood,
        output=loaded.loss,
        device=loaded.device,
        each_batch=each_batch,
        # The same examples in all processes and runs, so that all choose the same formulas.
        verify_on=next(iter(loaded.batches(2, 0, min(2, loaded.examples)))),
        allow_empty=True,
        **options,
    )
    sums.all_reduce(processes, len(own_rows))
    return sums
