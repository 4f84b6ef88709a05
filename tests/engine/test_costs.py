"""What a merge costs by arithmetic, against hand computation and against merges that are watched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.api.merging import planned
from gradmerge.cli.app import app
from gradmerge.curvature.needs import Rate
from gradmerge.engine import statistics, to_folder
from gradmerge.engine.calibration import ENTRIES, measure_speeds, read_rate
from gradmerge.engine.costs import CLUSTER_START, START, Pass, Speeds, cost_of, passes_of, seconds_of
from gradmerge.storage.tensorfile import PositionalFile

from ..making import near, random_curvature, random_state, three_models, write_model, write_recipe

SPEEDS = Speeds(Rate(1e3, "given"), Rate(200.0, "given"), Rate(50.0, "given"), Rate(100.0, "given"), Rate(10.0, "x"))


def invoke(*words: str | Path, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    folders, states = three_models(tmp_path)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        random_curvature(seed, state).save(folder / "curvature")
    return {"base": str(folders[0]), "models": [str(folder) for folder in folders[1:]]}


def test_seconds_of_a_pass_are_those_of_hand_computation() -> None:
    merge = Pass("merge", read=6000, written=2000, entries=1000, products=70.0)
    alone = seconds_of(merge, SPEEDS, 1, 1, (0.0, 0.0))
    assert alone == {"disk": 8.0, "network": 0.0, "cpu": 1000 / 50 + 70 / 10}
    together = seconds_of(merge, SPEEDS, 4, 8, (1.0, 1.0))
    assert together == {"disk": 8.0, "network": 8000 / 200 / 4, "cpu": 27 / 8}
    from_afar = seconds_of(merge, SPEEDS, 1, 1, (0.5, 0.0))
    assert from_afar["network"] == 3000 / 200
    angles = seconds_of(Pass("angles", 6000, 0, 1000), SPEEDS, 1, 1, (0.0, 0.0))
    assert angles["cpu"] == 10.0


def test_a_cost_adds_up_the_slowest_of_every_pass(recipe: dict[str, Any]) -> None:
    with planned({"method": "task-arithmetic", **recipe}) as plan:
        cost = cost_of(plan, SPEEDS, nodes=2, workers=4, away=(1.0, 1.0), beside=11)
        size = sum(job.info.nbytes for job in plan.jobs)
        assert (cost.read, cost.written, cost.network, cost.disk) == (3 * size, size, 4 * size, size + 11)
        entries = size // 4
        parts = {"disk": 4 * size / 1e3, "network": 4 * size / 200 / 2, "cpu": entries / 50 / 4}
        assert cost.seconds == {"start": CLUSTER_START, **parts, "total": CLUSTER_START + max(parts.values())}
        assert cost.limit == "network"
        assert cost_of(plan, SPEEDS).seconds["start"] == START


@pytest.mark.parametrize(
    ("method", "options", "passes"),
    [
        ("task-arithmetic", {}, ["merge"]),
        ("gradient-matching", {}, ["merge"]),
        ("ties", {}, ["thresholds", "thresholds", "merge"]),
        ("sparse-finetuning", {"scope": "tensor"}, ["thresholds", "merge"]),
        ("model-stock", {}, ["products", "merge"]),
        ("removal", {}, ["damping", "merge"]),
        ("tsv", {}, ["merge"]),
    ],
)
def test_the_bytes_of_all_passes_are_those_that_a_merge_reads(
    recipe: dict[str, Any],
    method: str,
    options: dict[str, Any],
    passes: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"method": method, **recipe, "options": options}
    with planned(given) as plan:
        found = passes_of(plan)
        sizes = {file.name: file.stat().st_size for file in plan.inputs.files()}
    assert [one.what for one in found] == passes
    read, before = 0, PositionalFile.read_into

    def counted(file: PositionalFile, buffer: memoryview, offset: int) -> None:
        nonlocal read
        read += len(buffer)
        before(file, buffer, offset)

    monkeypatch.setattr(PositionalFile, "read_into", counted)
    for looks in ("coefficient_notes", "judge_removal"):  # at samples, which are all of such a small model
        monkeypatch.setattr(to_folder, looks, lambda *_, **__: [])
    result = gm.merge(given, tmp_path / "out", progress=False, accept_untrusted=True)
    # Besides: headers, and where thresholds are those of single tensors, samples that are all of such small ones.
    slack = 3 * sum(sizes.values()) if options else 20_000
    assert sum(one.read for one in found) <= read <= sum(one.read for one in found) + slack
    assert sum(one.written for one in found) == result.bytes_written


def test_tensors_whose_thresholds_a_sample_tells_are_planned_and_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four tensors one has differences that are all unlike, and one is too small for a sample."""
    monkeypatch.setattr(statistics, "TENSOR_RUN", 16)
    shapes = {"a": (60, 20), "b": (60, 20), "unlike": (60, 20), "small": (10, 20)}
    base = {name: value.round() for name, value in random_state(0, shapes, scale=9.0).items()}
    fifth = {name: (torch.arange(v.numel()) % 5 == 0).reshape(v.shape) for name, v in base.items()}
    tuned = {n: v + (random_state(1, shapes)[n] if n == "unlike" else fifth[n]) for n, v in base.items()}
    folders = [str(write_model(tmp_path / f"m{i}", state)) for i, state in enumerate((base, tuned))]
    recipe = {"method": "ties", "base": folders[0], "models": folders[1:]}
    recipe |= {"options": {"scope": "tensor", "density": 0.1}}
    with planned(recipe) as plan:
        _, guessed = measure_speeds(plan, threads=1, disk=Rate(1.0, "given"))
        assert sorted(guessed) == ["a", "b"]
        found = passes_of(plan, guessed)
    assert [(one.what, one.entries) for one in found] == [("thresholds", 1400), ("merge", 3800)]
    assert gm.merge(recipe, tmp_path / "out", progress=False).bytes_read == sum(one.read for one in found)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells a process's own peak")
