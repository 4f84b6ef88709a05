"""`model_args`: allowed keys and values, and the arguments of from_pretrained that they become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.errors import InputError
from gradmerge.tasks import load_model
from gradmerge.tasks.loading import complete
from gradmerge.tasks.model_args import ModelArgs, parse_model_args

from .making import tiny_bert_checkpoint

CPU = torch.device("cpu")


def arguments(given: dict[str, Any], *, quantized: bool = False, bytes_per_parameter: int = 0) -> dict[str, Any]:
    args = ModelArgs.parse(given)
    return args.from_pretrained(object(), "bfloat16", CPU, quantized=quantized, bytes_per_parameter=bytes_per_parameter)


def test_the_command_line_gives_texts_and_booleans() -> None:
    text = "load_in_4bit=True,gradient_checkpointing=false, tokenizer = org/name"
    assert parse_model_args(text) == {
        "load_in_4bit": True,
        "gradient_checkpointing": False,
        "tokenizer": "org/name",
    }
    for wrong in ("", "sdpa", "device_map=", "=auto", "tokenizer=a,,", "tokenizer=a,tokenizer=b"):
        with pytest.raises(InputError):
            parse_model_args(wrong)


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


def test_4_bits_and_8_bits_exclude_each_other() -> None:
    with pytest.raises(InputError):
        ModelArgs.parse({"load_in_4bit": True, "load_in_8bit": True})
    assert ModelArgs.parse({"load_in_4bit": True, "load_in_8bit": False}).bits == 4


def test_from_pretrained_gets_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.utils

    assert arguments({}) == arguments({"tokenizer": "x", "gradient_checkpointing": True, "load_in_4bit": False}) == {}
    assert arguments({"attn_implementation": "eager"}) == {"attn_implementation": "eager"}
    monkeypatch.setattr(accelerate.utils, "get_max_memory", lambda: {0: 900, "cpu": 300})
    given = arguments({"device_map": "auto"}, bytes_per_parameter=4)  # room for 4 bytes beside each bfloat16
    assert given == {"device_map": "auto", "max_memory": {0: 300, "cpu": 100}}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_becomes_a_config_of_bitsandbytes(bits: int) -> None:
    given = arguments({f"load_in_{bits}bit": True}, quantized=True)
    config = given.pop("quantization_config")
    assert given == {"device_map": {"": CPU}}
    assert (config.load_in_4bit, config.load_in_8bit) == (bits == 4, bits == 8)
    if bits == 4:
        assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_compute_dtype == torch.bfloat16


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
