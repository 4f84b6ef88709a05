"""Where sums are kept: on the device that they come about on, in the computer's memory, on disk, or shared out.

A :class:`Total` is one sum. What is kept elsewhere comes to the device while something is added to it, so that it has
the same bits as it would have there. What is shared out over processes is never whole on any: what a process adds to
it is reduced and scattered at once, and each keeps its stretch.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..arguments import check_known
from ..errors import InputError, MachineError
from ..text import size

if TYPE_CHECKING:
    from ..processes import Processes

#: Where sums may be kept.
PLACES = ("device", "cpu", "disk")
_BLOCK = 1 << 20
_MMAP_THRESHOLD = -3  # of glibc's mallopt


class Keeping:
    """How the sums of one estimate are kept.

    ``folder`` is where those on disk lie: in files without a name, which are gone when the process is. With
    ``processes`` the model's parameters, and with them all sums, are shared out over these.
    """

    def __init__(self, where: str = "device", folder: Path | None = None, processes: Processes | None = None) -> None:
        check_known(f"--sums {where}", where, PLACES)
        self.where, self.folder, self.processes = where, folder, processes
        if not self.plain:
            give_memory_back()
        self.idle = False
        """This process has no examples left, and runs others' layers along with them: what it adds does not count."""
        self.handlers: dict[nn.Parameter, Callable[[Tensor], None]] = {}
        """Of a shared parameter: what its gradient is handed to, whole, in the backward pass of one process."""
        self.strays: set[nn.Parameter] = set()
        """Shared parameters that a gradient came to which nobody had asked for."""

    @property
    def plain(self) -> bool:
        """Sums lie where they come about."""
        return self.where == "device" and self.processes is None

    @property
    def shared(self) -> bool:
        return self.processes is not None

    def total(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Total:
        """A sum that begins with zeros."""
        return (SharedTotal if self.shared else Total)(self, torch.Size(shape), dtype, device)

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

    def some(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some process."""
        if self.processes is None or not flags:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.int64)
        self.processes.add([found])
        return [bool(one) for one in found]

    def sum_up(self, number: int) -> int:
        """The sum of the processes' numbers."""
        return number if self.processes is None else sum(self.processes.gather(number))

    def most(self, number: int) -> int:
        """The largest of the processes' numbers."""
        return number if self.processes is None else max(self.processes.gather(number))


def give_memory_back() -> None:
    """Have glibc return what is freed of a megabyte or more, where memory matters more than the time that it takes.

    It would keep such blocks for later once it has seen some, and layers that come and go leave gaps between them.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def in_step(batches: Iterable[Any], keeping: Keeping) -> Iterator[Any]:
    """The batches; where processes share a model, all go on until none has any left, idly with their last one."""
    if not keeping.shared:
        yield from batches
        return
    left, last = iter(batches), None
    try:
        while True:
            batch = next(left, None)
            keeping.idle = batch is None
            if not any(keeping.some([batch is not None])):
                return
            last = last if batch is None else batch
            if any(keeping.some([last is None])):
                raise InputError("--shard: there are fewer examples than processes. Start fewer processes.")
            yield last
    finally:
        keeping.idle = False


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
            f"--sums disk: {where} takes no more: a sum of {size(nbytes)} cannot be kept there ({reason}). "
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


def _reduce_scatter(distributed: Any) -> Any:
    return getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor  # by version


class Total:
    """A sum that is kept somewhere, and added to on a device."""

    def __init__(self, keeping: Keeping, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.keeping, self.shape, self.dtype, self.device = keeping, shape, dtype, device
        self._value = keeping.zeros(self._kept_shape(), dtype, device)

    def _kept_shape(self) -> torch.Size:
        return self.shape

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
        """The sum itself; where processes share it, on the first of them, and on the others its shape alone."""
        return self._value


class SharedTotal(Total):
    """A sum of which every process has a stretch of entries."""

    def _kept_shape(self) -> torch.Size:
        assert self.keeping.processes is not None
        self._stretch = -(-self.shape.numel() // self.keeping.processes.count)
        return torch.Size([self._stretch])

    def add(self, put: Callable[[Tensor], Any]) -> None:
        from torch import distributed

        processes = self.keeping.processes
        assert processes is not None
        whole = torch.zeros(self._stretch * processes.count, dtype=self.dtype, device=self.device)
        if not self.keeping.idle:
            put(whole[: self.shape.numel()].view(self.shape))
        mine = whole.new_empty(self._stretch)
        with processes.guarded("adding up the sums of a layer"):
            _reduce_scatter(distributed)(mine, whole)
        self._value += mine.to(self._value.device)
        let_go(self._value)

    def whole(self) -> Tensor:
        from torch import distributed

        processes = self.keeping.processes
        assert processes is not None
        mine = self._value.to(self.device)
        parts = [torch.empty_like(mine) for _ in range(processes.count)] if processes.first else None
        with processes.guarded("gathering the sums of a layer"):
            distributed.gather(mine, parts)
        if parts is None:
            return torch.empty(self.shape, dtype=self.dtype, device="meta")
        # Where there is a folder to write to, no process holds all sums, not even the one that writes them.
        numel, folder = self.shape.numel(), self.keeping.folder
        disk = folder is not None and numel > 0
        found = on_disk(self.shape, self.dtype, folder) if disk else torch.empty(self.shape, dtype=self.dtype)
        flat = found.view(-1)
        for number, part in enumerate(parts):
            first = number * self._stretch
            flat[first : first + self._stretch] = part[: max(0, numel - first)].to(flat.device)
        let_go(found)
        return found
