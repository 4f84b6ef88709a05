"""Small files that would become gigabytes, and damaged ones: refused with the limit, or in one sentence."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from gradmerge.errors import InputError
from gradmerge.io import small_files as smallfile
from gradmerge.tasks import data_sources
from gradmerge.tasks.columns import choose_columns
from gradmerge.tasks.data_sources import LONGEST_ROW, read_rows

from .test_data_sources import ROWS, in_form

ENDLESS = b"a" * (LONGEST_ROW + 1)
LINE = b"a" * 999 + b"\n"
CELL = b'"' + LINE + b'",'


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.jsonl", b'{"text": "a"}\n{"text": "' + ENDLESS),
        ("a.txt", b"a\nb\n" + ENDLESS),
        ("a.csv", b"text,label\nx,1\n" + ENDLESS),
        ("header.csv", ENDLESS),
        ("quoted.csv", b'text,label\n"' + LINE * (LONGEST_ROW // len(LINE) + 1)),
        ("cells.csv", b"text,label\n" + CELL * (LONGEST_ROW // len(CELL) + 1)),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_without_end_is_refused_with_the_limit(tmp_path: Path, name: str, raw: bytes, packed: bool) -> None:
    path = tmp_path / (name + ".gz" * packed)
    path.write_bytes(gzip.compress(raw, 1) if packed else raw)
    if name == "a.jsonl":
        assert len(read_rows(str(path), limit=1)) == 1
    with pytest.raises(InputError, match=r"32\.0 MB"):
        read_rows(str(path), limit=10)


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smallfile, "UNPACKED_BYTES", 1_000_000)


@pytest.mark.parametrize("form", ["jsonl", "csv", "txt"])
def test_a_packed_file_that_becomes_too_large_is_refused_but_not_what_a_limit_needs(
    tmp_path: Path, small_limits: None, form: str
) -> None:
    row = {"jsonl": b'{"text": "a"}\n', "csv": b"text\n", "txt": b"text\n"}[form]
    path = tmp_path / f"a.{form}.gz"
    path.write_bytes(gzip.compress(row * 400_000))
    assert len(read_rows(str(path), limit=3)) == 3
    with pytest.raises(InputError, match=r"1\.0 MB"):
        read_rows(str(path))


def test_what_packs_well_but_honestly_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 20_000))
    assert len(read_rows(str(path))) == 20_000


@pytest.mark.parametrize("limit", [None, 1000])
def test_a_parquet_file_whose_dictionary_unfolds_is_refused(
    tmp_path: Path, small_limits: None, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    monkeypatch.setattr(data_sources, "BATCH_BYTES", 1_000_000)
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2000, pyarrow.int32()), ["a" * 300_000])
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": text}), path, compression="zstd", store_schema=False)
    assert path.stat().st_size < 5000
    assert len(read_rows(str(path), limit=2)) == 2
    with pytest.raises(InputError, match=r"1\.0 MB"):
        read_rows(str(path), limit=limit)


def test_packed_parquet_and_arrays_that_unpack_too_large_are_refused(tmp_path: Path, small_limits: None) -> None:
    for name in ("a.parquet.gz", "a.npz.gz"):
        (tmp_path / name).write_bytes(gzip.compress(bytes(3_000_000)))
        with pytest.raises(InputError, match=r"1\.0 MB"):
            read_rows(str(tmp_path / name))
    np.savez_compressed(tmp_path / "b.npz", x=np.zeros((300, 100, 100), np.uint8), y=np.zeros(300, np.uint8))
    with pytest.raises(InputError, match=r"1\.0 MB"):
        read_rows(str(tmp_path / "b.npz"))


def test_an_array_that_claims_more_than_there_is_memory_is_refused(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6, 10**3)}
    )
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name in ("x.npy", "y.npy"):
            archive.writestr(name, header.getvalue())
    with pytest.raises(InputError, match=r"a\.npz"):
        read_rows(str(tmp_path / "a.npz"))


def test_a_table_of_very_many_columns_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join(map(str, range(100_000))) + "\n" + "," * 99_999 + "\n")
    (tmp_path / "a.jsonl").write_text(json.dumps(dict.fromkeys(map(str, range(100_000)))))
    for name in ("a.csv", "a.jsonl"):
        with pytest.raises(InputError, match="100000 columns"):
            read_rows(str(tmp_path / name))


def test_files_that_are_none_are_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(InputError, match=r"a\.jsonl"):
        read_rows(str(tmp_path / "a.jsonl"))
    loop = tmp_path / "photos" / "cat"
    loop.mkdir(parents=True)
    (loop / "a.png").symlink_to("a.png")
    assert len(read_rows(str(tmp_path / "photos"))) == 1  # and the image is named when it is read


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, cut out, doubled, or the end cut off."""
    data = bytearray(raw)
    for _ in range(rng.choice([1, 1, 2, 8])):
        place = rng.randrange(len(data))
        change = rng.randrange(4)
        if change == 0:
            data[place] = rng.randrange(256)
        elif change == 1:
            del data[place : place + rng.randrange(1, 20)]
        elif change == 2:
            data[place:place] = data[place : place + rng.randrange(1, 20)]
        else:
            data[place : place + 4] = rng.choice([b"\0\0\0\0", b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff"])
        if not data:
            return b""
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


def arrays(folder: Path) -> Path:
    pixels = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 4, 4)
    np.savez_compressed(folder / "a.npz", x=pixels, y=np.array([0, 1, 2]))
    return folder / "a.npz"


FORMS: dict[str, Callable[[Path], Path]] = {
    form: (lambda folder, form=form: in_form(folder, form))
    for form in ("jsonl", "csv", "csv.gz", "parquet", "parquet.gz")
} | {"npz": arrays}


@pytest.mark.parametrize("form", FORMS)
def test_damaged_data_is_read_or_refused_and_nothing_else(tmp_path: Path, form: str) -> None:
    path = FORMS[form](tmp_path)
    raw, rng, outcomes = path.read_bytes(), random.Random(1), Counter[str]()
    for _ in range(300):
        path.write_bytes(damaged(raw, rng))
        try:
            rows = read_rows(str(path))
            for task in ("image",) if form == "npz" else ("classify", "causal-lm", "seq2seq"):
                choose_columns(task, rows, None)
            outcomes["read"] += 1
        except InputError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 50
    path.write_bytes(raw)
    assert len(read_rows(str(path))) == len(ROWS)
