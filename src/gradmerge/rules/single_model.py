"""Rules for one model: passthrough, NearSwap, Arcee Fusion, and samples from the posterior of a merged model."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .measures import Ranked
from .sparse import Seed
from .spec import Help, Numbers, Tensors, per_model, rule


@rule(
    "passthrough",
    matching_form=("1", "I", "0"),
    reference="Goddard et al., Arcee's MergeKit, EMNLP 2024",
    only_one_model=True,
    propagates_nonfinite=False,
)
def passthrough(
    tuned: Tensors, *, scale: Annotated[float, Help("factor of the model's entries", per_model=True)] = 1.0
) -> Tensor:
    """scale · θ_1, the tensors of one model.

    Used to stack layers of several models, or to scale tensors.
    """
    factor = per_model(scale, tuned)[0]
    return tuned[0].clone() if factor == 1 else tuned[0] * factor


@rule(
    "nearswap",
    matching_form=("1", "0", "min(1, t/|Δ|)"),
    reference="alchemonaut, QuartetAnemoi-70B-t0.0001, Hugging Face 2024",
    only_one_model=True,
)
def nearswap(
    base: Tensor,
    tuned: Tensors,
    *,
    t: Annotated[float, Help("entries that differ by at most t are replaced", ge=0)] = 1e-4,
) -> Tensor:
    """θ_0 + min(1, t/|Δ|) Δ, which moves every entry of the base toward one model by at most t.

    Differences below 1e-6 count as 1e-6.
    """
    delta = tuned[0] - base
    return delta.mul_((t / delta.abs().clamp_(min=1e-6)).clamp_(max=1.0)).add_(base)


def importance(base: Tensor, tuned: Tensors) -> Tensor:
    """|Δ| · KL(softmax θ_1 ‖ softmax θ_0), with the softmax of each vector along the last axis.

    The divergence is of the order of Δ², so it is computed in float64.
    """
    model, small = tuned[0], 1e-8
    if not model.dim():
        return torch.zeros_like(model)
    p, q = (x.double().softmax(-1).add_(small) for x in (model, base))
    divergence = q.div_(p).log_().neg_().mul_(p).sum(-1, keepdim=True).clamp_(min=0)  # negative only by rounding
    return (model - base).abs_().mul_(divergence.to(model.dtype))


def _quartile_ranks(entries: int) -> list[int]:
    """The ranks of the lower quartile, the median and the upper quartile."""
    return [entries - int(share * (entries - 1)) for share in (0.25, 0.5, 0.75)]


@rule(
    "arcee-fusion",
    matching_form=("1", "0", "0/1 mask of the most important entries"),
    reference="Goddard et al., Arcee's MergeKit, EMNLP 2024 (arcee_fusion)",
    only_one_model=True,
    measures={"quartiles": Ranked(importance, _quartile_ranks)},
    granularity="rows",
    propagates_nonfinite=False,
)
def arcee_fusion(base: Tensor, tuned: Tensors, quartiles: Numbers) -> Tensor:
    """θ_0 + m Δ, where m keeps the entries whose importance exceeds the median by 1.5 interquartile ranges.

    The importance of an entry is |Δ| · KL(softmax θ_1 ‖ softmax θ_0). The divergence is that of the vector along the
    last axis which contains the entry. The quartiles are over all entries of the tensor.
    """
    lower, median, upper = torch.tensor(quartiles, dtype=base.dtype)
    taken = importance(base, tuned) >= median + 1.5 * (upper - lower)
    return torch.where(taken, tuned[0], base)


@rule(
    "posterior-sample",
    matching_form=("1", "0", "1"),
    reference="Daheim et al., Model Merging by Uncertainty-Based Gradient Matching, ICLR 2024",
    only_one_model=True,
    needs_float64=lambda weights, options: True,
)
def posterior_sample(
    tuned: Tensors,
    curvature: Tensors,
    damping: float,
    normal: Tensors,
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
