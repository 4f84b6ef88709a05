"""Merges on Ray: the bytes of a local merge, whatever the method, the shards, the workers, and who dies meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

import gradmerge as gm
from gradmerge.api.merge import planned
from gradmerge.engine.input_state import state_of
from gradmerge.engine.ray import crew as ray_crew, worker as on_worker
from gradmerge.engine.ray.cluster import RayCluster
from gradmerge.engine.ray.crew import Crew
from gradmerge.engine.run import statistics
from gradmerge.engine.run.fingerprint import files_read, fingerprint_of
from gradmerge.engine.run.journal import NAME
from gradmerge.engine.run.merge import MergeResult, merge_to_folder
from gradmerge.errors import InputError, MachineError
from gradmerge.io.atomic_dir import MARK
from gradmerge.progress import NoProgress
from gradmerge.recipe import make_recipe
from gradmerge.rules import METHODS
from gradmerge.urls import output_path

from ..making import SHAPES, Stop, near, random_curvature, random_state, weight_bytes, write_model
from ..recipe.test_external_rules import EXAMPLE
from . import test_layers, test_merge

OPTIONS: dict[str, dict[str, Any]] = {"slerp": {"t": 0.3}, "nearswap": {"t": 0.1}}
ONE_MODEL = {"slerp", "nearswap", "arcee-fusion", "passthrough"}
WITH_CURVATURE = {"fa1", "fisher-averaging", "gradient-matching", "removal"}


@pytest.fixture(scope="module")
def cluster(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with RayCluster(workers=2, threads=1) as cluster:
        first = tmp_path_factory.mktemp("first") / "out"
        on(cluster, recipe_of("average", place), first, progress=UntilAllHaveCome(cluster))
        yield cluster


class UntilAllHaveCome(NoProgress):
    """Holds a merge up until all workers have opened it."""

    def __init__(self, cluster: RayCluster) -> None:
        self.crew = cluster.crew

    def begin(self, what: str, total: int, done: int = 0) -> None:
        for reference, (worker, share) in list(self.crew._flying.items()):
            assert share is None and self.crew._answer(worker, None, reference)[1] == 0
            del self.crew._flying[reference]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two tuned models in unequal shards, with curvature of every kind."""
    folder = tmp_path_factory.mktemp("models")
    base = random_state(0)
    for name, state, shards in (("base", base, 1), ("a", near(base, 1), 2), ("b", near(base, 2), 3)):
        write_model(folder / name, state, shards)
        random_curvature(shards, base).save(folder / f"curvature-{name}")
    linear = {name: shape for name, shape in SHAPES.items() if ".linear.weight" in name}
    rows = [{name: torch.randn(30, shape[1]) for name, shape in linear.items()} for _ in range(2)]
    test_merge.write_grams(folder, [{name: x.T @ x for name, x in one.items()} for one in rows], "[]")
    return folder


def recipe_of(method: str, place: Path, **keys: Any) -> dict[str, Any]:
    names = ["a"] if method in ONE_MODEL else ["a", "b"]
    models: list[dict[str, Any]] = [{"model": str(place / name)} for name in names]
    base: dict[str, Any] = {"model": str(place / "base")}
    if method in WITH_CURVATURE:
        for name, entry in zip(["base", *names], [base, *models], strict=True):
            entry["curvature"] = str(place / f"curvature-{name}")
    for number, entry in enumerate(models if method == "regmean" else ()):
        entry["curvature"] = str(place / f"gram{number}.safetensors")
    return {"method": method, "base": base, "models": models, "options": OPTIONS.get(method, {}), **keys}


def on(
    cluster: RayCluster, recipe: dict[str, Any], out: Path, workers: int = 2, folder: Path | None = None, **how: Any
) -> MergeResult:
    """A merge on some of a cluster's workers, in small blocks."""
    made = make_recipe(recipe, folder=folder, allow_code=True)
    idle, cluster.crew.members = cluster.crew.members[workers:], cluster.crew.members[:workers]
    cluster.crew.workers = workers
    try:
        with planned(made) as plan:
            plan.block = 64
            return merge_to_folder(made, plan, out, cluster=cluster, accept_untrusted=True, **how)
    finally:
        cluster.crew.members += idle
        cluster.crew.workers = 2


