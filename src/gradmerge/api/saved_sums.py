"""The sums of an unfinished estimate, saved from time to time so that ``--resume`` can continue from them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from ..curvature.batches import Placed
from ..curvature.curvature import Curvature, require_finite, write_sums
from ..curvature.estimate import estimate_curvature
from ..curvature.format import open_curvature
from ..curvature.kronecker import KroneckerCurvature
from ..curvature.together import Together, parts, without
from ..errors import InputError, MachineError
from ..io.atomic_dir import MARK, AtomicDir
from ..processes import Processes
from ..progress import Progress
from ..tasks import LoadedTask

#: The file with the sums, and the file that replaces it once it is complete.
STEM, NEW = "saved-sums", "saved-sums-new"


class SavedSums:
    """One file in the folder that becomes the result: the sums, their rows and the request.

    The rows and the request are header metadata of the file with the sums, so one rename replaces all three.
    """

    def __init__(self, staging: AtomicDir) -> None:
        self._staging, self._folder = staging, staging.folder
        self._path = self._folder / f"{STEM}.safetensors"
        self.request: dict[str, Any] = {}
        """What is estimated; :meth:`read` refuses the sums of another request."""
        staging.keep = self._path.is_file()

    def write(self, sums: Curvature | KroneckerCurvature, rows: Sequence[Sequence[int]]) -> None:
        """Replace the saved sums; ``rows`` lists the ranges [first, end) of rows that the sums include."""
        require_finite(sums)
        header = {**sums.header(), "request": self._request_text(), "rows": json.dumps(list(map(list, rows)))}
        write_sums(self._folder, sums, header, sys.maxsize, NEW)
        new = self._folder / f"{NEW}.safetensors"
        try:
            with new.open("rb") as file:
                os.fsync(file.fileno())
            new.replace(self._path)
        except OSError as error:
            raise MachineError(f"{self._path}: cannot be written: {error.strerror}") from error
        self._staging.keep = True

    def clear_rest(self) -> None:
        """Remove all files but the saved sums, to make room for the result."""
        for child in self._folder.iterdir():
            if child not in (self._path, self._folder / MARK):
                shutil.rmtree(child) if child.is_dir() else child.unlink()

    def remove(self) -> None:
        """Remove the saved sums: the result is complete, or the sums may be wrong."""
        self._staging.keep = False
        self._path.unlink(missing_ok=True)

    def read(self, kind: str, total: int) -> tuple[Curvature | KroneckerCurvature, list[list[int]]] | None:
        """The sums that an earlier run saved and the ranges of rows they include, of ``total`` rows."""
        if not self._path.is_file():
            return None
        try:
            with open_curvature(str(self._path)) as file:
                header, examples = file.metadata, file.examples
            rows = _ranges(header["rows"])
        except (InputError, OSError, ValueError, KeyError, RecursionError) as error:
            raise InputError(self._unusable(f"cannot be read ({error})")) from error
        if header.get("request") != self._request_text():
            raise InputError(
                f"{self._folder}: holds a measurement of another model, other data or other options. "
                "Run it with the same ones, or without --resume to begin anew."
            )
        if not _fit(rows, examples, total):
            raise InputError(self._unusable(f"holds sums over {examples} examples, but lists other rows: {rows}"))
        return (KroneckerCurvature if kind == "kronecker" else Curvature).load(self._path), rows

    def _request_text(self) -> str:
        return json.dumps(self.request, sort_keys=True)

    def _unusable(self, why: str) -> str:
        return f"{self._path}: {why}. Run without --resume to begin anew."


def _ranges(text: str) -> list[list[int]]:
    """Pairs of whole numbers from JSON."""
    ranges = json.loads(text)
    if not isinstance(ranges, list) or not all(
        isinstance(pair, list) and len(pair) == 2 and all(type(number) is int for number in pair) for pair in ranges
    ):
        raise ValueError("its rows are not pairs of whole numbers")
    return ranges


def _fit(ranges: list[list[int]], examples: int, total: int) -> bool:
    """Whether ranges lie within ``total`` rows, do not overlap, and have as many rows as there are examples."""
    end_before = 0
    for first, end in sorted(ranges):
        if not end_before <= first <= end <= total:
            return False
        end_before = end
    return sum(end - first for first, end in ranges) == examples


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
