"""From what a user writes as data to rows: files, folders of images, arrays, and data sets of the Hub."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, Any

from ..arguments import checked
from ..errors import InputError, MachineError
from ..io.reader import local_path, require_utf8_path
from ..io.small_files import require_unpackable
from ..text import first_line, listed, size
from ..urls import as_url, remote_url, unredact
from .rows import Row, Rows, shown

FORMS = (
    ".jsonl, .csv, .parquet or .txt (each also .gz), .npz, a folder of images by class, or org/name:split of the Hub"
)
SUFFIXES = (".jsonl", ".csv", ".parquet", ".txt", ".npz")
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.+-]+))?")
SPLIT = re.compile(r"(?P<place>.+):(?P<split>\w[\w.-]*)")

#: Bytes of one row as text, which may hold a whole document. As JSON it may take forty times that in memory.
LONGEST_ROW = 32_000_000
#: Bytes of a batch of rows of a parquet file, where the rows may all be as long as its longest column.
BATCH_BYTES = 500_000_000
MOST_COLUMNS = 10_000


@checked()
def read_rows(source: str | Path, *, limit: int | None = None, split: str | None = None) -> Rows:
    """The rows of a data set. Where the format allows, no more of a file is read than ``limit`` takes.

    Args:
        source: .jsonl, .csv, .parquet or .txt (each also .gz), .npz, a folder of images by class, or Hub id:split.
        limit, split: How many rows at most; of which split, if ``source`` does not name it.

    Returns:
        The rows, each a mapping from columns to values, as ``.rows``, and what is known of the ``.columns``.

    >>> read_rows("reviews.jsonl", limit=1).rows[0]  # doctest: +SKIP
    {'text': 'Great food.', 'label': 1}
    """
    source = str(source)
    if limit is not None and limit < 1:
        raise InputError(f"--limit {limit}: at least one example is needed")
    place, split = place_and_split(source, split)
    path = at_hand(place)
    if path.is_dir():
        rows = _image_folder(source, path, split, limit)
    elif path.is_file():
        rows = _file(source, path, split, limit)
    elif (hub := HUB.fullmatch(place)) and _kind(Path(place)) is None:
        rows = _hub(source, hub["name"], hub["config"], split, limit)
    else:
        raise InputError(f"{source}: no such file or folder. Data is {FORMS}")
    if not len(rows):
        raise InputError(f"{source}: the data has no rows")
    if len(rows.columns) > MOST_COLUMNS:
        raise InputError(f"{source}: the data has {len(rows.columns)} columns; {MOST_COLUMNS} is the limit")
    return rows


def place_and_split(source: str, split: str | None) -> tuple[str, str | None]:
    """`data.npz:test` into file and split; what exists as a whole is a path, even with a colon in it."""
    url = remote_url(source)
    match = SPLIT.fullmatch(source if url is None else unredact(url))
    if match is None:
        return source, split
    if local_path(source, None).exists() if url is None else _kind(Path(match["place"].partition("?")[0])) is None:
        return source, split
    if split is not None and split != match["split"]:
        raise InputError(f"{source}: two splits are given, {match['split']} and {split}")
    return as_url(match["place"]) or match["place"], match["split"]


def at_hand(place: str) -> Path:
    """Where a file or folder of data lies on this machine; a file at a URL is fetched for that."""
    if (url := remote_url(place)) is None:
        return local_path(place, None)
    from ..io.remote import download_file

    return download_file(url)


def data_paths(source: str | None) -> list[Path]:
    """The file or folder of a data set, whether the source names a split or not; nothing for one of the Hub.

    Commands write over none of them, and notice when they change.
    """
    if source is None:
        return []
    place, _ = place_and_split(source, None)
    texts = (source, place) if remote_url(place) is None else (place,)
    return [path for text in texts if (path := at_hand(text)).exists()]


def _kind(path: Path) -> str | None:
    """The format of a file by its name: a suffix such as `.csv`, whether packed or not."""
    name = path.name.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _file(source: str, path: Path, split: str | None, limit: int | None) -> Rows:
    kind = _kind(path)
    if kind is None:
        raise InputError(f"{source}: data of this kind is not known. Data is {FORMS}")
    if kind == ".npz":
        return _arrays(source, path, split, limit)
    if split is not None:
        raise InputError(f"{source}: a {kind} file has no splits; leave {split!r} out")
    readers = {".jsonl": _jsonl, ".csv": _csv, ".txt": _lines}
    try:
        if kind == ".parquet":
            return _parquet(source, require_utf8_path(path), limit)
        with _opened(path) as file:
            rows = list(islice(readers[kind](source, file), limit))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{source}: the file cannot be unpacked, it is cut short or no gzip: {error}") from error
    except OSError as error:
        raise MachineError(f"{source}: reading failed: {error.strerror or error}") from error
    return Rows(source, rows, tuple(rows[0]) if rows else (), folder=path.parent)


def _opened(path: Path) -> IO[bytes]:
    try:
        if path.name.lower().endswith(".gz"):
            return io.BufferedReader(_Unpacked(path))
        return path.open("rb")
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {error.strerror}") from error


class _Unpacked(io.RawIOBase):
    """What a packed file unpacks to, up to a limit."""

    def __init__(self, path: Path) -> None:
        self.path, self._file, self._done = path, gzip.open(path, "rb"), 0  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer)
        self._done += count
        require_unpackable(self.path, self._done)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


def _numbered(source: str, file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers."""
    number = 0
    while line := file.readline(LONGEST_ROW + 1):
        number += 1
        if len(line) > LONGEST_ROW:
            raise InputError(f"{source}: line {number} is longer than {size(LONGEST_ROW)}, the limit for a row")
        yield number, line


