"""A merge on Ray has the bytes of a local merge, also if a worker dies or the driver is killed and resumes."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import gradmerge as gm
from gradmerge.api.merge import planned
from gradmerge.engine import on_ray as ray_module
from gradmerge.engine.executor import ignore
from gradmerge.engine.input_state import files_read, fingerprint_of, state_of
from gradmerge.engine.on_ray import MergeTask, MergeWorker, RayCluster
from gradmerge.engine.output import JOURNAL, Journal
from gradmerge.engine.run import MergeResult, merge_to_folder
from gradmerge.errors import InputError
from gradmerge.progress import NoProgress
from gradmerge.recipe import make_recipe
from gradmerge.rules import METHODS
from gradmerge.urls import output_path

from ..making import SHAPES, near, random_curvature, random_state, weight_bytes, write_model
from . import test_kronecker, test_merge

OPTIONS: dict[str, dict[str, Any]] = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.1}}
ONE_MODEL = {"slerp", "nearswap", "arcee-fusion", "passthrough", "posterior-sample"}
WITH_CURVATURE = {"fa1", "fisher-averaging", "gradient-matching", "removal", "posterior-sample"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(workers=2, threads=1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two fine-tuned models in unequal shards, with every kind of curvature."""
    folder = tmp_path_factory.mktemp("models")
    base = random_state(0)
    for name, state, shards in (("base", base, 1), ("a", near(base, 1), 2), ("b", near(base, 2), 3)):
        write_model(folder / name, state, shards)
        random_curvature(shards, base).save(folder / f"curvature-{name}")
    linear = {name: shape for name, shape in SHAPES.items() if ".linear.weight" in name}
    rows = [{name: torch.randn(30, shape[1]) for name, shape in linear.items()} for _ in range(2)]
    test_merge.write_grams(folder, [{name: x.T @ x for name, x in one.items()} for one in rows], "[]")
    return folder


def recipe_of(method: str, models: Path, **keys: Any) -> dict[str, Any]:
    names = ["a"] if method in ONE_MODEL else ["a", "b"]
    entries: list[dict[str, Any]] = [{"model": str(models / name)} for name in names]
    base: dict[str, Any] = {"model": str(models / "base")}
    if method in WITH_CURVATURE:
        for name, entry in zip(["base", *names], [base, *entries], strict=True):
            entry["curvature"] = str(models / f"curvature-{name}")
    for number, entry in enumerate(entries if method == "regmean" else ()):
        entry["curvature"] = str(models / f"gram{number}.safetensors")
    return {"method": method, "base": base, "models": entries, "options": OPTIONS.get(method, {}), **keys}


def on_ray(
    cluster: RayCluster, recipe: dict[str, Any], out: Path, workers: int = 2, folder: Path | None = None, **how: Any
) -> MergeResult:
    cluster.workers = workers
    made = make_recipe(recipe, folder=folder, allow_code=True)
    with planned(made) as plan:
        plan.block = 64
        return merge_to_folder(plan, out, executor=cluster, accept_untrusted=True, **how)


def record(out: Path) -> dict[str, Any]:
    content = json.loads((out / "gradmerge.json").read_text())
    return {key: value for key, value in content.items() if key not in ("created", "timings")}


