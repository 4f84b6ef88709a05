"""`gradmerge extract-lora`, and what the other commands make of an adapter that gradmerge wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

import gradmerge as gm

from ..making import assert_close, read_model, run, tuned_from
from ..tasks.making import sentences, tiny_bert_checkpoint, tiny_gpt2_checkpoint, write_jsonl


def test_extracting_says_what_is_lost_and_every_command_takes_the_adapter(tmp_path: Path) -> None:
    tiny_gpt2_checkpoint(tmp_path / "base")
    tuned_from(tmp_path / "base", tmp_path / "tuned", 1, 0.02)
    data = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in sentences(8)])
    lora = tmp_path / "lora"
    said = run("extract-lora", "--base", tmp_path / "base", tmp_path / "tuned", "--rank", 4, "-o", lora)
    assert "c_attn" in said.output
    more = ["--exclude", "*wte*", "--exclude", "*ln_*", "--exclude", "*bias", "--json"]
    told = json.loads(
        run(
            "extract-lora", "--base", tmp_path / "base", tmp_path / "tuned", "--rank", 9, "-o", tmp_path / "b", *more
        ).stdout
    )
    assert 0 < told["lost_share"] < 1 and max(told["lost"].values()) >= told["lost_share"]
    assert {key.rpartition(".lora_")[1] for key in load_file(tmp_path / "b/adapter_model.safetensors")} == {".lora_"}

    run("inspect", tmp_path / "base", lora)
    words = ["--data", data, "--device", "cpu", "--model-args", f"tokenizer={tmp_path / 'base'}"]
    gm.merge({"method": "average", "base": str(tmp_path / "base"), "models": [str(lora)]}, tmp_path / "full")
    losses = [
        gm.evaluate(m, data, model_args={"tokenizer": str(tmp_path / "base")}, progress=False)
        for m in (lora, tmp_path / "full")
    ]
    assert losses[0]["loss_per_example"] == pytest.approx(losses[1]["loss_per_example"], rel=1e-4)
    run("curvature", "estimate", lora, *words, "-o", tmp_path / "curvature")
    assert gm.Curvature.load(tmp_path / "curvature").keys() == read_model(tmp_path / "base").keys()
    recipe = {
        "method": "task-arithmetic",
        "base": {"model": "base", "curvature": {"identity": 1.0}},
        "models": [{"model": "lora", "curvature": "curvature"}],
    }
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    run("diagnose", tmp_path / "recipe.yml", "--merged", lora, "-o", tmp_path / "report")


def test_layers_that_are_solved_whole_go_into_an_adapter_with_their_biases(tmp_path: Path) -> None:
    tiny_bert_checkpoint(tmp_path / "base")
    rows = [{"text": text, "label": i % 2} for i, text in enumerate(sentences(8))]
    data = write_jsonl(tmp_path / "a.jsonl", rows)
    tuned_from(tmp_path / "base", tmp_path / "tuned", 1, 0.02)
    for name in ("base", "tuned"):
        run("curvature", "estimate", tmp_path / name, "--data", data, "--kind", "kronecker", "--device", "cpu",
            "-o", tmp_path / name / "curvature")  # fmt: skip
    words = ["merge", "-m", "gradient-matching", "--base", tmp_path / "base", "--model", tmp_path / "tuned"]
    run(*words, "-o", tmp_path / "model")
    run(*words, "--set", "output.format=adapter", "--set", "output.rank=64", "-o", tmp_path / "lora")
    want = gm.evaluate(tmp_path / "model", data, progress=False)["loss_per_example"]
    got = gm.evaluate(tmp_path / "lora", data, model_args={"tokenizer": str(tmp_path / "base")}, progress=False)[
        "loss_per_example"
    ]
    assert got == pytest.approx(want, rel=1e-4)
    gm.merge(
        {"method": "average", "base": str(tmp_path / "base"), "models": [str(tmp_path / "lora")]}, tmp_path / "again"
    )
    assert_close(read_model(tmp_path / "again"), read_model(tmp_path / "model"), 2e-6)
