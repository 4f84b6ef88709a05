"""One safetensors file, read by position.

Only the header is parsed; tensors are read with ``pread`` into buffers that the caller reuses. Memory mapping would be
shorter, but every page that it touches counts as resident memory, so that a merge would seem to need all its inputs
at once. A header is untrusted: everything in it is checked before any of it is used.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from ..text import size
from ..urls import as_url, count_local_copies, strip_file_scheme
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
#: Name of a type in a safetensors header → bytes per element.
ITEM_SIZE = {name: nbytes for nbytes, names in _TYPES_BY_SIZE.items() for name in names.split()}
#: The types that a merge does arithmetic on, and their names in recipes.
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

#: Bytes of a header and of an index. The format allows headers of 100 MB, but these would take 3 GB of memory, and
#: headers in use have a few: 32 MB are 300,000 tensors in one file.
MAX_HEADER = 32_000_000
MAX_INDEX = 32_000_000


@dataclass(frozen=True)
class TensorInfo:
    """What is known of a tensor before it is read."""

    dtype: str
    """As a safetensors header names it."""
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
    """Where one tensor lies in a file."""

    start: int
    """Offset of the first byte in the file."""


class PositionalFile:
    """An open file that tensors are read from by position; ``entries`` says where they lie, in file order.

    The stand-in of a file at a URL (`io/remote.py`) is read there, in ranges.
    """

    entries: Mapping[str, Entry]

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory: dict[str, Any] = {}
        """Tensors of the file that cannot be read by position, and were loaded."""
        self._ranges = _ranges_of(path) if count_local_copies() else None
        self._fd = open_regular(path)

    @property
    def nbytes(self) -> int:
        return os.fstat(self._fd).st_size

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill the buffer with the file's bytes from ``offset`` on."""
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
                raise MachineError(f"{self.path}: ends at byte {offset + done}; it was longer when the merge began")
            done += count

    def will_need(self, offset: int, nbytes: int) -> None:
        """Ask the operating system to start reading these bytes."""
        if self._ranges is not None:
            self._ranges.will_need(offset, nbytes)
        elif hasattr(os, "posix_fadvise") and self._fd >= 0:
            with contextlib.suppress(OSError):  # it is advice: some file systems take none
                os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._ranges is not None:
            self._ranges.close()


def _ranges_of(path: Path) -> RangeReader | None:
    from .range_reader import RangeReader
    from .remote import remote_file_at

    stored = remote_file_at(path)
    return None if stored is None else RangeReader(stored)


