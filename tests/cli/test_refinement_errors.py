"""`gradmerge calibrate` and `distill` with invalid input: status 2, a message that names it, and nothing is written."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from ..making import run
from ..tasks.making import tiny_llama_checkpoint
from .test_calibrate import write_texts

LAYER = "model.layers.1.mlp.gate_proj"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A merge of two language models with rows, and invalid variants of them."""
    place = write_texts(tmp_path_factory.mktemp("errors"), 20)
    tiny_llama_checkpoint(place / "wide", hidden_size=24, intermediate_size=16)
    shutil.copytree(place / "yelp", place / "other-vocabulary")
    vocabulary = place / "other-vocabulary" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace('"film"', '"movie"'))
    for name, key in (("infinite", "merged"), ("infinite-teacher", "yelp")):
        shutil.copytree(place / key, place / name)
        state = load_file(place / key / "model.safetensors")
        state["model.layers.1.post_attention_layernorm.weight"][3] = torch.inf
        save_file(state, place / name / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(place / "merged", place / "excluded")
    record = json.loads((place / "merged" / "gradmerge.json").read_text())
    record["recipe"]["exclude"] = ["*"]
    (place / "excluded" / "gradmerge.json").write_text(json.dumps(record))
    (place / "empty.jsonl").write_text("")
    return place


BOTH = {
    "a task without a teacher": ("merged", "amazon={yelp}.jsonl", [], "amazon"),
    "a teacher without rows": ("merged", "yelp={yelp}.jsonl", ["--teacher", "imdb={imdb}"], "imdb"),
    "a teacher of other shapes": ("merged", "yelp={yelp}.jsonl", ["--teacher", "yelp={wide}"], "embed_tokens"),
    "a teacher of another vocabulary": (
        "merged",
        "yelp={yelp}.jsonl",
        ["--teacher", "yelp={other-vocabulary}"],
        "movie",
    ),
    "no rows": ("merged", "yelp={empty}.jsonl", [], "empty.jsonl"),
    "the same task twice": ("merged", "yelp={yelp}.jsonl", ["--data", "yelp={imdb}.jsonl"], "yelp"),
    "a model without a record": ("base", "yelp={yelp}.jsonl", [], "teacher"),
    "infinite activations of the merge": ("infinite", "yelp={yelp}.jsonl", [], "finite"),
    "OUT is in an input": ("merged", "yelp={yelp}.jsonl", ["-o", "{yelp}/inside"], "yelp"),
}
CASES = {
    "calibrate": BOTH
    | {
        "infinite activations of a teacher": (
            "merged",
            "yelp={yelp}.jsonl",
            ["--teacher", "yelp={infinite-teacher}"],
            LAYER,
        ),
        "no linear layer": ("excluded", "yelp={yelp}.jsonl", [], "no linear layer"),
        "no factors of any width": ("merged", "yelp={yelp}.jsonl", ["--max-kronecker-dim", "0"], "max-kronecker-dim"),
    },
    "distill": BOTH,
}


@pytest.mark.parametrize(("command", "case"), [(command, case) for command, cases in CASES.items() for case in cases])
def test_invalid_input_ends_with_status_2_and_writes_nothing(place, tmp_path, command, case):
    merged, data, more, named = CASES[command][case]

    def path(word):
        return re.sub(r"{([\w-]+)}", lambda found: str(place / found[1]), word)

    before = {file: file.stat().st_mtime_ns for file in place.rglob("*")}
    words = ["-o", tmp_path / "out", *map(path, more)]
    result = run(command, place / merged, "--data", path(data), *words, status=2)
    assert named in result.output
    assert {file: file.stat().st_mtime_ns for file in place.rglob("*")} == before
    assert list(tmp_path.iterdir()) == []
