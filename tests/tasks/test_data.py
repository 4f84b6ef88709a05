"""Every format of data gives the same rows, and files that cannot be read, or become too large, are refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from gradmerge.errors import InputError
from gradmerge.io import remote, small_files
from gradmerge.tasks.data import MAX_LINE, data_paths, dataset_metadata, read_rows

from ..http_stand_in import Web, web_server

ROWS = [
    {"text": "a good film, they said", "label": "1"},
    {"text": 'two lines\nand a "quote"', "label": "0"},
    {"text": "ein schöner Film", "label": "1"},
]


def write_format(folder: Path, form: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    """Write rows to a file of a format such as `csv.gz`."""
    kind = form.removesuffix(".gz")
    if kind == "jsonl":
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    elif kind == "csv":
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        raw = text.getvalue().encode()
    else:
        buffer = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), buffer)
        raw = buffer.getvalue()
    path = folder / f"data.{form}"
    path.write_bytes(gzip.compress(raw) if form.endswith(".gz") else raw)
    return path


@pytest.mark.parametrize("form", ["jsonl", "csv.gz", "parquet", "parquet.gz"])
def test_every_format_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    path = write_format(tmp_path, form)
    rows = read_rows(str(path))
    assert list(rows.rows) == ROWS
    assert rows.columns == ("text", "label")
    assert list(read_rows(str(path), limit=2).rows) == ROWS[:2]


def test_a_text_file_has_a_row_per_line_that_is_not_empty(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\n   \ntwo\nthree".encode())
    assert list(read_rows(str(tmp_path / "a.txt")).rows) == [{"text": t} for t in ("one", "two", "three")]


def test_a_hub_dataset_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        calls.append((name, config, split, streaming))
        data = datasets.Dataset.from_list(ROWS)
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_rows("org/name:test").rows) == ROWS
    assert list(read_rows("org/name/sub:train", limit=2).rows) == ROWS[:2]
    assert calls == [("org/name", None, "test", False), ("org/name", "sub", "train", True)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    data = datasets.Dataset.from_dict({"image": [Image.new("RGB", (2, 2))], "label": [1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    rows = read_rows("org/name:test")
    assert rows.class_names == {"label": ["cat", "dog"]}
    assert isinstance(rows.cell(0, "image")["bytes"], bytes)
    assert list(rows.column("label")) == [1]


def test_hub_datasets_that_cannot_be_loaded_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for source in ("org/name:test", "org/name"):
        with pytest.raises(InputError):
            read_rows(source)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError):
        read_rows("org/name:test")


def test_a_limit_stops_reading(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\nnot json\n')
    assert len(read_rows(str(path), limit=2)) == 2
    with pytest.raises(InputError, match=r"data\.jsonl: line 3"):
        read_rows(str(path))


def test_arrays_are_rows_and_may_have_splits(tmp_path: Path) -> None:
    x, y = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3), np.array([[0], [1], [2], [1]])
    np.savez(tmp_path / "one.npz", x=x, y=y)
    np.savez(tmp_path / "two.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:])
    rows = read_rows(str(tmp_path / "one.npz"), limit=3)
    assert [r["label"] for r in rows.rows] == [0, 1, 2]
    assert np.array_equal(rows.cell(2, "image"), x[2])
    assert len(read_rows(f"{tmp_path}/two.npz:train")) == 3
    with pytest.raises(InputError, match="x_dev"):
        read_rows(f"{tmp_path}/two.npz:dev")


def test_a_folder_of_images_has_a_row_per_image(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for number, name in enumerate(["dog", "cat"]):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for n in range(2):
                Image.new("RGB", (4, 4), (40 * number, 10 * n, 0)).save(folder / f"{n}.png")
    (tmp_path / "photos" / "test" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "photos" / "test" / "dog" / "loop.png").symlink_to("loop.png")
    rows = read_rows(f"{tmp_path}/photos:test")
    assert rows.class_names == {"label": ["cat", "dog"]}
    assert [Path(row["image"]).parent.name for row in rows.rows] == ["cat", "cat", "dog", "dog", "dog"]
    assert [row["label"] for row in read_rows(f"{tmp_path}/photos/train", limit=2).rows] == [0, 1]
    with pytest.raises(InputError, match="photos"):
        read_rows(f"{tmp_path}/photos")


#: File → its content, and the line that the message must name.
BROKEN: dict[str, tuple[bytes, str]] = {
    "a.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2"),
    "list.jsonl": (b"[1, 2]\n", "line 1"),
    "empty.jsonl": (b"\n\n", ""),
    "fewer.csv": (b"text,label\na,1\nb\n", "line 3"),
    "quote.csv": (b'text,label\n"a"b,1\n', "line 2"),
    "twice.csv": (b"text,text\na,1\n", ""),
    "a.parquet": (b"PAR1 nothing PAR1", ""),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 100)[:-12], ""),
    "a.npz": (b"no archive", ""),
    "long.jsonl": (b'{"text": "a"}\n{"text": "' + b"a" * MAX_LINE, "line 2"),
    "quoted.csv": (b'text,label\n"' + (b"a" * 999 + b"\n") * (MAX_LINE // 1000 + 1), ""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, name: str) -> None:
    raw, line = BROKEN[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(InputError, match=line or name):
        read_rows(str(tmp_path / name))


def test_other_sources_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    path = write_format(tmp_path, "jsonl")
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 4)), y=np.zeros(3))
    np.savez(tmp_path / "pickle.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    header = io.BytesIO()
    shape = (10**6, 10**6, 10**3)
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        for member in ("x.npy", "y.npy"):
            archive.writestr(member, header.getvalue())
    os.mkfifo(tmp_path / "pipe.jsonl")
    names = ("no.jsonl", "pipe.jsonl", "odd.npz", "pickle.npz", "huge.npz")
    for source in ("data/no.jsonl:train", f"{path}:train", *(f"{tmp_path}/{name}" for name in names)):
        with pytest.raises(InputError, match=source.rpartition(":")[0] or source):
            read_rows(source)
    with pytest.raises(InputError, match="limit"):
        read_rows(str(path), limit=0)


@pytest.mark.parametrize("form", ["jsonl.gz", "parquet", "npz"])
def test_a_packed_file_that_becomes_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(small_files, "UNPACKED_BYTES", 1_000_000)
    path = tmp_path / f"a.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": ["a" * 100_000] * 400}), path)
    elif form == "npz":
        np.savez_compressed(path, x=np.zeros((300, 100, 100), np.uint8), y=np.zeros(300, np.uint8))
    else:
        path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 400_000))
    with pytest.raises(InputError):
        read_rows(str(path))
    assert form == "npz" or len(read_rows(str(path), limit=3)) == 3


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "FRESH", -1.0)
    with web_server() as found:
        yield found


def test_data_at_a_url_is_fetched_once_and_again_when_it_changes(web: Web, tmp_path: Path) -> None:
    path = write_format(tmp_path, "jsonl")
    web.files["data.jsonl"] = path.read_bytes()
    url = f"http://{web.address}/data.jsonl"
    for _ in range(2):
        assert list(read_rows(url).rows) == ROWS
        assert [one.read_bytes() for one in data_paths(url)] == [path.read_bytes()]
    assert web.given["data.jsonl"] == len(path.read_bytes())
    web.files["data.jsonl"] = write_format(tmp_path, "jsonl", ROWS[1:]).read_bytes()
    assert list(read_rows(url, limit=5).rows) == ROWS[1:]
    assert dataset_metadata(url) == ("data.jsonl", {"type": "data.jsonl", "name": "data.jsonl"})
    assert dataset_metadata(url, 5)[0] == f"{web.address}/data.jsonl"
    assert dataset_metadata(f"file://{path}", 2)[0] == f"{tmp_path.name}/{path.name}"


def test_splits_and_secrets_of_data_at_a_url(web: Web, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x_test=np.zeros((3, 4, 4), np.uint8), y_test=[2, 1, 0])
    web.files["a.npz"], web.user = (tmp_path / "a.npz").read_bytes(), "me:word"
    url = f"http://me:word@{web.address}/a.npz?signature=secret"
    rows = read_rows(f"{url}:test")
    assert [row["label"] for row in rows.rows] == [2, 1, 0] and rows.label == f"http://{web.address}/a.npz"
    assert dataset_metadata(f"{url}:test")[0] == "a.npz"
    with pytest.raises(InputError, match=f"^http://{web.address}/a.npz: "):
        read_rows(url)
