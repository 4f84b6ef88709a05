"""A checkpoint: named tensors that can be read a range of elements at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..display import OneLine
from ..io.reader import ITEM_SIZE, PositionalFile, TensorInfo, bytes_of
from ..text import count

TORCH_TYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
STORED_TYPES = {v: k for k, v in TORCH_TYPES.items()}


class Buffers:
    """One thread's read buffers, by slot, each as large as the largest block that went through it."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[Tensor, memoryview]] = {}

    def take(self, slot: str, nbytes: int) -> Tensor:
        return self.take_both(slot, nbytes)[0]

    def take_both(self, slot: str, nbytes: int) -> tuple[Tensor, memoryview]:
        """A slot's memory, as a tensor of bytes and as what files are read into."""
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
        """Where config, tokenizer and a default curvature lie; None for a lone file or a state dict."""
        self.config = config or {}
        self.hub_id = hub_id
        self.modules = modules
        """Folders of sentence-transformers' further modules, or of diffusers' parts; names there begin with FOLDER/."""
        self.notes: list[str] = []
        self.absent: frozenset[str] = frozenset()
        """Tensors of other models that are merged without this one."""
        self._files = list(files or [])
        self._memory: dict[str, Tensor] = dict(memory or {})
        for file in self._files:
            self._memory |= file.memory
        self._places = {name: (file, entry) for file in self._files for name, entry in file.entries.items()}
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(entry.dtype, entry.shape) for name, (_, entry) in self._places.items()
        }
        for name, tensor in self._memory.items():
            self.tensors[name] = TensorInfo(STORED_TYPES[tensor.dtype], tuple(tensor.shape))

    def _line(self) -> list[str]:
        return [self.label, self.kind, f"{len(self.tensors)} tensors", f"{count(self.parameters)} parameters"]

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, in its stored type.

        The result may lie in the slot's buffer: it is valid until the slot is read into again, and not to be changed.
        """
        if name in self._memory:
            return self._memory[name].detach().reshape(-1)[start:stop].cpu()
        file, entry = self._places[name]
        size = ITEM_SIZE[entry.dtype]
        buffer, memory = buffers.take_both(slot, (stop - start) * size)
        if stop > start:
            file.read_into(memory, entry.start + start * size)
        return buffer.view(TORCH_TYPES[entry.dtype])

    def will_need(self, name: str) -> None:
        """Ask the operating system to start reading a tensor."""
        if name in self._places:
            file, entry = self._places[name]
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
