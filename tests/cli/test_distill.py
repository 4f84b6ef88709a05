"""`gradmerge distill`: from a merge and its fine-tuned models on disk to a new folder."""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import gradmerge as gm

from ..making import run
from ..tasks.making import tiny_llama_checkpoint
from .test_calibrate import data_of, fine_tune, merge_recipe, state_of, write_adapters, write_texts

STEPS = ("--steps", 20, "--lr", 0.0003, "--batch-size", 10)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("chats"))


def test_it_writes_the_best_model_with_record_card_and_report(chats, tmp_path):
    out = tmp_path / "out"
    result = run("distill", chats / "merged", *data_of(chats, "yelp", "imdb"), *STEPS, "--json", "-o", out)
    facts = json.loads(result.stdout)
    assert facts["improved"] and facts["match"] == "answers" and facts["steps"] == 20
    before, after = state_of(chats / "merged"), state_of(out)
    assert {n: (v.shape, v.dtype) for n, v in before.items()} == {n: (v.shape, v.dtype) for n, v in after.items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)
    AutoModelForCausalLM.from_pretrained(out)
    assert {"README.md", "gradmerge.json", "report.html", "config.json"} <= {p.name for p in out.iterdir()}
    record = json.loads((out / "gradmerge.json").read_text())
    assert (out / record["models"]["yelp"]).resolve() == chats / "yelp"


def test_what_the_recipe_excludes_stays_that_of_the_base_through_both_steps(chats, tmp_path):
    """A calibrated model also knows the teachers of its merge."""
    for name in ("base", "yelp", "imdb"):
        (tmp_path / name).symlink_to(chats / name)
    gm.merge(merge_recipe(tmp_path, exclude=["*.0.mlp.*"]), tmp_path / "merged", progress=False)
    data = data_of(chats, "yelp", "imdb")
    run("calibrate", tmp_path / "merged", *data, "--curvature", "none", "-o", tmp_path / "calibrated")
    run("distill", tmp_path / "calibrated", *data, *STEPS, "-o", tmp_path / "distilled")
    base, found = state_of(chats / "base"), state_of(tmp_path / "distilled")
    changed = {name for name in base if not torch.equal(base[name], found[name])}
    assert any(".1.mlp." in name for name in changed) and not any(".0.mlp." in name for name in changed)


def test_of_an_adapter_only_the_adapter_is_trained_and_written(tmp_path):
    base = write_adapters(tmp_path)
    out = tmp_path / "out"
    result = run("distill", tmp_path / "merged", *data_of(tmp_path, "code", "chat"), *STEPS, "--json", "-o", out)
    assert json.loads(result.stdout)["improved"]
    before, after = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "merged", out))
    assert before.keys() == after.keys() and any(not torch.equal(before[k], after[k]) for k in before)
    assert not (out / "model.safetensors").exists()
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)


def test_tied_weights_that_are_stored_twice_change_together(chats, tmp_path):
    tied = "lm_head.weight", "model.embed_tokens.weight"
    base = tiny_llama_checkpoint(tmp_path / "base", tie_word_embeddings=True)
    for number, name in enumerate(("base", "yelp", "imdb")):
        if name != "base":
            fine_tune(base, tmp_path / name, number)
        state = state_of(tmp_path / name)
        save_file(state | {tied[0]: state[tied[1]].clone()}, tmp_path / name / "model.safetensors", {"format": "pt"})
    gm.merge(merge_recipe(tmp_path), tmp_path / "merged", progress=False)
    assert tied[0] in state_of(tmp_path / "merged")
    out = tmp_path / "out"
    words = ["--steps", 10, "--lr", 1e-4, "--batch-size", 10]
    result = run("distill", tmp_path / "merged", *data_of(chats, "yelp", "imdb"), *words, "--json", "-o", out)
    assert json.loads(result.stdout)["improved"]
    before, after = state_of(tmp_path / "merged"), state_of(out)
    assert torch.equal(after[tied[0]], after[tied[1]]) and not torch.equal(before[tied[0]], after[tied[0]])
