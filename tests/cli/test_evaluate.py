"""`gradmerge evaluate` as a user runs it: numbers with their meaning, and one message for what is wrong."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from tests.tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    write_jsonl,
)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, and data for them."""
    folder = tmp_path_factory.mktemp("evaluate")
    tiny_bert_checkpoint(folder / "bert")
    tiny_gpt2_checkpoint(folder / "gpt2")
    write_jsonl(folder / "labelled.jsonl", labelled(9))
    write_jsonl(folder / "unlabelled.jsonl", [{"text": text} for text in sentences(4)])
    write_jsonl(folder / "odd.jsonl", [{"review": row["text"], "stars": row["label"]} for row in labelled(4)])
    return folder


def test_numbers_are_shown_with_their_meaning(place: Path) -> None:
    result = invoke(place / "bert", "--data", place / "labelled.jsonl", "--device", "cpu")
    assert result.exit_code == 0, result.output
    want = gm.evaluate(str(place / "bert"), str(place / "labelled.jsonl"), device="cpu")
    share, errors = want["accuracy"], want["standard_errors"]
    assert errors["accuracy"] == pytest.approx(math.sqrt(share * (1 - share) / 9))
    numbers = [f"{want[name]:.5g} ± {errors[name]:#.2g}" for name in ("accuracy", "loss_per_example")]
    for words in ("classify", *numbers):
        assert words in result.stdout, result.stdout


def test_perplexity_of_a_language_model(place: Path) -> None:
    result = invoke(place / "gpt2", "-d", place / "labelled.jsonl", "--max-length", 5, "--limit", 6, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["task"] == "causal-lm"
    assert facts["examples"] == 6
    assert facts["columns"] == {"text": ["text"]}
    assert len(facts["notes"]) == 1
    assert {"loss_per_token", "perplexity", "loss_per_example", "token_accuracy", "tokens", "seconds"} <= facts.keys()
    shown = invoke(place / "gpt2", "-d", place / "labelled.jsonl", "--max-length", 5)
    assert "note: " in shown.stderr
    quiet = invoke(place / "gpt2", "-d", place / "labelled.jsonl", "--max-length", 5, "--quiet")
    assert quiet.stderr == ""
    assert "perplexity" in quiet.stdout


#: Model, data and options, and the field that the message names.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no such data": (["bert", "nothing.jsonl"], ["nothing.jsonl"]),
    "no such model": (["nothing", "labelled.jsonl"], ["nothing"]),
    "no labels": (["bert", "unlabelled.jsonl"], ["text=text,label=COLUMN"]),
    "odd columns": (["bert", "odd.jsonl", "--columns", "text=review,label=start"], ["'start'", "'stars'"]),
    "columns without =": (["bert", "odd.jsonl", "--columns", "review"], ["--columns review"]),
    "label out of range": (["bert", "range.jsonl"], ["range.jsonl", "row 2", "'label'"]),
    "no head": (["gpt2", "labelled.jsonl", "--task", "classify"], ["score.weight"]),
    "unknown task": (["bert", "labelled.jsonl", "--task", "image-lm"], ["--task image-lm"]),
    "no device": (["bert", "labelled.jsonl", "--device", "cuda:77"], ["--device cuda:77"]),
    "too long": (["bert", "labelled.jsonl", "--max-length", "4000"], ["--max-length 4000"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_message_that_names_it(place: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    write_jsonl(place / "range.jsonl", [{"text": "a", "label": 1}, {"text": "b", "label": 7}])
    (model, data, *options), names = WRONG[case]
    result = invoke(model, "--data", data, *options)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ") and result.stderr.count("error:") == 1
    assert "Traceback" not in result.output and result.stdout == ""
    for name in names:
        assert name in result.stderr, result.stderr


def test_a_device_without_memory_is_a_failure_of_the_machine(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gradmerge.tasks.evaluate", full)
    result = invoke(place / "bert", "--data", place / "labelled.jsonl")
    assert result.exit_code == 1
    assert "--batch-size" in result.stderr
