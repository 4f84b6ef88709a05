"""Rows of a task: those that steps are made of, and those that are held back to judge them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..curvature.batches import batch_rows, examples_in, values_of
from ..errors import InputError
from ..quiet import quiet_transformers
from ..tasks import LoadedTask

#: Every so many rows, one is held back.
HELD = 10
#: Bytes of a task's batches that are kept in memory; those of larger ones are made anew in every pass.
KEPT_BYTES = 1_000_000_000


def split_rows(name: str, count: int, seed: int) -> tuple[list[int], list[int]]:
    """The places of a task's rows, in their order, and of a tenth that is held back, drawn by the seed and the name."""
    if count < 2:
        raise InputError(
            f"{name}: has {count} row{'s' if count != 1 else ''}, but at least two are needed, one of them held out"
        )
    key = hashlib.sha256(f"gradmerge held back {seed} {name}".encode()).digest()
    order = torch.randperm(count, generator=torch.Generator().manual_seed(int.from_bytes(key[:7], "little"))).tolist()
    held = max(1, count // HELD)
    return sorted(order[held:]), sorted(order[:held])


def split_batches(name: str, batches: Sequence[Any], seed: int) -> tuple[list[Any], list[Any]]:
    """Batches in memory without the rows held back, and these."""
    kept, held = split_rows(name, sum(map(examples_in, batches)), seed)
    return _rows_of(batches, kept), _rows_of(batches, held)


def sample_batches(batches: Sequence[Any], most: int, seed: int) -> Sequence[Any]:
    """At most so many of the rows of batches, drawn by the seed, in their order."""
    count = rows_in(batches)
    if count <= most:
        return batches
    drawn = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:most].sort().values.tolist()
    return batches.part(drawn) if isinstance(batches, RowBatches) else _rows_of(batches, drawn)


def _rows_of(batches: Sequence[Any], rows: Sequence[int]) -> list[Any]:
    sizes = [examples_in(batch) for batch in batches]
    chosen = torch.zeros(sum(sizes), dtype=torch.bool)
    chosen[rows] = True
    found = []
    for batch, marks in zip(batches, chosen.split(sizes), strict=True):
        if bool(marks.any()):
            place = next(value.device for value in values_of(batch) if isinstance(value, Tensor))
            found.append(batch_rows(batch, marks.nonzero()[:, 0].to(place)))
    return found


class RowBatches(Sequence[Any]):
    """Some rows of loaded data as batches, kept in memory where they are not too large."""

    def __init__(self, loaded: LoadedTask, rows: Sequence[int]) -> None:
        self._loaded, self._rows = loaded, rows
        self._kept: dict[int, Any] | None = {}

    @property
    def count_rows(self) -> int:
        return len(self._rows)

    def __len__(self) -> int:
        return -(-len(self._rows) // self._loaded.batch_size)

    def __getitem__(self, place: Any) -> Any:
        if not 0 <= place < len(self):
            raise IndexError(place)
        if self._kept is not None and place in self._kept:
            return self._kept[place]
        size = self._loaded.batch_size
        batch = self.rows(range(place * size, min((place + 1) * size, len(self._rows))))
        if self._kept is not None:
            self._kept[place] = batch
            if len(self._kept) == 1 and _nbytes(batch) * len(self) > KEPT_BYTES:
                self._kept = None
        return batch

    def part(self, places: Sequence[int]) -> RowBatches:
        """Some rows, as batches of their own."""
        return RowBatches(self._loaded, [self._rows[place] for place in places])

    def rows(self, places: Sequence[int]) -> Any:
        """Some rows as one batch."""
        with quiet_transformers():
            return self._loaded.data.batch([self._rows[place] for place in places])


def rows_in(batches: Sequence[Any]) -> int:
    """How many rows there are in all; those of loaded data are not made for it."""
    return batches.count_rows if isinstance(batches, RowBatches) else sum(map(examples_in, batches))


def _nbytes(batch: Any) -> int:
    return sum(value.nbytes for value in values_of(batch) if isinstance(value, Tensor))


def as_batches(name: str, batches: Iterable[Any]) -> Sequence[Any]:
    """Batches that can be gone through again; an iterator's are kept."""
    found = batches if isinstance(batches, Sequence) and not isinstance(batches, str) else list(batches)
    if not len(found) or not sum(map(examples_in, found)):
        raise InputError(f"{name}: there are no rows")
    return found
