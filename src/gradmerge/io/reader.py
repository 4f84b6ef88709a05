"""Read safetensors files by position.

``pread`` fills buffers that the caller reuses. Memory mapping would be shorter, but each page that it touches counts
as resident memory. A merge would seem to need all its inputs at once. Headers are untrusted: everything in them is
checked before it is used.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from ..text import size
from ..urls import count_local_copies, is_url, remote_url, strip_file_scheme, url_of
from .small_files import open_regular, parse_json_object, read_bounded, require_within

if TYPE_CHECKING:
    from torch import Tensor

    from .range_reader import RangeReader

_TYPES_BY_SIZE = {
    8: "F64 I64 U64 C64",
    4: "F32 I32 U32",
    2: "F16 BF16 I16 U16",
    1: "F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I8 U8 BOOL",
}
#: dtype of a safetensors header → bytes per element.
ITEM_SIZE = {name: nbytes for nbytes, names in _TYPES_BY_SIZE.items() for name in names.split()}
#: The dtypes that can be merged → their names in recipes.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

#: Limits on the bytes of a header and of an index. The format allows headers of 100 MB, which would take 3 GB of
#: memory. 32 MB are 300,000 tensors in one file.
MAX_HEADER = 32_000_000
MAX_INDEX = 32_000_000


@dataclass(frozen=True)
class TensorInfo:
    """Dtype and shape of a tensor."""

    dtype: str
    """As in a safetensors header."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEM_SIZE[self.dtype]

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS

    def __str__(self) -> str:
        return f"{FLOATS.get(self.dtype, self.dtype)} {list(self.shape)}"


@dataclass(frozen=True)
class Entry(TensorInfo):
    """A tensor in a file."""

    start: int
    """Offset of its first byte in the file."""


