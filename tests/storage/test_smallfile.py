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
from gradmerge.storage import smallfile
from gradmerge.storage.smallfile import read_bounded, read_json
from gradmerge.storage.tensorfile import MAX_HEADER, TensorFile, read_index
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
    with pytest.raises(InputError, match="larger than 7 B, the limit"):
        read_json(path, 7)


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"a": 1, "a": 2}', '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InputError, match="JSON"):
        read_json(path)


def config(folder: Path) -> None:
    open_checkpoint(str(folder)).close()


def adapter_config(folder: Path) -> None:
    read_adapter_config(folder)


def index(folder: Path) -> None:
    read_index(folder / "model.safetensors.index.json")


@pytest.mark.parametrize(
    ("name", "read"),
    [("config.json", config), ("adapter_config.json", adapter_config), ("model.safetensors.index.json", index)],
)
def test_a_file_beyond_its_limit_is_refused_with_the_limit(
    tmp_path: Path, name: str, read: Callable[[Path], None]
) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    sparse(folder / name, 32_000_001)
    with pytest.raises(InputError, match=f"{name}: larger than (10.0|32.0) MB"):
        read(folder)


@pytest.mark.parametrize("open_it", [read_json, TensorFile, lambda path: open_checkpoint(str(path))])
def test_a_pipe_or_a_device_is_refused_and_not_waited_for(tmp_path: Path, open_it: Callable[[Path], object]) -> None:
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(InputError, match=r"is no file|no such folder or file"):
            open_it(path)


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = sparse(tmp_path / "model.safetensors", MAX_HEADER + 100)
    with path.open("r+b") as file:
        file.write((MAX_HEADER + 1).to_bytes(8, "little"))
    with pytest.raises(InputError, match=r"more than the limit of 32\.0 MB"):
        TensorFile(path)


def test_an_index_of_safetensors_names_no_other_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    (folder / "model.safetensors").rename(folder / "weights.bin")
    text = json.dumps({"weight_map": {"a.weight": "weights.bin"}})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"'weights\.bin' that it names is no \.safetensors"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "shard.safetensors", "model.safetensors.index.json"]
)
def test_a_file_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    (folder / "config.json").write_text("{}")
    if name in ("shard.safetensors", "model.safetensors.index.json"):
        (folder / "model.safetensors").rename(folder / "shard.safetensors")
        text = json.dumps({"weight_map": {"a.weight": "shard.safetensors"}})
        (folder / "model.safetensors.index.json").write_text(text)
    open_checkpoint(str(folder)).close()
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(InputError, match=r"is a link to .* outside the model's folder"):
        open_checkpoint(str(folder))


def test_a_pickle_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    torch.save(random_state(0, SHAPES), tmp_path / "elsewhere.bin")
    (folder / "pytorch_model.bin").symlink_to(tmp_path / "elsewhere.bin")
    with pytest.raises(InputError, match="outside the model's folder"):
        open_checkpoint(str(folder), allow_pickle=True)


def test_the_layout_of_the_hub_cache_and_a_linked_folder_are_read(tmp_path: Path) -> None:
    state = random_state(0, SHAPES)
    whole = write_model(tmp_path / "m", state)
    snapshot = tmp_path / "models--org--m" / "snapshots" / "0a1b"
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(whole.iterdir())):
        path.rename(blobs / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "alias").symlink_to(snapshot)
    with open_checkpoint(str(tmp_path / "alias")) as checkpoint:
        assert checkpoint.tensors.keys() == state.keys()


def test_the_limits_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")
    for limit in (smallfile.MAX_CONFIG, smallfile.MAX_TOKENIZER, MAX_HEADER):
        assert f"{limit // 1_000_000} MB" in text
