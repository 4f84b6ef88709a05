"""Opening files, folders and pickles. tests/engine/test_remote_merges.py has Hub ids."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradmerge.checkpoints import Buffers, open_checkpoint
from gradmerge.errors import InputError
from tests.forked import forked
from tests.making import random_state, write_model


def read_all(reference: str | Path, **arguments: Any) -> dict[str, Tensor]:
    """Every tensor of a checkpoint through our own reader."""
    with open_checkpoint(str(reference), **arguments) as checkpoint:
        return {
            name: checkpoint.read(name, 0, info.numel, Buffers()).reshape(info.shape).clone()
            for name, info in checkpoint.tensors.items()
        }


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(got[name].dtype == value.dtype and got[name].equal(value) for name, value in want.items())


def mixed_state() -> dict[str, Tensor]:
    state = random_state(3)
    types = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32, torch.bfloat16)
    state = {name: value.to(dtype) for (name, value), dtype in zip(state.items(), types, strict=True)}
    return state | {"ids": torch.arange(5), "mask": torch.tensor([True, False]), "scalar": torch.tensor(1.5)}


# safetensors


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_read_whatever_its_shards(shards: int, tmp_path: Path) -> None:
    state = mixed_state()
    assert_same(read_all(write_model(tmp_path / "m", state, shards)), state)


def test_an_index_that_disagrees_with_its_files_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", random_state(0), 2)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())["weight_map"]
    fewer = list(good)[1:]
    for wrong in (
        good | {"extra.weight": "model-00001-of-00002.safetensors"},
        good | {"extra.weight": "model-00003-of-00002.safetensors"},
        {name: good[name] for name in fewer},
    ):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(InputError):
            open_checkpoint(str(folder))


# Pickles


def save_bins(folder: Path, state: dict[str, Tensor], shards: int = 1, **arguments: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", **arguments)
        return folder
    weight_map = {}
    for shard in range(shards):
        filename = f"pytorch_model-{shard + 1:05d}-of-{shards:05d}.bin"
        part = {name: state[name] for name in list(state)[shard::shards]}
        torch.save(part, folder / filename, **arguments)
        weight_map |= dict.fromkeys(part, filename)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("zipped", [True, False], ids=["zipped", "legacy"])
def test_a_folder_of_pickles_is_read_on_request_only(shards: int, zipped: bool, tmp_path: Path) -> None:
    state = mixed_state()
    folder = save_bins(tmp_path / "m", state, shards, _use_new_zipfile_serialization=zipped)
    torch.save(state, tmp_path / "alone.ckpt", _use_new_zipfile_serialization=zipped)
    for reference in (folder, tmp_path / "alone.ckpt"):
        with pytest.raises(InputError, match="pickle"):
            open_checkpoint(reference)
        assert_same(read_all(reference, allow_pickle=True), state)


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", ["zipped", "legacy", "bare"])
def test_code_in_a_pickle_is_refused_and_not_run(kind: str, tmp_path: Path) -> None:
    mark = tmp_path / "it ran"
    path = tmp_path / "bomb.bin"
    content = {"w": torch.zeros(3), "bomb": Bomb(mark)}
    if kind == "bare":
        path.write_bytes(pickle.dumps(content["bomb"]))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=kind == "zipped")
    for allow_pickle in (False, True):
        with pytest.raises(InputError):
            open_checkpoint(path, allow_pickle=allow_pickle)
        assert not mark.exists()
    if kind != "bare":  # the file is a bomb indeed
        torch.load(path, weights_only=False)
        assert mark.exists()


def test_a_hub_model_is_refused_quickly_without_a_network(tmp_path: Path) -> None:
    """In its own process: the Hugging Face library reads its settings once."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE", "TRANSFORMERS_"))}
    offline = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "home")}
    begun = time.perf_counter()
    run = forked("inspect", "org/absent", cwd=tmp_path, env=clean | offline)
    assert time.perf_counter() - begun < 20
    assert run.returncode == 2 and "org/absent" in run.stderr
