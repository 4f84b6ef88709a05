"""What an adapter comes to hold of each tensor: nothing, two factors, or the tensor itself; in a file for each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.checkpoint import STORED_TYPES, Buffers, Checkpoint
from ...errors import InputError, MachineError
from ...io.reader import TensorFile, bytes_of, header_bytes
from ...io.writer import ShardWriter

FOLDER = "parts"
#: Elements that are copied at once.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Part:
    """A tensor's part of the adapter, in its file."""

    path: Path
    keys: tuple[str, ...]
    """A and B, or the tensor under `whole`; none where it has not changed."""
    norm: float
    """The squared Frobenius norm of its change."""
    lost: float
    """The same of what the factors lack."""
    rank: int

    @property
    def share(self) -> float:
        return self.lost / self.norm if self.norm else 0.0

    @property
    def is_whole(self) -> bool:
        return self.keys == ("whole",)


def write_part(path: Path, tensors: Mapping[str, Tensor], norm: float = 0.0, lost: float = 0.0) -> Part:
    """Write a part; its file is there whole or not at all."""
    rank = tensors["A"].shape[0] if "A" in tensors else 0
    facts = json.dumps({"norm": norm, "lost": lost, "rank": rank})
    described = {key: (STORED_TYPES[value.dtype], tuple(value.shape)) for key, value in tensors.items()}
    header, _ = header_bytes(described, {"facts": facts})
    unfinished = path.with_suffix(".unfinished")
    try:
        path.parent.mkdir(exist_ok=True)
        with unfinished.open("wb") as file:
            file.write(header)
            for value in tensors.values():
                file.write(bytes_of(value.contiguous()))
        unfinished.rename(path)
    except OSError as error:
        raise MachineError(f"{path}: writing failed: {error.strerror}") from error
    return Part(path, tuple(tensors), norm, lost, rank)


def read_part(path: Path) -> Part | None:
    """A part that an earlier run has finished."""
    try:
        file = TensorFile(path)
    except (InputError, OSError):
        return None
    file.close()
    facts = json.loads(file.metadata["facts"])
    return Part(path, tuple(sorted(file.entries)), facts["norm"], facts["lost"], facts["rank"])


def join_parts(folder: Path, parts: Mapping[str, tuple[Part, str]]) -> dict[str, int]:
    """One file adapter_model.safetensors: key → the part, and its key there. Bytes of it."""
    places = {key: (part.path, own) for key, (part, own) in parts.items()}
    infos: dict[str, tuple[str, tuple[int, ...]]] = {}
    for key, (path, own) in sorted(places.items()):
        file = TensorFile(path)
        file.close()
        infos[key] = (file.entries[own].dtype, file.entries[own].shape)
    # PEFT looks for one file, however large.
    writer = ShardWriter(folder, "adapter_model", infos, 1 << 62, {"format": "pt"})
    try:
        writer.open()
        buffers = Buffers()
        for key, (path, own) in places.items():
            with Checkpoint(str(path), files=[TensorFile(path)]) as part:
                numel = part.tensors[own].numel
                for start in range(0, numel, CHUNK):
                    block = part.read(own, start, min(start + CHUNK, numel), buffers)
                    writer.write(key, start, bytes_of(block))
        writer.finish()
    finally:
        writer.close()
    return writer.sizes


def squares(values: Tensor) -> float:
    return float(values.to(torch.float64).square().sum())