def _jsonl(source: str, file: IO[bytes]) -> Iterator[Row]:
    for number, line in _numbered(source, file):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source}: line {number} is no JSON: {str(error)[:120]}") from error
        if not isinstance(row, dict):
            raise InputError(f'{source}: line {number} is no JSON object such as {{"text": …, "label": …}}')
        yield row


def _csv(source: str, file: IO[bytes]) -> Iterator[Row]:
    # A cell may hold a whole document; the standard library stops at 128 kB.
    csv.field_size_limit(LONGEST_ROW)
    text, taken = io.TextIOWrapper(file, "utf-8-sig", newline=""), 0

    def lines() -> Iterator[str]:
        nonlocal taken
        while line := text.readline(LONGEST_ROW + 1):
            taken += len(line)
            if taken > LONGEST_ROW:
                raise InputError(f"{source}: a row is longer than {size(LONGEST_ROW)}, the limit")
            yield line

    reader = csv.DictReader(lines(), strict=True)
    try:
        header = reader.fieldnames or ()
        for name, times in Counter(header).items():
            if times > 1:
                raise InputError(f"{source}: two columns are called {shown(name)}")
        for row in reader:
            taken = 0
            if None in row or None in row.values():
                than = f"{'more' if None in row else 'fewer'} fields than the header has columns"
                raise InputError(f"{source}: line {reader.line_num} has {than} ({', '.join(header)[:300]})")
            yield row
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{source}: line {reader.line_num + 1} cannot be read: {error}") from error


def _lines(source: str, file: IO[bytes]) -> Iterator[Row]:
    for number, line in _numbered(source, file):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise InputError(f"{source}: line {number} is no UTF-8 text: {error}") from error
        if text.strip():
            yield {"text": text}


def _parquet(source: str, path: Path, limit: int | None) -> Rows:
    import pyarrow  # type: ignore[import-untyped]
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows: list[Row] = []
    try:
        with pyarrow.parquet.ParquetFile(_whole(path)) as file:
            columns = tuple(file.schema_arrow.names)
            unpacked = 0
            for batch in file.iter_batches(batch_size=_batch_size(file.metadata, limit)):
                unpacked += batch.nbytes
                require_unpackable(path, unpacked)
                rows += batch.to_pylist()
                if limit is not None and len(rows) >= limit:
                    break
    except (InputError, EOFError, zlib.error, gzip.BadGzipFile):
        raise
    except Exception as error:  # pyarrow's own, and what Python says to dates and numbers that it does not have
        raise InputError(f"{source}: the parquet file cannot be read: {first_line(error)}") from error
    return Rows(source, rows[:limit], columns, folder=path.parent)


def _whole(path: Path) -> Path | io.BytesIO:
    """A file for formats that are not read from front to back; a packed one is unpacked whole into memory."""
    if not path.name.lower().endswith(".gz"):
        return path
    with _opened(path) as file:
        return io.BytesIO(file.read())


