"""Rows that are in two data sets."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ..curvature.batches import examples_in, values_of
from ..curvature.losses import MASKED
from ..storage.bytesof import bytes_of


def in_both(one: Iterable[Any], other: Iterable[Any]) -> int:
    """How many rows of one there are, identically, in the other too: the same input with the same label."""
    known = set(_digests(other))
    return sum(number for digest, number in Counter(_digests(one)).items() if digest in known)


def _digests(batches: Iterable[Any]) -> Iterator[bytes]:
    """A digest of every row, the same whatever it was padded to."""
    for batch in batches:
        mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        tensors = [(value is labels, value.cpu()) for value in values_of(batch) if isinstance(value, Tensor)]
        examples = examples_in(batch)
        for row in range(examples):
            digest = hashlib.blake2b(digest_size=16)
            for is_label, value in tensors:
                entry = value[row] if value.dim() and len(value) == examples else value
                # The labels of a text-to-text model have a padding of their own, though perhaps the same width.
                if mask is not None and not is_label and entry.shape == mask[row].shape:
                    entry = entry[mask[row].cpu().bool()]
                elif entry.dim() == 1 and not entry.is_floating_point():
                    entry = entry[entry != MASKED]
                digest.update(f"{entry.dtype} {tuple(entry.shape)} ".encode())
                digest.update(bytes_of(entry.contiguous()))
            yield digest.digest()
