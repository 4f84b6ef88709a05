"""Read rows of data from files, folders of images, arrays, and datasets of the Hub."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from ..arguments import checked
from ..display import OneLine
from ..errors import InputError, library_errors
from ..io.reader import local_path
from ..io.small_files import require_unpackable
from ..text import first_line, size
from ..urls import redact, remote_url, strip_file_scheme

FORMATS = (
    ".jsonl, .csv, .parquet or .txt (each also .gz), .npz, a folder of images by class, or org/name:split of the Hub"
)
SUFFIXES = (".npz", ".parquet", ".jsonl", ".csv", ".txt")
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"}
HUB_DATASET = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(/(?P<config>[\w.+-]+))?")
SPLIT = re.compile(r"(?P<location>.+):(?P<split>\w[\w.-]*)")

#: Limit on the bytes of a line of text. Parsed JSON takes up to forty times its size in memory.
MAX_LINE = 32_000_000
#: Bytes of the rows of a parquet file that are decoded at once.
BATCH_BYTES = 500_000_000

Row = Mapping[str, Any]


@dataclass(repr=False)
class Rows(OneLine):
    """Rows of data, and facts about their columns."""

    label: str
    """The source as the user wrote it, without secrets, for messages."""
    rows: Sequence[Row]
    columns: tuple[str, ...]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Column of class numbers → the names of the classes, if the data has them."""
    folder: Path = field(default_factory=Path)
    """Paths in the data are relative to this folder."""
    numbers: Sequence[int] | None = None
    """The number of each row in messages, if rows were left out. Default: counted from 1."""
    notes: list[str] = field(default_factory=list)
    """What a user should know about how the rows were read."""

    def _line(self) -> list[str]:
        return [self.label, f"{len(self)} rows", f"columns {', '.join(self.columns)}"]

    def __len__(self) -> int:
        return len(self.rows)

    def number(self, index: int) -> int:
        """Return the number of a row in messages. The first is 1."""
        return index + 1 if self.numbers is None else self.numbers[index]

    def name(self, index: int) -> str:
        """Return the name of a row in messages."""
        return f"{self.label}: row {self.number(index)}"

    def error(self, index: int, problem: str) -> InputError:
        """Return an error that names the row."""
        return InputError(f"{self.name(index)}: {problem[:5000]}")  # columns may have long names

    def cell(self, index: int, column: str) -> Any:
        try:
            return self.rows[index][column]
        except KeyError:
            raise self.error(index, f"has no {column!r}") from None

    def column(self, name: str) -> Iterable[Any]:
        if not isinstance(self.rows, list) and name in self.columns:
            dataset: Any = self.rows  # of the library `datasets`, which reads a column without the others
            cells: Iterable[Any] = dataset[name]
            return cells
        return (self.cell(index, name) for index in range(len(self)))

    def text(self, index: int, columns: Sequence[str]) -> str:
        """Join the texts of one or several columns by line feeds. A list of strings is text too."""
        texts: list[str] = []
        for column in columns:
            value = self.cell(index, column)
            lines = value if isinstance(value, list | tuple) else [value]
            if not all(isinstance(line, str) for line in lines):
                raise self.error(index, f"{column!r} is not text but {type(value).__name__}: {shorten(value)}")
            texts += lines
        return "\n".join(texts)

    def without(self, indices: Sequence[int]) -> Rows:
        """Return the rows without some of them. Messages keep their numbers."""
        kept = sorted(set(range(len(self))) - set(indices))
        return replace(self, rows=[self.rows[i] for i in kept], numbers=[self.number(i) for i in kept])


