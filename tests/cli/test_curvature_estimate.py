"""`gradmerge curvature estimate` as a user runs it, and merging with what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gradmerge as gm

from ..making import read_model, run, write_recipe
from ..rules import slow as slow_rules
from ..tasks.making import (
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    write_jsonl,
)

MAKERS: Mapping[str, Any] = {"classify": tiny_bert_checkpoint, "causal-lm": tiny_gpt2_checkpoint}
DATA = {"classify": "labels.jsonl", "causal-lm": "texts.txt"}
LIKELIHOOD = {"classify": "exact", "causal-lm": "sampled"}
#: The matrix of a linear layer of each model; GPT-2's is transposed.
LAYER = {"classify": "bert.encoder.layer.1.output.dense.weight", "causal-lm": "transformer.h.1.mlp.c_fc.weight"}


def estimate(*arguments: str | Path | int, status: int = 0) -> Any:
    return run("curvature", "estimate", *arguments, "--device", "cpu", status=status)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For every task a base and two models in a folder of its name, and data."""
    folder = tmp_path_factory.mktemp("estimate")
    for task, make in MAKERS.items():
        for seed, name in enumerate(("base", "a", "b")):
            make(folder / task / name, seed=seed)
    texts = sentences(7)
    write_jsonl(folder / "labels.jsonl", labelled(7))
    (folder / "texts.txt").write_text("\n".join(texts))
    return folder


def double(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in state.items()}


def assert_merged(out: Path, want: Mapping[str, Tensor]) -> None:
    got = read_model(out)
    assert got.keys() == want.keys()
    for name, value in want.items():
        scale = max(1.0, float(value.abs().max()))
        assert float((got[name].double() - value).abs().max()) <= 2e-6 * scale, name


@pytest.mark.parametrize("task", MAKERS)
def test_measured_curvature_merges_by_gradient_matching(place: Path, task: str, tmp_path: Path) -> None:
    folder = place / task
    for name in ("base", "a", "b"):
        estimate(folder / name, "--data", place / DATA[task], "--likelihood", LIKELIHOOD[task], "-o", tmp_path / name)
    base, *tuned = (double(read_model(folder / name)) for name in ("base", "a", "b"))
    h0, *h = (double(gm.Curvature.load(tmp_path / name)) for name in ("base", "a", "b"))
    weights = (0.6, 0.9)
    models = [
        {"model": str(folder / n), "curvature": str(tmp_path / n), "weight": w}
        for n, w in zip("ab", weights, strict=True)
    ]
    recipe: dict[str, Any] = {
        "method": "gradient-matching",
        "base": {"model": str(folder / "base"), "curvature": str(tmp_path / "base")},
        "models": models,
        "damping": 1e-3,
    }
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "matched")
    want = {}
    for name, theta in base.items():
        prior = h0[name] + 1e-3
        whole = prior + sum(w * one[name] for w, one in zip(weights, h, strict=True))
        want[name] = theta + sum(
            w * (prior + one[name]) / whole * (model[name] - theta)
            for w, one, model in zip(weights, h, tuned, strict=True)
        )
    assert_merged(tmp_path / "matched", want)


@pytest.mark.parametrize("task", MAKERS)
def test_gram_matrices_merge_by_regmean(place: Path, task: str, tmp_path: Path) -> None:
    folder = place / task
    for name in "ab":
        estimate(folder / name, "-d", place / DATA[task], "--kind", "gram", "-o", tmp_path / name)
    assert json.loads(run("curvature", "show", tmp_path / "a", "--json").stdout)["kind"] == "gram"
    recipe = {
        "method": "regmean",
        "models": [{"model": str(folder / n), "curvature": str(tmp_path / n)} for n in "ab"],
        "damping": 1e-2,
    }
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "out")
    models = [double(read_model(folder / n)) for n in "ab"]
    grams = [load_file(tmp_path / n / "curvature.safetensors") for n in "ab"]
    got = read_model(tmp_path / "out")
    layer = LAYER[task]
    turn = (lambda m: m.T) if task == "causal-lm" else (lambda m: m)
    want = slow_rules.regmean(
        [turn(m[layer]).numpy() for m in models], [g[layer].double().numpy() for g in grams], [1.0, 1.0], 1e-2
    )
    assert np.allclose(turn(got[layer]).double().numpy(), want, atol=1e-5)
    for name in got.keys() - grams[0].keys():
        assert torch.allclose(got[name].double(), (models[0][name] + models[1][name]) / 2, atol=1e-6)
