"""`model_args`: allowed keys and values, and the arguments of from_pretrained that they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.errors import InputError
from gradmerge.tasks import load_model
from gradmerge.tasks.loading import complete
from gradmerge.tasks.model_args import ModelArgs, parse_model_args

from .making import labelled, tiny_bert_checkpoint, write_jsonl

CPU = torch.device("cpu")


def arguments(given: dict[str, Any], *, quantized: bool = False, bytes_per_parameter: int = 0) -> dict[str, Any]:
    args = ModelArgs.parse(given)
    return args.from_pretrained(object(), "bfloat16", CPU, quantized=quantized, bytes_per_parameter=bytes_per_parameter)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("attn_implementation=sdpa", {"attn_implementation": "sdpa"}),
        ("load_in_4bit=True,gradient_checkpointing=false", {"load_in_4bit": True, "gradient_checkpointing": False}),
        (" tokenizer = org/name , device_map = map.json ", {"tokenizer": "org/name", "device_map": "map.json"}),
    ],
)
def test_the_command_line_gives_texts_and_booleans(text: str, expected: dict[str, Any]) -> None:
    assert parse_model_args(text) == expected


@pytest.mark.parametrize("text", ["", "sdpa", "device_map=", "=auto", "tokenizer=a,,", "tokenizer=a,tokenizer=b"])
def test_text_without_a_key_or_a_value_and_a_repeated_key_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--model-args"):
        parse_model_args(text)


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("trust_remote_code", "trust_remote_code is not allowed"),
        ("use_safetensors", "use_safetensors is not allowed"),
        ("dtype", "option dtype"),
        ("attn_implementaton", "did you mean 'attn_implementation'"),
        ("load_in_4bits", "did you mean 'load_in_4bit'"),
        ("revision", "revision"),
    ],
)
@pytest.mark.parametrize("value", [True, False, "x"])
def test_other_keys_are_refused_by_name(key: str, says: str, value: object) -> None:
    with pytest.raises(InputError, match=says):
        ModelArgs.parse({key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_implementation", 1),
        ("attn_implementation", "kernels-community/flash-attn2"),
        ("tokenizer", True),
        ("device_map", 0),
        ("device_map", "everywhere"),
        ("load_in_4bit", "yes"),
        ("load_in_8bit", 1),
        ("gradient_checkpointing", None),
        ("gradient_checkpointing", "on"),
    ],
)
def test_wrong_values_are_refused_by_their_key(key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        ModelArgs.parse({key: value})


def test_4_bits_and_8_bits_exclude_each_other() -> None:
    with pytest.raises(InputError, match="load_in_8bit"):
        ModelArgs.parse({"load_in_4bit": True, "load_in_8bit": True})
    assert ModelArgs.parse({"load_in_4bit": True, "load_in_8bit": False}).bits == 4
    assert ModelArgs.parse({"load_in_4bit": False, "load_in_8bit": True}).bits == 8
    assert ModelArgs.parse({"load_in_8bit": False}).bits == 0
    assert ModelArgs.parse({}).bits is None


def test_nothing_is_given_to_from_pretrained_by_default() -> None:
    assert arguments({}) == arguments({"tokenizer": "x", "gradient_checkpointing": True, "load_in_4bit": False}) == {}
    assert arguments({"attn_implementation": "eager"}) == {"attn_implementation": "eager"}


def test_auto_leaves_memory_for_the_bytes_beside_each_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    import accelerate.utils

    monkeypatch.setattr(accelerate.utils, "get_max_memory", lambda: {0: 900, "cpu": 300})
    given = arguments({"device_map": "auto"}, bytes_per_parameter=4)
    assert given == {"device_map": "auto", "max_memory": {0: 300, "cpu": 100}}


@pytest.mark.parametrize("bits", [4, 8])
def test_quantization_becomes_a_config_of_bitsandbytes(bits: int) -> None:
    given = arguments({f"load_in_{bits}bit": True}, quantized=True)
    config = given.pop("quantization_config")
    assert given == {"device_map": {"": CPU}}
    assert (config.load_in_4bit, config.load_in_8bit) == (bits == 4, bits == 8)
    if bits == 4:
        assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_compute_dtype == torch.bfloat16


@pytest.mark.parametrize("key", ["device_map", "load_in_4bit", "load_in_8bit", "gradient_checkpointing"])
def test_commands_that_merge_in_memory_take_attention_and_tokenizer_only(key: str) -> None:
    value: Any = "auto" if key == "device_map" else True
    with pytest.raises(InputError, match=key):
        gm.preview({"method": "average", "models": ["./a", "./b"]}, model_args={key: value})
    basic = {"attn_implementation": "eager", "tokenizer": "./t"}
    assert complete({"model_args": basic}, gm.preview)["model_args"] == basic


TAKES: dict[str, Callable[[str], list[str]]] = {
    "evaluate": lambda args: ["evaluate", "model", "--data", "rows.jsonl", "--model-args", args],
    "estimate": lambda args: [
        "curvature",
        "estimate",
        "model",
        "--data",
        "rows.jsonl",
        "-o",
        "o",
        "--model-args",
        args,
    ],
    "preview": lambda args: ["preview", "recipe.yml", "-o", "o", "--model-args", args],
}


@pytest.mark.parametrize("command", TAKES)
@pytest.mark.parametrize("args", ["trust_remote_code=true", "use_safetensors=false", "device_map=nowhere", "eager"])
def test_wrong_arguments_end_a_command_with_status_2(
    command: str, args: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_bert_checkpoint(tmp_path / "model")
    write_jsonl(tmp_path / "rows.jsonl", labelled(2))
    (tmp_path / "recipe.yml").write_text("method: average\nmodels: [model, model]\n")
    result = CliRunner().invoke(app, TAKES[command](args))
    assert result.exit_code == 2, result.output
    assert args.partition("=")[0] in result.stderr
    assert not (tmp_path / "o").exists()


def test_a_model_is_loaded_with_the_attention_and_the_devices_of_its_arguments(tmp_path: Path) -> None:
    folder = str(tiny_bert_checkpoint(tmp_path / "model"))
    model: Any = load_model(folder, model_args={"attn_implementation": "eager", "device_map": {"": "disk"}})[0]
    assert model.config._attn_implementation == "eager"
    assert {p.device.type for p in model.parameters()} == {"meta"}
