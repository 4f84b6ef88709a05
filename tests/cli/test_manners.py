"""Hostile names, odd paths, failing streams, limits of the machine: clear words, the right status, nothing broken."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import Result

from gradmerge.cli.output import explain, indented
from gradmerge.errors import InputError
from gradmerge.text import printable

from ..making import near, random_curvature, random_state, read_model, run, three_models, write_model, write_recipe

ESCAPES = "\x1b[31m\x9b2J\x07\u202e\u2028"
#: Tensors of a model that somebody made to be looked at.
HOSTILE = {
    f"layers.0.{ESCAPES}.weight": (4, 3),
    "layers.1\nerror: all is lost.weight": (3, 3),
    "=cmd|' /C calc'!A0.bias": (3,),
    "<script>alert(1)</script>.$x^2$.weight": (2, 2),
}


def clean(*arguments: str | Path, status: int = 0) -> Result:
    """The result of a command that printed nothing that a terminal obeys, and no line that it did not mean."""
    result: Result = run(*arguments, status=status)
    for text in (result.stdout, result.stderr):
        assert printable(text) == text
        assert "\nerror: all is lost" not in text
    if "--json" in arguments:
        json.loads(result.stdout, parse_constant=pytest.fail)
    return result


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models with hostile names, configs and curvature, a recipe, and models that do not fit."""
    folder = tmp_path_factory.mktemp("hostile")
    base = random_state(0, HOSTILE)
    states = {"base": base, f"=a`|<b>{ESCAPES}": near(base, 1), "b\n---\n# x": near(base, 2)}
    for seed, (name, state) in enumerate(states.items()):
        write_model(folder / name, state, config={"architectures": [f"{ESCAPES}\nerror: all is lost"]})
        curvature = random_curvature(seed, state)
        curvature.model = f"{ESCAPES}\nerror: all is lost"
        curvature.save(folder / name / "curvature")
    recipe = {"method": "gradient-matching", "base": "base", "models": list(states)[1:]}
    write_recipe(folder / "recipe.yml", recipe)
    lost = "layers.1\nerror: all is lost.weight"
    write_model(folder / "other", {n: t for n, t in base.items() if n != lost} | {f"new\n{ESCAPES}": torch.zeros(2)})
    write_model(folder / "nan", base | {lost: torch.full((3, 3), torch.nan)})
    return folder


@pytest.mark.parametrize("more", [[], ["--json"], ["--quiet"], ["--tensors"]])
def test_inspect_shows_hostile_names_as_text(hostile: Path, more: list[str]) -> None:
    for folder in (hostile / "base", hostile / f"=a`|<b>{ESCAPES}"):
        clean("inspect", folder, *more)
    shown = clean("inspect", hostile / "base", hostile / "other", *more, status=2).output
    assert "layers.1\\nerror: all is lost.weight" in shown.replace("\\\\n", "\\n")  # escaped once more in JSON


def test_a_message_of_a_hostile_name_stays_one_message(hostile: Path, tmp_path: Path) -> None:
    words = ["merge", "-m", "task-arithmetic", "--base", hostile / "base", "--model", hostile / "nan"]
    message = clean(*words, "-o", tmp_path / "out", status=2).stderr
    assert [line[:7] for line in message.splitlines() if line.startswith("error:")] == ["error: "]
    clean("merge", "-m", f"no\nerror: all is lost{ESCAPES}", "--model", "x", "-o", tmp_path / "out", status=2)
    clean("inspect", f"none\nerror: all is lost{ESCAPES}", status=2)
    clean("inspect", "x", f"--{ESCAPES}", status=2)
    assert indented("a\nb\n  c\n• d\n\ne") == "a\n  b\n  c\n• d\n\n  e"


