"""A model as it is, or scaled: for slices, which stack the layers of several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .spec import Help, each, rule


@rule(
    "passthrough",
    row=("s", "0", "I"),
    reference="Kim et al., SOLAR 10.7B: Scaling large language models with simple yet effective depth up-scaling, "
    "NAACL 2024",
    only_one_model=True,
)
def passthrough(
    tuned: Sequence[Tensor],
    *,
    scale: Annotated[float, Help("what every weight is multiplied by", per_model=True)] = 1.0,
) -> Tensor:
    """s θ_1, the one model as it is, or scaled.

    With slices, it stacks layers of several models, or some layers twice.
    """
    return tuned[0] * each(scale, tuned)[0]
