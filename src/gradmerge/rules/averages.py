"""Averages of models without curvature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from torch import Tensor

from .spec import Help, negative_weights, rule


@rule(
    "average",
    matching_form=("1/T", "I", "0"),
    reference="Wortsman et al., Model soups, ICML 2022",
    when={"base": "include_base"},
)
def average(
    tuned: Sequence[Tensor],
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
    tuned: Sequence[Tensor],
    weights: Sequence[float],
    base_weight: float | None,
    *,
    normalize: Annotated[bool, Help("divide by the sum of the weights")] = True,
) -> Tensor:
    """Σ w_t θ_t / Σ w_t, a weighted average.

    The base takes part only if it has a weight (`base: {model: …, weight: …}`). With `normalize: false` the sum is not
    divided, so the weights should add up to 1.
    """
    models = list(zip(tuned, weights, strict=True))
    if base is not None and base_weight is not None:
        models.append((base, base_weight))
    whole = math.fsum(weight for _, weight in models) if normalize else 1.0
    # Weights such as 0.1, 0.2 and -0.3 sum to 0 up to rounding.
    if normalize and abs(whole) <= 1e-12 * math.fsum(abs(weight) for _, weight in models):
        raise ValueError(
            "the weights sum to 0, so the average is not defined; change them, or set options.normalize: false"
        )
    (first, weight), *others = models
    total = first * (weight / whole)
    for model, weight in others:
        total.add_(model, alpha=weight / whole)
    return total
