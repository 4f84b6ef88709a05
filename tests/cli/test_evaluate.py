"""`gradmerge evaluate` as a user runs it: numbers with their meaning, and a device that is too small."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from tests.making import run
from tests.tasks.making import (
    labelled,
    tiny_bert_checkpoint,
    write_jsonl,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and data for it."""
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_bert_checkpoint(folder / "bert")
    write_jsonl(folder / "labelled.jsonl", labelled(9))
    return folder


def test_numbers_are_shown_with_their_meaning(place: Path) -> None:
    result = run("evaluate", place / "bert", "--data", place / "labelled.jsonl", "--device", "cpu")
    want = gm.evaluate(str(place / "bert"), str(place / "labelled.jsonl"), device="cpu")
    share, errors = want["accuracy"], want["standard_errors"]
    assert errors["accuracy"] == pytest.approx(math.sqrt(share * (1 - share) / 9))
    numbers = [f"{want[name]:.5g} ± {errors[name]:#.2g}" for name in ("accuracy", "loss_per_example")]
    for words in ("classify", *numbers):
        assert words in result.stdout, result.stdout


def test_a_device_without_memory_is_a_failure_of_the_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gradmerge.tasks.evaluate", full)
    assert "--batch-size" in run("evaluate", place / "bert", "--data", place / "labelled.jsonl", status=1).stderr