def shorten(value: Any) -> str:
    """Format a value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


@checked()
def read_rows(source: str | Path, *, limit: int | None = None) -> Rows:
    """Read the rows of a data source. With ``limit``, line formats and Hub datasets are read no further.

    Args:
        source: A .jsonl, .csv, .parquet or .txt file (each also .gz), an .npz (`digits.npz:test` reads `x_test` and
            `y_test`), a folder of images by class, or a Hub dataset `org/name:split`.
        limit: The maximum number of rows.

    Returns:
        The rows, each a mapping from columns to values, as ``.rows``, and the names of the ``.columns``.

    >>> read_rows("reviews.jsonl", limit=1).rows[0]  # doctest: +SKIP
    {'text': 'Great food.', 'label': 1}
    """
    source = str(source)
    if limit is not None and limit < 1:
        raise InputError(f"limit {limit}: must be at least 1")
    location, split = split_source(source)
    path = _local_file(location)
    if path.is_dir():
        rows = _read_image_folder(source, path, split, limit)
    elif path.is_file():
        rows = _read_file(source, path, split, limit)
    elif (hub := HUB_DATASET.fullmatch(location)) and _format(location) is None:
        rows = _read_hub_dataset(source, hub["name"], hub["config"], split, limit)
    else:
        raise InputError(f"{source}: no such file or folder. Data is {FORMATS}")
    if not len(rows):
        raise InputError(f"{source}: the data has no rows")
    return replace(rows, label=redact(source))


def split_source(source: str) -> tuple[str, str | None]:
    """Split `digits.npz:test` into location and split. The name of an existing file may contain a colon."""
    url = remote_url(source)
    match = SPLIT.fullmatch(source)
    if match is None:
        return source, None
    if local_path(source, None).exists() if url is None else _format(match["location"].partition("?")[0]) is None:
        return source, None
    return match["location"], match["split"]


def _local_file(location: str) -> Path:
    """Return the path of a location. A file at a URL is downloaded."""
    if (url := remote_url(location)) is None:
        return local_path(location, None)
    from ..io.remote import download_url

    path = download_url(url)
    if path.is_dir():
        raise InputError(f"{location}: is a folder. Pass the URL of one file.")
    return path


def data_paths(source: str) -> list[Path]:
    """Return the file or folder of a source, which commands must not overwrite; nothing for a Hub dataset."""
    path = _local_file(split_source(source)[0])
    return [path] if path.exists() else []


def dataset_metadata(source: str, parts: int = 1) -> tuple[str, dict[str, str]]:
    """Return the name of a source for texts, and its `dataset` entry in a model index.

    The name of a path is its last ``parts`` parts: other users do not have the path.
    """
    url = remote_url(source)
    location, split = split_source(source)
    if url is None and not data_paths(source) and (match := HUB_DATASET.fullmatch(location)):
        entry = {"type": match["name"], "name": match["name"], "config": match["config"], "split": split}
        return source, {key: text for key, text in entry.items() if text}
    path = Path(strip_file_scheme(source)).absolute().parts[1:] if url is None else redact(url).split("/")[2:]
    name = "/".join(path[-parts:]) or source
    return name, {"type": dataset_type(name), "name": name}


def dataset_type(name: str) -> str:
    """Return a name in the form of a Hub dataset's id."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "data"


def _format(location: str) -> str | None:
    """Return the format of a file by its name, such as `.csv` for `a.csv.gz`."""
    name = location.lower().removesuffix(".gz")
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _read_file(source: str, path: Path, split: str | None, limit: int | None) -> Rows:
    suffix = _format(path.name)
    if suffix is None:
        raise InputError(f"{source}: unknown format. Data is {FORMATS}")
    if split is not None and suffix != ".npz":
        raise InputError(f"{source}: a {suffix} file has no splits. Remove :{split}")
    with library_errors(f"{source}: cannot be read"):
        if suffix == ".npz":
            return _read_npz(source, path, split, limit)
        if suffix == ".parquet":
            return _read_parquet(source, path, limit)
        readers = {".jsonl": _read_jsonl, ".csv": _read_csv, ".txt": _read_txt}
        rows = list(islice(readers[suffix](source, path), limit))
    return Rows(source, rows, tuple(rows[0]) if rows else (), folder=path.parent)


def _open(path: Path) -> Any:
    """Open a file for reading bytes, unpacked if it is a .gz."""
    return gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")


