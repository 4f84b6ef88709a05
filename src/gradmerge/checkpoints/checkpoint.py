"""Checkpoints: named tensors that are read a range of elements at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..display import OneLine
from ..errors import InputError
from ..io.reader import ITEM_SIZE, PositionalFile, TensorInfo, bytes_of
from ..text import count, listed, nearest

TORCH_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
STORED_TYPES = {v: k for k, v in TORCH_TYPES.items()}


class Buffers:
    """The read buffers of one thread, by slot. A buffer grows to the largest block that was read into it."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[Tensor, memoryview]] = {}

    def take(self, slot: str, nbytes: int) -> Tensor:
        return self.take_both(slot, nbytes)[0]

    def take_both(self, slot: str, nbytes: int) -> tuple[Tensor, memoryview]:
        """Return the memory of a slot, as a tensor of bytes and as a memoryview for reading files into it."""
        tensor, memory = self._slots.get(slot, (None, memoryview(b"")))
        if tensor is None or len(memory) < nbytes:
            tensor = torch.empty(nbytes, dtype=torch.uint8)
            memory = bytes_of(tensor)
            self._slots[slot] = tensor, memory
        return (tensor, memory) if len(memory) == nbytes else (tensor[:nbytes], memory[:nbytes])


class Checkpoint(OneLine):
    """Named tensors in file order, from files, from memory, or from both."""

    kind = "checkpoint"

    def __init__(
        self,
        label: str,
        *,
        files: Sequence[PositionalFile] | None = None,
        memory: Mapping[str, Tensor] | None = None,
        folder: Path | None = None,
        config: dict[str, Any] | None = None,
        hub_id: str | None = None,
        modules: tuple[str, ...] = (),
    ) -> None:
        self.label = label
        """The model as the user wrote it."""
        self.folder = folder
        """The folder with config, tokenizer and default curvature; None for a single file or a state dict."""
        self.config = config or {}
        self.hub_id = hub_id
        self.modules = modules
        """Subfolders of sentence-transformers modules with weights. Their tensors are named FOLDER/NAME."""
        self.notes: list[str] = []
        self.absent: frozenset[str] = frozenset()
        """Tensors of other models that are merged without this model."""
        self._files = list(files or [])
        self._memory: dict[str, Tensor] = dict(memory or {})
        for file in self._files:
            self._memory |= file.memory
        self._entries = {name: (file, entry) for file in self._files for name, entry in file.entries.items()}
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(entry.dtype, entry.shape) for name, (_, entry) in self._entries.items()
        }
        for name, tensor in self._memory.items():
            self.tensors[name] = TensorInfo(STORED_TYPES[tensor.dtype], tuple(tensor.shape))

    def _line(self) -> list[str]:
        return [self.label, self.kind, f"{len(self.tensors)} tensors", f"{count(self.parameters)} parameters"]

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, in its stored type.

        The result can be a view of the slot's buffer. Do not change it, and do not use it after the next read into the
        same slot.
        """
        if name in self._memory:
            return self._memory[name].detach().reshape(-1)[start:stop].cpu()
        file, entry = self._entries[name]
        size = ITEM_SIZE[entry.dtype]
        buffer, memory = buffers.take_both(slot, (stop - start) * size)
        if stop > start:
            file.read_into(memory, entry.start + start * size)
        return buffer.view(TORCH_TYPES[entry.dtype])

    def read_whole(self, name: str) -> Tensor:
        info = self.tensors[name]
        return self.read(name, 0, info.numel, Buffers()).reshape(info.shape)

    def will_need(self, name: str) -> None:
        """Ask the operating system to read a tensor ahead."""
        if name in self._entries:
            file, entry = self._entries[name]
            file.will_need(entry.start, entry.nbytes)

    def files(self) -> list[Path]:
        return [file.path for file in self._files]

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self.tensors.values())

    @property
    def parameters(self) -> int:
        return sum(info.numel for info in self.tensors.values() if info.is_float)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class View(Checkpoint):
    """A checkpoint with other tensor names. Subclasses override ``tensors`` and ``read`` to change shapes or values."""

    def __init__(self, inner: Checkpoint, inner_names: Mapping[str, str] | None = None) -> None:
        """``inner_names`` maps each tensor to its name in ``inner``. The default is all tensors, unchanged."""
        super().__init__(
            inner.label, folder=inner.folder, config=inner.config, hub_id=inner.hub_id, modules=inner.modules
        )
        self.inner = inner
        self.kind = inner.kind
        self.notes = inner.notes
        self.inner_names = {name: name for name in inner.tensors} if inner_names is None else dict(inner_names)
        self.tensors = {name: inner.tensors[inner_name] for name, inner_name in self.inner_names.items()}

    def source(self, name: str) -> tuple[Checkpoint, str]:
        """Return the checkpoint that a tensor is read from, and its name there."""
        return self.inner, self.inner_names[name]

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        inner, inner_name = self.source(name)
        return inner.read(inner_name, start, stop, buffers, slot)

    def will_need(self, name: str) -> None:
        if name in self.tensors:
            inner, inner_name = self.source(name)
            inner.will_need(inner_name)

    def files(self) -> list[Path]:
        return self.inner.files()

    def close(self) -> None:
        self.inner.close()


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace the first prefix that matches."""
    prefix = next((prefix for prefix in rename if name.startswith(prefix)), None)
    return name if prefix is None else rename[prefix] + name[len(prefix) :]


class RenamedCheckpoint(View):
    """A checkpoint whose tensors get other prefixes."""

    def __init__(self, inner: Checkpoint, rename: Mapping[str, str], where: str = "rename") -> None:
        self._rename = dict(rename)
        for prefix in rename:
            if not any(name.startswith(prefix) for name in inner.tensors):
                raise InputError(
                    f"{where}: no tensor of {inner.label} begins with {prefix!r}{nearest(prefix, inner.tensors)}"
                )
        counts = Counter(renamed(name, rename) for name in inner.tensors)
        twice = [name for name, number in counts.items() if number > 1]
        if twice:
            raise InputError(f"{where}: several tensors of {inner.label} would get the same name:\n{listed(twice)}")
        super().__init__(inner, {renamed(name, rename): name for name in inner.tensors})

    def new_name(self, name: str) -> str:
        """Return the new name of a tensor, or of something that belongs to it."""
        return renamed(name, self._rename)


def unwrap_chain(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """Yield a checkpoint, the checkpoint it is a view of or an adapter on, and so on to the innermost."""
    inner: Checkpoint | None = checkpoint
    while inner is not None:
        yield inner
        inner = getattr(inner, "inner", None) or getattr(inner, "base", None)


def innermost(checkpoint: Checkpoint) -> Checkpoint:
    """Return the last checkpoint of the chain, whose folder has the config and tokenizer."""
    return list(unwrap_chain(checkpoint))[-1]


def is_same(first: Checkpoint, other: Checkpoint) -> bool:
    """Return whether two checkpoints are the same files, seen in the same way."""
    return first is other or (type(first) is type(other) and bool(first.files()) and first.files() == other.files())


def folders_of(checkpoint: Checkpoint) -> list[Path]:
    """Return the folders of all checkpoints in the chain."""
    return [inner.folder for inner in unwrap_chain(checkpoint) if inner.folder is not None]
