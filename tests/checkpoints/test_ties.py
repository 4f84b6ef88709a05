"""Tied weights: the names that the table has, and what transformers knows of a model's class beyond them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.checkpoints.compat.tied_weights import tied_to
from tests.forked import forked
from tests.making import random_state, write_model

WHISPER = {"model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "tie_word_embeddings": True}
HEAD, EMBEDDING = "proj_out.weight", "model.decoder.embed_tokens.weight"
SHAPES = {EMBEDDING: (6, 4), "model.decoder.layers.0.fc1.weight": (4, 4)}


def checkpoint(label: str, head: torch.Tensor | None = None, **config: Any) -> Checkpoint:
    state = random_state(0, SHAPES)
    if head is not None:
        state[HEAD] = head
    return Checkpoint(label, memory=state, config=WHISPER | config)


def test_transformers_is_asked_about_a_head_that_the_table_does_not_have() -> None:
    assert tied_to(HEAD, checkpoint("one")) == EMBEDDING
    assert tied_to(HEAD, checkpoint("one", tie_word_embeddings=False)) is None
    assert tied_to("model.decoder.embed_positions.weight", checkpoint("one")) is None


def test_a_copy_of_such_a_head_merges_with_a_model_that_stores_it_once() -> None:
    copy = random_state(0, SHAPES)[EMBEDDING]
    result = compare(checkpoint("base", copy.clone()), [checkpoint("tuned")])
    assert result.problems == []
    assert result.aliases == [{HEAD: EMBEDDING}]
    result = compare(checkpoint("base"), [checkpoint("tuned", copy.clone())])
    assert result.problems == []
    assert [note for note in result.notes if HEAD in note and EMBEDDING in note]


def test_such_a_head_of_its_own_does_not_merge_with_an_embedding() -> None:
    other = random_state(0, SHAPES)[EMBEDDING] + 1
    [problem] = compare(checkpoint("base", other), [checkpoint("tuned")]).problems
    assert "tie_word_embeddings" in problem and HEAD in problem


@pytest.mark.parametrize("architecture", ["NoSuchModel", "__path__", "", 5, None, "BertForSequenceClassification"])
def test_a_class_that_has_no_ties_or_is_none_is_no_error(architecture: Any) -> None:
    assert tied_to("some_head.weight", checkpoint("one", architectures=[architecture])) is None


def write_adapter(folder: Path, module: str) -> None:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "base_model_name_or_path": "base"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    factors = {"A": torch.ones(1, 4), "B": torch.ones(4, 1)}
    tensors = {f"base_model.model.{module}.lora_{letter}.weight": factor for letter, factor in factors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("tuned", ["stored once", "stored twice", "an adapter"])
def test_the_usual_models_merge_without_the_seconds_that_transformers_takes(tuned: str, tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    state = random_state(0, {"model.embed_tokens.weight": (6, 4), "model.layers.0.up.weight": (4, 4)})
    write_model(tmp_path / "base", state, 1, config)
    if tuned == "an adapter":
        write_adapter(tmp_path / "tuned", "model.layers.0.up")
    else:
        copy = {"lm_head.weight": state["model.embed_tokens.weight"].clone()} if tuned == "stored twice" else {}
        write_model(tmp_path / "tuned", state | copy, 1, config)
    code = (
        "import sys, gradmerge as gm\n"
        "gm.merge({'method': 'average', 'base': 'base', 'models': ['tuned']}, 'out')\n"
        "assert 'transformers' not in sys.modules and 'regex' not in sys.modules\n"
    )
    done = forked(code=code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