def record(out: Path) -> dict[str, Any]:
    found = json.loads((out / "gradmerge.json").read_text())
    return {key: value for key, value in found.items() if key not in ("created", "timings")}


def same(cluster: RayCluster, recipe: dict[str, Any], tmp_path: Path, workers: int, folder: Path | None = None) -> None:
    local = gm.merge(
        make_recipe(recipe, folder=folder), tmp_path / "local" / "out", block=64, accept_untrusted=True, progress=False
    )
    result = on(cluster, recipe, tmp_path / "ray" / "out", workers, folder)
    assert weight_bytes(tmp_path / "ray" / "out") == weight_bytes(tmp_path / "local" / "out")
    assert record(tmp_path / "ray" / "out") == record(tmp_path / "local" / "out")
    assert (result.bytes_read, result.notes) == (local.bytes_read, local.notes)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_bytes_of_a_local_merge(
    method: str, cluster: RayCluster, place: Path, tmp_path: Path
) -> None:
    number = list(METHODS).index(method)
    output = {"shard_size": [10**9, 2000, 500][number % 3], "curvature": method == "gradient-matching"}
    same(cluster, recipe_of(method, place, output=output), tmp_path, 1 + (number // 3) % 2)


def test_workers_load_the_file_of_a_rule(cluster: RayCluster, place: Path, tmp_path: Path) -> None:
    (tmp_path / "median.py").write_text(EXAMPLE, "utf-8")
    recipe = recipe_of("./median.py", place, options={"scale": 0.9})
    gm.merge(make_recipe(recipe, folder=tmp_path, allow_code=True), tmp_path / "local" / "out", block=64)
    on(cluster, recipe, tmp_path / "ray" / "out", folder=tmp_path)
    assert weight_bytes(tmp_path / "ray" / "out") == weight_bytes(tmp_path / "local" / "out")


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_thresholds_outside_their_bracket_need_further_passes_over_the_workers(
    scope: str, cluster: RayCluster, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "bracket_of", lambda share, runs: (0.0, 1e-9))
    same(cluster, recipe_of("ties", place, options={"density": 0.3, "scope": scope}), tmp_path, 2)


def kronecker(folder: Path) -> tuple[dict[str, Any], Path | None]:
    states = [random_state(0, test_layers.SHAPES, torch.float64)]
    states += [near(states[0], 1), near(states[0], 2)]
    for state in states:
        state["lm_head.weight"] = state[test_layers.EMBEDDING].clone()
    config = {"tie_word_embeddings": True}
    folders = [str(write_model(folder / f"m{i}", state, config=config)) for i, state in enumerate(states)]
    sources = [test_layers.kronecker(seed) for seed in (4, 5, 6)]
    return test_layers.recipe_of(folders, sources, folder, "gradient-matching"), None


def removal(folder: Path) -> tuple[dict[str, Any], Path | None]:
    recipe, _ = kronecker(folder)
    return recipe | {"method": "removal", "damping": "auto"}, None


def slices(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """Without a type, for whose defaults every worker would import transformers."""
    shapes = {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,), "lm_head.weight": (20, 8)}
    shapes |= {f"model.layers.{i}.mlp.up_proj.weight": (16, 8) for i in range(3)}
    for seed, name in enumerate("AB"):
        write_model(folder / name, random_state(seed, shapes), 1 + seed, {"num_hidden_layers": 3, "model_type": None})
    parts = [{"models": [{"model": name, "layers": [seed, seed + 2]}]} for seed, name in enumerate("AB")]
    return {"method": "passthrough", "slices": parts}, folder


def union(folder: Path) -> tuple[dict[str, Any], Path | None]:
    for seed, (name, words) in enumerate({"base": "<unk> a b c", "a": "<unk> a b d", "b": "<unk> e b c f"}.items()):
        tokens = {word: number for number, word in enumerate(words.split())}
        shapes = {"model.embed_tokens.weight": (len(tokens), 8), "lm_head.weight": (len(tokens), 8), "norm": (8,)}
        write_model(folder / name, random_state(seed, shapes), 1 + seed, {"vocab_size": len(tokens)})
        Tokenizer(WordLevel(tokens, unk_token="<unk>")).save(str(folder / name / "tokenizer.json"))
    models = [{"model": name} for name in "ab"]
    return {"method": "task-arithmetic", "base": "base", "models": models, "tokenizer": "union"}, folder


def adapters(folder: Path) -> tuple[dict[str, Any], Path | None]:
    base = random_state(0)
    write_model(folder / "base", base)
    for seed, name in enumerate(("a", "b")):
        target = "layers.0.linear"
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [target]}
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": str(folder / "base")})
        )
        factors: dict[str, Tensor] = random_state(seed, {"lora_A": (2, 8), "lora_B": (16, 2)})
        named = {f"base_model.model.{target}.{part}.weight": values for part, values in factors.items()}
        save_file(named, folder / name / "adapter_model.safetensors")
    models = [{"model": str(folder / name)} for name in "ab"]
    return {"method": "ties", "base": str(folder / "base"), "models": models}, None


