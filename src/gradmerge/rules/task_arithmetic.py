"""Task arithmetic: add up the changes of the models."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from .sparse import Scale, summed
from .spec import Help, Numbers, Tensors, rule


@rule(
    "task-arithmetic",
    matching_form=("w_t", "I", "0"),
    reference="Ilharco et al., Editing models with task arithmetic, ICLR 2023",
)
def task_arithmetic(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
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
