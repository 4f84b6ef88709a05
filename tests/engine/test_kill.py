"""Merges that are killed: never half a result under the final name, nothing lost, and the same bytes in the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.engine.output import JOURNAL
from tests.forked import forked
from tests.making import near, random_state, weight_bytes, write_model

# A process that imports once and forks for every merge. It computes nothing itself, so that it has one thread when it
# forks. A merge kills itself before the `at`-th change to its folder, or as soon as its journal has `units` lines:
# whoever watched from outside might look too late, and wait for a journal that is gone.
DRIVER = """
import json, os, signal, sys
import torch
torch.set_num_threads(1)
import gradmerge as gm
import gradmerge.engine.plan, gradmerge.engine.run
from gradmerge.engine.output import Journal
from gradmerge.errors import GradmergeError

from tests.fuzz.killing import kill_before_change

gm.merge  # imported when it is first named

def kill_at(units):
    write = Journal._write

    def watched(journal, line):
        write(journal, line)
        if journal.path.read_bytes().count(b"\\n") >= units:
            os.kill(os.getpid(), signal.SIGKILL)

    Journal._write = watched

def merge(order):
    if order.get("units"):
        kill_at(order["units"])
    changes = kill_before_change(order["out"], order.get("at"))
    status = 0
    try:
        gm.merge(order["recipe"], order["out"], threads=2, block=4096, force=order["force"], resume=order["resume"])
    except GradmergeError as error:
        status = error.status
    answer = {"killed": False, "status": status, "changes": changes()}
    os.write(1, json.dumps(answer).encode() + b"\\n")

