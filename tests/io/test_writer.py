"""Writing safetensors files by position."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradmerge.engine.executor import run_parallel
from gradmerge.errors import MachineError
from gradmerge.io.reader import TensorInfo, bytes_of
from gradmerge.io.writer import ShardWriter


def test_blocks_in_any_order_on_threads_give_shards_that_safetensors_reads(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(50)}
    state |= {f"sub/{name}": values for name, values in list(state.items())[:3]}
    tensors = dict.fromkeys(state, TensorInfo("F32", (8,)))
    with ShardWriter(tmp_path, "model", tensors, 64, {"format": "pt"}, ["sub"]) as writer:

        def work(number: int, _: object) -> None:
            name, start = list(state)[number * 7 % len(state)], 4 * (number // len(state))
            writer.write(name, start, bytes_of(state[name][start : start + 4].contiguous()))

        run_parallel(range(2 * len(state)), work, 4)
        writer.finish()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 50 * 32 and len(set(index["weight_map"].values())) == 25
    inner = json.loads((tmp_path / "sub" / "model.safetensors.index.json").read_text())
    files = {name: tmp_path / file for name, file in index["weight_map"].items()}
    files |= {f"sub/{name}": tmp_path / "sub" / file for name, file in inner["weight_map"].items()}
    for name, values in state.items():
        assert load_file(files[name])[name.removeprefix("sub/")].equal(values)
    assert {file.relative_to(tmp_path).as_posix(): file.stat().st_size for file in files.values()} == writer.sizes


def test_a_file_that_disappeared_is_not_created_again(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "model", {"t": TensorInfo("F32", (1,))}, 4, {})
    writer.open()
    writer.close()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(MachineError):
        writer.write("t", 0, bytes_of(torch.zeros(1)))
