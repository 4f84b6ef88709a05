"""Pickles of strange tensors, and damaged ones: read right, or refused in one sentence."""

from __future__ import annotations

import io
import json
import os
import random
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradmerge.checkpoints import open_checkpoint, pickles
from gradmerge.checkpoints.model import Buffers
from gradmerge.checkpoints.pickles import PickleFile
from gradmerge.errors import InputError, MachineError
from gradmerge.storage import smallfile

T = torch.arange(6.0).reshape(2, 3)


def saved(path: Path, value: Any, zipped: bool = True) -> str:
    torch.save(value, path, _use_new_zipfile_serialization=zipped)
    return str(path)


def read_all(path: str) -> dict[str, Tensor]:
    with open_checkpoint(path, allow_pickle=True) as checkpoint:
        return {
            name: checkpoint.read(name, 0, info.numel, Buffers()).reshape(info.shape).clone()
            for name, info in checkpoint.tensors.items()
        }


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
    got = read_all(saved(tmp_path / "m.bin", {"a": READ[case]}, zipped))["a"]
    assert torch.equal(got, READ[case].detach().resolve_conj().resolve_neg())


REFUSED: dict[str, tuple[Any, str]] = {
    "sparse": ({"a": T.to_sparse()}, "cannot be"),
    "sparse rows": (T.to_sparse_csr, "cannot be"),
    "no data": ({"a": T.to("meta")}, "has no data"),
    "one number a billion times": ({"a": torch.zeros(1).expand(10**9)}, "unpacks to more than 1.0 GB"),
    "one number too often to count": ({"a": torch.zeros(1).expand(2**60)}, "unpacks to more than"),
    "names that are no words": ({(1, 2): T}, "names are no words"),
    "two of a name": ({0: T, "0": T}, "two of one name"),
    "half a character": ({"a\ud800": T}, "no valid Unicode"),
    "no state dict": ([T], "holds no state dict"),
    "nothing": ({}, "holds no state dict"),
    "a type of its own": ({"a": T.to(torch.complex128)}, "cannot be merged"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("case", REFUSED)
def test_a_strange_pickle_is_refused_in_one_sentence(
    tmp_path: Path, case: str, zipped: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    value, reason = REFUSED[case]
    path = saved(tmp_path / "m.bin", {"a": value()} if callable(value) else value, zipped)
    with pytest.raises(InputError, match=reason):
        open_checkpoint(path, allow_pickle=True)
    assert "Traceback" not in capfd.readouterr().err


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_archive_that_unpacks_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallfile, "UNPACKED_BYTES", 100_000)
    saved(tmp_path / "m.bin", {"a": torch.zeros(1_000_000)})
    with zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, raw in members(tmp_path / "m.bin").items():
            archive.writestr(name, raw)
    with pytest.raises(InputError, match="more than 100 times its size"):
        open_checkpoint(str(tmp_path / "packed.bin"), allow_pickle=True)


def damaged(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 4])):
        place, change = rng.randrange(len(data)), rng.randrange(4)
        if change == 0:
            data[place] = rng.randrange(256)
        elif change == 1:
            del data[place : place + rng.randrange(1, 8)]
        elif change == 2:
            data[place:place] = data[place : place + rng.randrange(1, 8)]
        else:
            data[place : place + 4] = rng.choice([b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff"])
    return bytes(data)


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("what", ["archive", "pickle inside", "old format"])
def test_a_damaged_pickle_is_read_or_refused_and_nothing_else(tmp_path: Path, what: str) -> None:
    path = tmp_path / "m.bin"
    saved(path, {"a": T.clone(), "b": T.T, "c": T.half(), "d": torch.arange(5)}, what != "old format")
    raw, rng, outcomes = path.read_bytes(), random.Random(3), Counter[str]()
    inside = members(path) if what == "pickle inside" else {}
    for _ in range(400):
        if inside:
            buffer = io.BytesIO()
            with zipfile.ZipFile(buffer, "w", rng.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])) as archive:
                for name, value in inside.items():
                    archive.writestr(name, damaged(value, rng) if name.endswith("data.pkl") else value)
            path.write_bytes(buffer.getvalue())
        else:
            path.write_bytes(damaged(raw, rng))
        try:
            read_all(str(path))
            outcomes["read"] += 1
        except InputError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100, outcomes


