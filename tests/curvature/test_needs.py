"""What estimating curvature needs by arithmetic, against estimates that are done and against hand computation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.curvature.losses import LOSSES
from gradmerge.curvature.needs import (
    BUS,
    GPU_CONTEXT,
    OVER_PLAIN,
    START,
    ModelShapes,
    Rate,
    activations_of,
    batch_needs,
    estimate_cost,
    shapes_of,
)
from gradmerge.tasks.loading import complete_large
from gradmerge.tasks.outlines import outline_task

from ..tasks.making import sentences, tiny_gpt2_checkpoint, tiny_llama_checkpoint, write_jsonl

MAKERS: dict[str, Any] = {"gpt2": tiny_gpt2_checkpoint, "llama": tiny_llama_checkpoint}
SHAPES = ModelShapes(
    parameters=1000, multiplied=900, largest=400, weights=2000, gathered=600, sums=4000, products=50, blocks=4
)
RATES = {name: Rate(amount, "given") for name, amount in (("compute", 1e3), ("disk", 100.0), ("network", 10.0))}


@pytest.fixture(params=MAKERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder: Path = MAKERS[request.param](tmp_path / "model")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in sentences(20)])


def dry_run(model: Path, data: Path, *words: str, status: int = 0) -> Any:
    arguments = ["curvature", "estimate", str(model), "--data", str(data), "--dry-run", *words]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == status, result.output
    return json.loads(result.stdout) if "--json" in words and not status else result.output


@pytest.mark.parametrize("kind", ["diagonal", "gram", "kronecker"])
def test_the_sums_are_as_large_as_those_of_an_estimate(model: Path, data: Path, kind: str, tmp_path: Path) -> None:
    planned = dry_run(model, data, "--json", "--kind", kind)
    gm.estimate_curvature(model, data, kind=kind, out=tmp_path / "out", progress=False, device="cpu")
    load: Any = {"gram": gm.Gram, "kronecker": gm.KroneckerCurvature}.get(kind, gm.Curvature)
    done = load.load(tmp_path / "out") if kind != "gram" else None
    files = sum(file.stat().st_size for file in (tmp_path / "out").glob("*.safetensors"))
    assert planned["examples"] == 20 and planned["bytes_disk"] == planned["sums"]
    assert planned["sums"] < files < planned["sums"] + 20_000  # headers
    if done is not None:
        assert planned["sums"] == 4 * sum(value.numel() for value in done.values())


def test_what_autograd_keeps_is_counted_without_values_as_with_them(model: Path, data: Path) -> None:
    from transformers import AutoModelForCausalLM

    real = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.randint(4, 20, (3, 7))
    loss = LOSSES["next-token"]
    counted = batch_needs(real, {"input_ids": ids, "labels": ids}, loss)
    found = outline_task(str(model), str(data), "cpu", complete_large({"batch_size": 3}, outline_task)).loaded.model
    mode = next(iter(found.parameters())).fake_mode  # type: ignore[attr-defined]
    with mode:
        fake = torch.empty(3, 7, dtype=torch.long)
        planned = batch_needs(found, {"input_ids": fake, "labels": fake}, loss)
    assert planned.operations == counted.operations == pytest.approx(2 * 21 * shapes_of(real).multiplied, rel=0.07)
    assert planned.kept == pytest.approx(counted.kept, rel=0.05) and planned.largest == counted.largest


def test_shapes_of_a_model_are_those_of_hand_computation() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.ModuleList([nn.Linear(4, 6), nn.Linear(6, 3, bias=False)]))
    found = shapes_of(model)
    assert found.parameters == 40 + 24 + 6 + 18 and found.multiplied == 48
    assert (found.largest, found.weights, found.sums, found.blocks) == (40, 352, 352, 2)
    assert found.gathered == 2 * 40 * 4
    assert shapes_of(model, "gram").sums == 4 * (16 + 36)
    kronecker = shapes_of(model, "kronecker")
    assert kronecker.sums == 4 * (40 + 25 + 36 + 36 + 9)  # the table's diagonal; A with its bias, G; A, G
    assert shapes_of(model, "kronecker", widest=5).sums == 4 * 88


def test_a_cost_is_that_of_hand_computation() -> None:
    given: Any = {"examples": 100, "tokens": 500, "batch_size": 8, "activations": 70}
    alone = estimate_cost(SHAPES, RATES, **given)
    assert alone.batches == 13 and alone.memory["weights"] == 2000 and alone.memory["sums"] == 4000
    work = (6 * 900 + 2 * 50) * OVER_PLAIN * 500
    assert alone.seconds["compute"] == pytest.approx(work / 1e3) and alone.seconds["disk"] == 60.0
    assert alone.seconds["total"] == pytest.approx(START + work / 1e3 + 60.0)
    copies = estimate_cost(SHAPES, RATES, **given, nodes=2, per_node=3)
    assert (copies.processes, copies.batches, copies.memory["total"]) == (6, 3, alone.memory["total"])
    assert copies.network == 2 * 4000 and copies.seconds["network"] == 400.0  # sums are added once
    shared = estimate_cost(SHAPES, RATES, **given, nodes=2, per_node=2, shard=True, device="cuda", recomputed=True)
    assert shared.memory["weights"] == 500 + 600 and shared.memory["sums"] == 1000
    assert shared.memory["process"] == GPU_CONTEXT and shared.memory_cpu > 0
    assert shared.network == (2 * 2000 + 4000) * shared.batches
    assert shared.seconds["compute"] == pytest.approx((8 * 900 + 100) * OVER_PLAIN * 500 / 4 / 1e3)
    away = estimate_cost(SHAPES, RATES, **given, device="cuda", sums="cpu")
    assert away.memory["sums"] == 0 and away.memory_cpu == alone.memory["process"] + 4000 + 4000
    assert away.seconds["compute"] == pytest.approx(work / 1e3 + 2 * 4000 * 13 / BUS)
    on_disk = estimate_cost(SHAPES, RATES, **given, sums="disk")
    assert on_disk.disk == 8000 and on_disk.seconds["disk"] == (6000 + 2 * 4000 * 13) / 100
    gram = estimate_cost(SHAPES, RATES, **given, kind="gram")
    assert gram.seconds["compute"] == pytest.approx((2 * 900 + 100) * 500 / 1e3)


def test_activations_shrink_where_they_are_computed_again() -> None:
    needs: Any = batch_needs_of(kept=1000, largest=200)
    assert activations_of(SHAPES, needs, "diagonal", 10) == 1200
    assert activations_of(SHAPES, needs, "diagonal", 10, recomputed=True) == 10 * 4 + 800 // 4 + 400
    assert activations_of(SHAPES, needs, "gram", 10) == 800


def batch_needs_of(kept: int, largest: int) -> Any:
    from gradmerge.curvature.needs import BatchNeeds

    return BatchNeeds(kept, largest, 1)


def test_parameters_of_llama_are_those_that_are_published() -> None:
    report = json.loads((Path(__file__).parents[2] / "benchmarks/results/planning.json").read_text("utf-8"))
    published = {"8 B": 8_030_261_248, "70 B": 70_553_706_496, "405 B": 405_853_388_800}
    for name, (hidden, layers, heads, keys, inner, words) in report["llama"].items():
        if name in published:
            attention = 2 * hidden * hidden + 2 * hidden * (hidden // heads) * keys
            counted = layers * (attention + 3 * hidden * inner + 2 * hidden) + 2 * words * hidden + hidden
            assert counted == published[name]
            assert {row["parameters"] for row in report["estimates"] if row["model"] == name} == {counted}


def test_a_plan_needs_neither_weights_nor_the_device(data: Path, tmp_path: Path) -> None:
    folder = tiny_llama_checkpoint(tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    header = int.from_bytes(weights.read_bytes()[:8], "little") + 8
    size = weights.stat().st_size
    with weights.open("r+b") as file:  # a hole in place of the data
        file.truncate(header)
        file.truncate(size)
    words = ["--device", "cuda", "--memory", "0.0001", "--compute-rate", "300", "--disk-rate", "1", "--nodes", "2"]
    found = dry_run(folder, data, "--json", *words, "--processes", "4", "--shard", "--sums", "cpu")
    assert (found["device"], found["processes"], found["fits"]) == ("cuda", 8, False)
    assert found["rates"]["compute"] == {"amount": 3e14, "source": "given"}
    text = dry_run(folder, data, *words)
    assert "does NOT fit" in text and "--sums cpu" in text and "2 nodes with 1 process each" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--processes", "0"], "--processes"),
        (["--nodes", "-2"], "--nodes"),
        (["--memory", "-1"], "--memory -1"),
        (["--compute-rate", "0"], "--compute-rate 0"),
        (["--network-rate", "inf"], "--network-rate inf"),
        (["--device", "cuda:77"], "--memory GB and --compute-rate"),
        (["--kind", "full"], "--kind full"),
        (["--sums", "moon"], "--sums moon"),
        (["--dtype", "int8"], "--dtype int8"),
        (["--quantize", "4bit"], "adapter"),
    ],
)
def test_what_makes_no_sense_is_refused(data: Path, words: list[str], said: str, tmp_path: Path) -> None:
    assert said in dry_run(tiny_gpt2_checkpoint(tmp_path / "model"), data, *words, status=2)