def test_a_process_peaks_within_the_memory_that_is_stated(tmp_path: Path) -> None:
    base = random_state(0, {f"layers.{i}.weight": (1024, 1024) for i in range(4)}, torch.bfloat16)
    folders = [write_model(tmp_path / f"m{i}", s) for i, s in enumerate((base, near(base, 1), near(base, 2)))]
    recipe = {"method": "ties", "base": str(folders[0]), "models": [str(folder) for folder in folders[1:]]}
    path = write_recipe(tmp_path / "r.json", recipe)
    facts = json.loads(invoke("merge", path, "--dry-run", "--json", "--threads", "2", "--disk-rate", "1"))
    words = ["merge", str(path), "-o", str(tmp_path / "out"), "--threads", "2", "--quiet"]
    watched = (
        "from gradmerge.cli.app import main\ntry:\n    main()\nfinally:\n    print(open('/proc/self/status').read())"
    )
    done = subprocess.run([sys.executable, "-c", watched, *words], check=True, capture_output=True, text=True)
    peak = 1024 * int(done.stdout.split("VmHWM:")[1].split()[0])
    assert 0.5 * facts["memory"] < peak < 1.25 * facts["memory"]


def test_speeds_are_measured_on_a_little_of_the_inputs(recipe: dict[str, Any], tmp_path: Path) -> None:
    with planned({"method": "ties", **recipe}) as plan:
        speeds, guessed = measure_speeds(plan, threads=1, network=Rate(5.0, "given"))
        assert not guessed and speeds.network == Rate(5.0, "given")
        entries = sum(job.info.numel for job in plan.jobs)
        assert entries < ENTRIES and speeds.entries.amount > 0
        assert speeds.statistics is not None and speeds.statistics.amount > 0 and "merged here" in speeds.entries.source
        assert speeds.solving is None and "of the inputs" in speeds.disk.source
    with planned({"method": "tsv", **recipe}) as plan:
        speeds, _ = measure_speeds(plan, threads=1, disk=Rate(1.0, "given"))
        assert speeds.solving is not None and speeds.solving.amount > 0
    assert read_rate([], 1).source == "assumed"


def test_a_dry_run_counts_nodes_rates_and_the_network(recipe: dict[str, Any], tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "r.yml", {"method": "task-arithmetic", **recipe})
    alone = json.loads(invoke("merge", path, "--dry-run", "--json", "-o", tmp_path / "out"))
    assert (alone["nodes"], alone["workers"], alone["bytes_network"]) == (1, 1, 0)
    assert alone["bytes_free"] > 0 and alone["bytes_disk"] >= alone["bytes_written"]
    assert alone["rates"]["disk"]["source"].startswith("measured")
    rates = ["--disk-rate", "2", "--network-rate", "0.5", "--workers", "6"]
    many = json.loads(invoke("merge", path, "--dry-run", "--json", "--nodes", "3", *rates))
    moved = many["bytes_read"] + many["bytes_written"]
    assert (many["workers"], many["bytes_network"]) == (6, moved)
    assert many["seconds"]["network"] == pytest.approx(moved / 0.5e9 / 3, abs=1e-3)
    assert many["rates"]["network"] == {"amount": 0.5e9, "source": "given"}
    text = invoke("merge", path, "--dry-run", "--nodes", "3")
    assert all(word in text for word in ("in one pass", "network:", "time:", "3 nodes", "10 Gbit/s", "is the limit"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--dry-run", "--nodes", "0"], "--nodes"),
        (["--dry-run", "--disk-rate", "0"], "--disk-rate 0"),
        (["--dry-run", "--disk-rate", "nan"], "--disk-rate nan"),
        (["--dry-run", "--network-rate", "-1"], "--network-rate -1"),
        (["--dry-run", "--nodes", "4", "--workers", "2"], "--workers 2"),
        (["--nodes", "2"], "--dry-run"),
        (["--disk-rate", "2"], "--dry-run"),
    ],
)
def test_assumptions_that_make_no_sense_are_refused(
    recipe: dict[str, Any], words: list[str], said: str, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path / "r.yml", {"method": "task-arithmetic", **recipe})
    assert said in invoke("merge", path, "-o", tmp_path / "out", *words, status=2)
    assert not (tmp_path / "out").exists()
