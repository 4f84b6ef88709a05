"""Commands that are killed: OUT is absent or complete, and running the command again gives the whole result.

Merges and estimates, which can be resumed, are tested in tests/engine/test_kill.py and tests/api/test_saved_sums.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.cli.test_calibrate import write_texts
from tests.making import three_models
from tests.tasks.making import tiny_llama_checkpoint

from .killing import kill_before_change
from .trial import command, files_in

KILLS = max(2, int(os.environ.get("FUZZ_KILLS", "0")) // 4)


def write_merge_inputs() -> None:
    three_models(Path(), curvature=True)
    recipe = {"method": "gradient-matching", "base": "base", "models": ["a", {"model": "b", "weight": 0.5}]}
    Path("recipe.yml").write_text(json.dumps(recipe))


def write_refinement_inputs() -> None:
    write_texts(Path(), 3, partial(tiny_llama_checkpoint, hidden_size=8, intermediate_size=8))


DATA = ["--data", "yelp=yelp.jsonl", "--data", "imdb=imdb.jsonl", "--device", "cpu"]
COMMANDS: dict[str, tuple[Callable[[], None], list[str]]] = {
    "preview": (write_merge_inputs, ["preview", "recipe.yml", "--methods", "gradient-matching,task-arithmetic"]),
    "diagnose": (write_merge_inputs, ["diagnose", "recipe.yml"]),
    "calibrate": (write_refinement_inputs, ["calibrate", "merged", *DATA, "--curvature", "none"]),
    "distill": (write_refinement_inputs, ["distill", "merged", *DATA, "--steps", "3"]),
}


def in_child(words: list[str], out: Path, *, at: int | None = None, delay: float = 120.0) -> int | None:
    """Run a command in a process that is killed after a delay or before its ``at``-th change on disk.

    Return the number of changes, or None if the process was killed.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            changes = kill_before_change(str(out), at)
            command(*words, "-o", str(out))
            os.write(writes, str(changes()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    deadline = time.monotonic() + delay
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() >= deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            break
        time.sleep(0.001)
    with os.fdopen(reads, "rb") as file:
        said = file.read()
    return int(said) if said else None


def content(out: Path) -> dict[str, bytes]:
    """The files of a result. The record and the page contain times: of the page, only the end is compared."""
    files = {str(name): value for name, value in files_in(out).items() if name.name != "gradmerge.json"}
    return {name: value.rstrip()[-7:] if name.endswith(".html") else value for name, value in files.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_leaves_no_half_result(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, words = COMMANDS[name]
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    make()
    before, whole = files_in(tmp_path / "in"), tmp_path / "whole" / "out"
    whole.parent.mkdir()
    began = time.monotonic()
    changes = in_child(words, whole)
    seconds, wanted = time.monotonic() - began, content(whole)
    assert changes and wanted
    choose = random.Random(name)
    for number in range(KILLS):
        out = tmp_path / str(number) / "out"
        out.parent.mkdir()
        if number % 2:
            in_child(words, out, delay=choose.random() * seconds)
        else:
            assert in_child(words, out, at=choose.randint(1, changes)) is None
        if not out.exists():
            assert in_child(words, out)
        assert content(out) == wanted
        assert files_in(tmp_path / "in") == before
        assert [path.name for path in out.parent.iterdir()] == ["out"]