class TensorFile(PositionalFile):
    """A safetensors file: its tensors in file order, its metadata, and positional reads."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            self.entries, self.metadata = _parse_header(self, self.nbytes)
            if self._ranges is not None:
                self._ranges.cut(entry.start for entry in self.entries.values())
        except BaseException:
            self.close()
            raise


def _parse_header(file: TensorFile, total: int) -> tuple[dict[str, Entry], dict[str, str]]:
    def broken(why: str) -> InputError:
        return InputError(f"{file.path}: not a valid safetensors file: {why}. Download or save it again.")

    if total < 8:
        raise broken(f"it has {total} bytes, fewer than the 8 that give the header's length")
    prefix = bytearray(8)
    file.read_into(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER:
        raise broken(f"the header claims {length} bytes, more than the limit of {size(MAX_HEADER)}")
    if 8 + length > total:
        raise broken(f"the header claims {length} bytes, but the file has {total} in all; it is cut short")
    raw = bytearray(length)
    file.read_into(memoryview(raw), 8)
    header = parse_json_object(raw, broken)

    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise broken("__metadata__ must map words to words")

    start = 8 + length
    entries = {name: _check_entry(name, value, start, total, broken) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes, item[0])))
    reached = start
    for name, entry in entries.items():
        if entry.start != reached:
            found = f"starts at byte {entry.start - start} where {reached - start} was expected"
            raise broken(f"tensor {_quoted(name)} {found}: a hole or an overlap")
        reached += entry.nbytes
    if reached != total:
        raise broken(f"{total - reached} bytes after the last tensor belong to none")
    return entries, metadata


def _check_entry(name: str, value: Any, start: int, total: int, broken: Callable[[str], InputError]) -> Entry:
    """One entry of a header whose data lie from byte ``start`` to byte ``total`` of the file."""

    def whole(numbers: Any) -> bool:
        return isinstance(numbers, list) and all(type(n) is int and 0 <= n < 2**62 for n in numbers)

    if not is_text(name):
        raise broken(f"the tensor name {_quoted(name)} is no valid Unicode")
    tensor = f"tensor {_quoted(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise broken(f"{tensor} must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise broken(f"{tensor} has the unknown dtype {str(dtype)[:40]!r}")
    if not whole(shape) or len(shape) > 64:
        raise broken(f"{tensor} has a shape that is no list of whole numbers")
    if not whole(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"{tensor} has data_offsets that are no [begin, end]")
    begin, end = offsets
    entry = Entry(dtype, tuple(shape), start + begin)
    if start + end > total:
        raise broken(f"{tensor} ends at byte {end} of {total - start} data bytes; the file is cut short")
    if entry.nbytes != end - begin:
        raise broken(f"{tensor} of {dtype} {list(shape)} takes {entry.nbytes} bytes, not {end - begin}")
    return entry


def header_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """The first bytes of a file that holds these tensors (name → dtype, shape) in this order, and their places."""
    # The name of a folder may be no UTF-8.
    words = {key: value.encode(errors="backslashreplace").decode() for key, value in metadata.items()}
    header: dict[str, Any] = {"__metadata__": words} if words else {}
    places: dict[str, Entry] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        places[name] = Entry(dtype, tuple(shape), end)
        begin, end = end, end + places[name].nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    entries = {name: replace(place, start=8 + len(text) + place.start) for name, place in places.items()}
    return len(text).to_bytes(8, "little") + text, entries


def local_path(reference: str, relative_to: Path | None) -> Path:
    """Where a reference lies if it is a path, whether there is something or not.

    A URL is where its stand-in lies, whose small files are fetched for that. What is relative to a URL is one.
    """
    if url := _url_at(reference, relative_to):
        from .remote import local_copy

        try:
            return local_copy(url)
        except InputError:
            if as_url(reference):
                raise
            return Path(url)  # where there is nothing: it may be an id of the Hub
    try:
        path = (relative_to or Path()) / Path(strip_file_scheme(reference)).expanduser()
        path.exists()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "there is no such user"
        raise InputError(f"{reference[:200]}: cannot be opened: {reason}") from error
    return path


def _url_at(reference: str, relative_to: Path | None) -> str | None:
    """The URL that a reference is, or that it is at if it is relative to one; None for a place on this machine."""
    if (url := as_url(reference)) is not None:
        return None if url.startswith("file://") else url
    if relative_to is None or reference.startswith(("/", "~")):
        return None
    folder = as_url(relative_to)
    if folder is None and count_local_copies():
        from .remote import url_of

        folder = url_of(relative_to)
    if folder is None or folder.startswith("file://"):
        return None
    scheme, _, place = folder.partition("://")
    return as_url(f"{scheme}://{os.path.normpath(f'{place}/{reference}')}")


def require_utf8_path(path: Path) -> Path:
    """The path, if libraries that are not written in Python can open it."""
    if not is_text(str(path)):
        raise InputError(
            f"{path}: the name is not UTF-8, and cannot be opened for that. Rename it, or link to it (ln -s)."
        )
    return path


def open_files(folder: Path, stem: str) -> list[TensorFile] | None:
    """The files ``stem.safetensors``, or the shards of ``stem.safetensors.index.json``; None when neither is there."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        by_file = read_index(index)
        for name in by_file:
            if not name.endswith(".safetensors"):
                raise InputError(
                    f"{index}: not a valid index: the file {name!r} that it names is no .safetensors file."
                )
        with contextlib.ExitStack() as opened:
            files = [_open_shard(index, *shard, opened) for shard in by_file.items()]
            opened.pop_all()
        return files
    if single.is_file():
        require_within(single, folder)
        return [TensorFile(single)]
    return None


def _open_shard(index: Path, filename: str, names: Sequence[str], opened: contextlib.ExitStack) -> TensorFile:
    file = TensorFile(index.parent / filename)
    opened.callback(file.close)
    absent = [n for n in names if n not in file.entries]
    if absent:
        raise InputError(f"{index}: says that {filename} holds {_quoted(absent[0])}, but it does not. Save it again.")
    unlisted = file.entries.keys() - set(names)
    if unlisted:
        first = next(n for n in file.entries if n in unlisted)
        raise InputError(f"{index}: does not list {_quoted(first)}, which {filename} holds. Save it again.")
    return file


def read_index(index: Path) -> dict[str, list[str]]:
    """File name → names of the tensors in it, from an index in the Hugging Face layout, files in sorted order."""

    def broken(why: str) -> InputError:
        return InputError(f"{index}: not a valid index: {why}.")

    require_within(index, index.parent)
    weight_map = parse_json_object(read_bounded(index, MAX_INDEX), broken).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise broken("it has no weight_map")
    by_file: dict[str, list[str]] = {}
    for name, filename in weight_map.items():
        if not isinstance(filename, str) or not is_plain_name(filename):
            where = f"{_quoted(name)} points to {str(filename)[:80]!r}"
            raise broken(f"{where}, which is not a file name inside the folder")
        by_file.setdefault(filename, []).append(name)
    for filename in by_file:
        if not (index.parent / filename).is_file():
            raise broken(f"the file {filename!r} that it names is not there")
        require_within(index.parent / filename, index.parent)
    return dict(sorted(by_file.items()))


def _quoted(name: str) -> str:
    """A name from a file, for a message: quoted, and cut if it is long."""
    return repr(name if len(name) <= 100 else name[:99] + "…")


def is_text(name: str) -> bool:
    """Whether a name can be written again: JSON can hold halves of characters, which UTF-8 cannot."""
    return not re.search("[\ud800-\udfff]", name)


def is_plain_name(filename: str) -> bool:
    """Whether a name from a file names something in the same folder."""
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
