"""The sizes that `--dry-run` reports, compared with what merges and estimates read, write and hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.api import dry_run
from gradmerge.api.dry_run import dry_run_merge
from gradmerge.api.merge import as_recipe
from gradmerge.engine import run as run_merge
from gradmerge.io.reader import PositionalFile

from ..making import near, random_state, run, three_models, write_model, write_recipe
from ..tasks.making import sentences, tiny_gpt2_checkpoint, tiny_llama_checkpoint, write_jsonl


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    folders, _ = three_models(tmp_path, curvature=True)
    return {"base": str(folders[0]), "models": [str(folder) for folder in folders[1:]]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in sentences(20)])


@pytest.mark.parametrize("method", ["task-arithmetic", "gradient-matching", "model-stock", "removal"])
def test_the_bytes_are_those_that_the_merge_reads_and_writes(
    recipe: dict[str, Any], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"method": method, **recipe}
    job = dry_run_merge(as_recipe(given), tmp_path / "out")
    assert not (tmp_path / "out").exists() and job.facts["merged_tensors"] == 6
    read, original = 0, PositionalFile.read_into

    def counted(file: PositionalFile, buffer: memoryview, offset: int) -> None:
        nonlocal read
        read += len(buffer)
        original(file, buffer, offset)

    monkeypatch.setattr(PositionalFile, "read_into", counted)
    for checks in ("coefficient_notes", "check_step_size"):  # these read samples, which cover small models completely
        monkeypatch.setattr(run_merge, checks, lambda *_, **__: [])
    result = gm.merge(given, tmp_path / "out", progress=False, accept_untrusted=True)
    assert job.bytes_read <= read <= job.bytes_read + 20_000  # headers
    assert job.bytes_written == result.bytes_written


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux reports the peak of a process")
def test_the_peak_memory_of_a_merge_is_near_the_reported_one(tmp_path: Path) -> None:
    base = random_state(0, {f"layers.{i}.weight": (1024, 1024) for i in range(4)}, torch.bfloat16)
    folders = [write_model(tmp_path / f"m{i}", s) for i, s in enumerate((base, near(base, 1), near(base, 2)))]
    recipe = {"method": "ties", "base": str(folders[0]), "models": [str(folder) for folder in folders[1:]]}
    path = write_recipe(tmp_path / "r.json", recipe)
    job = dry_run_merge(as_recipe(recipe), None, threads=2)
    words = ["merge", str(path), "-o", str(tmp_path / "out"), "--threads", "2", "--quiet"]
    watched = (
        "from gradmerge.cli.app import main\ntry:\n    main()\nfinally:\n    print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", watched, *words], check=True, capture_output=True, text=True)
    peak = 1024 * int(done.stdout.split("VmHWM:")[1].split()[0])
    assert 0.5 * job.memory < peak < 1.25 * job.memory


def test_the_command_prints_the_same_and_exits_with_0_if_the_job_does_not_fit(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["merge", "--method", "task-arithmetic"]
    words += ["--base", recipe["base"], "--model", recipe["models"][0], "--dry-run", "-o", str(tmp_path / "out")]
    found = json.loads(run(*words, "--json").stdout)
    assert found["fits"] and found["free_memory"] > 0 and found["free_disk"] > 0
    monkeypatch.setattr(dry_run, "free_memory", lambda _: 1000)
    found = json.loads(run(*words, "--json").stdout)
    assert not found["fits"] and found["free_memory"] == 1000
    assert not (tmp_path / "out").exists() and run(*words).stdout


@pytest.mark.parametrize("kind", ["diagonal", "gram", "kronecker"])
@pytest.mark.parametrize("make", [tiny_gpt2_checkpoint, tiny_llama_checkpoint])
def test_an_estimate_writes_as_many_bytes_as_reported(make: Any, data: Path, kind: str, tmp_path: Path) -> None:
    model = make(tmp_path / "model")
    words = ["curvature", "estimate", model, "--data", data, "--kind", kind, "--dry-run", "--device", "cpu"]
    found = json.loads(run(*words, "--json").stdout)
    gm.estimate_curvature(model, data, kind=kind, out=tmp_path / "out", progress=False, device="cpu")
    files = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert found["bytes_written"] < files < found["bytes_written"] + 20_000  # headers
    assert found["bytes_read"] == sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert found["examples"] == 20 and found["memory"] > found["bytes_read"]
    assert run(*words).stdout
