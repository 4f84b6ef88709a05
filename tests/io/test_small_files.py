"""Files that are too large, that are not regular files, or that link out of a model's folder are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gradmerge.checkpoints import open_checkpoint
from gradmerge.checkpoints.lora import read_adapter_config
from gradmerge.errors import InputError
from gradmerge.io.reader import TensorFile, read_index
from gradmerge.io.small_files import lies_within, read_bounded, read_json
from tests.making import random_state, write_model

SHAPES = {"a.weight": (4, 3)}


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert read_bounded(path, 8) == b'{"a": 1}' and read_json(path, 8) == {"a": 1}
    with pytest.raises(InputError):
        read_json(path, 7)


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1, "a": 2}', '{"a": ' + "[" * 100_000, '{"a": ' + "9" * 5000 + "}"])
def test_a_file_without_a_json_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError):
        read_json(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda folder: open_checkpoint(str(folder)).close()),
        ("adapter_config.json", read_adapter_config),
        ("model.safetensors.index.json", lambda folder: read_index(folder / "model.safetensors.index.json")),
    ],
)
def test_a_file_above_its_limit_is_refused(tmp_path: Path, name: str, read: Callable[[Path], object]) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    (folder / name).touch()
    os.truncate(folder / name, 32_000_001)
    with pytest.raises(InputError, match=name):
        read(folder)


@pytest.mark.parametrize("read", [read_json, TensorFile, lambda path: open_checkpoint(str(path))])
def test_pipes_and_devices_are_refused_without_waiting(tmp_path: Path, read: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    for path in (tmp_path / "model.safetensors", Path("/dev/zero")):
        with pytest.raises(InputError):
            read(path)


def test_an_index_names_only_safetensors_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", random_state(0, SHAPES))
    (folder / "model.safetensors").rename(folder / "weights.bin")
    text = json.dumps({"weight_map": {"a.weight": "weights.bin"}})
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "shard.safetensors", "model.safetensors.index.json", "pytorch_model.bin"],
)
def test_a_link_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
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
    with pytest.raises(InputError):
        open_checkpoint(str(folder), allow_pickle=True)


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        ("file", True),
        ("../model/file", True),
        ("missing", True),
        ("../secret", False),
        ("linked/secret", False),
        ("loop", False),
        ("/dev/zero", False),
        ("..", False),
        ("../model-2/file", False),
    ],
)
def test_links_are_followed_to_their_end(tmp_path: Path, target: str, inside: bool) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "file").touch()
    (tmp_path / "secret").touch()
    (tmp_path / "alias").symlink_to("model")
    (folder / "linked").symlink_to("..")
    (folder / "loop").symlink_to("link")
    (folder / "link").symlink_to(target)
    assert lies_within(folder / "link", folder) is lies_within(folder / "link", tmp_path / "alias") is inside


@pytest.mark.parametrize(
    ("target", "inside"), [("a/blobs/beef", True), ("b/blobs/beef", False), ("secret", False), ("keys/beef", False)]
)
def test_a_snapshot_of_the_hub_cache_links_only_to_its_own_blobs(tmp_path: Path, target: str, inside: bool) -> None:
    snapshot = tmp_path / "a" / "snapshots" / "0123abc"
    (snapshot / "inner").mkdir(parents=True)
    for folder in ("a/blobs", "b/blobs", "keys"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "beef").touch()
    (tmp_path / "secret").touch()
    for link in (snapshot / "file", snapshot / "inner" / "file"):
        link.symlink_to(tmp_path / target)
        assert lies_within(link, snapshot) is inside
