"""Whether models stem from one another, judged on a sample of their weight matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...notes import Kind, Note
from ...text import count
from ..checkpoint import Buffers, Checkpoint

#: Fine-tuning moves weight matrices by a few hundredths of their own size, long training on other data by a few tenths;
#: matrices that have nothing to do with one another are about √2 apart.
FAR = 0.7
#: At most this many matrices are compared, and this many entries from the middle of each: a million per model.
MATRICES = 64
RUN = 1 << 14


@dataclass(frozen=True)
class Kinship:
    """How far θ_t is from θ_0: ‖θ_t − θ_0‖ / ‖θ_0‖ (0 where that cannot be told), and the cosine between them."""

    distance: float
    cosine: float
    looked_at: int


def kinship(first: Checkpoint, other: Checkpoint, names: Sequence[str]) -> Kinship:
    """Compare the matrices among ``names``, which both models have; each sample stands for its whole matrix."""
    ours = theirs = product = 0.0
    looked_at = 0
    buffers = Buffers()
    matrices = [name for name in names if len(first.tensors[name].shape) >= 2 and first.tensors[name].numel]
    most = min(MATRICES, len(matrices))
    for name in (matrices[place * len(matrices) // most] for place in range(most)):
        numel = first.tensors[name].numel
        length = min(RUN, numel)
        start = (numel - length) // 2
        a = first.read(name, start, start + length, buffers, "ours").double()
        b = other.read(name, start, start + length, buffers, "theirs").double()
        # Sums of products, not `@`: it wakes every thread of the machine for a few microseconds of work.
        ours += float((a * a).sum()) * numel / length
        theirs += float((b * b).sum()) * numel / length
        product += float((a * b).sum()) * numel / length
        looked_at += length
    square, norms = ours + theirs - 2 * product, math.sqrt(ours) * math.sqrt(theirs)
    distance = math.sqrt(max(0.0, square) / ours) if ours and math.isfinite(square) else 0.0
    return Kinship(distance, product / norms if norms else 0.0, looked_at)


def kinship_note(first: Checkpoint, other: Checkpoint, found: Kinship, first_is_base: bool) -> Note | None:
    """A warning with the numbers if a model is too far from the one that it should stem from."""
    if found.distance < FAR:
        return None
    what = first.label if first_is_base else f"the same base as {first.label}"
    text = (
        f"WARNING: {other.label} may not stem from {what}: its weight matrices differ from those of {first.label} "
        f"by {found.distance:.2f} times their size (‖difference‖ / ‖{first.label}‖), and their cosine is "
        f"{found.cosine:.2f} (on a sample of {count(found.looked_at)} entries). After fine-tuning these are near 0 and "
        "1. A merge of models without a common base is noise: check that these are the models you mean."
    )
    return Note(text, Kind.STRANGERS, distance=found.distance, cosine=found.cosine)
