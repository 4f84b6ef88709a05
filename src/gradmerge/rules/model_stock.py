"""Model Stock: the distance from the base follows from the angles between the models."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor

from .measures import DELTA_PRODUCTS, spanned, square
from .spec import Help, rule

_TINY = 1e-6


def _by_row(base: Tensor, tuned: Sequence[Tensor]) -> Tensor:
    """Model Stock for every vector along the last axis, each with its angle."""
    shape = base.shape or (1,)
    deltas = [(model - base).reshape(shape).double() for model in tuned]
    norms = [delta.norm(dim=-1, keepdim=True) for delta in deltas]
    cosine = torch.zeros_like(norms[0])
    pairs = list(itertools.combinations(range(len(deltas)), 2))
    for i, j in pairs:
        dot = (deltas[i] * deltas[j]).sum(-1, keepdim=True)
        cosine += (dot / (norms[i] * norms[j]).clamp_(min=_TINY)).clamp_(-1, 1) / len(pairs)
    divisor = 1 + (len(deltas) - 1) * cosine
    share = torch.where(divisor.abs() < _TINY, 0.0, cosine / divisor)  # t / T
    step = share * torch.stack(deltas).sum(0)
    return step.reshape(base.shape).to(base.dtype).add_(base)


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
    tuned: Sequence[Tensor],
    products: Sequence[float] | None = None,
    *,
    filter_wise: Annotated[bool, Help("use an angle per vector along the last axis instead of one per tensor")] = False,
) -> Tensor:
    """θ_0 + (t/T) Σ Δ_t with t = T c / (1 + (T − 1) c), c the mean cosine of the angles between the Δ_t.

    If the models agree (c = 1) the result is their mean. If the Δ_t are orthogonal (c = 0) they count as noise and the
    result is the base. Meant for models that were fine-tuned on the same task.
    """
    count = len(tuned)
    if count < 2:
        raise ValueError("needs at least two fine-tuned models, because it uses the angles between them")
    if filter_wise:
        return _by_row(base, tuned)
    assert products is not None
    inner = square(products)
    norms = inner.diagonal().sqrt().tolist()
    cosines = [
        max(-1.0, min(1.0, float(inner[i, j]) / max(norms[i] * norms[j], _TINY)))
        for i, j in itertools.combinations(range(count), 2)
    ]
    cosine = math.fsum(cosines) / len(cosines)
    divisor = 1 + (count - 1) * cosine
    share = 0.0 if abs(divisor) < _TINY else cosine / divisor
    return spanned(base, tuned, [share] * count)
