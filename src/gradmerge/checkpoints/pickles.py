"""PyTorch's own checkpoint files (`.bin`, `.pt`), opened only on request and only with ``weights_only``."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..storage.tensorfile import Entry, PositionalFile
from .model import STORED_TYPES

SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}


class PickleFile(PositionalFile):
    """A zipped ``torch.save`` file: names and places of its tensors, read by position like a safetensors file."""

    def __init__(self, path: Path) -> None:
        self.memory: dict[str, Tensor] = {}
        """Tensors that do not lie in the file as one contiguous run, loaded at once."""
        zipped = _is_archive(path)
        tensors = _load(path, fake=zipped)
        records = _stored_records(path) if zipped else {}
        entries: dict[str, Entry] = {}
        scattered = []
        for name, tensor in tensors.items():
            if tensor.dtype not in STORED_TYPES:
                raise InputError(f"{path}: tensor {name!r} has the type {tensor.dtype}, which cannot be merged")
            place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            # The place is computed, not looked up: it is wrong in an archive that was packed again by another program.
            if place not in records or not tensor.is_contiguous():
                scattered.append(name)
                continue
            offset = tensor.storage_offset() * tensor.element_size()
            entry = Entry(STORED_TYPES[tensor.dtype], tuple(tensor.shape), place + offset)
            if offset + entry.nbytes > records[place]:
                raise InputError(f"{path}: tensor {name!r} is longer than its data; the file is damaged")
            entries[name] = entry
        if scattered:
            whole = _load(path, fake=False)
            self.memory = {name: whole[name].contiguous() for name in scattered}
        self.entries = entries
        super().__init__(path)


def _is_archive(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except (zipfile.BadZipFile, ValueError):  # the end of an archive, with numbers in it that cannot be
        return False


def _stored_records(path: Path) -> dict[int, int]:
    """Offset → size of the archive's records that are not compressed."""
    records: dict[int, int] = {}
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                if info.compress_type == zipfile.ZIP_STORED:
                    records[info.header_offset + 30 + name_length + extra_length] = info.file_size
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return {}
    return records


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
            return {_name(path, k): _dense(path, k, v) for k, v in candidate.items()}
    raise InputError(f"{path}: holds no state dict (a mapping from names to tensors)")


def _name(path: Path, key: Any) -> str:
    name = str(key)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{path}: {name[:80]!a} is no name for a tensor: it holds half a character") from error
    return name


def _dense(path: Path, name: Any, tensor: Tensor) -> Tensor:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        what = "only a shape" if tensor.device.type == "meta" else "sparse"
        raise InputError(f"{path}: tensor {str(name)[:80]!a} is {what}; only dense tensors can be merged")
    return tensor
