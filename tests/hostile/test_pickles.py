"""Pickled checkpoints with tensors and names that no merge can use: refused in one sentence."""

from __future__ import annotations

import io
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm

STATES: dict[str, dict[Any, Any]] = {
    "a sparse tensor": {"a": torch.eye(3).to_sparse()},
    "a compressed sparse tensor": {"a": torch.eye(3).to_sparse_csr()},
    "a tensor without numbers": {"a": torch.empty(3, device="meta")},
    "a quantised tensor": {"a": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)},
    "a name with half a character": {"\ud800": torch.ones(3)},
    "a nested state dict with one": {"state_dict": {"\udfff.weight": torch.ones(3)}},
    "one number a billion times": {"a": torch.zeros(1).expand(10**9)},
    "one number too often to count": {"a": torch.zeros(1).expand(2**60)},
    "names that are no words": {(1, 2): torch.ones(3)},
    "two of a name": {0: torch.ones(3), "0": torch.ones(3)},
    "a type of its own": {"a": torch.ones(3, dtype=torch.complex128)},
    "no tensor": {"a": 5},
    "nothing": {},
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", STATES)
def test_a_pickle_that_cannot_be_merged_is_refused(case: str, zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    torch.save(STATES[case], path, _use_new_zipfile_serialization=zipped)
    recipe = {"method": "average", "models": [str(path)]}
    with pytest.raises(gm.InputError):
        gm.merge(recipe, tmp_path / "out", allow_pickle=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.bin"]


@pytest.mark.parametrize("place", range(4, 22))
def test_an_archive_whose_end_is_damaged_is_refused(place: int, tmp_path: Path) -> None:
    """The last 22 bytes say how many disks the archive is on, and where on them its list of parts lies."""
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(3)}, path)
    raw = bytearray(path.read_bytes())
    raw[-22 + place] ^= 0xFF
    raw += b"PK\x06\x07" + b"\xff" * 16 + bytes(raw[-22:])  # and what larger archives have before it
    path.write_bytes(raw)
    with pytest.raises(gm.InputError):
        gm.merge({"method": "average", "models": [str(path)]}, tmp_path / "out", allow_pickle=True)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_global_with_a_long_name_is_refused_at_once(zipped: bool, tmp_path: Path) -> None:
    """torch words its own refusal in a time that grows with the square of the name: here, half a minute."""
    path = tmp_path / "model.bin"
    torch.save({"a": torch.ones(3)}, path, _use_new_zipfile_serialization=zipped)
    raw = path.read_bytes()
    long = b"torch._utils\n_rebuild_tensor_v2" + b"x" * 100_000
    if zipped:
        with zipfile.ZipFile(io.BytesIO(raw)) as archive:
            parts = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(path, "w") as archive:
            for name, content in parts.items():
                archive.writestr(name, content.replace(b"torch._utils\n_rebuild_tensor_v2", long))
    else:
        path.write_bytes(raw.replace(b"torch._utils\n_rebuild_tensor_v2", long))
    begun = time.perf_counter()
    with pytest.raises(gm.InputError, match=r"model\.bin"):
        gm.merge({"method": "average", "models": [str(path)]}, tmp_path / "out", allow_pickle=True)
    assert time.perf_counter() - begun < 5


def test_a_value_larger_than_the_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x02\x96" + (2**62).to_bytes(8, "little") + b"few bytes.")  # BYTEARRAY8 with its length
    with pytest.raises(gm.InputError):
        gm.merge({"method": "average", "models": [str(path)]}, tmp_path / "out", allow_pickle=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model.bin"]