def _lines(source: str, path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line of a UTF-8 file."""
    number = total = 0
    with _open(path) as file:
        while line := file.readline(MAX_LINE + 1):
            number, total = number + 1, total + len(line)
            if len(line) > MAX_LINE:
                raise InputError(f"{source}: line {number} is longer than the limit of {size(MAX_LINE)}")
            if isinstance(file, gzip.GzipFile):
                require_unpackable(path, total)
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{source}: line {number} is not UTF-8: {error}") from error
            yield number, text


def _read_txt(source: str, path: Path) -> Iterator[Row]:
    return ({"text": line.rstrip("\r\n")} for _, line in _lines(source, path) if line.strip())


def _read_jsonl(source: str, path: Path) -> Iterator[Row]:
    for number, line in _lines(source, path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{source}: line {number} is not JSON: {str(error)[:120]}") from error
        if not isinstance(row, dict):
            raise InputError(f'{source}: line {number} is not a JSON object such as {{"text": …, "label": …}}')
        yield row


def _read_csv(source: str, path: Path) -> Iterator[Row]:
    csv.field_size_limit(MAX_LINE)  # a cell may hold a document; the default is 128 kB
    reader = csv.DictReader((line for _, line in _lines(source, path)), strict=True)
    try:
        header = reader.fieldnames or ()
        if len(set(header)) < len(header):
            raise InputError(f"{source}: two columns have the same name ({', '.join(header)[:300]})")
        for row in reader:
            if None in row or None in row.values():
                raise InputError(f"{source}: line {reader.line_num} must have {len(header)} fields, like the header")
            yield row
    except csv.Error as error:
        raise InputError(f"{source}: line {reader.line_num + 1} cannot be read: {error}") from error


def _read_parquet(source: str, path: Path, limit: int | None) -> Rows:
    import pyarrow.parquet  # type: ignore[import-untyped]

    rows: list[Row] = []
    unpacked = 0
    with _open(path) as raw, pyarrow.parquet.ParquetFile(raw) as file:
        # Every row may be as long as its row group: a dictionary stores a text once for many rows.
        longest = max([1, *(file.metadata.row_group(n).total_byte_size for n in range(file.num_row_groups))])
        for batch in file.iter_batches(batch_size=max(1, min(limit or 4096, 4096, BATCH_BYTES // longest))):
            unpacked += batch.nbytes
            require_unpackable(path, unpacked)
            rows += batch.to_pylist()
            if limit is not None and len(rows) >= limit:
                break
        return Rows(source, rows[:limit], tuple(file.schema_arrow.names), folder=path.parent)


def _read_npz(source: str, path: Path, split: str | None, limit: int | None) -> Rows:
    import numpy as np

    wanted = [f"{letter}_{split}" if split else letter for letter in "xy"]
    with np.load(path, allow_pickle=False) as file:
        if missing := [name for name in wanted if name not in file.files]:
            raise InputError(
                f"{source}: the file has no array {missing[0]}, but {', '.join(file.files)[:2000] or 'nothing'}. "
                f"A split such as {path.name}:test has the arrays x_test and y_test."
            )
        require_unpackable(path, sum(file.zip.getinfo(f"{name}.npy").file_size for name in wanted))
        try:
            x, y = (np.asarray(file[name]) for name in wanted)
        except MemoryError as error:  # the header of an array claims any shape
            raise InputError(f"{source}: cannot be read: {first_line(error)}") from error
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if x.ndim not in (3, 4) or y.ndim != 1 or len(x) != len(y):
        raise InputError(
            f"{source}: x has shape {list(x.shape)} and y {list(y.shape)}, but images must be N × height × width "
            "(× channels), and labels N"
        )
    rows = [{"image": image, "label": label} for image, label in zip(x[:limit], y[:limit].tolist(), strict=True)]
    return Rows(source, rows, ("image", "label"), folder=path.parent)


def _read_image_folder(source: str, folder: Path, split: str | None, limit: int | None) -> Rows:
    root = (folder / split if split else folder).absolute()
    try:
        classes = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
        files = [(path, number) for number, name in enumerate(classes) for path in sorted(name.iterdir())]
    except OSError as error:
        raise InputError(f"{source}: {error.filename} cannot be read: {error.strerror}") from error
    files = [(path, n) for path, n in files if path.suffix.lower() in IMAGES and not path.name.startswith(".")]
    if not files:
        raise InputError(
            f"{source}: no images. A folder of data has one folder per class, with images in it. Or name a split, such "
            f"as {source}:test"
        )
    if limit is not None and limit < len(files):  # spread over all images: the first ones are all of one class
        files = [files[len(files) * n // limit] for n in range(limit)]
    rows = [{"image": str(path), "label": number} for path, number in files]
    return Rows(source, rows, ("image", "label"), {"label": [path.name for path in classes]}, root)


def _read_hub_dataset(source: str, name: str, config: str | None, split: str | None, limit: int | None) -> Rows:
    if split is None:
        raise InputError(f"{source}: no such file or folder. For a dataset of the Hub, name the split: {source}:test")
    try:
        import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise InputError(f"{source}: needs the library datasets: pip install 'gradmerge[hub]'") from error
    with library_errors(f"{source}: no such file or folder, and the Hub did not return this dataset"):
        data = datasets.load_dataset(name, config, split=split, streaming=limit is not None)
        features = data.features or {}
        for column, feature in features.items():
            if isinstance(feature, datasets.Image):
                data = data.cast_column(column, datasets.Image(decode=False))
        rows = data if limit is None else list(data.take(limit))
    class_names = {n: f.names for n, f in features.items() if isinstance(f, datasets.ClassLabel) and f.names}
    columns = tuple(features) or (tuple(rows[0]) if len(rows) else ())
    return Rows(source, rows, columns, class_names)