def test_a_map_that_is_made_anew_while_it_is_read_gives_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "REMAPPED_AFTER", 16)
    state = {"a": torch.arange(40.0), "b": torch.tensor(3.0), "c": torch.arange(9).bfloat16(), "d": torch.arange(8.0)}
    state["tied"] = state["a"]
    path = saved(tmp_path / "m.bin", state)
    with open_checkpoint(path, allow_pickle=True) as checkpoint:
        for name, value in state.items():
            blocks = [
                checkpoint.read(name, i, min(i + 3, value.numel()), Buffers()) for i in range(0, value.numel(), 3)
            ]
            assert torch.equal(torch.cat(blocks).reshape(value.shape), value), name


def test_maps_of_many_files_together_hold_no_more_memory_than_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "SMALL", 0)
    monkeypatch.setattr(pickles, "REMAPPED_AFTER", 400)
    state = {f"{n}.w": torch.arange(50.0) + n for n in range(10)}
    for n in range(10):
        saved(tmp_path / f"pytorch_model-{n}.bin", {f"{n}.w": state[f"{n}.w"]})
    index = {"weight_map": {f"{n}.w": f"pytorch_model-{n}.bin" for n in range(10)}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    anew: list[str] = []
    plain = PickleFile._map
    with open_checkpoint(str(tmp_path), allow_pickle=True) as checkpoint:
        monkeypatch.setattr(PickleFile, "_map", lambda self, t: (anew.append(self.path.name), plain(self, t)))
        for name, value in state.items():
            assert torch.equal(checkpoint.read(name, 0, 50, Buffers()), value)
            assert sum(PickleFile._read.values()) <= 400
    # Those that were read longest ago are mapped anew; the last two still count.
    assert anew == [f"pytorch_model-{n}.bin" for n in range(8)]
    assert PickleFile._read == {}


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_mapped_file_that_is_gone_is_read_as_it_was(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickles, "REMAPPED_AFTER", 4)
    path = saved(tmp_path / "m.bin", {"a": T})
    with open_checkpoint(path, allow_pickle=True) as checkpoint:
        if how == "replaced":
            Path(saved(tmp_path / "other.bin", {"a": T + 1})).rename(path)
        else:
            Path(path).unlink()
        for _ in range(2):
            assert torch.equal(checkpoint.read("a", 0, 6, Buffers()), T.flatten())


def test_a_mapped_file_that_was_cut_short_meanwhile_ends_in_a_message(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.bin", {"a": torch.zeros(100_000)})
    with open_checkpoint(path, allow_pickle=True) as checkpoint:
        os.truncate(path, 1000)
        with pytest.raises(MachineError, match="it was longer when the merge began"):
            checkpoint.read("a", 90_000, 100_000, Buffers())


def test_a_tensor_that_claims_another_size_than_its_data_is_refused(tmp_path: Path) -> None:
    """Read from a map, it would end in the next one."""
    saved(tmp_path / "m.bin", {"a": torch.zeros(8), "b": torch.ones(8), "c": torch.ones(16)})
    inside = members(tmp_path / "m.bin")
    with zipfile.ZipFile(tmp_path / "claims.bin", "w") as archive:
        for name, raw in inside.items():
            eight = b"K\x08"
            archive.writestr(name, raw.replace(eight, b"K\x09") if name.endswith("data.pkl") else raw)
    with pytest.raises(InputError, match="does not have the size of its data"):
        open_checkpoint(str(tmp_path / "claims.bin"), allow_pickle=True)


def test_a_file_whose_name_is_not_utf8_is_read_without_a_map(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.bin")
    try:
        torch.save({"a": T}, Path(tmp_path / "m.bin"))
        (tmp_path / "m.bin").rename(path)
    except OSError:
        pytest.skip("the file system takes no such names")
    assert torch.equal(read_all(path)["a"], T)