@pytest.mark.parametrize("make", [kronecker, removal, slices, union, adapters])
def test_layers_slices_vocabularies_and_adapters_give_the_bytes_of_a_local_merge(
    make: Callable[[Path], tuple[dict[str, Any], Path | None]], cluster: RayCluster, tmp_path: Path
) -> None:
    recipe, folder = make(tmp_path)
    # Each worker that merges vocabularies imports transformers.
    same(cluster, recipe | {"output": {"shard_size": 2000}}, tmp_path, 1 if make is union else 2, folder)


def test_a_nan_is_named_as_of_a_local_merge_and_the_workers_stay(
    cluster: RayCluster, place: Path, tmp_path: Path
) -> None:
    state = near(random_state(0), 3)
    state["layers.1.norm.weight"][3] = torch.nan
    recipe = recipe_of("task-arithmetic", place)
    recipe["models"][1]["model"] = str(write_model(tmp_path / "nan", state))
    with pytest.raises(InputError) as local:
        gm.merge(recipe, tmp_path / "out", progress=False)
    pids = {worker.pid for worker in cluster.crew.members}
    with pytest.raises(InputError) as error:
        on(cluster, recipe, tmp_path / "out")
    assert str(error.value) == str(local.value)
    assert [path.name for path in tmp_path.iterdir()] == ["nan"]
    assert {worker.pid for worker in cluster.crew.members} == pids


def order_of(recipe: dict[str, Any], staging: Path, **changed: Any) -> on_worker.Order:
    made = make_recipe(recipe)
    with planned(made) as plan:
        state = state_of(files_read(plan))
        order = on_worker.Order(
            recipe=made.model_dump(mode="json"),
            folder=str(Path.cwd()),
            made={},
            allowed={},
            block=plan.block,
            allow_nonfinite=False,
            precision_factor=1.0,
            fingerprint=fingerprint_of(made, plan, state, False),
            state=state,
            staged=str(staging),
            out="out",
            shard_size=10**9,
            run="mine",
        )
    return replace(order, **changed)