for line in sys.stdin:
    order = json.loads(line)
    pid = os.fork()
    if pid == 0:
        try:
            merge(order)
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        os.write(1, json.dumps({"killed": True}).encode() + b"\\n")
"""


class Driver:
    """Runs merges in processes of their own, cheaply."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", DRIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )

    def merge(
        self, recipe: dict[str, Any], out: Path, *, force: bool = False, resume: bool = False, **order: Any
    ) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        text = json.dumps({"recipe": recipe, "out": str(out), "force": force, "resume": resume, **order})
        self._process.stdin.write(text.encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the driver has died"
        result: dict[str, Any] = json.loads(line)
        return result

    def finish(self, recipe: dict[str, Any], out: Path, **settings: Any) -> dict[str, Any]:
        """A merge that must end well."""
        result = self.merge(recipe, out, **settings)
        assert not result["killed"] and result["status"] == 0, result
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.close()


def make_models(folder: Path, tensors: int, size: int) -> dict[str, Any]:
    """Three models and a recipe that reads all of them twice: first for the thresholds, then to merge."""
    base = random_state(0, {f"layers.{i}.weight": (size, 64) for i in range(tensors)}, torch.bfloat16)
    for name, state, shards in (("base", base, 1), ("a", near(base, 1), 3), ("b", near(base, 2), 2)):
        write_model(folder / name, state, shards)
    return {
        "method": "ties",
        "base": str(folder / "base"),
        "models": [str(folder / "a"), {"model": str(folder / "b"), "weight": 0.5}],
        "options": {"density": 0.3},
        "output": {"shard_size": 2 * size * 64 * tensors // 2},
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """1.5 million bytes a model, merged in 200 blocks."""
    folder = tmp_path_factory.mktemp("models")
    return make_models(folder, 40, 300), folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("small")
    recipe = make_models(folder, 6, 200)
    return recipe, folder


def partial(out: Path) -> Path:
    return out.with_name(out.name + ".gradmerge-partial")


def replaced(out: Path) -> Path:
    return out.with_name(out.name + ".gradmerge-replaced")


def phase_of(out: Path) -> str:
    """How far a killed merge had come, from what it left."""
    if out.exists():
        return "done"
    if not partial(out).exists():
        return "opening"
    journal = partial(out) / JOURNAL
    if not journal.exists():
        return "creating or finishing"
    lines = journal.read_bytes().count(b"\n")
    return "measuring" if lines < 2 else "merging"


def undisturbed(driver: Driver, recipe: dict[str, Any], out: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    result = driver.finish(recipe, out)
    return weight_bytes(out), result


@pytest.fixture(scope="module")
def whole(
    driver: Driver, models: tuple[dict[str, Any], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What the merge of the models gives."""
    return undisturbed(driver, models[0], tmp_path_factory.mktemp("undisturbed") / "out")[0]


def test_a_merge_killed_at_work_never_leaves_half_a_result_and_always_resumes(
    driver: Driver, models: tuple[dict[str, Any], Path], whole: dict[str, bytes], tmp_path: Path
) -> None:
    recipe, _ = models
    assert set(whole) > {"model.safetensors.index.json", "config.json", "README.md"}
    for units in (1, 40, 100, 190):
        out = tmp_path / str(units) / "out"
        assert driver.merge(recipe, out, units=units)["killed"]
        assert phase_of(out) == ("merging" if units > 1 else "measuring")
        driver.finish(recipe, out, resume=True)
        assert weight_bytes(out) == whole
        assert not partial(out).exists()


def test_a_merge_killed_before_any_change_that_it_makes_on_disk_resumes(
    driver: Driver, small: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    """Every step of beginning and finishing, which chance would seldom meet."""
    recipe, _ = small
    want, first = undisturbed(driver, recipe, tmp_path / "undisturbed" / "out")
    assert first["changes"] > 10
    phases: Counter[str] = Counter()
    for at in range(1, first["changes"] + 1):
        out = tmp_path / str(at) / "out"
        result = driver.merge(recipe, out, at=at)
        assert result["killed"]
        phases[phase_of(out)] += 1
        assert not out.exists()
        driver.finish(recipe, out, resume=True)
        assert weight_bytes(out) == want, f"killed before change {at}"
        assert not partial(out).exists()
    assert phases["creating or finishing"] > 5, phases


def test_a_merge_that_replaces_a_folder_loses_neither_the_old_nor_the_new_when_it_is_killed(
    driver: Driver, small: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    recipe, _ = small
    old = {"config.json": b"{}", "notes/mine.txt": b"precious", "model.safetensors": b"old"}  # and a record

    def prepare(out: Path) -> Path:
        for name, content in old.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_bytes(content)
        (out / "gradmerge.json").write_text("{}")
        return out

    out = prepare(tmp_path / "undisturbed" / "out")
    first = driver.finish(recipe, out, force=True)
    want = weight_bytes(out)
    assert not replaced(out).exists()
    between = 0
    for at in range(1, first["changes"] + 1):
        out = prepare(tmp_path / str(at) / "out")
        assert driver.merge(recipe, out, at=at, force=True)["killed"]
        if out.exists():
            assert weight_bytes(out) in (old, want), f"killed before change {at}"
        else:
            between += 1
            assert weight_bytes(replaced(out)) == old
            # A run that may not replace the old folder restores it, and refuses.
            assert driver.merge(recipe, out)["status"] == 2
            assert weight_bytes(out) == old
        driver.finish(recipe, out, resume=True, force=True)
        assert weight_bytes(out) == want
        driver.finish(recipe, out, force=True)
        assert weight_bytes(out) == want
        assert sorted(p.name for p in out.parent.iterdir()) == ["out"]
    assert between == 1


@pytest.fixture
def unfinished(
    driver: Driver, models: tuple[dict[str, Any], Path], whole: dict[str, bytes], tmp_path: Path
) -> tuple[dict[str, Any], Path, dict[str, bytes]]:
    """A recipe, where its merge was killed half-way, and what should have come out."""
    out = tmp_path / "killed" / "out"
    assert driver.merge(models[0], out, units=60)["killed"]
    assert phase_of(out) == "merging"
    return models[0], out, whole


Unfinished = tuple[dict[str, Any], Path, dict[str, bytes]]


def test_a_merge_whose_input_has_changed_is_not_resumed_and_its_work_is_kept(driver: Driver, tmp_path: Path) -> None:
    recipe = make_models(tmp_path, 40, 250)
    out = tmp_path / "out"
    assert driver.merge(recipe, out, units=25)["killed"]
    path = next((tmp_path / "a").glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    before = weight_bytes(partial(out))
    result = driver.merge(recipe, out, resume=True)
    assert result["status"] == 2
    assert not out.exists() and weight_bytes(partial(out)) == before
    driver.finish(recipe, out)
    driver.finish(recipe, tmp_path / "fresh" / "out")
    assert weight_bytes(out) == weight_bytes(tmp_path / "fresh" / "out")


@pytest.mark.parametrize(
    "damage", ["a shard is gone", "a shard is cut", "the journal's last line is torn", "the journal is garbage"]
)
def test_a_merge_whose_unfinished_work_was_damaged_ends_with_the_right_bytes(
    driver: Driver, unfinished: Unfinished, damage: str
) -> None:
    recipe, out, want = unfinished
    shard = sorted(partial(out).glob("model-*.safetensors"))[0]
    journal = partial(out) / JOURNAL
    if damage == "a shard is gone":
        shard.unlink()
    elif damage == "a shard is cut":
        os.truncate(shard, 1000)
    elif damage == "the journal's last line is torn":
        journal.write_bytes(journal.read_bytes() + b"[12,34")
    else:
        journal.write_bytes(journal.read_bytes() + b'5\n"x"\n{"statistics": 3}\n')
    driver.finish(recipe, out, resume=True)
    assert weight_bytes(out) == want


# Through the command line.


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose merge takes the command line long enough to be caught at work."""
    folder = tmp_path_factory.mktemp("large")
    recipe = make_models(folder, 40, 4000)
    (folder / "recipe.yml").write_text(json.dumps(recipe))
    return folder / "recipe.yml"


@pytest.fixture(scope="module")
def undisturbed_bytes(large: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    gm.merge(large, out)
    return weight_bytes(out)


def begin(recipe: Path, out: Path) -> subprocess.Popen[str]:
    """A merge that is stopped at work."""
    command = [sys.executable, "-m", "gradmerge", "merge", str(recipe), "-o", str(out), "--threads", "1"]
    # A shell's background jobs ignore Ctrl-C, and so would the merge if the tests are run in one.
    heard = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **heard)
    deadline = time.monotonic() + 60
    while not (partial(out) / JOURNAL).exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGSTOP)
    assert not out.exists()
    return process


def test_ctrl_c_ends_a_merge_with_one_message_and_resume_completes_it(
    large: Path, undisturbed_bytes: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = begin(large, out)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGCONT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert stderr.startswith("error: ") and "--resume" in stderr and stderr.count("\n") == 1
    assert stdout == "" and not out.exists() and partial(out).exists()
    resumed = forked("merge", large, "-o", out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert weight_bytes(out) == undisturbed_bytes


def test_a_second_merge_to_the_same_place_is_refused_while_the_first_is_at_work(
    large: Path, undisturbed_bytes: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = begin(large, out)
    try:
        for option in ([], ["--force"], ["--resume"]):
            second = forked("merge", large, "-o", out, *option)
            assert second.returncode == 2
    finally:
        process.send_signal(signal.SIGCONT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert weight_bytes(out) == undisturbed_bytes
