"""The options of loading a model and its data: the same keywords everywhere, checked in one place."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.quiet import quiet_transformers
from gradmerge.tasks import load_task
from gradmerge.tasks.loading import DEFAULTS

from .making import labelled, tiny_bert_checkpoint, write_jsonl

RECIPE = {"method": "task-arithmetic", "base": "./base", "models": ["./a"]}
TAKES: dict[str, Callable[..., Any]] = {
    "evaluate": lambda **options: gm.evaluate("./model", "data.jsonl", **options),
    "load_task": lambda **options: load_task("./model", "data.jsonl", **options),
    "estimate_curvature": lambda **options: gm.estimate_curvature("./model", "data.jsonl", out="./out", **options),
    "preview": lambda **options: gm.preview(RECIPE, **options),
    "suggest_weights": lambda **options: gm.suggest_weights(RECIPE, **options),
    "diagnose": lambda **options: gm.diagnose(RECIPE, "./out", **options),
}
WRONG = {
    "a slip of the pen": ({"batchsize": 4}, "there is no option 'batchsize'; did you mean 'batch_size'?"),
    "text for a number": ({"limit": "4"}, "limit is '4', but must be a whole number or None"),
    "a truth for a number": ({"batch_size": True}, "batch_size is True, but must be a whole number"),
    "text for columns": ({"columns": "text=review"}, "columns is 'text=review', but must be a mapping or None"),
    "nothing where something is needed": ({"device": None}, "device is None, but must be text"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("function", TAKES)
def test_every_function_refuses_what_it_cannot_load_with(function: str, case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(gm.InputError) as error:
        TAKES[function](**options)
    assert str(error.value).startswith(message)


def test_a_hint_knows_the_other_options_of_the_function() -> None:
    with pytest.raises(gm.InputError, match="there is no option 'wieghts'; did you mean 'weights'"):
        TAKES["preview"](wieghts="0:1:0.5")


def test_every_option_has_a_default() -> None:
    assert list(DEFAULTS) == list(gm.LoadOptions.__annotations__)


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


def test_bitsandbytes_says_nothing_while_models_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "bitsandbytes")
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with quiet_transformers():
        assert not logger.isEnabledFor(logging.WARNING)
    assert logger.isEnabledFor(logging.WARNING)
