"""Wrong input: one clear message, the right exit status, and nothing left behind or lost."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from gradmerge.cli.app import app
from gradmerge.engine import output
from gradmerge.io import atomic_dir
from tests.making import (
    cli,
    near,
    random_curvature,
    random_state,
    three_models,
    weight_bytes,
    write_model,
    write_recipe,
)


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(out: Path | None, *arguments: str | Path, status: int = 2, says: tuple[str, ...] = ()) -> str:
    """Check that a command fails and leaves nothing; return its message, which names the fields in ``says``."""
    before = sorted(out.parent.iterdir()) if out is not None and out.parent.is_dir() else []
    result = invoke(*arguments, *(["-o", out] if out is not None else []))
    assert result.exit_code == status, result.output
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("error:") == 1 and "Traceback" not in result.output and "internal" not in result.stderr
    assert result.stdout == ""
    for words in says:
        assert words in result.stderr, result.stderr
    if out is not None:
        assert not out.exists()
        after = sorted(out.parent.iterdir()) if out.parent.is_dir() else []
        assert after == before, "something was left behind"
    return result.stderr


class Place:
    """A base and two tuned models, and where their merge goes."""

    def __init__(self, tmp_path: Path) -> None:
        (self.base, self.a, self.b), (self.base_state, self.a_state, self.b_state) = three_models(tmp_path)
        self.path = tmp_path
        self.out = tmp_path / "out"

    def command(self, method: str = "task-arithmetic", *models: str | Path) -> list[str | Path]:
        words: list[str | Path] = ["merge", "--method", method, "--base", self.base]
        for model in models or (self.a,):
            words += ["--model", model]
        return words

    def recipe(self, **keys: Any) -> dict[str, Any]:
        return {"method": "task-arithmetic", "base": str(self.base), "models": [str(self.a), str(self.b)]} | keys

    def write(self, **keys: Any) -> Path:
        return write_recipe(self.path / "recipe.yml", self.recipe(**keys))

    def text(self, text: str | bytes) -> Path:
        path = self.path / "recipe.yml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# Checkpoints


def test_models_that_cannot_be_merged_are_refused(place: Place) -> None:
    state = place.a_state | {"classifier.weight": torch.zeros(3, 8, dtype=torch.int32)}
    odd = write_model(place.path / "odd", state)
    refused(place.out, *place.command("task-arithmetic", odd), says=("classifier.weight",))
    refused(place.out, "merge", place.write(exclude=["*"]))
    refused(place.out, "merge", place.write(include=["layer.*"]), says=("include", "layer.*"))
    for name in ("~nobody-of-that-name/x", "x" * 5000, ""):
        refused(place.out, *place.command("average", name))
    (place.path / "empty").mkdir()
    refused(place.out, *place.command("average", place.path / "empty"), says=("model.safetensors",))


# Numbers and curvature


def curvature_command(place: Place, curvature: Path, *more: str) -> list[str | Path]:
    given = ["--curvature", "base=identity:1.0", "--curvature", f"{place.a}={curvature}"]
    return [*place.command("gradient-matching"), *given, *more]


def damaged_curvature(place: Place, change: Mapping[str, torch.Tensor], without: str = "") -> Path:
    folder = place.path / "curvature"
    random_curvature(5, place.a_state).save(folder)
    path = folder / "curvature.safetensors"
    metadata = {"format": "gradmerge-curvature/1", "examples": "100", "likelihood": "empirical"}
    state = {n: t for n, t in load_file(path).items() if n != without}
    save_file(state | dict(change), path, metadata=metadata)
    return folder


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_curvature_that_is_negative_or_not_finite_is_refused(place: Place, value: float) -> None:
    bad = torch.ones(3, 8)
    bad[1, 1] = value
    folder = damaged_curvature(place, {"classifier.weight": bad})
    refused(place.out, *curvature_command(place, folder), says=(str(folder), "classifier.weight"))
    shown = invoke("curvature", "show", folder)
    assert shown.exit_code == 2 and "classifier.weight" in shown.stderr


def test_curvature_of_another_model_is_refused(place: Place) -> None:
    folder = damaged_curvature(place, {"classifier.weight": torch.ones(2, 8)})
    refused(place.out, *curvature_command(place, folder), says=("classifier.weight: [2, 8]", "[3, 8]"))
    random_curvature(1, {"other.weight": torch.ones(3)}).save(place.path / "other")
    for other in (place.path / "other", place.base / "model.safetensors", place.path / "nowhere"):
        refused(place.out, *curvature_command(place, other), says=(str(other),))


def test_curvature_that_is_not_given_or_given_too_often_is_refused(place: Place) -> None:
    refused(place.out, *place.command("gradient-matching"), says=("base.curvature",))
    for given in (["x"] * 5, ["nobody=x"], ["base=identity:-1"], ["base=identity:x"]):
        words = [word for value in given for word in ("--curvature", value)]
        refused(place.out, *place.command("gradient-matching", place.a, place.b), *words)


# Recipes and options


def test_a_python_tag_in_yaml_is_not_run(place: Place) -> None:
    text = f"!!python/object/apply:os.system ['touch {place.path / 'executed'}']"
    refused(place.out, "merge", place.text(f"method: {text}\n"))
    refused(place.out, *place.command(), "--set", f"damping={text}", says=("--set damping",))
    assert not (place.path / "executed").exists()


@pytest.mark.parametrize(
    "setting",
    [
        *["nonsense", "=1", "²=1", "damping=[", "damping.x=1", "dense=0.2", "models[9].weight=1", "method=[a]"],
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(place: Place, setting: str) -> None:
    message = refused(place.out, *place.command("ties"), "--set", setting)
    assert setting.partition("=")[0].partition(".")[0].partition("[")[0] in message


@pytest.mark.parametrize("option", [["--threads", "0"], ["--model"], ["--device", "meta"], ["a", "b"]])
def test_an_option_that_makes_no_sense_is_refused(place: Place, option: list[str]) -> None:
    result = invoke(*place.command(), "-o", place.out, *option)
    assert result.exit_code == 2 and result.stdout == "" and "Traceback" not in result.stderr
    assert result.stderr.lower().count("error: ") == 1
    assert option[0] == "a" or option[0] in result.stderr
    assert not place.out.exists()


def test_too_little_or_too_much_on_the_command_line_is_refused(place: Place) -> None:
    refused(place.out, "merge", says=("--method",))
    refused(place.out, "merge", "--method", "task-arithmetic", "--base", place.base, says=("--model",))
    refused(place.out, "merge", "--method", "task-arithmetic", "--model", place.a, says=("base",))
    refused(place.out, "merge", place.write(), "--base", place.base, says=("--set",))
    refused(place.out, *place.command("task-arithmetic", f"{place.a}=nan"), says=("weight",))
    refused(None, *place.command(), says=("-o OUT",))
    refused(place.out, *place.command("average", f"{place.a}=2"), says=("weight",))
    refused(place.out, *place.command("slerp", place.a, place.b), says=("slerp",))


# Output


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A small file system of its own, where the machine lets us have one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user cannot mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], capture_output=True, check=True)


def test_space_that_runs_out_on_the_way_stops_the_merge_and_resume_goes_on(place: Place) -> None:
    state = random_state(0, {f"layers.{i}.weight": (400, 250) for i in range(20)})
    base, tuned = write_model(place.path / "large", state), write_model(place.path / "tuned", near(state, 1))
    command: list[str | Path] = ["merge", "-m", "task-arithmetic", "--base", base, "--model", tuned]
    with mounted(place.path / "disk", "12m") as disk:
        out = disk / "out"
        filler = disk / "filler"
        # Enough when it begins; then another process takes it. That cannot be timed from outside, hence the patch.
        original = atomic_dir.require_space

        def look_then_fill(folder: Path, nbytes: int) -> None:
            original(folder, nbytes)
            filler.write_bytes(bytes(7_000_000))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(output, "require_space", look_then_fill)
            result = invoke(*command, "-o", out)
        assert result.exit_code == 1, result.output
        assert result.stderr.startswith("error: ")
        assert not out.exists() and (disk / "out.gradmerge-partial").is_dir()
        # Still no space: what was done stays.
        again = invoke(*command, "-o", out, "--resume")
        assert again.exit_code == 1 and (disk / "out.gradmerge-partial" / "gradmerge.journal").is_file()
        filler.unlink()
        result = invoke(*command, "-o", out, "--resume")
        assert result.exit_code == 0, result.output
        assert invoke(*command, "-o", place.path / "whole" / "out").exit_code == 0
        assert weight_bytes(out) == weight_bytes(place.path / "whole" / "out")


def test_debug_shows_the_traceback_of_an_error(place: Place) -> None:
    done = cli("merge", place.write(metod="x"), "-o", place.out)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "Traceback" in invoke("merge", place.write(metod="x"), "-o", place.out, "--debug").stderr
