"""Storage of sums: on the device that computes them, in CPU memory, or on disk.

A :class:`StoredSum` is one sum. A sum in other storage is copied to the device while something is added to it, so the
result has the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..arguments import check_known
from ..errors import MachineError
from ..text import size

LOCATIONS = ("device", "cpu", "disk")
_BLOCK = 1 << 20
_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt


class SumStorage:
    """Creates the sums of one estimate. On disk they are unnamed files in ``folder``, which end with the process."""

    def __init__(self, location: str = "device", folder: Path | None = None) -> None:
        check_known(f"accumulate_on {location}", location, LOCATIONS)
        self.location, self.folder = location, folder
        if not self.on_device:
            return_freed_memory()

    @property
    def on_device(self) -> bool:
        """Whether sums stay on the device that computes them."""
        return self.location == "device"

    def new_sum(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> StoredSum:
        """Return a sum of zeros."""
        value = (
            zeros_on_disk(shape, dtype, self.folder)
            if self.location == "disk" and torch.Size(shape).numel()
            else torch.zeros(shape, dtype=dtype, device="cpu" if self.location == "cpu" else device)
        )
        return StoredSum(value, device)


class StoredSum:
    """A sum in some storage, to which a device adds."""

    def __init__(self, value: Tensor, device: torch.device) -> None:
        self.value = value
        """The sum, in its storage."""
        self._device = device

    def add(self, add_to: Callable[[Tensor], Any]) -> None:
        """Call ``add_to`` with the sum on the device."""
        if self.value.device == self._device:
            add_to(self.value)
        else:
            on_device = self.value.to(self._device)
            add_to(on_device)
            self.value.copy_(on_device)


def return_freed_memory() -> None:
    """Make glibc return freed blocks of a megabyte or more to the system, where memory matters more than time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def zeros_on_disk(shape: Sequence[int], dtype: torch.dtype, folder: Path | None) -> Tensor:
    """Return zeros in an unnamed file. Its disk space is reserved, so a full disk is an error here, not a crash."""
    directory = Path(folder) if folder is not None else Path(tempfile.gettempdir())
    numel = torch.Size(shape).numel()
    nbytes = numel * dtype.itemsize
    try:
        with tempfile.NamedTemporaryFile(prefix=".sums-", dir=directory) as file:
            if hasattr(os, "posix_fallocate"):  # not on macOS
                os.posix_fallocate(file.fileno(), 0, nbytes)
            return torch.from_file(file.name, shared=True, size=numel, dtype=dtype).view(tuple(shape))
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MachineError(
            f"accumulate_on disk: {directory} has no room for a sum of {size(nbytes)} ({reason}). The sums need 4 "
            "bytes per parameter, besides the result."
        ) from error
