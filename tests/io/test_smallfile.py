"""Files that are too large, no files at all, or links out of a model's folder are refused before they are read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradmerge.checkpoints import open_checkpoint
from gradmerge.checkpoints.adapter_config import read_adapter_config
from gradmerge.errors import InputError
from gradmerge.io.reader import MAX_HEADER, TensorFile, read_index
from gradmerge.io.small_files import read_bounded, read_json
from tests.making import random_state, write_model

SHAPES = {"a.weight": (4, 3)}


def sparse(path: Path, nbytes: int) -> Path:
    path.touch()
    os.truncate(path, nbytes)
    return path


def test_a_file_at_the_limit_is_read_and_one_above_is_not(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert read_bounded(path, 8) == b'{"a": 1}'
    assert read_json(path, 8) == {"a": 1}
    with pytest.raises(InputError, match=r"x\.json"):
        read_json(path, 7)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"a": 1, "a": 2}', '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"x\.json"):
        read_json(path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: open_checkpoint(str(folder)).close()),
        ("adapter_config.json", read_adapter_config),
        ("model.safetensors.index.json", lambda folder: read_index(folder / "model.safetensors.index.json")),
    ],
)
def test_a_file_beyond_its_limit_is_refused(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    sparse(folder / name, 32_000_001)
    with pytest.raises(InputError, match=name):
        read(folder)


@pytest.mark.parametrize("open_it", [read_json, TensorFile, lambda path: open_checkpoint(str(path))])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path, open_it: Callable[[Path], object]) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError):
            open_it(path)


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.safetensors", MAX_HEADER + 100)
    with path.open("r+b") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
    with pytest.raises(InputError, match=r"model\.safetensors"):
        TensorFile(path)


def test_an_index_of_safetensors_names_no_other_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    (folder / "model.safetensors").rename(folder / "weights.bin")
    text = json.dumps({"weight_map": {"a.weight": "weights.bin"}})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"weights\.bin"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "shard.safetensors", "model.safetensors.index.json", "pytorch_model.bin"],
)
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    if name in ("shard.safetensors", "model.safetensors.index.json"):
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        text = json.dumps({"weight_map": {"a.weight": "shard.safetensors"}})
        (folder / "model.safetensors.index.json").write_text(text)
    if name == "pytorch_model.bin":
        (folder / "model.safetensors").unlink()
        torch.save(random_state(0, SHAPES), folder / name)
    open_checkpoint(str(folder), allow_pickle=True).close()
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=name):
        open_checkpoint(str(folder), allow_pickle=True)