def test_a_worker_names_the_path_that_differs_from_the_drivers(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_worker, "SEEN_WITHIN", 0.0)
    staged = tmp_path / "out.gradmerge-partial"
    staged.mkdir()
    fine = order_of(recipe_of("average", place), staged)

    def said(order: on_worker.Order) -> str:
        opened, status, message = on_worker.opened(order, here=True)
        assert opened is None and status == 2
        return message

    assert str(staged) in said(fine)
    (staged / MARK).write_text(json.dumps({"kind": "merge", "run": "of another"}))
    assert str(staged) in said(fine)
    (staged / MARK).write_text(json.dumps({"kind": "merge", "run": "mine"}))
    opened, status, _ = on_worker.opened(fine, here=True)
    assert opened is not None and status == 0
    opened.close()

    path, size, *rest = fine.state[0]
    assert path in said(replace(fine, state=[[path, size + 1, *rest], *fine.state[1:]]))
    assert f"{place / 'gone'}" in said(replace(fine, state=[*fine.state, [f"{place / 'gone'}", 1, 1]]))
    away = replace(fine, recipe=fine.recipe | {"base": {"model": str(place / "elsewhere")}})
    assert str(place / "elsewhere") in said(away)
    said(replace(fine, recipe=fine.recipe | {"exclude": ["embed.*"]}))


def test_a_worker_with_other_versions_or_without_gradmerge_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = ray_crew._worker_class()()
    name, pid, status, message = worker.open({}, {"gradmerge": gm.__version__, "torch": "1.0"}, "")
    assert (pid, status) == (os.getpid(), 2) and platform.node() in name
    assert torch.__version__ in message and "1.0" in message
    monkeypatch.setitem(sys.modules, "gradmerge.engine.ray.worker", None)
    *_, status, message = worker.open({}, {}, "")
    assert status == 2 and "gradmerge" in message


