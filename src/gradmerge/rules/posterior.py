"""Samples from the posterior of a merged model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor

from .sparse import Seed
from .spec import Help, rule


def _always(weights: Sequence[float], options: Mapping[str, Any]) -> bool:
    return True


@rule(
    "posterior-sample",
    matching_form=("1", "0", "1"),
    reference="Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024",
    only_one_model=True,
    needs_float64=_always,
)
def posterior_sample(
    tuned: Sequence[Tensor],
    curvature: Sequence[Tensor],
    damping: float,
    normal: Sequence[Tensor],
    *,
    temperature: Annotated[float, Help("factor of the variance", ge=0)] = 1.0,
    sample: Annotated[int, Help("number of the sample: others are independent", ge=0)] = 0,
    seed: Seed = 0,
) -> Tensor:
    """θ_1 + √(temperature / (F_1 + δ)) z with z ~ N(0, I): a sample from the posterior of a merged model.

    The model is a merge written with `output.curvature: true`, whose curvature is the precision H̄ of the posterior.
    Entries whose F_1 + δ is 0 have no finite variance and stay at θ_1. Set `damping`: with `auto`, δ is 1e-10. The
    random numbers depend only on the seed, the sample, the tensor's name and the entry's position.
    """
    precision = curvature[0] + damping
    spread = torch.where(precision > 0, (temperature / precision).sqrt(), 0.0)
    return normal[0] * spread + tuned[0]
