"""`gradmerge remove --model`: the note about a step that is too long."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app

from ..making import random_curvature, read_model, three_models

runner = CliRunner()
#: The paper's formula, with nothing that bounds the step.
UNBOUNDED = ("--set", "damping=1e-10", "--set", "cap=none")


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    """The base knows nothing of one layer's curvature."""
    folders, states = three_models(tmp_path)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        sums = random_curvature(seed, state).sum()
        if seed == 0:
            sums["layers.0.linear.weight"][:] = 0.0
        gm.Curvature(sums, 100).save(folder / "curvature")
    return folders


def remove(*arguments: str | Path, status: int = 0) -> tuple[str, str]:
    done = runner.invoke(app, ["remove", *map(str, arguments)])
    assert done.exit_code == status, done.output
    return done.stdout, done.stderr


def test_a_step_that_is_too_long_is_noted_on_stderr_and_the_model_is_written_if_that_is_accepted(
    models: list[Path], tmp_path: Path
) -> None:
    base, a, _ = models
    printed, noted = remove("--base", base, "--model", a, *UNBOUNDED, "-o", tmp_path / "out", "--accept-untrusted")
    assert "layers.0" in noted and "layers.0" not in printed
    damping = noted.partition("from 1e-10 to ")[2].partition(",")[0]
    better = ("--set", f"damping={damping}", "--set", "cap=none", "-o", tmp_path / "better")
    _, noted = remove("--base", base, "--model", a, *better)
    assert noted == ""
    assert read_model(tmp_path / "out").keys() == read_model(tmp_path / "better").keys()


def test_the_note_is_in_json_in_the_record_and_in_a_dry_run(models: list[Path], tmp_path: Path) -> None:
    base, a, _ = models
    arguments = ("--base", base, "--model", a, *UNBOUNDED)
    (note,) = json.loads(remove(*arguments, "-o", tmp_path / "out", "--json", "--accept-untrusted")[0])["notes"]
    assert json.loads((tmp_path / "out" / "gradmerge.json").read_text())["notes"] == [note]
    words = ["merge", "-m", "removal", *map(str, arguments), "--dry-run", "--json"]
    assert json.loads(runner.invoke(app, words).stdout)["notes"] == [note]
    assert not list(tmp_path.glob("*partial*"))


def test_by_default_the_step_is_bounded_and_nothing_is_to_be_said(models: list[Path], tmp_path: Path) -> None:
    _, noted = remove("--base", models[0], "--model", models[1], "-o", tmp_path / "out")
    assert noted == ""
    base, tuned, out = (read_model(folder) for folder in (models[0], models[1], tmp_path / "out"))
    for name, value in base.items():
        assert bool(((out[name] - value).abs() <= 2.001 * (tuned[name] - value).abs() + 1e-6).all())
