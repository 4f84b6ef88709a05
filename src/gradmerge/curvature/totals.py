"""Where sums are kept: on the device that they come about on, in the computer's memory, or on disk.

A :class:`Total` is one sum. What is kept elsewhere comes to the device while something is added to it, so that it has
the same bits as it would have there.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..arguments import check_known
from ..errors import MachineError
from ..text import size

#: Where sums can be kept.
LOCATIONS = ("device", "cpu", "disk")
_BLOCK = 1 << 20
_MMAP_THRESHOLD = -3  # of glibc's mallopt


class Keeping:
    """How the sums of one estimate are kept.

    ``folder`` is where those on disk lie: in files without a name, which are gone when the process is.
    """

    def __init__(self, where: str = "device", folder: Path | None = None) -> None:
        check_known(f"accumulate_on {where}", where, LOCATIONS)
        self.where, self.folder = where, folder
        if not self.plain:
            give_memory_back()

    @property
    def plain(self) -> bool:
        """Sums lie where they come about."""
        return self.where == "device"

    def total(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Total:
        """A sum that begins with zeros."""
        return Total(self, torch.Size(shape), dtype, device)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros where sums are kept."""
        if self.where != "disk" or not torch.Size(shape).numel():
            return torch.zeros(shape, dtype=dtype, device="cpu" if self.where == "cpu" else device)
        return on_disk(shape, dtype, self.folder)

    def copied(self, value: Tensor) -> Tensor:
        """A copy, where sums are kept."""
        if self.where != "disk" or not value.numel():
            return value.clone()
        copy = on_disk(value.shape, value.dtype, self.folder).copy_(value)
        let_go(copy)
        return copy


def give_memory_back() -> None:
    """Have glibc return what is freed of a megabyte or more, where memory matters more than the time that it takes.

    It would keep such blocks for later once it has seen some, and layers that come and go leave gaps between them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def on_disk(shape: Sequence[int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Zeros in a file without a name, whose place on the disk is taken: a full disk is an error here, not a crash."""
    where = Path(folder) if folder is not None else Path(tempfile.gettempdir())
    count = torch.Size(shape).numel()
    nbytes = count * torch.empty(0, dtype=dtype).element_size()
    try:
        handle, path = tempfile.mkstemp(prefix=".sums-", dir=where)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(handle, 0, nbytes)
            else:  # macOS
                for first in range(0, nbytes, _BLOCK):
                    os.write(handle, bytes(min(_BLOCK, nbytes - first)))
            pages = _Pages(handle, nbytes)
        finally:
            os.close(handle)
            Path(path).unlink()
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MachineError(
            f"accumulate_on disk: {where} takes no more: a sum of {size(nbytes)} cannot be kept there ({reason}). "
            "Make room there; the sums need 4 bytes for each parameter beside the result."
        ) from error
    flat = torch.frombuffer(pages, dtype=dtype)
    _PAGES[flat.data_ptr()] = pages
    return flat.view(tuple(shape))


class _Pages(mmap.mmap):
    """A file in memory, as far as it is looked at; it lasts as long as its tensors."""


_PAGES: WeakValueDictionary[int, _Pages] = WeakValueDictionary()
"""By the address of the first entry."""


def let_go(value: Tensor) -> None:
    """Of a tensor on disk, hold nothing in memory until it is looked at again; any other stays as it is."""
    pages = _PAGES.get(value.untyped_storage().data_ptr()) if _PAGES and value.device.type == "cpu" else None
    if pages is not None and hasattr(mmap, "MADV_DONTNEED"):
        pages.madvise(mmap.MADV_DONTNEED)


class Total:
    """A sum that is kept somewhere, and added to on a device."""

    def __init__(self, keeping: Keeping, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, dtype, device
        self._value = keeping.zeros(shape, dtype, device)

    def add(self, put: Callable[[Tensor], Any]) -> None:
        """``put`` adds to the tensor that it is given."""
        if self._value.device == self.device:
            put(self._value)
        else:
            near = self._value.to(self.device)
            put(near)
            self._value.copy_(near)
        let_go(self._value)

    def whole(self) -> Tensor:
        """The sum itself, where it is kept."""
        return self._value
