"""Iso-C: make all singular values of Σ w_t Δ_t equal."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .measures import spanned
from .sparse import Scale
from .spec import extreme_weights, rule
from .svd import plain_mean, rounding, svd


@rule(
    "iso-c",
    matching_form=("w_t", "I", "0, all directions equal"),
    reference="Marczak et al., No task left behind: isotropic model merging, ICML 2025",
    granularity="tensor",
    needs_float64=extreme_weights,
    workspace=6,
)
def iso_c(base: Tensor, tuned: Sequence[Tensor], weights: Sequence[float], *, scale: Scale = 1.0) -> Tensor:
    """θ_0 + scale · σ̄ U Vᵀ for matrices, with U Σ Vᵀ = Σ w_t Δ_t and σ̄ the mean of its singular values.

    No direction counts more because several tasks share it. Directions where Σ w_t Δ_t is 0, such as those outside the
    rank of adapters, stay 0. Other tensors (vectors, convolutions) become θ_0 + (scale/T) Σ w_t Δ_t.

    Each matrix is decomposed on one thread or the device. The time grows with the cube of the width.
    """
    if base.dim() != 2 or min(base.shape) == 0:
        return plain_mean(base, tuned, weights, scale)
    u, sigma, vh = svd(spanned(None, [model - base for model in tuned], weights), rounding(base))
    return (u @ vh).mul_(float(sigma.mean()) * scale).add_(base) if len(sigma) else base.clone()
