"""The options of loading a model and its data are the same keywords everywhere, checked in one place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.quiet import quiet_transformers
from gradmerge.tasks import load_task

from .making import labelled, tiny_bert_checkpoint, write_jsonl

RECIPE = {"method": "task-arithmetic", "base": "./base", "models": ["./a"]}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "evaluate": lambda **options: gm.evaluate("./model", "data.jsonl", **options),
    "load_task": lambda **options: load_task("./model", "data.jsonl", **options),
    "estimate_curvature": lambda **options: gm.estimate_curvature("./model", "data.jsonl", out="./out", **options),
    "preview": lambda **options: gm.preview(RECIPE, **options),
    "diagnose": lambda **options: gm.diagnose(RECIPE, "./out", **options),
}


def test_wrong_values_of_options_are_refused() -> None:
    with pytest.raises(gm.InputError, match="limit"):
        gm.evaluate("./model", "data.jsonl", limit="4")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_unknown_options_are_refused(function: str) -> None:
    with pytest.raises(gm.InputError, match="'batch_size'"):
        FUNCTIONS[function](batchsize=4)


def test_a_task_yields_batches_of_its_batch_size(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", labelled(7))
    loaded = load_task(tiny_bert_checkpoint(tmp_path / "model"), data, batch_size=3, device="cpu")
    assert [len(batch["labels"]) for batch in loaded.batches()] == [3, 3, 1]
    assert [len(batch["labels"]) for batch in loaded.batches(5)] == [5, 2]


def test_threads_load_models_one_after_the_other() -> None:
    order: list[str] = []
    inside, waiting = threading.Event(), threading.Event()

    def second() -> None:
        inside.wait()
        waiting.set()
        with quiet_transformers():
            order.append("second")

    thread = threading.Thread(target=second)
    thread.start()
    with quiet_transformers():
        inside.set()
        waiting.wait()
        with quiet_transformers():  # the same thread may enter again
            order.append("first")
        time.sleep(0.05)  # a thread that does not wait would be done by now
        order.append("end of first")
    thread.join()
    assert order == ["first", "end of first", "second"]