def assert_same(
    cluster: RayCluster, recipe: dict[str, Any], tmp_path: Path, workers: int = 2, folder: Path | None = None
) -> None:
    made = make_recipe(recipe, folder=folder, allow_code=True)
    local = gm.merge(made, tmp_path / "local" / "out", block=64, accept_untrusted=True, progress=False)
    result = on_ray(cluster, recipe, tmp_path / "ray" / "out", workers, folder)
    assert weight_bytes(tmp_path / "ray" / "out") == weight_bytes(tmp_path / "local" / "out")
    assert record(tmp_path / "ray" / "out") == record(tmp_path / "local" / "out")
    assert (result.bytes_read, result.notes) == (local.bytes_read, local.notes)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_bytes_of_a_local_merge(
    method: str, cluster: RayCluster, models: Path, tmp_path: Path
) -> None:
    number = list(METHODS).index(method)
    output = {"shard_size": [10**9, 2000, 500][number % 3], "curvature": method == "gradient-matching"}
    assert_same(cluster, recipe_of(method, models, output=output), tmp_path, 1 + number // 3 % 2)


def kronecker(folder: Path) -> dict[str, Any]:
    states = [random_state(0, test_kronecker.SHAPES, torch.float64)]
    states += [near(states[0], 1), near(states[0], 2)]
    for state in states:
        state["lm_head.weight"] = state[test_kronecker.EMBEDDING].clone()
    config = {"tie_word_embeddings": True}
    folders = [str(write_model(folder / f"m{i}", state, config=config)) for i, state in enumerate(states)]
    sources = [test_kronecker.kronecker(seed) for seed in (4, 5, 6)]
    return test_kronecker.recipe_of(folders, sources, folder, "gradient-matching")


def test_layers_give_the_bytes_of_a_local_merge(cluster: RayCluster, tmp_path: Path) -> None:
    removal = {"method": "removal", "damping": "auto", "output": {"shard_size": 2000}}
    assert_same(cluster, kronecker(tmp_path) | removal, tmp_path)


def test_workers_read_urls_and_the_driver_uploads_what_they_write(
    cluster: RayCluster, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec treats `local://` like a store."""
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    recipe = recipe_of("gradient-matching", models, output={"shard_size": 500})
    gm.merge(recipe, tmp_path / "here" / "out", progress=False)
    at_urls = json.loads(json.dumps(recipe).replace(str(models), f"local://{models}"))
    on_ray(cluster, at_urls, output_path(f"local://{tmp_path}/there/out"))
    here, there = (weight_bytes(tmp_path / name / "out") for name in ("here", "there"))
    assert len(here) > 4 and here.keys() == there.keys()
    assert {name for name in here if here[name] != there[name]} <= {"README.md"}
    assert not list((tmp_path / "cache").rglob("*.gradmerge-partial"))


def test_an_error_of_a_worker_names_the_tensor(cluster: RayCluster, models: Path, tmp_path: Path) -> None:
    state = near(random_state(0), 3)
    state["layers.1.norm.weight"][3] = torch.nan
    recipe = recipe_of("task-arithmetic", models)
    recipe["models"][1]["model"] = str(write_model(tmp_path / "nan", state))
    with pytest.raises(InputError, match=r"layers\.1\.norm\.weight"):
        on_ray(cluster, recipe, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["nan"]


class Kill(NoProgress):
    """Kills all workers, once, while they have shares left."""

    pids: tuple[int, ...] = ()

    def advance(self, amount: int) -> None:
        if not self.pids:
            workers = [
                child for child in psutil.Process().children(recursive=True) if is_worker(child, "run_share", "IDLE")
            ]
            self.pids = tuple(child.pid for child in workers)
            for child in workers:
                child.send_signal(signal.SIGKILL)


def is_worker(process: psutil.Process, *names: str) -> bool:
    """Return whether a process is a worker, by what Ray says that it runs."""
    try:
        return "".join(process.cmdline()[:1]).startswith(tuple(f"ray::{name}" for name in names))
    except psutil.Error:
        return False


def test_the_shares_of_killed_workers_are_repeated(cluster: RayCluster, models: Path, tmp_path: Path) -> None:
    recipe = recipe_of("ties", models)
    gm.merge(recipe, tmp_path / "local" / "out", progress=False)
    kill = Kill()
    on_ray(cluster, recipe, tmp_path / "ray" / "out", progress=kill)
    assert kill.pids
    assert weight_bytes(tmp_path / "ray" / "out") == weight_bytes(tmp_path / "local" / "out")


class StopMerging(NoProgress):
    """Interrupts a merge after some of its blocks."""

    left = math.inf

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.left = 5 if what == "merging" else math.inf

    def advance(self, amount: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_an_interrupted_merge_resumes_on_ray(cluster: RayCluster, models: Path, tmp_path: Path) -> None:
    recipe, out = recipe_of("ties", models), tmp_path / "ray" / "out"
    gm.merge(recipe, tmp_path / "local" / "out", block=64, progress=False)
    with pytest.raises(KeyboardInterrupt):
        on_ray(cluster, recipe, out, progress=StopMerging())
    lines = (tmp_path / "ray" / "out.gradmerge-partial" / JOURNAL).read_bytes().count(b"\n")
    assert lines > 1 and not out.exists()
    on_ray(cluster, recipe, out, workers=1, resume=True)
    assert record(out)["resumed_blocks"] == lines - 1
    assert weight_bytes(out) == weight_bytes(tmp_path / "local" / "out")
    assert gm.merge(recipe, out, block=64, resume=True, engine="ray", progress=False).already_done


def test_sigterm_ends_the_command_and_its_workers_and_keeps_the_work(cluster: RayCluster, tmp_path: Path) -> None:
    import ray

    base = random_state(0, {f"layers.{i}.weight": (1000, 64) for i in range(40)}, torch.bfloat16)
    for name, state in (("base", base), ("a", near(base, 1))):
        write_model(tmp_path / name, state)
    recipe = {"method": "task-arithmetic", "base": str(tmp_path / "base"), "models": [str(tmp_path / "a")]}
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    out, address = tmp_path / "ray" / "out", ray.get_runtime_context().gcs_address
    options = ["-o", str(out), "--engine", "ray", "--workers", "1", "--threads", "1"]
    command = [sys.executable, "-m", "gradmerge", "merge", str(tmp_path / "recipe.yml"), *options]
    process = subprocess.Popen(command, env=os.environ | {"RAY_ADDRESS": address})
    deadline = time.monotonic() + 120
    partial = tmp_path / "ray" / "out.gradmerge-partial"
    while not (partial / JOURNAL).exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 1 and not out.exists() and partial.exists()
    while any(is_worker(child, "run_share") for child in psutil.Process().children(recursive=True)):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_worker_refuses_inputs_and_folders_that_differ_from_the_drivers(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_module, "FOLDER_DELAY", 0.0)
    recipe = make_recipe(recipe_of("average", models))
    with planned(recipe) as plan:
        state = state_of(files_read(plan))
        fingerprint, block = fingerprint_of(plan, state), plan.block
    Journal(tmp_path, fingerprint).open(fresh=True)
    task = MergeTask(
        recipe=recipe.to_dict(),
        recipe_folder=str(Path.cwd()),
        merged_folders={},
        plan_options={},
        block=block,
        allow_nonfinite=False,
        fingerprint=fingerprint,
        state=state,
        folder=str(tmp_path),
        name="out",
        threads=1,
    )
    MergeWorker(task).merge([], ignore)
    path, size, *rest = state[0]
    for changed in (
        {"folder": str(tmp_path / "elsewhere")},
        {"fingerprint": "of another merge"},
        {"state": [[path, size + 1, *rest], *state[1:]]},
        {"state": [*state, [str(models / "missing"), 1, 1]]},
        {"recipe": task.recipe | {"models": [str(models / "unreadable")]}},
        {"recipe": task.recipe | {"exclude": ["embed.*"]}},
    ):
        with pytest.raises(InputError):
            MergeWorker(replace(task, **changed)).merge([], ignore)


def test_a_cluster_without_room_is_refused(
    cluster: RayCluster, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    recipe, cores = recipe_of("average", models), int(ray.cluster_resources()["CPU"])
    with pytest.raises(InputError):
        gm.merge(recipe, tmp_path / "out", engine="ray", workers=cores + 1, progress=False)
    assert list(tmp_path.iterdir()) == []


def test_invalid_combinations_are_refused(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # not installed
    recipe = recipe_of("average", models)
    for how in (
        {"engine": "dask"},
        {"workers": 2},
        {"ray_address": "auto"},
        {"engine": "ray"},
        {"engine": "ray", "workers": 0},
        {"engine": "ray", "device": "cuda"},
    ):
        with pytest.raises(InputError):
            gm.merge(recipe, tmp_path / "out", progress=False, **how)
    assert list(tmp_path.iterdir()) == []
