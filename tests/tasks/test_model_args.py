"""`model_args`: allowed keys and values, and the arguments of from_pretrained that they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.errors import InputError
from gradmerge.load_options import parse_pairs
from gradmerge.tasks import load_model
from gradmerge.tasks.loading import complete
from gradmerge.tasks.model_args import ModelArgs

from .making import tiny_bert_checkpoint

CPU = torch.device("cpu")


def test_the_command_line_gives_texts_and_booleans() -> None:
    text = "load_in_4bit=True,gradient_checkpointing=false, tokenizer = org/name"
    assert parse_pairs("model_args", text) == {
        "load_in_4bit": True,
        "gradient_checkpointing": False,
        "tokenizer": "org/name",
    }
    for wrong in ("", "sdpa", "device_map=", "=auto", "tokenizer=a,,", "tokenizer=a,tokenizer=b"):
        with pytest.raises(InputError):
            parse_pairs("model_args", wrong)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trust_remote_code", False),
        ("use_safetensors", True),
        ("dtype", "float32"),
        ("attn_implementation", "kernels-community/flash-attn2"),
        ("tokenizer", True),
        ("device_map", "everywhere"),
        ("load_in_4bit", "yes"),
        ("gradient_checkpointing", None),
    ],
)
def test_other_keys_and_wrong_values_are_refused_by_their_key(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        ModelArgs.parse({key: value})


@pytest.mark.parametrize("key", ["device_map", "load_in_4bit", "gradient_checkpointing"])
def test_commands_that_merge_in_memory_take_attention_and_tokenizer_only(key: str) -> None:
    value: Any = "auto" if key == "device_map" else True
    with pytest.raises(InputError, match=key):
        gm.preview({"method": "average", "models": ["./a", "./b"]}, model_args={key: value})
    basic = {"attn_implementation": "eager", "tokenizer": "./t"}
    assert complete({"model_args": basic}, gm.preview)["model_args"] == basic


def test_a_model_is_loaded_with_its_arguments(tmp_path: Path) -> None:
    folder = str(tiny_bert_checkpoint(tmp_path / "model"))
    model: Any = load_model(folder, model_args={"attn_implementation": "eager", "device_map": {"": "disk"}})[0]
    assert model.config._attn_implementation == "eager"
    assert {p.device.type for p in model.parameters()} == {"meta"}
