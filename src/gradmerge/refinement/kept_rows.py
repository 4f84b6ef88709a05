"""Rows that stay and rows that go: a part held back to judge by, and rows that are in both."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..curvature.batches import examples_in, values_of
from ..storage.bytesof import bytes_of

#: One row in so many is held back.
HELD = 10
#: Labels of tokens that do not count.
IGNORED = -100


def held_rows(rows: int, seed: int = 0) -> Tensor:
    """Which of so many rows are held back: a tenth, drawn at random; none of fewer than ten."""
    drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(rows, dtype=torch.bool)
    held[drawn[: rows // HELD]] = True
    return held


def held_back(batches: Sequence[Any], seed: int = 0) -> tuple[list[Any], list[Any]]:
    """The batches without the rows that are held back, and those."""
    sizes = [examples_in(batch) for batch in batches]
    kept, apart = [], []
    for batch, held in zip(batches, held_rows(sum(sizes), seed).split(sizes), strict=True):
        kept += [] if bool(held.all()) else [_rows(batch, ~held)]
        apart += [_rows(batch, held)] if bool(held.any()) else []
    return kept, apart


def in_both(one: Iterable[Any], other: Iterable[Any]) -> int:
    """How many rows of one there are, identically, in the other too."""
    known = set(_digests(other))
    return sum(number for digest, number in Counter(_digests(one)).items() if digest in known)


def _rows(batch: Any, mask: Tensor) -> Any:
    """The rows of a batch that a mask names; what has no axis of examples stays as it is."""
    examples = len(mask)

    def some(value: Any) -> Any:
        has_rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == examples
        return value[mask.to(value.device)] if has_rows else value

    if isinstance(batch, Mapping):
        return {name: some(value) for name, value in batch.items()}
    return tuple(some(value) for value in batch)


def _digests(batches: Iterable[Any]) -> list[bytes]:
    """A digest of every row, the same whatever it was padded to."""
    found = []
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        tensors = [value.cpu() for value in values_of(batch) if isinstance(value, Tensor)]
        for row in range(examples_in(batch)):
            digest = hashlib.blake2b(digest_size=16)
            for value in tensors:
                entry = value[row] if value.dim() else value
                if mask is not None and entry.shape == mask[row].shape:
                    entry = entry[mask[row].cpu().bool()]
                elif entry.dim() == 1 and not entry.is_floating_point():
                    entry = entry[entry != IGNORED]
                digest.update(f"{entry.dtype}{tuple(entry.shape)}".encode())
                digest.update(bytes_of(entry.contiguous().reshape(-1)))
            found.append(digest.digest())
    return found