class PositionalFile:
    """An open file that is read by position. If it is a placeholder of a remote file, ranges of that are read."""

    entries: Mapping[str, Entry]
    """The tensors, in file order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: dict[str, Any] = {}
        """Tensors that cannot be read by position, and were loaded."""
        self._ranges: RangeReader | None = None
        if count_local_copies():
            from .range_reader import RangeReader
            from .remote import remote_file_at

            remote = remote_file_at(path)
            self._ranges = None if remote is None else RangeReader(remote)
        self._fd = open_regular(path)

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the bytes from ``offset`` on."""
        if self._ranges is not None:
            self._ranges.read_into(buffer, offset)
            return
        done = 0
        while done < len(buffer):
            try:
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
            except OSError as error:
                raise MachineError(f"{self.path}: reading failed at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise MachineError(f"{self.path}: ends at byte {offset + done}; it was longer when it was opened")
            done += count

    def will_need(self, offset: int, nbytes: int) -> None:
        """Start to read these bytes in the background."""
        if self._ranges is None and hasattr(os, "posix_fadvise") and self._fd >= 0:
            with contextlib.suppress(OSError):  # only advice: some file systems do not support it
                os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._ranges is not None:
            self._ranges.close()


class TensorFile(PositionalFile):
    """A safetensors file and its metadata."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.entries, self.metadata = _parse_header(self, self.nbytes)
        except BaseException:
            self.close()
            raise


def _parse_header(file: TensorFile, total: int) -> tuple[dict[str, Entry], dict[str, str]]:
    def broken(why: str) -> InputError:
        return InputError(f"{file.path}: not a valid safetensors file: {why}. Download or save it again.")

    if total < 8:
        raise broken(f"it has only {total} bytes")
    prefix = bytearray(8)
    file.read_into(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        raise broken(f"the header has {length} bytes, more than the limit of {size(MAX_HEADER)}")
    if 8 + length > total:
        raise broken(f"the header has {length} bytes, but the file only {total}. The file is truncated")
    raw = bytearray(length)
    file.read_into(memoryview(raw), 8)
    header = parse_json_object(raw, broken)

    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise broken("__metadata__ must map strings to strings")

    start = 8 + length
    entries = {name: _check_entry(name, value, start, broken) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes, item[0])))
    reached = start
    for name, entry in entries.items():
        if entry.start != reached:
            begin, expected = entry.start - start, reached - start
            raise broken(f"tensor {_quoted(name)} starts at byte {begin} instead of {expected}: a gap or an overlap")
        reached += entry.nbytes
    if reached != total:
        raise broken(f"the tensors end at byte {reached}, but the file at byte {total}. The file may be truncated")
    return entries, metadata


def _check_entry(name: str, value: Any, start: int, broken: Callable[[str], InputError]) -> Entry:
    """Check one entry of a header, whose offsets count from byte ``start`` of the file."""

    def are_whole(numbers: Any, most: int) -> bool:
        within = isinstance(numbers, list) and len(numbers) <= most
        return within and all(type(number) is int and 0 <= number < 2**62 for number in numbers)

    tensor = f"tensor {_quoted(name)}"
    if not is_text(name):
        raise broken(f"the name of {tensor} is not valid Unicode")
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise broken(f"{tensor} must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise broken(f"{tensor} has the unknown dtype {str(dtype)[:40]!r}")
    if not are_whole(shape, 64) or not are_whole(offsets, 2) or len(offsets) != 2:
        raise broken(f"{tensor} has an invalid shape, or data_offsets that are not [begin, end]")
    begin, end = offsets
    entry = Entry(dtype, tuple(shape), start + begin)
    if entry.nbytes != end - begin:
        raise broken(f"{tensor} of {dtype} {list(shape)} takes {entry.nbytes} bytes, not {end - begin}")
    return entry


def local_path(reference: str, relative_to: Path | None) -> Path:
    """Return the path of a reference that is a path, whether it exists or not. Of a URL, return the local copy.

    A path relative to a URL is a URL.
    """
    if url := _url_at(reference, relative_to):
        from .remote import local_copy

        try:
            return local_copy(url)
        except InputError:
            if is_url(reference):
                raise
            return Path(url)  # does not exist: it may be a Hub id
    try:
        path = (relative_to or Path()) / Path(strip_file_scheme(reference)).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no such user"
        raise InputError(f"{reference[:200]}: cannot be opened: {reason}") from error
    return path


def _url_at(reference: str, relative_to: Path | None) -> str | None:
    """Return the URL of a reference that is a URL or is relative to one; None for a local path."""
    if is_url(reference):
        return remote_url(reference)
    folder = None if relative_to is None or reference.startswith(("/", "~")) else url_of(relative_to)
    if folder is None:
        return None
    scheme, _, path = folder.partition("://")
    return remote_url(f"{scheme}://{os.path.normpath(f'{path}/{reference}')}")


def open_files(folder: Path, stem: str) -> list[TensorFile] | None:
    """Open ``stem.safetensors``, or the shards of ``stem.safetensors.index.json``. Return None if neither exists."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if not index.is_file():
        if not single.is_file():
            return None
        require_within(single, folder)
        return [TensorFile(single)]
    files: list[TensorFile] = []
    try:
        for filename, names in read_index(index).items():
            if not filename.endswith(".safetensors"):
                raise InputError(f"{index}: not a valid index: {filename!r} is not a .safetensors file")
            files.append(TensorFile(folder / filename))
            for name in files[-1].entries.keys() ^ set(names):
                place = f"in {filename}" if name in names else "in the index"
                raise InputError(f"{index}: {_quoted(name)} is not {place}. Save the model again.")
    except BaseException:
        close_files(files)
        raise
    return files


def read_index(index: Path) -> dict[str, list[str]]:
    """Return file name → tensor names of an index in the Hugging Face layout, sorted by file name."""

    def broken(why: str) -> InputError:
        return InputError(f"{index}: not a valid index: {why}.")

    require_within(index, index.parent)
    weight_map = parse_json_object(read_bounded(index, MAX_INDEX), broken).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise broken("it has no weight_map")
    by_file: dict[str, list[str]] = {}
    for name, filename in weight_map.items():
        if not isinstance(filename, str) or not is_plain_name(filename):
            raise broken(f"{_quoted(name)}: {str(filename)[:80]!r} is not the name of a file in the folder")
        by_file.setdefault(filename, []).append(name)
    for filename in by_file:
        if not (index.parent / filename).is_file():
            raise broken(f"the file {filename!r} does not exist")
        require_within(index.parent / filename, index.parent)
    return dict(sorted(by_file.items()))


def _quoted(name: str) -> str:
    """Return a name from a file for a message, quoted and shortened."""
    return repr(name if len(name) <= 100 else name[:99] + "…")


def is_text(name: str) -> bool:
    """Return whether UTF-8 can encode a name. JSON can contain surrogates, which UTF-8 cannot."""
    return not re.search("[\ud800-\udfff]", name)


def is_plain_name(filename: str) -> bool:
    """Return whether a file name from untrusted data stays in its folder."""
    fits = filename not in ("", ".", "..") and not set(filename) & set("/\\\0")
    return fits and is_text(filename) and len(filename.encode()) < 256


def close_files(files: Iterable[PositionalFile]) -> None:
    for file in files:
        file.close()


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor as bytes, without a copy: reading into it fills the tensor."""
    import torch

    # Every PyTorch operation releases the GIL, which makes threads wait for each other. Call only those needed.
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    return memoryview((flat.detach() if flat.requires_grad else flat).view(torch.uint8).numpy())  # type: ignore[arg-type]
