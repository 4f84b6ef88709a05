"""Defaults from the environment, and recipes on standard input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from gradmerge.cli.app import app

from ..making import three_models
from ..tasks.making import labelled, tiny_bert_checkpoint, write_jsonl


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a base and two models, all with curvature."""
    three_models(tmp_path, curvature=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


RECIPE = "method: gradient-matching\nbase: base\nmodels: [{model: a, weight: 0.5}, b]\n"


def invoke(*words: str, text: str | bytes | None = None, status: int = 0, **variables: str) -> Result:
    result = CliRunner().invoke(app, list(words), input=text, env=variables)
    assert result.exit_code == status, result.output
    return result


# A recipe on standard input.


def test_a_merge_from_standard_input_is_the_one_from_a_file(place: Path) -> None:
    (place / "recipe.yml").write_text(RECIPE)
    invoke("merge", "recipe.yml", "-o", "one")
    invoke("merge", "-", "-o", "two", text=RECIPE)
    one, two = (json.loads((place / name / "gradmerge.json").read_text()) for name in ("one", "two"))
    assert one["recipe"] == two["recipe"] and one["inputs"] == two["inputs"]
    assert (place / "one" / "model.safetensors").read_bytes() == (place / "two" / "model.safetensors").read_bytes()


# Defaults from the environment.


@pytest.mark.parametrize("value", ["nonsense", "cuda:99", "meta"])
def test_a_device_that_is_not_there_names_the_variable_it_came_from(place: Path, value: str) -> None:
    tiny_bert_checkpoint(place / "bert")
    write_jsonl(place / "rows.jsonl", labelled(4))
    for words in (["merge", "-", "-o", "x"], ["evaluate", "bert", "--data", "rows.jsonl"]):
        told = invoke(*words, text=RECIPE, status=2, GRADMERGE_DEVICE=value).stderr
        assert f"GRADMERGE_DEVICE={value}" in told
        assert "GRADMERGE_DEVICE" not in invoke(*words, "--device", value, text=RECIPE, status=2).stderr
    found = json.loads(
        invoke("evaluate", "bert", "--data", "rows.jsonl", "--json", "--device", "cpu", GRADMERGE_DEVICE=value).stdout
    )
    assert found["device"] == "cpu"


def test_the_folder_for_what_is_fetched_is_that_of_the_variable(place: Path) -> None:
    script = (
        "import sys; from typer.testing import CliRunner; from gradmerge.cli.app import app; "
        "done = CliRunner().invoke(app, sys.argv[1:]); from huggingface_hub import constants; "
        "print(done.exit_code, constants.HF_HUB_CACHE)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "methods", "ties"],
        capture_output=True, text=True, cwd=place, check=True, env=os.environ | {"GRADMERGE_CACHE": "mine"},
    )  # fmt: skip
    assert done.stdout.split() == ["0", str(place / "mine" / "hub")]
    (place / "file").write_text("")
    assert "GRADMERGE_CACHE" in invoke("methods", status=2, GRADMERGE_CACHE="file").stderr
