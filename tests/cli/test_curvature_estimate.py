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
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.api import estimate as estimating
from gradmerge.cli.output import PlainProgress

from ..forked import forked
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
    for shown in facts["layers"]:
        layer = got.layers[shown["name"]]
        for part, matrix in (("inputs", layer.inputs / layer.tokens), ("outputs", layer.outputs)):
            values, said = np.linalg.eigvalsh(matrix.double().numpy()), shown[part]
            assert said["size"] == len(matrix)
            for key, want in (("trace", values.sum()), ("largest", values.max())):
                assert np.isclose(said[key], want, rtol=1e-4), key
            below = np.sort(values)[(len(values) - 1) // 2]
            assert np.isclose(said["median"], max(below, 0.0), rtol=1e-2, atol=1e-6 * values.max())
            assert np.isclose(said["effective_rank"], values.sum() ** 2 / (values**2).sum(), rtol=1e-3)
    assert LAYER[task] in run("curvature", "show", tmp_path / "k").stdout


def test_kronecker_factors_are_refused_where_a_diagonal_is_needed(place: Path, tmp_path: Path) -> None:
    model, data = place / "classify/a", place / "labels.jsonl"
    estimate(model, "-d", data, "--kind", "kronecker", "-o", tmp_path / "k")
    estimate(model, "-d", data, "-o", tmp_path / "d")
    for method in ("fisher-averaging", "regmean"):
        entry = {"model": str(model), "curvature": str(tmp_path / "k")}
        recipe = write_recipe(tmp_path / "r.yml", {"method": method, "models": [entry, entry]})
        assert str(tmp_path / "k") in run("merge", recipe, "-o", tmp_path / "out", status=2).stderr
    with pytest.raises(gm.InputError, match="prior"):
        gm.PriorAdamW(torch.nn.Linear(2, 2).named_parameters(), prior=tmp_path / "k")
    assert not (tmp_path / "out").exists()


def test_a_limit_takes_the_first_rows(place: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "few.jsonl", labelled(7)[:3])
    estimate(place / "classify/a", "-d", place / "labels.jsonl", "--limit", 3, "-o", tmp_path / "limit")
    estimate(place / "classify/a", "-d", tmp_path / "few.jsonl", "-o", tmp_path / "few")
    assert gm.Curvature.load(tmp_path / "limit").examples == 3
    names = "limit", "few"
    one, other = ((tmp_path / name / "curvature.safetensors").read_bytes() for name in names)
    assert one == other
    cards = [(tmp_path / name / "README.md").read_text() for name in names]
    assert cards[0].replace("`labels.jsonl`", "`few.jsonl`") == cards[1] and "| examples | 3 |" in cards[1]


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


def test_progress_and_notes_go_to_stderr(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PlainProgress, "every", 0.0)
    words = (place / "classify/a", "-d", place / "labels.jsonl", "--batch-size", 2, "--max-length", 6)
    shown = estimate(*words, "-o", tmp_path / "c")
    assert "57 %" in shown.stderr and "note: " in shown.stderr
    assert shown.stdout.count("\n") == 1
    assert "57 %" in estimate(*words, "--kind", "gram", "-o", tmp_path / "g").stderr
    quiet = estimate(*words, "--quiet", "-o", tmp_path / "q")
    assert quiet.output == ""


def test_a_process_of_its_own_says_one_line_and_nothing_of_transformers(place: Path, tmp_path: Path) -> None:
    done = forked("curvature", "estimate", place / "image/a", "-d", place / "images", "-o", tmp_path / "c")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    assert done.stderr.count("\n") == done.stderr.count("note: "), done.stderr
    assert not [p for p in tmp_path.iterdir() if p.name != "c"]


def test_resume_goes_on_and_refuses_what_is_different(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["-d", place / "labels.jsonl", "--batch-size", 2, "-o", tmp_path / "c"]
    defaults = estimating.estimate_to_disk.__kwdefaults__ | {"save_every": 0.0}
    monkeypatch.setattr("gradmerge.api.estimate.estimate_to_disk.__kwdefaults__", defaults)
    with monkeypatch.context() as patch:
        calls = 0

        def interrupt(self: PlainProgress, amount: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise KeyboardInterrupt

        patch.setattr(PlainProgress, "advance", interrupt)
        stopped = estimate(place / "classify/a", *words, status=1)
        assert "--resume" in stopped.stderr
    assert not (tmp_path / "c").exists()
    estimate(place / "classify/b", *words, "--resume", status=2)
    estimate(place / "classify/a", *words, "--resume", "--likelihood", "exact", status=2)
    facts = json.loads(estimate(place / "classify/a", *words, "--resume", "--json").stdout)
    assert (facts["resumed_from"], facts["examples"]) == (4, 7)
    estimate(place / "classify/a", *words[:-1], tmp_path / "whole")
    got, want = gm.Curvature.load(tmp_path / "c"), gm.Curvature.load(tmp_path / "whole")
    assert all(float((got[n] - v).abs().max()) <= 1e-6 * float(v.max()) for n, v in want.items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "whole"]


#: Model, data and options, and what the message names. Errors of models and data are those of `evaluate`.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no such data": (["classify/a", "nothing.jsonl"], ["nothing.jsonl"]),
    "weights that are NaN": (["nan", "labels.jsonl"], ["example 0"]),
    "exact for sequences": (["causal-lm/a", "texts.txt", "--likelihood", "exact"], ["--likelihood sampled"]),
    "unknown kind": (["classify/a", "labels.jsonl", "--kind", "grams"], ["kind grams", "'gram'"]),
    "narrow Gram": (["classify/a", "labels.jsonl", "--kind", "gram", "--precision", "log8"], ["float32"]),
    "factors at a difference": (
        ["classify/a", "labels.jsonl", "--kind", "kronecker", "--at-delta", "classify/base"],
        ["at-delta"],
    ),
    "a width for a diagonal": (["classify/a", "labels.jsonl", "--max-kronecker-dim", "9"], ["max-kronecker-dim"]),
    "base of another model": (["classify/a", "labels.jsonl", "--at-delta", "causal-lm/a"], ["--at-delta"]),
    "no device": (["classify/a", "labels.jsonl", "--device", "cuda:77"], ["--device cuda:77"]),
}


@pytest.fixture(scope="module")
def wrong(place: Path) -> Path:
    """What is wrong, beside what is right."""
    file = tiny_bert_checkpoint(place / "nan") / "model.safetensors"
    weights = load_file(file)
    weights["bert.encoder.layer.0.output.dense.weight"][0, 0] = torch.nan
    save_file(weights, file, {"format": "pt"})
    return place


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_gets_one_message_that_names_it_and_leaves_nothing(
    wrong: Path, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(wrong)
    (model, data, *options), says = WRONG[case]
    words = ["--device", "cpu"] if "--device" not in options else []
    result = run("curvature", "estimate", model, "--data", data, *words, *options, "-o", tmp_path / "c", status=2)
    assert result.stderr.startswith("error: ") and result.stderr.count("error:") == 1
    assert result.stdout == ""
    for text in says:
        assert text in result.stderr, result.stderr
    assert not list(tmp_path.iterdir())


def test_a_full_device_is_the_machines_failure(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("gradmerge.curvature.estimate.logits_of", full)
    result = estimate(place / "classify/a", "-d", place / "labels.jsonl", "-o", tmp_path / "c", status=1)
    assert "--max-length" in result.stderr
    assert not list(tmp_path.iterdir())
