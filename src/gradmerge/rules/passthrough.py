"""One model, unchanged or scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .spec import Help, per_model, rule


@rule(
    "passthrough",
    matching_form=("1", "I", "0"),
    reference="Goddard et al., Arcee's MergeKit, EMNLP 2024",
    only_one_model=True,
    propagates_nonfinite=False,
)
def passthrough(
    tuned: Sequence[Tensor],
    *,
    scale: Annotated[float, Help("factor of the model's entries", per_model=True)] = 1.0,
) -> Tensor:
    """scale · θ_1, the tensors of one model.

    Used to stack layers of several models, or to scale tensors.
    """
    factor = per_model(scale, tuned)[0]
    return tuned[0].clone() if factor == 1 else tuned[0] * factor
