"""A checkpoint seen through another: with other names, shapes or values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from .model import Buffers, Checkpoint


class View(Checkpoint):
    """Another checkpoint, as it is. What derives from it changes ``tensors`` and what ``read`` gives."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(
            inner.label, folder=inner.folder, config=inner.config, hub_id=inner.hub_id, modules=inner.modules
        )
        self.inner = inner
        self.kind = inner.kind
        self.notes = inner.notes
        self.tensors = dict(inner.tensors)

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        return self.inner.read(name, start, stop, buffers, slot)

    def will_need(self, name: str) -> None:
        self.inner.will_need(name)

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
