"""Safetensors files, configs and adapters with contents that no program writes: read, or refused at little cost."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.checkpoints import open_checkpoint
from gradmerge.checkpoints.checkpoint import Buffers
from tests.fuzz.models import Adapters, Index, Weights
from tests.fuzz.mutate import with_length
from tests.fuzz.trial import REFUSED, WORKED, Case, run_case

BIG = 2**61


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "BOOL", "U64", "C64"])
def test_a_tensor_of_any_known_type_is_copied_when_it_is_not_merged(tmp_path: Path, dtype: str) -> None:
    header = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "odd": {"dtype": dtype, "shape": [8 // (8 if dtype in ("U64", "C64") else 1)], "data_offsets": [8, 16]},
    }
    data = bytes(range(16))
    (tmp_path / "m.safetensors").write_bytes(with_length(json.dumps(header).encode(), data))
    gm.merge({"method": "average", "models": [str(tmp_path / "m.safetensors")], "include": ["w"]}, tmp_path / "out")
    with open_checkpoint(str(tmp_path / "out")) as result:
        assert result.tensors["odd"].dtype == dtype
        copied = result.read("odd", 0, result.tensors["odd"].numel, Buffers())
        assert copied.view(torch.uint8).numpy().tobytes() == data[8:]


CLAIMS: dict[str, Any] = {
    "a huge tensor": {"w": {"dtype": "F64", "shape": [BIG], "data_offsets": [0, BIG]}},
    "a large tensor": {"w": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}},
    "many axes": {"w": {"dtype": "U8", "shape": [2**31] * 64, "data_offsets": [0, 8]}},
    "a huge axis of nothing": {"w": {"dtype": "U8", "shape": [0, BIG], "data_offsets": [0, 0]}},
    "one place for many": {f"w{i}": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for i in range(10_000)},
}


@pytest.mark.parametrize("claim", [*CLAIMS, "a header of 100 MB"])
def test_a_huge_claim_in_a_small_file_costs_nothing(claim: str, tmp_path: Path) -> None:
    kind = Weights(tmp_path / "weights")
    raw = with_length(b"{}", b"", 10**8)
    if claim in CLAIMS:
        raw = with_length(json.dumps(CLAIMS[claim]).encode(), bytes(8))
    result = run_case(kind, Case({kind.file: raw}))
    assert result.outcome == REFUSED and result.memory < 50_000_000


@pytest.mark.parametrize("base", [".", "../adapter", "x" * 5000, "~nobody-of-that-name/x", "a\x00b", 5, [], {"a": 1}])
def test_an_adapter_on_a_base_that_cannot_be_is_refused(base: Any, tmp_path: Path, monkeypatch: Any) -> None:
    kind = Adapters(tmp_path / "adapters")
    monkeypatch.chdir(kind.place.inputs / "adapter")
    config = json.loads(Path("adapter_config.json").read_text())
    Path("adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": base}))
    with pytest.raises(gm.InputError):
        open_checkpoint(".")


@pytest.mark.parametrize(
    "text",
    [
        *["5", "[]", "null", '"x"', "{", "", "{}", "\x00", '{"architectures": {"a": 1}, "vocab_size": []}'],
        '{"architectures": 5, "text_config": 3, "tie_word_embeddings": "no"}',
    ],
)
def test_a_strange_config_is_read_or_refused(text: str, tmp_path: Path) -> None:
    kind = Weights(tmp_path / "weights")
    files = {f"{name}/config.json": text.encode() for name in ("base", "a", "b")}
    result = run_case(kind, Case(files, how={"changes": {"output": {"dtype": "bfloat16"}}}))
    assert result.outcome == (WORKED if text.startswith('{"') or text == "{}" else REFUSED)


def test_many_names_in_one_file_are_opened_in_little_more_than_the_time_to_read_them(tmp_path: Path) -> None:
    """Half a minute, were every name looked for in a list of all."""
    count = 60_000
    header = {f"p{i}.w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
    (tmp_path / "one.safetensors").write_bytes(with_length(json.dumps(header).encode(), b""))
    index = {"weight_map": dict.fromkeys(header, "one.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with open_checkpoint(str(tmp_path)) as checkpoint:
        assert len(checkpoint.tensors) == count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 10


@pytest.mark.parametrize("name", ["../../secret.safetensors", "config.json", "/etc/passwd", ".."])
def test_an_index_that_names_another_file_is_refused_and_that_file_not_opened(name: str, tmp_path: Path) -> None:
    kind = Index(tmp_path / "index")
    file = "a/model.safetensors.index.json"
    index = json.loads(kind.place.original(file))
    assert run_case(kind, Case({file: json.dumps(index).encode()})).outcome == WORKED
    index["weight_map"]["a.weight"] = name
    result = run_case(kind, Case({file: json.dumps(index).encode()}))
    assert result.outcome == REFUSED
