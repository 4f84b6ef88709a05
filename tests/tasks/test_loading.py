"""The options of loading a model and its data are the same keywords everywhere, checked in one place."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.quiet import quiet_transformers
from gradmerge.tasks import load_task

from .making import labelled, tiny_bert_checkpoint, write_jsonl


def test_wrong_and_unknown_options_are_refused() -> None:
    with pytest.raises(gm.InputError, match="limit"):
        gm.evaluate("./model", "data.jsonl", limit="4")
    unknown: dict[str, Any] = {"batchsize": 4}
    with pytest.raises(gm.InputError, match="batchsize"):
        load_task("./model", "data.jsonl", **unknown)
    with pytest.raises(gm.InputError, match="batchsize"):
        gm.preview({"method": "task-arithmetic", "base": "./base", "models": ["./a"]}, **unknown)


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
