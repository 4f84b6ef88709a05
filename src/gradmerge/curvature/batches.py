"""Batches: mappings of keyword arguments with `labels`, or sequences that end with the labels."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, MachineError
from ..progress import Progress
from .losses import MASKED


class IndexedBatches:
    """Batches that know the index of their first example in the data: ``make`` returns pairs (index, batch)."""

    def __init__(self, make: Callable[[], Iterable[tuple[int, Any]]]) -> None:
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return (batch for _, batch in self._make())

    def indexed(self) -> Iterator[tuple[int, Any]]:
        """Yield each batch with the index of its first example."""
        return iter(self._make())


def indexed(batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield each batch with the index of its first example; by default, batches follow one another."""
    if isinstance(batches, IndexedBatches):
        yield from batches.indexed()
        return
    first = 0
    for batch in batches:
        yield first, batch
        first += examples_in(batch)


def with_progress(batches: Iterable[Any], progress: Progress, what: str) -> Iterator[Any]:
    """Report progress per batch."""
    progress.begin(what, length_hint(batches))
    for batch in batches:
        yield batch
        progress.advance(1)


def values_of(batch: Any) -> Iterable[Any]:
    """Return the tensors, and what else is in a batch."""
    if not isinstance(batch, Mapping | Sequence) or isinstance(batch, str) or not batch:
        raise InputError(
            f"a batch must be a mapping with labels, or a tuple ending with them, not {type(batch).__name__}"
        )
    return batch.values() if isinstance(batch, Mapping) else batch


def examples_in(batch: Any) -> int:
    """Return the number of examples: the length of the labels, or else of the first tensor."""
    values = list(values_of(batch))
    values.insert(0, batch.get("labels") if isinstance(batch, Mapping) else batch[-1])
    lengths = [len(value) for value in values if isinstance(value, Tensor) and value.dim()]
    if not lengths:
        raise InputError("a batch has no tensor with an axis of examples")
    return lengths[0]


def _each(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the batch with ``change`` applied to every tensor."""
    if isinstance(batch, Mapping):
        return {name: change(value) if isinstance(value, Tensor) else value for name, value in batch.items()}
    return tuple(change(value) if isinstance(value, Tensor) else value for value in batch)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch on a device."""
    # A non-blocking copy to the CPU could be read before it is complete.
    return _each(batch, lambda value: value.to(device, non_blocking=device.type != "cpu"))


def batch_rows(batch: Any, rows: slice | Tensor) -> Any:
    """Return some examples of a batch. Tensors without an axis of examples do not change."""
    examples = examples_in(batch)
    return _each(batch, lambda value: value[rows] if value.dim() and len(value) == examples else value)


def is_out_of_memory(error: BaseException) -> bool:
    says = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in says or "out of memory" in says


@contextlib.contextmanager
def enough_memory(what: str = "a batch") -> Iterator[None]:
    """Turn running out of memory into a MachineError."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MachineError(
            f"out of memory with {what}. Use a smaller batch_size or max_length, dtype bfloat16, or a larger device; "
            "the result does not depend on batch_size."
        ) from error


def masks_of(model: nn.Module, batch: Any) -> dict[bool, Tensor | None]:
    """Return masks of tokens that are not padding: of the encoder under False, of the decoder under True."""
    if not isinstance(batch, Mapping):
        return {}
    return {False: batch.get("attention_mask"), True: _decoder_mask(model, batch)}


def sees_decoder(name: str) -> bool:
    """Return whether a layer sees the decoder's tokens: all in a decoder but keys and values of cross-attention."""
    crossing = any(word in name for word in ("EncDecAttention", "encoder_attn", "crossattention"))
    keys = name.removesuffix(".weight").rpartition(".")[2] in ("k", "v", "k_proj", "v_proj", "key", "value")
    return ("decoder." in name or name.startswith("lm_head")) and not (crossing and keys)


def _decoder_mask(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | None:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return batch.get("attention_mask")
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"]
    labels = batch.get("labels")
    return labels != MASKED if isinstance(labels, Tensor) and labels.dim() == 2 else None
