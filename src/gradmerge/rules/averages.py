"""Averages of models without curvature, and Model Stock."""

from __future__ import annotations

from typing import Annotated

import torch
from torch import Tensor

from .measures import DELTA_PRODUCTS, normalized, spanned, square
from .spec import Help, Numbers, Tensors, negative_weights, rule


@rule(
    "average",
    matching_form=("1/T", "I", "0"),
    reference="Wortsman et al., Model soups, ICML 2022",
    when={"base": "include_base"},
)
def average(
    tuned: Tensors,
    base: Tensor | None = None,
    *,
    include_base: Annotated[bool, Help("include the base in the mean")] = False,
) -> Tensor:
    """(1/T) Σ θ_t, the mean of the fine-tuned models.

    All models count equally; weighted-average takes weights.
    """
    models = [base, *tuned] if include_base and base is not None else list(tuned)
    total = models[0].clone()
    for model in models[1:]:
        total += model
    return total.div_(len(models))


@rule(
    "weighted-average",
    matching_form=("w_t / Σ w", "I", "0"),
    reference="Wortsman et al., Model soups, ICML 2022",
    optional={"base"},
    needs_float64=negative_weights,
)
def weighted_average(
    base: Tensor | None,
    tuned: Tensors,
    weights: Numbers,
    base_weight: float | None,
    *,
    normalize: Annotated[bool, Help("divide by the sum of the weights")] = True,
) -> Tensor:
    """Σ w_t θ_t / Σ w_t, a weighted average.

    The base takes part only if it has a weight (`base: {model: …, weight: …}`). With `normalize: false` the sum is not
    divided, so the weights should add up to 1.
    """
    if base is not None and base_weight is not None:
        tuned, weights = [*tuned, base], [*weights, base_weight]
    return spanned(None, tuned, normalized(weights) if normalize else weights)


_TINY = 1e-6


def _stock_share(inner: Tensor) -> Tensor:
    """t/T = c / (1 + (T − 1) c) from the inner products of the Δ_t: T × T, or T × T × rows."""
    norms = inner[range(len(inner)), range(len(inner))].sqrt()
    i, j = torch.triu_indices(len(inner), len(inner), 1)
    cosine = (inner[i, j] / (norms[i] * norms[j]).clamp_(min=_TINY)).clamp_(-1, 1).mean(0)
    divisor = 1 + (len(inner) - 1) * cosine
    return torch.where(divisor.abs() < _TINY, 0.0, cosine / divisor)


@rule(
    "model-stock",
    matching_form=("t/T, t by angles", "I", "0"),
    reference="Jang et al., Model Stock: all we need is just a few fine-tuned models, ECCV 2024",
    measures={"products": DELTA_PRODUCTS},
    when={"products": ("filter_wise", False)},
    granularity=lambda options: "rows" if options["filter_wise"] else "entries",
)
def model_stock(
    base: Tensor,
    tuned: Tensors,
    products: Numbers | None = None,
    *,
    filter_wise: Annotated[bool, Help("use an angle per vector along the last axis instead of one per tensor")] = False,
) -> Tensor:
    """θ_0 + (t/T) Σ Δ_t with t = T c / (1 + (T − 1) c), c the mean cosine of the angles between the Δ_t.

    If the models agree (c = 1) the result is their mean. If the Δ_t are orthogonal (c = 0) they count as noise and the
    result is the base. Meant for models that were fine-tuned on the same task.
    """
    if len(tuned) < 2:
        raise ValueError("needs at least two fine-tuned models, because it uses the angles between them")
    if not filter_wise:
        assert products is not None
        return spanned(base, tuned, [float(_stock_share(square(products)))] * len(tuned))
    deltas = [(model - base).reshape(base.shape or (1,)).double() for model in tuned]
    inner = torch.stack([torch.stack([(x * y).sum(-1, keepdim=True) for y in deltas]) for x in deltas])
    step = _stock_share(inner) * torch.stack(deltas).sum(0)
    return step.reshape(base.shape).to(base.dtype).add_(base)
