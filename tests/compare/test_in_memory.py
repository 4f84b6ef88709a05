"""Batches that are kept from one model to the next: only as long as they are needed, and not too many."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradmerge.compare import diagnosis, in_memory
from gradmerge.compare.in_memory import TaskData
from gradmerge.recipe import make_recipe

from ..making import random_curvature, read_model


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
    monkeypatch.setattr(in_memory, "KEPT", limit)
    loaded: Any = Batches()
    data = TaskData("a", loaded)
    for _ in range(2):
        for number, batch in enumerate(data.batches()):
            del batch
            # The one at hand is held by those who made it.
            assert loaded.alive <= (3 if kept or number < 2 else 1)
    assert (loaded.made, loaded.alive) == (made, kept)
    data.forget()
    assert loaded.alive == 0


def test_a_diagnosis_frees_the_batches_of_a_task_before_the_next(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[TaskData] = []
    held: list[int] = []

    def load(*args: Any) -> TaskData:
        loaded.append(in_memory.load_data(*args))
        return loaded[-1]

    def evaluate(data: TaskData, model: Any) -> Any:
        held.append(sum(other._kept is not None for other in loaded if other is not data))
        return plain(data, model)

    plain = TaskData.evaluate_rows
    monkeypatch.setattr(diagnosis, "load_data", load)
    monkeypatch.setattr(TaskData, "evaluate_rows", evaluate)
    models = []
    for seed, name in enumerate("ab"):
        random_curvature(seed, read_model(texts / name)).save(tmp_path / name)
        models.append({"model": str(texts / name), "curvature": str(tmp_path / name)})
    recipe = make_recipe({"method": "task-arithmetic", "base": str(texts / "base"), "models": models})
    found = diagnosis.find_costs(recipe, data={name: str(texts / f"{name}.jsonl") for name in "ab"})
    assert found.metrics["tuned"].keys() == {"a", "b"} and len(held) > 2
    assert not any(held) and [data._kept for data in loaded] == [None, None]
