"""Pickles with unusual or damaged tensors."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from gradmerge.checkpoints import open_checkpoint
from gradmerge.errors import InputError

from .test_open import read_all

T = torch.arange(6.0).reshape(2, 3)


def saved(path: Path, value: Any, zipped: bool = True) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return str(path)


READ = {
    "a transposed tensor": T.T,
    "a part of a tensor": T[1:, :2],
    "a repeated row": T[0].expand(4, 3),
    "a negative that is not worked out": torch.complex(T, T).conj().imag,
    "a conjugate that is not worked out": torch.complex(T, T + 1).conj(),
    "nothing": torch.zeros(0, 3),
    "nothing, repeated": torch.zeros(0).expand(5, 0),
    "a parameter": torch.nn.Parameter(T),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", READ)
def test_every_way_to_store_a_tensor_gives_its_numbers(tmp_path: Path, case: str, zipped: bool) -> None:
    got = read_all(saved(tmp_path / "m.bin", {"a": READ[case]}, zipped), allow_pickle=True)["a"]
    assert torch.equal(got, READ[case].detach().resolve_conj().resolve_neg())


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.mark.parametrize("case", ["compressed", "in another byte order"])
def test_an_archive_that_cannot_be_mapped_is_refused(tmp_path: Path, case: str) -> None:
    saved(tmp_path / "m.bin", {"a": T})
    compression = zipfile.ZIP_DEFLATED if case == "compressed" else zipfile.ZIP_STORED
    with zipfile.ZipFile(tmp_path / "odd.bin", "w", compression) as archive:
        for name, raw in members(tmp_path / "m.bin").items():
            archive.writestr(name, b"big" if name.endswith("byteorder") and case != "compressed" else raw)
    with pytest.raises(InputError, match=r"odd\.bin"):
        open_checkpoint(str(tmp_path / "odd.bin"), allow_pickle=True)


def test_a_tensor_that_claims_another_size_than_its_data_is_refused(tmp_path: Path) -> None:
    """Read from a map, it would end in the next one."""
    saved(tmp_path / "m.bin", {"a": torch.zeros(8), "b": torch.ones(8), "c": torch.ones(16)})
    inside = members(tmp_path / "m.bin")
    with zipfile.ZipFile(tmp_path / "claims.bin", "w") as archive:
        for name, raw in inside.items():
            eight = b"K\x08"
            archive.writestr(name, raw.replace(eight, b"K\x09") if name.endswith("data.pkl") else raw)
    with pytest.raises(InputError, match=r"claims\.bin"):
        open_checkpoint(str(tmp_path / "claims.bin"), allow_pickle=True)
