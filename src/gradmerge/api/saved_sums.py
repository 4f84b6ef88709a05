"""Save the sums of an unfinished estimate from time to time, so that ``resume=True`` can continue from them.

In each run, every process saves the sums over its rows in its own file. A resumed run estimates the rows that are in
no file, and adds the sums of all files at the end.
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
from ..curvature.curvature import Curvature, require_finite
from ..curvature.estimate import estimate_curvature
from ..curvature.format import open_curvature, write_sums
from ..distributed import Processes
from ..errors import InputError, MachineError
from ..io.atomic_dir import MARK
from ..progress import Progress
from ..tasks import LoadedTask
from ..urls import redact

#: The files of sums, and a file that gets such a name once it is complete.
SUMS_STEM, NEW_STEM = "saved-sums", "new-sums"


class SavedSums:
    """Files of sums, their rows and the request, in the unfinished folder of an estimate.

    The rows and the request are header metadata of the file with the sums, so one rename replaces all three.
    """

    def __init__(self, folder: Path, request: dict[str, Any], processes: Processes) -> None:
        self._folder, self._request = folder, redact(json.dumps(request, sort_keys=True))
        self._processes = processes
        self._earlier: list[Path] = processes.all_gather(self._files())[0]
        """The files of earlier runs."""
        used = [int(path.stem.rpartition("-")[2]) for path in self._earlier]
        self._name = f"{max(used, default=-1) + 1 + processes.rank:06}"

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob(f"{SUMS_STEM}-*.safetensors"))

    @property
    def exist(self) -> bool:
        return bool(self._files())

    def rows_left(self, total: int) -> np.ndarray:
        """Return the rows that no earlier run has estimated, of ``total`` rows. Remove all other files."""
        done = np.zeros(total, bool)
        if self._processes.is_first:
            for path in self._earlier:
                done[self._read_rows(path)] = True
            for child in self._folder.iterdir():
                if child.name != MARK and child not in self._earlier:
                    shutil.rmtree(child) if child.is_dir() else child.unlink()
        result: np.ndarray = self._processes.all_gather(np.flatnonzero(~done))[0]
        return result

    def _read_rows(self, path: Path) -> np.ndarray:
        try:
            with open_curvature(str(path)) as file:
                header = file.metadata
            if header["request"] == self._request:
                return np.concatenate([np.arange(first, end) for first, end in json.loads(header["rows"])])
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise InputError(f"{path}: cannot be read ({error}). Run without resume to start over.") from error
        raise InputError(
            f"{self._folder}: holds the unfinished estimate of another model, other data or other options. Run with "
            "the same ones, or without resume to start over."
        )

    def write(self, sums: Curvature, rows: np.ndarray) -> None:
        """Replace this process's file by sums over these rows."""
        require_finite(sums)
        header = {**sums.header(), "request": self._request, "rows": json.dumps(ranges_of(rows))}
        new = f"{NEW_STEM}-{self._name}"
        write_sums(self._folder, sums, header, sys.maxsize, new)
        path = self._folder / f"{SUMS_STEM}-{self._name}.safetensors"
        try:
            with (self._folder / f"{new}.safetensors").open("rb") as file:
                os.fsync(file.fileno())
            (self._folder / f"{new}.safetensors").replace(path)
        except OSError as error:
            raise MachineError(f"{path}: cannot be written: {error.strerror}") from error

    def add_earlier(self, sums: Curvature) -> None:
        """Add the sums of earlier runs, in the first process."""
        for path in self._earlier if self._processes.is_first else ():
            with open_curvature(str(path)) as file:
                sums.add_file(file)

    def remove(self) -> None:
        """Remove all saved sums."""
        for path in self._files():
            path.unlink()


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
    """Return the curvature of all rows: of ``rows`` over all processes, and of earlier runs.

    Each process saves its sums every ``save_every`` seconds.
    """
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
        **options,
    )
    sums.all_reduce(processes, len(own_rows))
    saved.add_earlier(sums)
    return sums
