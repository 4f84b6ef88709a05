"""`gradmerge calibrate` and `distill` on sentence-transformers folders."""

from __future__ import annotations

import json

import pytest
import torch

import gradmerge as gm

from ..making import run
from ..tasks.making import write_jsonl, write_sentence_model
from .test_calibrate import data_of, state_of, write_texts


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("embeddings"), 40, write_sentence_model)


@pytest.mark.parametrize("words", [["calibrate", "--curvature", "merge"], ["distill", "--steps", 20]])
def test_the_transformer_changes_and_the_other_modules_come_along(place, tmp_path, words):
    out = tmp_path / "out"
    command, *options = words
    result = run(command, place / "merged", *data_of(place, "yelp", "imdb"), *options, "--json", "-o", out)
    assert json.loads(result.stdout)["improved"]
    before, after = state_of(place / "merged"), state_of(out)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    others = {p.relative_to(place / "merged") for p in (place / "merged").rglob("*") if p.suffix == ".json"}
    assert {p for p in others if p.name != "gradmerge.json"} <= {p.relative_to(out) for p in out.rglob("*")}
    rows = [{"sentence1": "a good film", "sentence2": "the plot was bad", "score": 0.5}]
    scored = gm.evaluate(out, write_jsonl(tmp_path / "pairs.jsonl", rows * 3), progress=False)
    assert scored["task"] == "embedding"
