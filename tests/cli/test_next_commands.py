"""The commands that diagnoses and previews advise: they run, and `calibrate` is absent if it cannot help."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.recipe import make_recipe
from gradmerge.report.advice import next_commands

from ..compare.conftest import write_texts
from ..making import run


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(write_texts(tmp_path))
    gm.merge("recipe.yml", "merged")
    return tmp_path


def run_advised(command: str) -> None:
    name, *arguments = shlex.split(command)
    assert name == "gradmerge"
    run(*arguments, *(["--device", "cpu"] if "merge" not in arguments else []))


def advised(stdout: str) -> str:
    return stdout[stdout.index("gradmerge calibrate") :].splitlines()[0]


def test_the_command_that_a_preview_prints_runs(place: Path) -> None:
    options = ["--weights", "0,0.4", "-d", "a=a.jsonl", "-d", "base=b.jsonl", "--columns", "text=text,label=label"]
    options += ["--device", "cpu", "--save-best", "best"]
    done = run("preview", "recipe.yml", *options, "-o", "report")
    assert "gradmerge merge" not in done.stdout, "it is merged already"
    command = advised(done.stdout)
    assert "gradmerge calibrate" in (place / "report" / "report.html").read_text()
    run_advised(command.replace("b=ROWS", "b=b.jsonl"))
    record = json.loads((place / "calibrated" / "gradmerge.json").read_text())
    assert set(record["calibration"]["data"]) == {"a", "b", "base"}


def test_the_command_of_a_diagnosis_names_the_merged_model_and_models_that_have_no_record(place: Path) -> None:
    (place / "merged" / "gradmerge.json").unlink()
    for name in ("base", "a", "b"):
        gm.estimate_curvature(name, "a.jsonl", out=f"{name}/curvature", device="cpu")
    data = ["-d", "a=a.jsonl", "-d", "b=b.jsonl"]
    run("diagnose", "recipe.yml", "--merged", "merged", *data, "--device", "cpu", "-o", "report")
    found = gm.diagnose("recipe.yml", merged="merged", data={"a": "a.jsonl", "b": "b.jsonl"}, device="cpu")
    run_advised(found.commands["calibrate"])
    assert (place / "calibrated" / "model.safetensors").exists()
    run_advised(f"{found.commands['preview']} --weights 0,1 -o preview")
    run_advised(f"{found.commands['merge']} -o again")
    assert (place / "preview" / "report.html").exists() and (place / "again").exists()


@pytest.mark.parametrize(
    "changes", [{"method": "removal", "models": [{"model": "a", "weight": 1}]}, {"tokenizer": {"source": "union"}}]
)
def test_merges_that_cannot_be_calibrated_have_no_command(changes: dict[str, object]) -> None:
    recipe = make_recipe({"method": "average", "base": "base", "models": ["a", "b"]} | changes)
    assert "calibrate" not in next_commands(recipe, {})
