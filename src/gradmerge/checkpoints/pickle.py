"""Checkpoint files of `torch.save` (`.bin`, `.pt`), opened only on request and only with ``weights_only``."""

from __future__ import annotations

import contextlib
import io
import pickletools
import sys
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import PositionalFile, is_text
from ..io.small_files import require_unpackable
from ..text import first_line
from ..urls import count_local_copies
from .checkpoint import STORED_TYPES

SUFFIXES = {".bin", ".pt", ".pth", ".ckpt"}
#: Keys under which training programs store a state dict beside other state, such as the optimizer's.
WRAPPERS = ("state_dict", "model_state_dict", "model", "module", "net", "params")
#: Maximum length of the name of a global. torch takes quadratic time in this length to refuse one.
MAX_GLOBAL = 1000


class PickleFile(PositionalFile):
    """A ``torch.save`` file, mapped into memory. Files in PyTorch's old format are loaded."""

    def __init__(self, path: Path) -> None:
        if count_local_copies():
            from ..io.remote import download

            download([path])
        super().__init__(path)
        self.entries = {}
        try:
            sizes = _record_sizes(path)
            _check_globals(path)
            loaded = torch.load(path, weights_only=True, mmap=bool(sizes), map_location="cpu")
            tensors = _state_dict(path, loaded)
            for name, tensor in tensors.items():
                _check(path, name, tensor, sizes)
            # A tensor with strides of 0 can repeat one number any number of times.
            copied = [tensor for tensor in tensors.values() if not tensor.is_contiguous()]
            require_unpackable(path, sum(tensor.numel() * tensor.element_size() for tensor in copied))
            self.memory = {name: t.resolve_conj().resolve_neg().contiguous() for name, t in tensors.items()}
        except Exception as error:
            self.close()
            if isinstance(error, InputError | MemoryError):
                raise
            reason = first_line(error)[:200]
            raise InputError(
                f"{path}: cannot be read as a PyTorch checkpoint ({reason}). Only tensors are accepted (weights_only); "
                "convert the model to safetensors if you trust it."
            ) from error


def _record_sizes(path: Path) -> set[int]:
    """Return the sizes of an archive's records; empty for a file in the old format, which is no archive."""
    if not zipfile.is_zipfile(path):
        return set()
    with zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise InputError(f"{path}: is compressed, and cannot be mapped into memory. Save it again with torch.save.")
        orders = [archive.read(info) for info in infos if info.filename.endswith("/byteorder")]
    if any(order != sys.byteorder.encode() for order in orders):
        raise InputError(f"{path}: was saved on a machine with another byte order. Convert it to safetensors there.")
    return {info.file_size for info in infos}


def _check_globals(path: Path) -> None:
    """Refuse damaged pickles, and those with a global whose name is longer than any real one."""
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(path.open("rb"))
        pickles: list[IO[bytes]] = [file] * 5  # the legacy format stores five pickles before the data
        if zipfile.is_zipfile(path):
            archive = stack.enter_context(zipfile.ZipFile(path))
            pickles = [io.BytesIO(archive.read(name)) for name in archive.namelist() if name.endswith("data.pkl")]
        for pickled in pickles:
            try:
                for opcode, argument, _ in pickletools.genops(pickled):
                    if opcode.name == "GLOBAL" and len(str(argument)) > MAX_GLOBAL:
                        raise ValueError("a name is too long")
            except (ValueError, MemoryError, OverflowError) as error:
                reason = first_line(error)[:200]
                raise InputError(f"{path}: cannot be read as a PyTorch checkpoint ({reason})") from None


def _state_dict(path: Path, loaded: Any) -> dict[str, Tensor]:
    inner = [loaded.get(key) for key in WRAPPERS] if isinstance(loaded, dict) else []
    for candidate in (loaded, *inner):
        if isinstance(candidate, dict) and candidate and all(isinstance(v, Tensor) for v in candidate.values()):
            tensors = {str(key): value for key, value in candidate.items() if isinstance(key, str | int)}
            if len(tensors) != len(candidate) or not all(map(is_text, tensors)):
                raise InputError(f"{path}: has tensors whose names are not valid text, or two with the same name")
            return tensors
    raise InputError(f"{path}: has no state dict (a mapping from names to tensors)")


def _check(path: Path, name: str, tensor: Tensor, sizes: set[int]) -> None:
    """Refuse a tensor that cannot be merged, or whose storage does not have the size of a record of the file."""
    if tensor.dtype not in STORED_TYPES:
        raise InputError(f"{path}: tensor {name!r} has the type {tensor.dtype}, which cannot be merged")
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        raise InputError(f"{path}: tensor {name!r} is sparse, nested, or has no data; it cannot be merged")
    if sizes and tensor.numel() and tensor.untyped_storage().nbytes() not in sizes:
        raise InputError(f"{path}: tensor {name!r} does not have the size of its data; the file is damaged")
