"""`gradmerge curvature estimate` as a user runs it, and merging with what it writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
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
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    write_jsonl,
)

MAKERS: Mapping[str, Any] = {
    "classify": tiny_bert_checkpoint,
    "causal-lm": tiny_gpt2_checkpoint,
    "seq2seq": tiny_t5_checkpoint,
    "image": tiny_vit_checkpoint,
}
DATA = {"classify": "labels.jsonl", "causal-lm": "texts.txt", "seq2seq": "pairs.csv", "image": "images"}
LIKELIHOOD = {"classify": "exact", "causal-lm": "sampled", "seq2seq": "empirical", "image": "exact"}
#: The matrix of a linear layer of each model; GPT-2's is transposed.
LAYER = {
    "classify": "bert.encoder.layer.1.output.dense.weight",
    "causal-lm": "transformer.h.1.mlp.c_fc.weight",
    "seq2seq": "decoder.block.1.layer.1.EncDecAttention.k.weight",
    "image": "vit.encoder.layer.1.attention.attention.query.weight",
}


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
    rows = [f"{a.replace(',', '')},{b.replace(',', '')}" for a, b in pairwise(texts)]
    (folder / "pairs.csv").write_text("\n".join(["source,target", *rows]))
    generator = np.random.default_rng(0)
    for number in range(3):
        (folder / "images" / str(number)).mkdir(parents=True)
        for name in "ab":
            pixels = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / str(number) / f"{name}.png")
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
def test_measured_curvature_merges_by_gradient_matching_and_fisher_averaging(
    place: Path, task: str, tmp_path: Path
) -> None:
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

    recipe = {"method": "fisher-averaging", "models": models, "damping": 1e-3}
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "averaged")
    want = {
        name: sum(w * (f[name] + 1e-3) * model[name] for w, f, model in zip(weights, h, tuned, strict=True))
        / sum(w * (f[name] + 1e-3) for w, f in zip(weights, h, strict=True))
        for name in base
    }
    assert_merged(tmp_path / "averaged", want)


@pytest.mark.parametrize("task", ["classify", "causal-lm"])
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


@pytest.mark.parametrize("task", ["classify", "causal-lm"])
def test_kronecker_factors_are_written_and_shown(place: Path, task: str, tmp_path: Path) -> None:
    words = (place / task / "a", "-d", place / DATA[task], "--kind", "kronecker", "--likelihood", LIKELIHOOD[task])
    estimate(*words, "-o", tmp_path / "k")
    got = gm.Curvature.load(tmp_path / "k")
    assert (LAYER[task] in got.layers) and (LAYER[task] in got.transposed) == (task == "causal-lm")
    facts = json.loads(run("curvature", "show", tmp_path / "k", "--json").stdout)
    assert (facts["kind"], facts["likelihood"], facts["examples"]) == ("kronecker", LIKELIHOOD[task], got.examples)
    assert facts["parameters"] == sum(value.numel() for value in read_model(place / task / "a").values())
    assert {layer["name"]: layer["tokens"] for layer in facts["layers"]} == {
        name: layer.tokens for name, layer in got.layers.items()
    }
    assert LAYER[task] in run("curvature", "show", tmp_path / "k").stdout


def test_a_machine_reads_what_was_measured(place: Path, tmp_path: Path) -> None:
    words = (place / "classify/a", "-d", place / "labels.jsonl", "--likelihood", "exact", "--precision", "log8")
    result = estimate(*words, "--max-length", 6, "--json", "-o", tmp_path / "c")
    facts = json.loads(result.stdout)
    stored = read_model(place / "classify/a")
    assert facts.pop("memory")[0]["peak_rss_bytes"] > 0
    assert facts | {"seconds": 0, "notes": []} == {
        "out": str(tmp_path / "c"),
        "kind": "diagonal",
        "task": "classify",
        "examples": 7,
        "tensors": len(stored),
        "entries": sum(v.numel() for v in stored.values()),
        "seconds": 0,
        "device": "cpu",
        "resumed_from": 0,
        "processes": 1,
        "notes": [],
        "model": str(place / "classify/a"),
        "data": str(place / "labels.jsonl"),
        "likelihood": "exact",
        "precision": "log8",
    }
    assert len(facts["notes"]) == 1
    assert result.stderr == ""
    shown = json.loads(run("curvature", "show", tmp_path / "c", "--json").stdout)
    assert (shown["examples"], shown["likelihood"], shown["parameters"]) == (7, "exact", facts["entries"])
    assert shown["model"] == "a"


@pytest.mark.parametrize(
    "words",
    [
        ["--data", "nothing.jsonl"],
        ["--data", "labels.jsonl", "--kind", "grams"],
        ["--data", "labels.jsonl", "--kind", "gram", "--precision", "log8"],
        ["--data", "labels.jsonl", "--kind", "kronecker", "--at-delta", "classify/base"],
        ["--data", "labels.jsonl", "--max-kronecker-dim", "9"],
        ["--data", "labels.jsonl", "--at-delta", "causal-lm/a"],
    ],
)
def test_wrong_input_is_one_message_and_leaves_nothing(
    place: Path, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    result = estimate("classify/a", *words, "-o", tmp_path / "c", status=2)
    assert result.stderr.count("error:") == 1 and not result.stdout
    assert not list(tmp_path.iterdir())
