"""Every form of data gives the same rows, and says what is wrong when it cannot."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from gradmerge.errors import InputError
from gradmerge.tasks.data_names import named_data
from gradmerge.tasks.data_sources import data_paths, read_rows
from gradmerge.urls import redact_urls

from ..http_stand_in import Web, serving, web_server

ROWS = [
    {"text": "a good film, they said", "label": "1"},
    {"text": 'two lines\nand a "quote"', "label": "0"},
    {"text": "ein schöner Film", "label": "1"},
]


def in_form(folder: Path, form: str, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    """The rows in a file of a form such as `csv.gz`."""
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


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "csv", "csv.gz", "parquet", "parquet.gz"])
def test_every_file_format_gives_the_same_rows(tmp_path: Path, form: str) -> None:
    path = in_form(tmp_path, form)
    rows = read_rows(str(path))
    assert list(rows.rows) == ROWS
    assert rows.columns == ("text", "label")
    assert list(read_rows(str(path), limit=2).rows) == ROWS[:2]


def test_lines_of_a_text_file_are_rows_and_empty_ones_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\n\n   \ntwo\nthree".encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"one\n\ntwo\nthree\n"))
    for name in ("a.txt", "a.txt.gz"):
        assert list(read_rows(str(tmp_path / name)).rows) == [{"text": t} for t in ("one", "two", "three")]


def test_a_hub_data_set_gives_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        data = datasets.Dataset.from_list(ROWS)
        return data.to_iterable_dataset() if streaming else data

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_rows("org/name:test").rows) == ROWS
    assert list(read_rows("org/name/sub:train", limit=2).rows) == ROWS[:2]
    assert list(read_rows("org/name", split="dev").rows) == ROWS
    assert asked == [
        ("org/name", None, "test", False),
        ("org/name", "sub", "train", True),
        ("org/name", None, "dev", False),
    ]


def test_names_of_hub_classes_are_known_and_images_stay_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    data = datasets.Dataset.from_dict({"image": [Image.new("RGB", (2, 2))], "label": [1]}, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: data)
    rows = read_rows("org/name:test")
    assert rows.class_names == {"label": ["cat", "dog"]}
    assert isinstance(rows.cell(0, "image")["bytes"], bytes)
    assert list(rows.column("label")) == [1]


def test_without_the_library_a_hub_data_set_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'gradmerge\[hub\]'"):
        read_rows("org/name:test")


def test_a_hub_data_set_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match="org/name:test"):
        read_rows("org/name:test")
    with pytest.raises(InputError, match="org/name:test"):
        read_rows("org/name")


def test_a_limit_stops_reading_before_what_is_broken_further_on(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a"}\n{"text": "b"}\nnot json\n')
    assert len(read_rows(str(path), limit=2)) == 2
    with pytest.raises(InputError, match=r"data\.jsonl: line 3"):
        read_rows(str(path))


def test_arrays_are_rows_with_splits(tmp_path: Path) -> None:
    x, y = np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3), np.array([[0], [1], [2], [1]])
    np.savez(tmp_path / "one.npz", x=x, y=y)
    np.savez(tmp_path / "two.npz", X_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:])
    rows = read_rows(str(tmp_path / "one.npz"), limit=3)
    assert [r["label"] for r in rows.rows] == [0, 1, 2]
    assert np.array_equal(rows.cell(2, "image"), x[2])
    assert len(read_rows(f"{tmp_path}/two.npz:train")) == 3
    assert len(read_rows(f"{tmp_path}/two.npz", split="test")) == 1
    with pytest.raises(InputError, match=r"two\.npz:test"):
        read_rows(f"{tmp_path}/two.npz")
    with pytest.raises(InputError, match="x_dev"):
        read_rows(f"{tmp_path}/two.npz:dev")


def test_arrays_that_are_pickles_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{"a": 1}], dtype=object), y=np.zeros(1))
    with pytest.raises(InputError, match=r"a\.npz"):
        read_rows(str(tmp_path / "a.npz"))


def images_by_class(folder: Path, classes: Sequence[str], count: int = 2) -> Path:
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for n in range(count):
            Image.new("RGB", (4, 4), (40 * number, 10 * n, 0)).save(folder / name / f"{n}.png")
    return folder


def test_a_folder_of_images_gives_a_row_for_each_image(tmp_path: Path) -> None:
    folder = images_by_class(tmp_path / "photos", ["dog", "cat"])
    (folder / "cat" / "notes.txt").write_text("no image")
    rows = read_rows(str(folder))
    assert rows.class_names == {"label": ["cat", "dog"]}
    assert [r["label"] for r in rows.rows] == [0, 0, 1, 1]
    assert [Path(r["image"]).parent.name for r in rows.rows] == ["cat", "cat", "dog", "dog"]
    assert [r["label"] for r in read_rows(str(folder), limit=2).rows] == [0, 1]


def test_a_folder_of_images_may_have_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        images_by_class(tmp_path / "photos" / split, ["a", "b"], 1 if split == "test" else 3)
    assert len(read_rows(f"{tmp_path}/photos:test")) == 2
    assert len(read_rows(f"{tmp_path}/photos", split="train")) == 6
    with pytest.raises(InputError, match="photos:test"):
        read_rows(f"{tmp_path}/photos")
    with pytest.raises(InputError, match="'dev'"):
        read_rows(f"{tmp_path}/photos:dev")


#: What a file holds, and where it is wrong.
BROKEN: dict[str, tuple[bytes, str]] = {
    "a.jsonl": (b'{"text": "a"}\n{"text": \n', "line 2"),
    "list.jsonl": (b"[1, 2]\n", "line 1"),
    "latin.jsonl": (b'{"text": "\xe9"}\n', "line 1"),
    "empty.jsonl": (b"\n\n", ""),
    "fewer.csv": (b"text,label\na,1\nb\n", "line 3"),
    "more.csv": (b"text,label\na,1,2\n", "line 2"),
    "latin.csv": (b"text,label\na\xe9,1\n", ""),
    "quote.csv": (b'text,label\n"a"b,1\n', "line 2"),
    "twice.csv": (b"text,text\na,1\n", "'text'"),
    "header.csv": (b"text,label\n", ""),
    "bytes.txt": (b"one\n\xff\xfe\n", "line 2"),
    "a.parquet": (b"PAR1 nothing PAR1", ""),
    "a.parquet.gz": (b"no gzip", ""),
    "cut.jsonl.gz": (gzip.compress(b'{"text": "a"}\n' * 100)[:-12], ""),
    "a.npz": (b"no archive", ""),
    "a.xlsx": (b"", ".jsonl, .csv"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    raw, place = BROKEN[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(InputError, match=f"{name}.*{place}"):
        read_rows(str(tmp_path / name))


def test_other_wrong_sources_are_named(tmp_path: Path) -> None:
    path = in_form(tmp_path, "jsonl")
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 4)), y=np.zeros(3))
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x", b"no array")
        archive.writestr("y", b"nor this")
    odd = (f"{tmp_path}/odd.npz", f"{tmp_path}/a.npz")
    for source in (f"{tmp_path}/nothing.jsonl", "data/nothing.jsonl:train", f"{path}:train", str(tmp_path), *odd):
        with pytest.raises(InputError, match=source.rpartition(":")[0] or source):
            read_rows(source)
    with pytest.raises(InputError, match="--limit 0"):
        read_rows(str(path), limit=0)


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    with web_server() as found:
        yield found


def test_data_at_a_url_are_fetched_once_and_anew_when_they_change(web: Web, tmp_path: Path) -> None:
    path = in_form(tmp_path, "jsonl")
    web.files["data.jsonl"] = path.read_bytes()
    url = f"http://{web.address}/data.jsonl"
    for _ in range(2):
        assert list(read_rows(url).rows) == ROWS
        assert [one.read_bytes() for one in data_paths(url)] == [path.read_bytes()]
    assert web.given["data.jsonl"] == len(path.read_bytes())
    web.files["data.jsonl"] = in_form(tmp_path, "jsonl", ROWS[1:]).read_bytes()
    assert list(read_rows(url, limit=5).rows) == ROWS[1:]
    assert named_data(url) == ("data.jsonl", {"type": "data.jsonl", "name": "data.jsonl"})
    assert named_data(url, 5)[0] == f"{web.address}/data.jsonl"
    assert named_data(f"file://{path}", 2)[0] == f"{tmp_path.name}/{path.name}"


def test_splits_and_signatures_of_data_at_a_url(web: Web, tmp_path: Path) -> None:
    images = np.arange(2 * 3 * 4 * 4).reshape(2, 3, 4, 4).astype(np.uint8)
    np.savez(tmp_path / "a.npz", x_train=images[0], y_train=[0, 1, 2], x_test=images[1], y_test=[2, 1, 0])
    web.files["a.npz"], web.user = (tmp_path / "a.npz").read_bytes(), "me:word"
    url = f"http://me:word@{web.address}/a.npz?signature=secret"
    rows = read_rows(f"{url}:test")
    assert [row["label"] for row in rows.rows] == [2, 1, 0] and np.array_equal(rows.rows[0]["image"], images[1, 0])
    assert rows.label == f"http://***@{web.address}/a.npz?signature=***"
    assert named_data(f"{url}:test")[0] == "a.npz"
    with pytest.raises(InputError, match=r"^http://\*\*\*@[^ ]*=\*\*\*"):
        read_rows(url)
    with pytest.raises(InputError, match=r"none\.csv"):
        read_rows(f"http://me:word@{web.address}/none.csv")
    web.files["page.html"] = b"<html>"
    with pytest.raises(InputError, match=r"page\.html"):
        read_rows(f"http://me:word@{web.address}/page.html")


def test_urls_that_differ_in_what_is_hidden_alone_are_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of one size, of a server that tells of no version; and splits of one file, whose URLs are shown alike."""
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    files = {"/d.csv?part=a": b"text,label\nred,0\n", "/d.csv?part=b": b"text,label\nsky,1\n"}
    arrays = {name: np.full((2, 4, 4), place, np.uint8) for place, name in enumerate(("x", "x_train", "x_test"))}
    np.savez(tmp_path / "a.npz", **arrays, y=[0, 0], y_train=[1, 1], y_test=[2, 2])
    files["/a.npz?part=a"] = (tmp_path / "a.npz").read_bytes()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(files[self.path])))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(files[self.path])

        def log_message(self, *_: Any) -> None:
            return

    Handler.do_HEAD = Handler.do_GET  # type: ignore[attr-defined]
    with serving(Handler) as address:
        one, two = (redact_urls(f"http://{address}/d.csv?part={part}") for part in "ab")
        assert "part=a" not in one and "part=b" not in two
        for _ in range(2):
            assert [read_rows(url).rows[0]["text"] for url in (one, two)] == ["red", "sky"]
        splits = [redact_urls(f"http://{address}/a.npz?part=a{split}") for split in (":train", ":test", "")]
        for _ in range(2):
            assert all(data_paths(url) for url in splits)
            assert [read_rows(url).rows[0]["label"] for url in splits] == [1, 2, 0]
