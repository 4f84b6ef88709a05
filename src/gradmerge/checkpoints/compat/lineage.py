"""Estimate from a sample of the weight matrices whether one model was fine-tuned from another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...notes import Kind, Note
from ...text import count
from ..checkpoint import Buffers, Checkpoint

#: Fine-tuning moves weight matrices by a few hundredths of their norm, long training on other data by a few tenths.
#: Unrelated matrices are about √2 apart.
UNRELATED_DISTANCE = 0.7
#: The sample: at most 64 matrices and 16,384 entries from the middle of each, about a million entries per model.
MAX_MATRICES = 64
SAMPLE = 1 << 14


@dataclass(frozen=True)
class Lineage:
    """How far θ_t is from θ_0."""

    distance: float
    """‖θ_t − θ_0‖ / ‖θ_0‖, or 0 if it is undefined."""
    cosine: float
    sampled: int
    """How many entries were compared."""


def lineage(first: Checkpoint, other: Checkpoint, names: Sequence[str]) -> Lineage:
    """Compare the matrices among ``names``, which both models have. Each sample counts for its whole matrix."""
    ours = theirs = product = 0.0
    sampled = 0
    buffers = Buffers()
    matrices = [name for name in names if len(first.tensors[name].shape) >= 2 and first.tensors[name].numel]
    number = min(MAX_MATRICES, len(matrices))
    for name in (matrices[i * len(matrices) // number] for i in range(number)):
        numel = first.tensors[name].numel
        length = min(SAMPLE, numel)
        start = (numel - length) // 2
        a = first.read(name, start, start + length, buffers, "ours").double()
        b = other.read(name, start, start + length, buffers, "theirs").double()
        # Sums of products instead of `@`, which would start every thread of the machine for microseconds of work.
        ours += float((a * a).sum()) * numel / length
        theirs += float((b * b).sum()) * numel / length
        product += float((a * b).sum()) * numel / length
        sampled += length
    square, norms = ours + theirs - 2 * product, math.sqrt(ours) * math.sqrt(theirs)
    distance = math.sqrt(max(0.0, square) / ours) if ours and math.isfinite(square) else 0.0
    return Lineage(distance, product / norms if norms else 0.0, sampled)


def lineage_note(first: Checkpoint, other: Checkpoint, found: Lineage, first_is_base: bool) -> Note | None:
    """Return a warning if a model is too far from its supposed base."""
    if found.distance < UNRELATED_DISTANCE:
        return None
    base = first.label if first_is_base else f"the same base as {first.label}"
    text = (
        f"WARNING: {other.label} may not be fine-tuned from {base}: its weight matrices differ from those of "
        f"{first.label} by {found.distance:.2f} times their norm, with a cosine of {found.cosine:.2f} (on a sample of "
        f"{count(found.sampled)} entries). After fine-tuning these are near 0 and 1. Models without a common base do "
        "not merge: check that these are the models you mean."
    )
    return Note(text, Kind.STRANGERS, distance=found.distance, cosine=found.cosine)
