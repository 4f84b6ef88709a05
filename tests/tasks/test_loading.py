"""The options of loading a model and its data: the same keywords everywhere, checked in one place."""

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
TAKES: dict[str, Callable[..., Any]] = {
    "evaluate": lambda **options: gm.evaluate("./model", "data.jsonl", **options),
    "load_task": lambda **options: load_task("./model", "data.jsonl", **options),
    "estimate_curvature": lambda **options: gm.estimate_curvature("./model", "data.jsonl", out="./out", **options),
    "preview": lambda **options: gm.preview(RECIPE, **options),
    "diagnose": lambda **options: gm.diagnose(RECIPE, "./out", **options),
}
#: Options that are wrong, and the option that is named.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"batchsize": 4}, "'batch_size'"),
    ({"limit": "4"}, "limit"),
    ({"batch_size": True}, "batch_size"),
    ({"columns": "text=review"}, "columns"),
    ({"device": None}, "device"),
]


@pytest.mark.parametrize(("options", "named"), WRONG)
def test_a_wrong_option_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(gm.InputError, match=named):
        TAKES["evaluate"](**options)


@pytest.mark.parametrize("function", TAKES)
def test_every_function_checks_the_options_of_loading(function: str) -> None:
    with pytest.raises(gm.InputError, match="'batch_size'"):
        TAKES[function](batchsize=4)


def test_a_task_gives_batches_of_the_size_that_it_was_loaded_with(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", labelled(7))
    loaded = load_task(tiny_bert_checkpoint(tmp_path / "model"), data, batch_size=3, device="cpu")
    assert [len(batch["labels"]) for batch in loaded.batches()] == [3, 3, 1]
    assert [len(batch["labels"]) for batch in loaded.batches(5)] == [5, 2]


def test_threads_load_models_one_after_the_other() -> None:
    order: list[str] = []
    inside, waiting = threading.Event(), threading.Event()

    def other() -> None:
        inside.wait()
        waiting.set()
        with quiet_transformers():
            order.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with quiet_transformers():
        inside.set()
        waiting.wait()
        with quiet_transformers():  # the same thread may go in again
            order.append("first")
        time.sleep(0.05)  # a thread that did not wait would be done by now
        order.append("end of first")
    thread.join()
    assert order == ["first", "end of first", "second"]
