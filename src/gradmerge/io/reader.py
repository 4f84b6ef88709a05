"""Read safetensors files by position.

``pread`` fills buffers that the caller reuses. Memory mapping would be shorter, but every page that it touches counts
as resident memory, so a merge would seem to need all its inputs at once. Headers are untrusted: everything in them is
checked before it is used.
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
from ..urls import as_url, count_local_copies, strip_file_scheme, url_of
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
        self._ranges = _ranges_of(path) if count_local_copies() else None
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
        if self._ranges is not None:
            self._ranges.will_need(offset)
        elif hasattr(os, "posix_fadvise") and self._fd >= 0:
            with contextlib.suppress(OSError):  # only advice: some file systems do not support it
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
    entries = {name: _check_entry(name, value, start, total, broken) for name, value in header.items()}
    entries = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes, item[0])))
    reached = start
    for name, entry in entries.items():
        if entry.start != reached:
            begin, expected = entry.start - start, reached - start
            raise broken(f"tensor {_quoted(name)} starts at byte {begin} instead of {expected}: a gap or an overlap")
        reached += entry.nbytes
    if reached != total:
        raise broken(f"{total - reached} bytes follow the last tensor")
    return entries, metadata


def _check_entry(name: str, value: Any, start: int, total: int, broken: Callable[[str], InputError]) -> Entry:
    """Check one entry of a header. The data are the bytes from ``start`` to ``total`` of the file."""

    def are_whole(numbers: Any, most: int) -> bool:
        within = isinstance(numbers, list) and len(numbers) <= most
        return within and all(type(number) is int and 0 <= number < 2**62 for number in numbers)

    if not is_text(name):
        raise broken(f"the tensor name {_quoted(name)} is not valid Unicode")
    tensor = f"tensor {_quoted(name)}"
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise broken(f"{tensor} must have dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_SIZE:
        raise broken(f"{tensor} has the unknown dtype {str(dtype)[:40]!r}")
    if not are_whole(shape, 64) or not are_whole(offsets, 2) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise broken(f"{tensor} has an invalid shape, or data_offsets that are not [begin, end]")
    begin, end = offsets
    entry = Entry(dtype, tuple(shape), start + begin)
    if start + end > total:
        raise broken(f"{tensor} ends at byte {end} of {total - start} data bytes. The file is truncated")
    if entry.nbytes != end - begin:
        raise broken(f"{tensor} of {dtype} {list(shape)} takes {entry.nbytes} bytes, not {end - begin}")
    return entry


def header_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, Entry]]:
    """Return the header of a file with these tensors (name → dtype, shape) in this order, and their entries."""
    # The name of a folder may not be UTF-8.
    text_metadata = {key: value.encode(errors="backslashreplace").decode() for key, value in metadata.items()}
    header: dict[str, Any] = {"__metadata__": text_metadata} if text_metadata else {}
    offsets: dict[str, Entry] = {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        offsets[name] = Entry(dtype, tuple(shape), end)
        begin, end = end, end + offsets[name].nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    entries = {name: replace(entry, start=8 + len(text) + entry.start) for name, entry in offsets.items()}
    return len(text).to_bytes(8, "little") + text, entries


def local_path(reference: str, relative_to: Path | None) -> Path:
    """Return the path of a reference that is a path, whether it exists or not. Of a URL, return the local copy.

    A path relative to a URL is a URL.
    """
    if url := _url_at(reference, relative_to):
        from .remote import local_copy

        try:
            return local_copy(url)
        except InputError:
            if as_url(reference):
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
    if (url := as_url(reference)) is not None:
        return None if url.startswith("file://") else url
    if relative_to is None or reference.startswith(("/", "~")):
        return None
    folder = url_of(relative_to)
    if folder is None or folder.startswith("file://"):
        return None
    scheme, _, path = folder.partition("://")
    return as_url(f"{scheme}://{os.path.normpath(f'{path}/{reference}')}")


def require_utf8_path(path: Path) -> Path:
    """Return the path. Raise if its name is not UTF-8, which libraries in other languages cannot open."""
    if not is_text(str(path)):
        raise InputError(f"{path}: the name is not UTF-8. Rename the file, or create a link to it (ln -s).")
    return path


def open_files(folder: Path, stem: str) -> list[TensorFile] | None:
    """Open ``stem.safetensors``, or the shards of ``stem.safetensors.index.json``. Return None if neither exists."""
    index, single = folder / f"{stem}.safetensors.index.json", folder / f"{stem}.safetensors"
    if index.is_file():
        by_file = read_index(index)
        for name in by_file:
            if not name.endswith(".safetensors"):
                raise InputError(f"{index}: not a valid index: {name!r} is not a .safetensors file")
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
        raise InputError(f"{index}: {filename} does not contain {_quoted(absent[0])}. Save the model again.")
    unlisted = file.entries.keys() - set(names)
    if unlisted:
        first = next(n for n in file.entries if n in unlisted)
        raise InputError(f"{index}: does not list {_quoted(first)} of {filename}. Save the model again.")
    return file


def read_index(index: Path) -> dict[str, list[str]]:
    """Return file name → tensor names of an index in the Hugging Face layout, in the order of file names."""

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
