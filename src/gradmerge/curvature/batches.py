"""Batches: mappings of keyword arguments with `labels`, or sequences that end with the labels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


class Again:
    """Batches that can be gone through more than once: they are made anew each time."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


def examples_in(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[-1]
    if not isinstance(labels, Tensor):
        labels = next(value for value in values if isinstance(value, Tensor))
    return len(labels)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device."""

    def move(value: Any) -> Any:
        return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

    if isinstance(batch, Mapping):
        return {name: move(value) for name, value in batch.items()}
    return tuple(move(value) for value in batch)


def batch_rows(batch: Any, rows: slice) -> Any:
    """Some examples of a batch; what has no axis of examples stays as it is."""
    examples = examples_in(batch)

    def cut(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == examples else value

    if isinstance(batch, Mapping):
        return {name: cut(value) for name, value in batch.items()}
    return tuple(cut(value) for value in batch)
