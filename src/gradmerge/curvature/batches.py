"""Batches: mappings of keyword arguments with `labels`, or sequences that end with them. Also memory that runs out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError, MachineError
from ..progress import Progress


class Again:
    """Batches that can be gone through more than once: they are made anew each time."""

    def __init__(self, make: Callable[[], Iterable[Any]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return iter(self._make())


class Placed(Again):
    """Batches that say where in the data they begin: each comes with the place of its first example."""

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self._make())

    def with_places(self) -> Iterator[tuple[int, Any]]:
        return iter(self._make())


def with_places(batches: Iterable[Any], first: int) -> Iterator[tuple[int, Any]]:
    """Each batch with the place of its first example; without a word of its own, it follows on the one before."""
    if isinstance(batches, Placed):
        yield from batches.with_places()
        return
    for batch in batches:
        yield first, batch
        first += examples_in(batch)


def watched(batches: Iterable[Any], progress: Progress, what: str) -> Iterable[Any]:
    """The batches, counted as they are gone through; those that can be gone through again still can."""

    def count() -> Iterator[Any]:
        progress.begin(what, length_hint(batches))
        for batch in batches:
            yield batch
            progress.advance(1)

    return count() if isinstance(batches, Iterator) else Again(count)


def values_of(batch: Any) -> Iterable[Any]:
    return batch.values() if isinstance(batch, Mapping) else batch


def examples_in(batch: Any) -> int:
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[-1]
    if not isinstance(labels, Tensor):
        labels = next(value for value in values_of(batch) if isinstance(value, Tensor))
    return len(labels)


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor changed."""
    if isinstance(batch, Mapping):
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return tuple(change(value) if isinstance(value, Tensor) else value for value in batch)


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on a device."""
    if not isinstance(batch, Mapping | Sequence) or isinstance(batch, str) or not batch:
        raise InputError(f"a batch is a mapping with labels or a tuple that ends with them, not {type(batch).__name__}")
    # What goes to the CPU without waiting may be read there before it has come.
    return _each(batch, lambda value: value.to(device, non_blocking=device.type != "cpu"))


def batch_rows(batch: Any, rows: slice | Tensor) -> Any:
    """Some examples of a batch; what has no axis of examples stays as it is."""
    examples = examples_in(batch)
    return _each(batch, lambda value: value[rows] if value.dim() and len(value) == examples else value)


def is_out_of_memory(error: BaseException) -> bool:
    says = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in says or "out of memory" in says


@contextlib.contextmanager
def enough_memory(examples: str) -> Iterator[None]:
    """Running out of memory is a MachineError: there is no smaller batch than these examples."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MachineError(
            f"out of memory with {examples}. Use shorter examples (--max-length), --dtype bfloat16, or a larger device."
        ) from None
