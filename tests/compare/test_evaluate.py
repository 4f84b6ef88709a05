"""Batches that are kept from one model to the next: only as long as they are needed, and not too many."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gradmerge.compare import evaluate
from gradmerge.compare.evaluate import TaskData


class Batches:
    """Of a loaded task, three batches of 40 bytes; counts how often they are made and which of them are in memory."""

    def __init__(self) -> None:
        self.made = 0
        self._seen: list[weakref.ref[Tensor]] = []

    def batches(self) -> Iterator[dict[str, Tensor]]:
        for _ in range(3):
            self.made += 1
            batch = {"x": torch.zeros(10)}
            self._seen.append(weakref.ref(batch["x"]))
            yield batch
            del batch

    @property
    def alive(self) -> int:
        return sum(seen() is not None for seen in self._seen)


@pytest.mark.parametrize(("limit", "made", "kept"), [(120, 3, 3), (119, 6, 0)], ids=["few", "too many"])
def test_batches_are_made_once_unless_they_are_too_many(
    monkeypatch: pytest.MonkeyPatch, limit: int, made: int, kept: int
) -> None:
    monkeypatch.setattr(evaluate, "MAX_KEPT", limit)
    loaded: Any = Batches()
    data = TaskData("a", loaded)
    for _ in range(2):
        for number, batch in enumerate(data.batches()):
            del batch
            # The one at hand is held by those who made it.
            assert loaded.alive <= (3 if kept or number < 2 else 1)
    assert (loaded.made, loaded.alive) == (made, kept)
