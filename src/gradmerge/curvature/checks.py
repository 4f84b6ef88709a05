"""When the ways that were chosen for a model's layers are held against autograd once more.

A way that fits the first examples may not fit later ones: a weight may be used elsewhere too when a text is long, or axes
may be mixed up in a manner that does not show while one of them is 1. So the first few shapes of batches are all checked,
later ones as far as that costs next to nothing, and whatever the shape, a batch now and then.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .batches import examples_in

#: So many shapes are checked as they come.
SHAPES = 4
#: Later ones are, as long as there is no more than one check in so many batches.
BATCHES = 256
#: Whatever its shape, a batch is checked when its number is this one, four times it, sixteen times, …
FIRST = 16


@dataclass
class Checks:
    """What has been checked of the batches so far."""

    shapes: set[Hashable] = field(default_factory=set)
    """Shapes that the ways were right for."""
    batches: int = 0
    again: int = field(default_factory=lambda: FIRST)
    """The number of the next batch that is checked whatever its shape."""
    count: int = 0
    skipped: bool = False
    """A batch was measured although its shape had not been checked."""

    def due(self, shape: Hashable) -> bool:
        """Whether the next batch, which has this shape, is to be checked before it is measured."""
        self.batches += 1
        if self.batches == self.again:
            self.again *= 4
            return True
        return shape not in self.shapes and (len(self.shapes) < SHAPES or self.count * BATCHES < self.batches)

    def passed(self, shape: Hashable) -> None:
        self.shapes.add(shape)
        self.count += 1


def shape_of(batch: Any) -> Hashable:
    """The shapes of a batch's tensors, where all numbers of examples are alike but 1."""
    examples = examples_in(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
    return examples > 1, *(shape[1:] if shape[:1] == (examples,) else ("all", *shape) for shape in shapes)
