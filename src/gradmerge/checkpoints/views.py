"""A checkpoint seen through another: with other names, shapes or values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor

from .checkpoint import Buffers, Checkpoint


class View(Checkpoint):
    """Another checkpoint, as it is or with other names. What derives from it may change ``tensors`` and ``read``."""

    def __init__(self, inner: Checkpoint, stored: Mapping[str, str] | None = None) -> None:
        """``stored`` are the tensors, each with its name in the other one; by default all, as they are."""
        super().__init__(
            inner.label, folder=inner.folder, config=inner.config, hub_id=inner.hub_id, modules=inner.modules
        )
        self.inner = inner
        self.kind = inner.kind
        self.notes = inner.notes
        self.stored = {name: name for name in inner.tensors} if stored is None else dict(stored)
        self.tensors = {name: inner.tensors[own] for name, own in self.stored.items()}

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        return self.inner.read(self.stored[name], start, stop, buffers, slot)

    def will_need(self, name: str) -> None:
        if name in self.stored:
            self.inner.will_need(self.stored[name])

    def files(self) -> list[Path]:
        return self.inner.files()

    def close(self) -> None:
        self.inner.close()


def beneath(checkpoint: Checkpoint) -> Iterator[Checkpoint]:
    """A checkpoint, and those that it is a view of, or an adapter on top of."""
    below: Checkpoint | None = checkpoint
    while below is not None:
        yield below
        below = getattr(below, "inner", None) or getattr(below, "base", None)


def is_same(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints are the same files."""
    return one is other or (type(one) is type(other) and bool(one.files()) and one.files() == other.files())


def folders_of(checkpoint: Checkpoint) -> list[Path]:
    """The folder of a checkpoint, and of those beneath it."""
    return [below.folder for below in beneath(checkpoint) if below.folder is not None]
