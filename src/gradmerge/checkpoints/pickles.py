"""PyTorch's own checkpoint files (`.bin`, `.pt`), opened only on request and only with ``weights_only``."""

from __future__ import annotations

import logging
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..storage.smallfile import require_unpackable
from ..storage.tensorfile import Entry, PositionalFile, is_text
from .model import STORED_TYPES

SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}


class PickleFile(PositionalFile):
    """A zipped ``torch.save`` file: names and places of its tensors, read by position like a safetensors file."""

    def __init__(self, path: Path) -> None:
        self.memory: dict[str, Tensor] = {}
        """Tensors that do not lie in the file as one contiguous run, loaded at once."""
        try:
            self.entries = self._placed(path)
        except (InputError, MemoryError):
            raise
        except Exception as error:  # torch has one for every way in which a tensor may be strange
            raise _unreadable(path, error) from error
        super().__init__(path)

    def _placed(self, path: Path) -> dict[str, Entry]:
        zipped = zipfile.is_zipfile(path)
        if zipped:
            _check_archive(path)
        tensors = _load(path, fake=zipped)
        records = _stored_records(path) if zipped else {}
        entries: dict[str, Entry] = {}
        scattered = []
        for name, tensor in tensors.items():
            if tensor.dtype not in STORED_TYPES:
                raise InputError(f"{path}: tensor {name!r} has the type {tensor.dtype}, which cannot be merged")
            if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type == "meta":
                raise InputError(f"{path}: tensor {name!r} is sparse, nested, or has no data; it cannot be merged")
            place = getattr(tensor.untyped_storage(), "_checkpoint_offset", None)
            # The place is computed, not looked up: it is wrong in an archive that was packed again by another program.
            if place not in records or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
                scattered.append(name)
                continue
            offset = tensor.storage_offset() * tensor.element_size()
            entry = Entry(STORED_TYPES[tensor.dtype], tuple(tensor.shape), place + offset)
            if offset + entry.nbytes > records[place]:
                raise InputError(f"{path}: tensor {name!r} is longer than its data; the file is damaged")
            entries[name] = entry
        if scattered:
            # A tensor may repeat one number any number of times.
            require_unpackable(path, sum(tensors[name].numel() * tensors[name].element_size() for name in scattered))
            whole = _load(path, fake=False) if zipped else tensors
            self.memory = {name: whole[name].resolve_conj().resolve_neg().contiguous() for name in scattered}
        return entries


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            total = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _unreadable(path, error) from error
    require_unpackable(path, total)


def _stored_records(path: Path) -> dict[int, int]:
    """Offset → size of the archive's records that are not compressed."""
    records: dict[int, int] = {}
    end = path.stat().st_size
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                file.seek(info.header_offset + 26)
                name_length, extra_length = struct.unpack("<HH", file.read(4))
                if info.compress_type == zipfile.ZIP_STORED:
                    start = info.header_offset + 30 + name_length + extra_length
                    records[start] = min(info.file_size, end - start)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return {}
    return records


def _load(path: Path, *, fake: bool) -> dict[str, Tensor]:
    """The state dict of a file; with ``fake``, shapes and places without the data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)  # it prints a traceback of what becomes one sentence here
    try:
        if fake:
            with FakeTensorMode():
                loaded = torch.load(path, weights_only=True)
        else:
            loaded = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:
        raise _unreadable(path, error) from error
    finally:
        log.setLevel(level)
    return _state_dict(path, loaded)


def _unreadable(path: Path, error: Exception) -> InputError:
    reason = str(error).strip().partition("\n")[0][:200] or type(error).__name__
    return InputError(
        f"{path}: cannot be read as a PyTorch checkpoint ({reason}). Only tensors are accepted (weights_only); "
        "convert the model to safetensors if you trust it."
    )


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    for candidate in (
        loaded,
        *(loaded.get(key) for key in ("state_dict", "model") if isinstance(loaded, dict)),
    ):
        if isinstance(candidate, dict) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
            names = {str(key): value for key, value in candidate.items() if isinstance(key, str | int)}
            if len(names) != len(candidate):
                raise InputError(f"{path}: holds tensors whose names are no words, or two of one name")
            for name in names:
                if not is_text(name):
                    raise InputError(f"{path}: the tensor name {name[:100]!r} is no valid Unicode")
            return names
    raise InputError(f"{path}: holds no state dict (a mapping from names to tensors)")
