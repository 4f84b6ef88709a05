"""PyTorch's own checkpoint files (`.bin`, `.pt`), opened only on request and only with ``weights_only``."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..storage.tensorfile import Entry, read_fully
from .model import STORED_TYPES

SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}


class PickleFile:
    """A zipped ``torch.save`` file: names and places of its tensors, read by position like a safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self.memory: dict[str, Tensor] = {}
        """Tensors that do not lie in the file as one contiguous run, loaded at once."""
        self._fd = -1
        tensors = _load(path, fake=zipfile.is_zipfile(path))
        size = path.stat().st_size
        scattered = []
        for name, tensor in tensors.items():
            if tensor.dtype not in STORED_TYPES:
                raise InputError(f"{path}: tensor {name!r} has the type {tensor.dtype}, which cannot be merged")
            place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            if place is None or not tensor.is_contiguous():
                scattered.append(name)
                continue
            start = place + tensor.storage_offset() * tensor.element_size()
            entry = Entry(STORED_TYPES[tensor.dtype], tuple(tensor.shape), start)
            if start < 0 or start + entry.nbytes > size:
                raise InputError(f"{path}: tensor {name!r} lies outside the file; the file is damaged")
            self.entries[name] = entry
        if scattered:
            whole = _load(path, fake=False)
            self.memory = {name: whole[name].contiguous() for name in scattered}
        self._fd = os.open(path, os.O_RDONLY)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        read_fully(self._fd, buffer, offset, self.path)

    def will_need(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _load(path: Path, *, fake: bool) -> dict[str, Tensor]:
    """The state dict of a file; with ``fake``, shapes and places without the data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        if fake:
            with FakeTensorMode():
                loaded = torch.load(path, weights_only=True)
        else:
            loaded = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise InputError(
            f"{path}: cannot be read as a PyTorch checkpoint ({reason}). Only tensors are accepted (weights_only); "
            "convert the model to safetensors if you trust it."
        ) from error
    return _state_dict(path, loaded)


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    for candidate in (
        loaded,
        *(loaded.get(key) for key in ("state_dict", "model") if isinstance(loaded, dict)),
    ):
        if isinstance(candidate, dict) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
            return {str(k): v for k, v in candidate.items()}
    raise InputError(f"{path}: holds no state dict (a mapping from names to tensors)")
