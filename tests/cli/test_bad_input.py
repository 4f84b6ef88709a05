"""Wrong input: one clear message, the right exit status, and nothing left behind or lost."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradmerge.engine import output
from gradmerge.io import atomic_dir
from tests.making import (
    cli,
    near,
    random_curvature,
    random_state,
    read_model,
    run,
    three_models,
    weight_bytes,
    write_model,
    write_recipe,
)


def refused(command: str, *names: str) -> None:
    """Check that a command fails with one message that has some names, and writes nothing."""
    before = sorted(Path.cwd().iterdir())
    result = run(*shlex.split(command), "-o", "out", status=2)
    assert result.stdout == "" and result.stderr.lower().count("error: ") == 1
    assert all(name in result.stderr for name in names), result.stderr
    assert sorted(Path.cwd().iterdir()) == before


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a base, two tuned models, and what cannot be merged."""
    monkeypatch.chdir(tmp_path)
    three_models(tmp_path)
    (tmp_path / "empty").mkdir()
    recipe = {"method": "task-arithmetic", "base": "base", "models": ["a", "b"]}
    write_recipe(tmp_path / "recipe.yml", recipe)
    (tmp_path / "tag.yml").write_text("method: !!python/object/apply:os.system ['touch executed']\n")
    return tmp_path


ONE, TWO = "--base base --model a", "--base base --model a --model b"
#: A command and what its message names.
WRONG = {
    "merge": "--method",
    "merge -m task-arithmetic --base base": "--model",
    "merge -m task-arithmetic --model a": "base",
    "merge -m average --base base --model empty": "model.safetensors",
    "merge -m average --base base --model ~nobody-of-that-name/x": "nobody-of-that-name",
    "merge -m average --base base --model ''": "model",
    "merge recipe.yml --base base": "--set",
    "merge recipe.yml other.yml": "other.yml",
    "merge tag.yml": "tag.yml",
    f"merge -m ties {ONE} --set \"damping=!!python/object/apply:os.system ['touch executed']\"": "--set damping",
    f"merge -m ties {ONE} --threads 0": "--threads",
    f"merge -m ties {ONE} --device meta": "--device",
    f"merge -m gradient-matching {ONE}": "base.curvature",
    f"merge -m gradient-matching {TWO} --curvature x": "--curvature",
    f"merge -m gradient-matching {TWO} --curvature nobody=x": "--curvature",
    f"merge -m gradient-matching {TWO} --curvature base=identity:-1": "identity",
}
SETTINGS = ("nonsense", "=1", "²=1", "damping=[", "damping.x=1", "dense=0.2", "models[9].weight=1", "method=[a]")


@pytest.mark.parametrize("command", WRONG)
def test_a_wrong_command_is_refused(place: Path, command: str) -> None:
    refused(command, WRONG[command])


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_that_makes_no_sense_is_refused(place: Path, setting: str) -> None:
    refused(f"merge -m ties {ONE} --set '{setting}'", setting.partition("=")[0].partition(".")[0].partition("[")[0])


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_curvature_that_is_negative_or_not_finite_is_refused(place: Path, value: float) -> None:
    random_curvature(5, read_model(place / "a")).save(place / "c")
    path = place / "c" / "curvature.safetensors"
    state = load_file(path)
    state["classifier.weight"][1, 1] = value
    save_file(state, path, {"format": "gradmerge-curvature/1", "examples": "100", "likelihood": "empirical"})
    refused(f"merge -m gradient-matching {ONE} --curvature base=identity:1.0 --curvature a=c", "classifier.weight")
    assert "classifier.weight" in run("curvature", "show", "c", status=2).stderr


def test_curvature_of_another_model_is_refused(place: Path) -> None:
    random_curvature(1, {"classifier.weight": torch.ones(2, 8)}).save(place / "shape")
    random_curvature(1, {"other.weight": torch.ones(3)}).save(place / "other")
    for name in ("shape", "other", "base/model.safetensors", "nowhere"):
        refused(f"merge -m gradient-matching {ONE} --curvature base=identity:1.0 --curvature a={name}", name)


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


def test_space_that_runs_out_on_the_way_stops_the_merge_and_resume_goes_on(place: Path) -> None:
    state = random_state(0, {f"layers.{i}.weight": (400, 250) for i in range(20)})
    base, tuned = write_model(place / "large", state), write_model(place / "tuned", near(state, 1))
    command: list[str | Path] = ["merge", "-m", "task-arithmetic", "--base", base, "--model", tuned]
    with mounted(place / "disk", "12m") as disk:
        out = disk / "out"
        filler = disk / "filler"
        # Enough when it begins; then another process takes it. That cannot be timed from outside, hence the patch.
        original = atomic_dir.require_space

        def look_then_fill(folder: Path, nbytes: int) -> None:
            original(folder, nbytes)
            filler.write_bytes(bytes(7_000_000))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(output, "require_space", look_then_fill)
            run(*command, "-o", out, status=1)
        assert not out.exists() and (disk / "out.gradmerge-partial").is_dir()
        # Still no space: what was done stays.
        run(*command, "-o", out, "--resume", status=1)
        assert (disk / "out.gradmerge-partial" / "gradmerge.journal").is_file()
        filler.unlink()
        run(*command, "-o", out, "--resume")
        run(*command, "-o", place / "whole" / "out")
        assert weight_bytes(out) == weight_bytes(place / "whole" / "out")


def test_debug_shows_the_traceback_of_an_error(place: Path) -> None:
    done = cli("merge", place / "tag.yml", "-o", place / "out")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    done = cli("merge", place / "tag.yml", "-o", place / "out", "--debug")
    assert done.returncode == 2 and "Traceback" in done.stderr
