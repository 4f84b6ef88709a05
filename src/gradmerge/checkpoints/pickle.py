"""Checkpoint files of `torch.save` (`.bin`, `.pt`), opened only on request and only with ``weights_only``."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import io
import mmap
import os
import pickletools
import sys
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import InputError, MachineError
from ..io.reader import Entry, PositionalFile, is_text
from ..io.small_files import require_unpackable
from ..urls import count_local_copies
from .checkpoint import STORED_TYPES

SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
#: Keys under which training programs store a state dict beside other state, such as the optimizer's.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "params")
#: Maximum length of the name of a global. torch takes quadratic time in this length to refuse one.
MAX_GLOBAL = 1000


class PickleFile(PositionalFile):
    """A memory-mapped ``torch.save`` file. Positions count through its tensors as if they were concatenated."""

    def __init__(self, path: Path) -> None:
        if count_local_copies():
            from ..io.remote import download

            download([path])
        super().__init__(path)
        self.entries: dict[str, Entry] = {}
        self._size = os.fstat(self._fd).st_size
        try:
            sizes = _record_sizes(path)
            _check_globals(path)
            tensors = _load(path, mapped=bool(sizes))
            for name, tensor in tensors.items():
                _check(path, name, tensor, sizes)
            self._add_entries(tensors, mapped=bool(sizes))
        except Exception as error:
            self.close()
            if isinstance(error, InputError | MemoryError):
                raise
            raise _unreadable(path, error) from error  # torch raises many types of errors for damaged tensors

    def _add_entries(self, tensors: dict[str, Tensor], mapped: bool) -> None:
        """Keep contiguous tensors mapped, and load the others into memory."""
        in_place = [
            n for n, t in tensors.items() if mapped and t.is_contiguous() and not t.is_conj() and not t.is_neg()
        ]
        loaded = tensors.keys() - set(in_place)
        # A tensor with strides of 0 can repeat one number any number of times.
        require_unpackable(self.path, sum(tensors[name].numel() * tensors[name].element_size() for name in loaded))
        self.memory = {n: t.resolve_conj().resolve_neg().contiguous() for n, t in tensors.items() if n in loaded}
        end = 0
        for name in in_place:
            self.entries[name] = Entry(STORED_TYPES[tensors[name].dtype], tuple(tensors[name].shape), end)
            end += self.entries[name].nbytes
        self._starts = [entry.start for entry in self.entries.values()]
        self._mapped = [tensors[name].detach().reshape(-1).view(torch.uint8) for name in in_place]

    def read_into(self, buffer: memoryview, offset: int) -> None:
        size = os.fstat(self._fd).st_size
        if size < self._size:  # reading past the end of a mapped file would kill the process
            raise MachineError(f"{self.path}: ends at byte {size}; it was longer when the merge began")
        index = bisect.bisect_right(self._starts, offset) - 1
        begin = offset - self._starts[index]
        block = self._mapped[index][begin : begin + len(buffer)]
        torch.frombuffer(buffer, dtype=torch.uint8).copy_(block)
        _unmap_pages(block)

    def will_need(self, offset: int, nbytes: int) -> None:
        """Do nothing: the operating system reads ahead in maps."""

    def close(self) -> None:
        super().close()
        self._mapped = []


def _unmap_pages(block: Tensor) -> None:
    """Release the pages of a mapped block, which count as memory of this process. The next read maps them again."""
    start = block.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    length = block.data_ptr() + block.nbytes - start
    ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _record_sizes(path: Path) -> set[int]:
    """Return the sizes of an archive's records; empty if the file cannot be mapped.

    It cannot if it is not an archive, is compressed, or has bytes in another order, which torch swaps in memory.
    """
    if not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as archive:
        records = archive.infolist()
        require_unpackable(path, sum(record.file_size for record in records))
        orders = [archive.read(record) for record in records if record.filename.endswith("/byteorder")]
    stored = all(record.compress_type == zipfile.ZIP_STORED for record in records)
    native = all(order == sys.byteorder.encode() for order in orders)
    return {record.file_size for record in records} if stored and native and is_text(str(path)) else set()


def _check_globals(path: Path) -> None:
    """Refuse a pickle with a global whose name is longer than any real one."""
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("rb"))
        pickles: list[IO[bytes]] = [file]
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            pickles = [io.BytesIO(archive.read(name)) for name in archive.namelist() if name.endswith("data.pkl")]
        for pickled in pickles:
            with contextlib.suppress(ValueError):
                for _ in range(5):  # the legacy format stores four or five pickles before the data
                    for opcode, argument, _position in pickletools.genops(pickled):
                        if opcode.name == "GLOBAL" and len(str(argument)) > MAX_GLOBAL:
                            raise InputError(f"{path}: cannot be read as a PyTorch checkpoint (a name is too long)")


def _load(path: Path, *, mapped: bool) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, weights_only=True, mmap=mapped, map_location="cpu")
    except Exception as error:
        raise _unreadable(path, error) from error
    return _state_dict(path, loaded)


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    inner = [loaded.get(key) for key in WRAPPERS] if isinstance(loaded, dict) else []
    for candidate in (loaded, *inner):
        if isinstance(candidate, dict) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
            tensors = {str(key): value for key, value in candidate.items() if isinstance(key, str | int)}
            if len(tensors) != len(candidate):
                raise InputError(f"{path}: has tensors whose names are not text, or two with the same name")
            for name in tensors:
                if not is_text(name):
                    raise InputError(f"{path}: the tensor name {name[:100]!r} is not valid Unicode")
            return tensors
    raise InputError(f"{path}: has no state dict (a mapping from names to tensors)")


def _check(path: Path, name: str, tensor: Tensor, sizes: set[int]) -> None:
    """Refuse a tensor that cannot be merged, or whose storage does not have the size of a record of the file."""
    if tensor.dtype not in STORED_TYPES:
        raise InputError(f"{path}: tensor {name!r} has the type {tensor.dtype}, which cannot be merged")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
        raise InputError(f"{path}: tensor {name!r} is sparse, nested, or has no data; it cannot be merged")
    if sizes and tensor.numel() and tensor.untyped_storage().nbytes() not in sizes:
        raise InputError(f"{path}: tensor {name!r} does not have the size of its data; the file is damaged")


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return InputError(
        f"{path}: cannot be read as a PyTorch checkpoint ({reason}). Only tensors are accepted (weights_only); convert "
        "the model to safetensors if you trust it."
    )