def _batch_size(metadata: Any, limit: int | None) -> int:
    """So few rows that they fit into memory even if each were as long as a whole group of rows.

    A dictionary stores a text once, however many rows have it. Columns are not asked: where a damaged file has
    statistics that do not fit, pyarrow ends the process.
    """
    longest = max((metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)), default=1)
    return max(1, min(limit or 4096, 4096, BATCH_BYTES // max(1, longest)))


def _arrays(source: str, path: Path, split: str | None, limit: int | None) -> Rows:
    import numpy as np

    try:
        with np.load(_whole(path), allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise InputError(f"{source}: this is no .npz archive of arrays x and y")
            x_name, y_name = _array_names(source, file.files, split)
            sizes = {info.filename.removesuffix(".npy"): info.file_size for info in file.zip.infolist()}  # type: ignore[union-attr]
            require_unpackable(path, sizes[x_name] + sizes[y_name])
            x, y = file[x_name], file[y_name]
            if not (isinstance(x, np.ndarray) and isinstance(y, np.ndarray)):
                raise InputError(f"{source}: {x_name} or {y_name} is no array")
    except InputError:
        raise
    except Exception as error:  # a broken archive, packing or header; or an array beyond all memory
        raise InputError(f"{source}: the arrays cannot be read: {first_line(error)}") from error
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if x.ndim not in (3, 4) or 0 in x.shape[1:] or y.ndim != 1 or len(x) != len(y):
        raise InputError(
            f"{source}: {x_name} of shape {list(x.shape)} and {y_name} of shape {list(y.shape)} do not fit: images are "
            "N × height × width (× channels), labels N"
        )
    if x.dtype.kind not in "ufib" or (x.dtype.kind in "ui" and x.size and (x.min() < 0 or x.max() > 255)):
        raise InputError(
            f"{source}: {x_name} of type {x.dtype} holds no pixels from 0 to 255, nor floating-point numbers"
        )
    rows = [{"image": image, "label": label} for image, label in zip(x[:limit], y[:limit].tolist(), strict=True)]
    return Rows(source, rows, ("image", "label"), folder=path.parent)


def _array_names(source: str, found: Sequence[str], split: str | None) -> tuple[str, str]:
    by_name = {name.lower(): name for name in found}
    tail = f"_{split.lower()}" if split else ""
    if f"x{tail}" in by_name and f"y{tail}" in by_name:
        return by_name[f"x{tail}"], by_name[f"y{tail}"]
    splits = sorted(name[2:] for name in by_name if name.startswith("x_") and f"y_{name[2:]}" in by_name)
    if split is None and splits:
        raise InputError(f"{source}: the file has splits; write {source}:{splits[0]} (or {', '.join(splits[1:])})")
    raise InputError(f"{source}: no arrays x{tail} and y{tail} in the file, but\n{listed(found) or '  nothing'}")


def _image_folder(source: str, folder: Path, split: str | None, limit: int | None) -> Rows:
    top = folder / split if split else folder
    if not top.is_dir():
        raise InputError(f"{source}: the folder has no split {split!r}, only\n{listed(_folders(folder)) or '  files'}")
    classes = _folders(top)
    rows: list[Row] = []
    for number, name in enumerate(classes):
        files = [p for p in _inside(top / name) if p.suffix.lower() in IMAGES and not p.name.startswith(".")]
        rows += [{"image": os.path.realpath(p), "label": number} for p in files]
    if not rows:
        nested = [name for name in classes if _folders(top / name)]
        hint = f"; name the split: {source}:{nested[0]}" if nested and not split else ""
        raise InputError(
            f"{source}: no images. A folder as data holds one folder for each class, with images in it{hint}"
        )
    if limit is not None and limit < len(rows):
        # The first images would all be of the first class.
        rows = [rows[len(rows) * n // limit] for n in range(limit)]
    return Rows(source, rows, ("image", "label"), {"label": classes}, top)


def _folders(folder: Path) -> list[str]:
    return [p.name for p in _inside(folder) if p.is_dir() and not p.name.startswith(".")]


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise InputError(f"{folder}: cannot be read: {error.strerror}") from error


def _hub(source: str, name: str, config: str | None, split: str | None, limit: int | None) -> Rows:
    if split is None:
        hub = f"For a data set of the Hub, name the split: {source}:test"
        raise InputError(f"{source}: there is no such file or folder here. {hub}")
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        lacking = "data sets of the Hub need the library datasets: pip install 'gradmerge[hub]'"
        raise InputError(f"{source}: {lacking}") from error
    try:
        # With a limit, only what it takes is fetched.
        data = datasets.load_dataset(name, config, split=split, streaming=limit is not None)
        for column, feature in (data.features or {}).items():
            if isinstance(feature, datasets.Image):
                data = data.cast_column(column, datasets.Image(decode=False))
        features = data.features or {}
        rows = data if limit is None else list(data.take(limit))
    except Exception as error:  # the library passes on errors of every kind: of the network, of scripts, of formats
        neither = "there is no such file or folder here, and the Hub did not give a data set of that name"
        raise InputError(f"{source}: {neither}: {first_line(error)}") from error
    names = {n: f.names for n, f in features.items() if isinstance(f, datasets.ClassLabel) and f.names}
    columns = tuple(features) or (tuple(rows[0]) if len(rows) else ())
    return Rows(source, rows, columns, names, whole_column=data.__getitem__ if limit is None else None)
