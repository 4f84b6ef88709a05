"""A cache of hidden states that keeps to a limit of memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class CachedTensor:
    """A tensor in a `HiddenCache`: in memory, or in a file."""

    def __init__(self, cache: HiddenCache, tensor: Tensor, path: Path | None) -> None:
        self._cache, self._path = cache, path
        self._tensor: Tensor | None = tensor if path is None else None
        self._dtype, self._shape, self._device = tensor.dtype, tensor.shape, tensor.device
        if path is not None:
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(path)

    def get(self) -> Tensor:
        """Return the tensor, read from its file if it has one."""
        if self._tensor is not None:
            return self._tensor
        size = self._shape.numel()
        if not size:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        stored = torch.from_file(str(self._path), size=size, dtype=self._dtype)
        return stored.reshape(self._shape).to(self._device)

    def drop(self) -> None:
        """Give back the memory, or delete the file."""
        if self._tensor is not None:
            self._cache.take_back(self._tensor)
            self._tensor = None
        elif self._path is not None:
            self._path.unlink(missing_ok=True)


class HiddenCache:
    """Keeps hidden states in memory up to a limit in bytes, and the others in temporary files.

    A dropped tensor's memory is used for the next one of its shape. Without that, small hidden states that stay lie
    between large blocks that are freed, and the C library's heap grows with every block of the model.
    """

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self.limit, self.nbytes, self.peak, self.spilled = limit, 0, 0, 0
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0
        self._unused: dict[tuple[Any, ...], list[Tensor]] = {}

    def put(self, tensor: Tensor) -> CachedTensor:
        """Keep a tensor."""
        if unused := self._unused.get(_layout(tensor)):
            return CachedTensor(self, unused.pop().copy_(tensor), None)
        size = _bytes_held(tensor)
        if self.nbytes + size > self.limit:
            self.free_unused()
        if self.nbytes + size <= self.limit:
            self.nbytes += size
            self.peak = max(self.peak, self.nbytes)
            # A view, such as an expanded mask, is kept as it is: a copy would be larger.
            return CachedTensor(self, tensor.detach().clone() if tensor.is_contiguous() else tensor, None)
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="gradmerge-hidden-", dir=self._folder)
        self._number += 1
        self.spilled += tensor.nbytes
        return CachedTensor(self, tensor, Path(self._temporary.name) / str(self._number))

    def take_back(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor for the next one of its shape."""
        if tensor.is_contiguous():
            self._unused.setdefault(_layout(tensor), []).append(tensor)
        else:
            self.nbytes -= _bytes_held(tensor)

    def free_unused(self) -> None:
        """Free the memory of dropped tensors."""
        self.nbytes -= sum(_bytes_held(tensor) for tensors in self._unused.values() for tensor in tensors)
        self._unused = {}

    def close(self) -> None:
        """Free what is unused, and delete the files."""
        self.free_unused()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def _bytes_held(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