def test_a_cluster_without_room_is_not_waited_for(
    cluster: RayCluster, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    recipe, cores = recipe_of("average", place), int(ray.cluster_resources()["CPU"])
    with pytest.raises(InputError, match=f"{cores} workers"):
        gm.merge(recipe, tmp_path / "out", engine="ray", workers=cores + 1, progress=False)
    monkeypatch.setattr(ray_crew, "PATIENCE", 0.1)
    with pytest.raises(MachineError, match=f"{cores - 2} of the cluster's {cores} cores"):
        gm.merge(recipe, tmp_path / "out", engine="ray", workers=1, threads=cores, progress=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ({"engine": "dask"}, "dask"),
        ({"workers": 2}, "workers"),
        ({"ray_address": "auto"}, "ray-address"),
        ({"engine": "ray", "workers": 0}, "workers"),
        ({"engine": "ray", "device": "cuda"}, "cpu"),
        ({"engine": "ray", "output": {"format": "adapter"}}, "adapter"),
        ({"engine": "ray", "ray": None}, r"gradmerge\[ray\]"),
    ],
)
def test_invalid_combinations_are_refused(
    how: dict[str, Any], field: str, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = dict(how)
    if "ray" in how:  # not installed
        monkeypatch.setitem(sys.modules, "ray", how.pop("ray"))
    recipe = recipe_of("average", place, output=how.pop("output", {}))
    with pytest.raises(InputError, match=field):
        gm.merge(recipe, tmp_path / "out", progress=False, **how)
    assert list(tmp_path.iterdir()) == []


def test_workers_read_urls_and_what_they_write_is_sent(
    cluster: RayCluster, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`local://` is a file system of fsspec's like those of stores, to us."""
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    recipe = recipe_of("gradient-matching", place, output={"shard_size": 500})
    gm.merge(recipe, tmp_path / "here" / "out", progress=False)
    at_urls = json.loads(json.dumps(recipe).replace(str(place), f"local://{place}"))
    on(cluster, at_urls, output_path(f"local://{tmp_path}/there/out"))
    here, there = (weight_bytes(tmp_path / name / "out") for name in ("here", "there"))
    assert len(here) > 4 and here.keys() == there.keys()
    assert {name for name in here if here[name] != there[name]} <= {"README.md"}
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_an_interrupted_merge_is_gone_on_with_on_ray(cluster: RayCluster, place: Path, tmp_path: Path) -> None:
    recipe = recipe_of("ties", place)
    gm.merge(recipe, tmp_path / "local" / "out", block=64, progress=False)
    out, pid = tmp_path / "ray" / "out", cluster.crew.members[0].pid
    with pytest.raises(KeyboardInterrupt):
        on(cluster, recipe, out, workers=1, progress=Stop(after=5))
    assert len(cluster.crew.members) == 1, "the one that was not at work"
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.01)
    lines = (tmp_path / "ray" / "out.gradmerge-partial" / NAME).read_bytes().count(b"\n")
    assert lines > 2 and not out.exists()
    on(cluster, recipe, out, workers=1, resume=True)
    assert record(out)["resumed_blocks"] == lines - 2
    assert weight_bytes(out) == weight_bytes(tmp_path / "local" / "out")
    assert gm.merge(recipe, out, block=64, resume=True, engine="ray", progress=False).already_done


def test_the_command_joins_a_cluster_and_sigterm_ends_its_workers_and_leaves_what_can_be_gone_on_with(
    cluster: RayCluster, tmp_path: Path
) -> None:
    """Where the last test has ended a worker, there is room for one."""
    import ray

    base = random_state(0, {f"layers.{i}.weight": (1000, 64) for i in range(40)}, torch.bfloat16)
    for name, state in (("base", base), ("a", near(base, 1))):
        write_model(tmp_path / name, state)
    free = ray.available_resources()["CPU"]
    recipe = {"method": "task-arithmetic", "base": str(tmp_path / "base"), "models": [{"model": str(tmp_path / "a")}]}
    words = ["merge", "--method", "task-arithmetic", "--base", str(tmp_path / "base"), "--model", str(tmp_path / "a")]
    out = tmp_path / "ray" / "out"
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "gradmerge", *words, "-o", str(out), "--engine", "ray", "--workers", "1"]
    process = subprocess.Popen(
        [*command, "--threads", "1", "--ray-address", address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    partial = tmp_path / "ray" / "out.gradmerge-partial"
    deadline = time.monotonic() + 120
    while not (partial / NAME).exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60) == ("", "") and process.returncode == -signal.SIGTERM
    while ray.available_resources().get("CPU", 0) < free:
        assert time.monotonic() < deadline, "the worker stays"
        time.sleep(0.1)
    assert not out.exists() and partial.exists()
    gm.merge(recipe, out, resume=True, progress=False)
    gm.merge(recipe, tmp_path / "local" / "out", progress=False)
    assert weight_bytes(out) == weight_bytes(tmp_path / "local" / "out")


class Kill(Stop):
    """Progress that kills a worker in the midst of its work, in place of interrupting the driver."""

    def __init__(self, cluster: RayCluster) -> None:
        super().__init__(after=2)
        self.cluster, self.pid = cluster, 0

    def advance(self, amount: int) -> None:
        with contextlib.suppress(KeyboardInterrupt):
            super().advance(amount)
            return
        self.pid = next(worker.pid for worker in self.cluster.crew.members if worker.load)
        os.kill(self.pid, signal.SIGKILL)


def test_the_shares_of_a_worker_that_is_killed_are_done_by_another(
    cluster: RayCluster, place: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = recipe_of("ties", place)
    gm.merge(recipe, tmp_path / "local" / "out", progress=False)
    kill = Kill(cluster)
    on(cluster, recipe, tmp_path / "ray" / "out", workers=1, progress=kill)
    assert kill.pid and kill.pid not in [worker.pid for worker in cluster.crew.members]
    assert weight_bytes(tmp_path / "ray" / "out") == weight_bytes(tmp_path / "local" / "out")
    assert capfd.readouterr() == ("", "")


def test_an_address_where_no_cluster_answers_is_said_at_once(place: Path, tmp_path: Path) -> None:
    """Last but one, since it needs a process that is not connected to Ray."""
    crew = Crew(None, None, "127.0.0.1:1")
    crew._own = True
    with pytest.raises(MachineError, match=r"127\.0\.0\.1:1"):
        crew._start()
    for wrong in ("ray://10.0.0.1:10001", "10.0.0.1", ":6379", "host:port"):
        with pytest.raises(InputError, match="HOST:PORT"):
            Crew(None, None, wrong)._start()
