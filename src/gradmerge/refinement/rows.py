"""Rows of a dataset as batches: select, hold out, sample and compare them."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..curvature.batches import batch_rows, examples_in, values_of
from ..curvature.losses import MASKED
from ..errors import InputError
from ..io.reader import bytes_of

#: One row in this many is held out.
HELD_OUT_ONE_IN = 10


def as_batches(name: str, batches: Any) -> Sequence[Any]:
    """Return batches that can be read several times. Raises InputError if they have no row."""
    ready = batches if isinstance(batches, Sequence) and not isinstance(batches, str) else list(batches)
    if not count_rows(ready):
        raise InputError(f"{name}: there are no rows")
    return ready


def count_rows(batches: Sequence[Any]) -> int:
    return sum(map(examples_in, batches))


class TaskRows(NamedTuple):
    """Rows of one task in batches."""

    fit: Sequence[Any]
    held_out: Sequence[Any]

    @property
    def number(self) -> int:
        """The number of all rows."""
        return count_rows(self.fit) + count_rows(self.held_out)


def hold_out(name: str, batches: Sequence[Any]) -> TaskRows:
    """Hold out a random tenth of the rows, at least one row."""
    count = count_rows(batches)
    if count < 2:
        raise InputError(f"{name}: has one row, but needs at least two, since one of them is held out")
    order = _permutation(count, "held out")
    held_out = max(1, count // HELD_OUT_ONE_IN)
    return TaskRows(select_rows(batches, sorted(order[held_out:])), select_rows(batches, sorted(order[:held_out])))


def sample_rows(batches: Sequence[Any], limit: int) -> Sequence[Any]:
    """At most ``limit`` random rows of the batches, in their order."""
    count = count_rows(batches)
    return batches if count <= limit else select_rows(batches, sorted(_permutation(count, "sample")[:limit]))


def cut_batch(batch: Any, tokens: int) -> list[Any]:
    """Split a batch of texts into smaller ones with at most so many tokens, padding included, or one row each."""
    if not isinstance(batch, Mapping) or "input_ids" not in batch or batch["input_ids"].numel() <= tokens:
        return [batch]
    count, length = batch["input_ids"].shape
    size = max(1, tokens // length)
    return [batch_rows(batch, slice(first, first + size)) for first in range(0, count, size)]


#: Inputs of texts that can be padded further, because a mask says what is padding.
_PADDED = ("input_ids", "attention_mask", "token_type_ids", "labels")


def positions_in(batch: Any) -> int:
    """Tokens of a batch with padding, or patches of its images, roughly."""
    if isinstance(batch, Mapping) and "input_ids" in batch:
        return int(batch["input_ids"].numel())
    images = [value for value in values_of(batch) if isinstance(value, Tensor) and value.dim() == 4]
    return sum(len(value) * value.shape[-1] * value.shape[-2] // 64 for value in images) or examples_in(batch)


def join_batches(batches: Sequence[Any], max_positions: int, pad_token: int) -> Iterator[tuple[list[int], Any]]:
    """Join batches that follow one another: small passes leave a GPU idle.

    Args:
        batches: The batches.
        max_positions: The limit of tokens or patches in a joined batch; 0 joins none.
        pad_token: The token that pads shorter texts.

    Yields:
        The numbers of the batches, and the joined batch with their rows in order.
    """
    numbers: list[int] = []
    joined: Any = None
    for number, batch in enumerate(batches):
        larger = _join(joined, batch, max_positions, pad_token) if numbers and max_positions else None
        if numbers and larger is None:
            yield numbers, joined
            numbers = []
        numbers, joined = [*numbers, number], batch if larger is None else larger
    if numbers:
        yield numbers, joined


def _join(batch: Any, other: Any, max_positions: int, pad_token: int) -> Any:
    """One batch with the rows of two; None if it would be too large, or if their inputs differ in kind."""
    if not isinstance(batch, Mapping) or not isinstance(other, Mapping) or batch.keys() != other.keys():
        return None
    joined = {}
    for name, first in batch.items():
        second = other[name]
        if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.dim() != second.dim():
            return None
        if first.shape[1:] != second.shape[1:]:
            if first.dim() != 2 or name not in _PADDED or "attention_mask" not in batch:
                return None
            length = max(first.shape[1], second.shape[1])
            value = {"input_ids": pad_token, "labels": MASKED}.get(name, 0)
            first, second = (F.pad(part, (0, length - part.shape[1]), value=value) for part in (first, second))
        joined[name] = torch.cat([first, second])
    return joined if positions_in(joined) <= max_positions else None


def select_rows(batches: Sequence[Any], rows: Sequence[int]) -> Sequence[Any]:
    """The rows of batches with these indices, which must be sorted."""
    sizes = [examples_in(batch) for batch in batches]
    chosen = torch.zeros(sum(sizes), dtype=torch.bool)
    chosen[rows] = True
    selected = []
    for batch, mask in zip(batches, chosen.split(sizes), strict=True):
        if bool(mask.any()):
            device = next(value.device for value in values_of(batch) if isinstance(value, Tensor))
            selected.append(batch_rows(batch, mask.nonzero()[:, 0].to(device)))
    return selected


def count_common_rows(batches: Iterable[Any], other: Iterable[Any]) -> int:
    """How many rows also occur in ``other``, with the same input and the same label."""
    known = set(_digests(other))
    return sum(number for digest, number in Counter(_digests(batches)).items() if digest in known)


def _digests(batches: Iterable[Any]) -> Iterator[bytes]:
    """A digest of every row, which does not depend on padding."""
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        tensors = [(value is labels, value.cpu()) for value in values_of(batch) if isinstance(value, Tensor)]
        examples = examples_in(batch)
        for row in range(examples):
            digest = hashlib.blake2b(digest_size=16)
            for is_label, value in tensors:
                entry = value[row] if value.dim() and len(value) == examples else value
                # Labels of a text-to-text model have a padding of their own, even if they are as wide as the mask.
                if mask is not None and not is_label and entry.shape == mask[row].shape:
                    entry = entry[mask[row].cpu().bool()]
                elif entry.dim() == 1 and not entry.is_floating_point():
                    entry = entry[entry != MASKED]
                digest.update(f"{entry.dtype} {tuple(entry.shape)} ".encode())
                digest.update(bytes_of(entry.contiguous()))
            yield digest.digest()


def _permutation(count: int, purpose: str) -> list[int]:
    seed = int.from_bytes(hashlib.sha256(f"gradmerge {purpose}".encode()).digest()[:7], "little")
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