def test_a_merge_of_hostile_names_leaves_files_that_are_safe_to_look_at(hostile: Path, tmp_path: Path) -> None:
    clean("merge", hostile / "recipe.yml", "--dry-run")
    clean("merge", hostile / "recipe.yml", "-o", tmp_path / "out")
    clean("curvature", "show", hostile / "base")
    clean("curvature", "show", hostile / "base", "--json")
    assert read_model(tmp_path / "out").keys() == HOSTILE.keys()
    for name in ("gradmerge.json", "README.md"):
        text = (tmp_path / "out" / name).read_text("utf-8")
        assert printable(text) == text
    front = yaml.safe_load((tmp_path / "out" / "README.md").read_text("utf-8").split("---\n")[1])
    assert front.keys() == {"library_name", "tags"}


@pytest.mark.parametrize("command", [["diagnose"], ["preview", "--weights", "0,1"]])
def test_reports_on_hostile_names_are_safe_to_open(hostile: Path, tmp_path: Path, command: list[str]) -> None:
    clean(*command, hostile / "recipe.yml", "-o", tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        text = path.read_text("utf-8")
        assert printable(text) == text, path.name
    clean(*command, hostile / "recipe.yml", "-o", tmp_path / "json", "--json")


# Errors for machines.


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
        ImportError("libtorch.so: failed to map segment from shared object"),
        caused(InputError("x: cannot be loaded"), MemoryError()),
        caused(InputError("x: cannot be opened"), OSError(errno.EMFILE, "")),
        caused(InputError("x: cannot be read"), OSError(errno.EIO, "")),
    ],
)
def test_a_failing_machine_is_not_blamed_on_the_input(error: BaseException) -> None:
    assert explain(error)[1] == 1


# Processes with streams that fail, and under limits.


@pytest.fixture
def place(tmp_path: Path) -> Path:
    three_models(tmp_path)
    # Curvature that the rule does not use is noted, on standard error.
    random_curvature(0, random_state(0)).save(tmp_path / "c")
    models = [{"model": "a", "curvature": "c"}, {"model": "b"}]
    write_recipe(tmp_path / "r.yml", {"method": "task-arithmetic", "base": "base", "models": models})
    write_recipe(tmp_path / "plain.yml", {"method": "task-arithmetic", "base": "base", "models": ["a", "b"]})
    return tmp_path


def shell(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A command line in which `gradmerge` stands for ours, by the shell of a user."""
    script = f'gradmerge() {{ "{sys.executable}" -m gradmerge "$@"; }}\n{command}'
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr, done.stderr
    return done


def test_a_full_output_is_a_failure_with_a_message(tmp_path: Path) -> None:
    done = shell(tmp_path, "gradmerge --help >/dev/full; echo $? >&2; gradmerge methods >/dev/full; echo $? >&2")
    assert re.fullmatch(r"error: .*\n1\nerror: .*\n1\n", done.stderr)
    done = shell(tmp_path, "gradmerge methods | true; echo ${PIPESTATUS[0]}; gradmerge --help >&- 2>&-")
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_a_merge_whose_summary_cannot_be_printed_stays(place: Path) -> None:
    full, closed = "gradmerge merge r.yml -o full >/dev/full", "gradmerge merge r.yml -o closed <&- >&- 2>&-"
    done = shell(place, f"{full}; echo $? >&2; {closed}; echo $? >&2; gradmerge merge r.yml -o noted 2>/dev/full")
    assert done.stderr.endswith("\n1\n0\n")
    for name in ("full", "closed", "noted"):
        assert read_model(place / name).keys() == random_state(0).keys()
    assert not list(place.glob("*.gradmerge-*"))


def test_too_few_files_and_too_little_memory_are_named(place: Path) -> None:
    done = shell(place, "(ulimit -n 8; gradmerge merge r.yml -o out; echo $?)")
    assert done.stdout == "1\n"
    assert re.fullmatch(r"error: .*ulimit -n.*\n", done.stderr)
    done = shell(place, "(ulimit -v 300000; gradmerge merge r.yml -o out; echo $?)")
    assert done.stdout == "1\n" and re.fullmatch(r"error: out of memory\..*\n", done.stderr)
    assert not list(place.glob("out*"))
