"""Gradient matching and removal for a linear layer whose curvature is a sum of Kronecker products.

For X = [W b] (out × in + 1) a task's curvature is H_t X = G_t X A_t / T_t. The base's curvature has the same form or
is one number per entry. Their sum has no closed-form inverse, so these functions use conjugate gradients in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .spec import Numbers, Tensors

#: Conjugate gradients stop when the residual, in the preconditioner's norm, falls to this share of the first residual.
TOLERANCE = 1e-9
#: They stop after this many steps; a residual above LOOSE is then an error.
STEPS = 2000
LOOSE = 1e-5
#: Eigenvalues below this share of the largest are rounding.
ROUNDING = 1e-14
#: `damping: auto` of a layer, as a share of the mean eigenvalue of its Σ |α_t| H_t.
LAYER_DAMPING = 0.2


class KroneckerFactors(NamedTuple):
    """The curvature ``scale`` · G ⊗ A of a layer's [W b]."""

    outputs: Tensor
    """G: out × out."""
    inputs: Tensor
    """A: in + 1 × in + 1, or in × in for a layer without a bias."""
    scale: float
    """1/T times the factor of `reduction`."""


LayerHessian = KroneckerFactors | Tensor
"""Kronecker factors, or a diagonal: one number per entry of X or one for all."""

LayerPenalty = Sequence[LayerHessian | None] | LayerHessian | None
"""P_t of every model, None for H_0; or one P for all models."""


def applied(hessian: LayerHessian, x: Tensor) -> Tensor:
    """H x."""
    if isinstance(hessian, KroneckerFactors):
        return (hessian.outputs @ x @ hessian.inputs).mul_(hessian.scale)
    return x * hessian


def applied_sum(parts: Sequence[tuple[float, LayerHessian]], x: Tensor) -> Tensor:
    """Σ w H x."""
    total = torch.zeros_like(x)
    for weight, hessian in parts:
        total += applied(hessian, x).mul_(weight)
    return total


def diagonal_of(hessian: LayerHessian) -> Tensor:
    """The diagonal of H, in the shape of X."""
    if isinstance(hessian, KroneckerFactors):
        return torch.outer(hessian.outputs.diagonal(), hessian.inputs.diagonal()).mul_(hessian.scale)
    return hessian


def penalty_of_each(penalty: Any, models: int, default: Any = None) -> list[Any]:
    """P_t of every model, from one P for all models, or from a list in which None is the default."""
    shared = penalty is None or isinstance(penalty, KroneckerFactors | Tensor)
    return [default if p is None else p for p in ([penalty] * models if shared else penalty)]


def match_layer(
    base: Tensor,
    tuned: Tensors,
    weights: Numbers,
    prior: LayerHessian,
    curvature: Sequence[LayerHessian],
    damping: float,
    penalty: LayerPenalty = None,
    *,
    removes: bool = False,
) -> Tensor:
    """θ_0 + H̄⁻¹ Σ α_t (P_t + H_t) Δ_t, with H_0 = F_0 + δ, H̄ = H_0 + Σ α_t H_t, and P_t = H_0 if it is None.

    With ``removes`` θ_0 − H_0⁻¹ Σ α_t (P_t + H_t) Δ_t. In directions where the divisor is 0 it is task arithmetic.
    """
    curvature = [sound(hessian) for hessian in curvature]
    initial = [(1.0, sound(prior)), (damping, base.new_ones(()))]
    divisor = initial if removes else [*initial, *zip(weights, curvature, strict=True)]
    arithmetic = torch.zeros_like(base)
    for model, weight in zip(tuned, weights, strict=True):
        arithmetic += (model - base) * weight
    # Solve for the difference from task arithmetic: Σ α_t [(P_t − H_0) Δ_t + H_t (Δ_t − Σ_s α_s Δ_s)]. In a removal the
    # last sum is 0. H_0 Δ_t is subtracted only if there is a P_t, because it may be much larger than the rest.
    right = torch.zeros_like(base)
    for model, hessian, weight, p in zip(tuned, curvature, weights, penalty_of_each(penalty, len(tuned)), strict=True):
        delta = model - base
        right += applied(hessian, delta if removes else delta - arithmetic).mul_(weight)
        if p is not None:
            right += (applied(sound(p), delta) - applied_sum(initial, delta)).mul_(weight)
    step = arithmetic + solve(divisor, right)
    return base - step if removes else base + step


def mean_eigenvalue(weights: Numbers, curvature: Sequence[LayerHessian], numel: int) -> float:
    """The trace of Σ |α_t| H_t divided by its size."""
    total = 0.0
    for weight, hessian in zip(weights, curvature, strict=True):
        diagonal = diagonal_of(hessian)
        total += abs(weight) * float(diagonal.sum()) * numel / diagonal.numel()
    return total / numel


def solve(parts: Sequence[tuple[float, LayerHessian]], right: Tensor) -> Tensor:
    """Solve Σ w H X = ``right`` by preconditioned conjugate gradients; X is 0 in directions where the sum is 0.

    Raises ValueError if the sum is not positive, as with negative weights, or nearly singular.
    """
    inverse = _preconditioner(parts, right)
    x, residual = torch.zeros_like(right), right.clone()
    ahead = towards = inverse(residual)
    size = first = float((residual * ahead).sum())
    for _ in range(STEPS):
        if size <= TOLERANCE**2 * first:
            return x
        bent = applied_sum(parts, towards)
        curve = float((towards * bent).sum())
        if not curve > 0:
            if min(weight for weight, _ in parts) >= 0:  # the rest is rounding
                return x
            raise ValueError(
                "H̄ is not positive, so the merged loss has no minimum. With Kronecker curvature H_0 + Σ α_t H_t must "
                "be positive; use a larger damping, or the method removal to remove a task"
            )
        x.add_(towards, alpha=size / curve)
        residual.sub_(bent, alpha=size / curve)
        ahead = inverse(residual)
        before, size = size, float((residual * ahead).sum())
        towards = ahead.add(towards, alpha=size / before)
    if size > LOOSE**2 * first:
        raise ValueError(
            f"conjugate gradients did not converge in {STEPS} steps (residual {(size / first) ** 0.5:.1g}) because H̄ "
            "is nearly singular; use a larger damping"
        )
    return x


def _preconditioner(parts: Sequence[tuple[float, LayerHessian]], like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that divides by the diagonal of the sum, in a basis where all products are nearly diagonal.

    The basis consists of the eigenvectors of Σ |w| A · scale · tr G and of Σ |w| G · scale · tr A. For a single
    Kronecker product, or none, the division is exact.
    """
    factors = [(abs(weight), part) for weight, part in parts if isinstance(part, KroneckerFactors)]
    values = torch.zeros_like(like)
    if not factors:
        for weight, part in parts:
            values.add_(diagonal_of(part), alpha=weight)
        inverses = torch.where(values > 0, 1 / values, 0.0)
        return lambda x: x * inverses
    left, right = (like.new_zeros(size, size) for size in like.shape)
    for weight, kron in factors:
        left.add_(kron.outputs, alpha=weight * kron.scale * float(kron.inputs.trace()))
        right.add_(kron.inputs, alpha=weight * kron.scale * float(kron.outputs.trace()))
    left, right = (torch.linalg.eigh(side).eigenvectors for side in (left, right))
    for weight, kron in factors:
        values.add_(torch.outer(_along(left, kron.outputs), _along(right, kron.inputs)), alpha=weight * kron.scale)
    values[values < ROUNDING * float(values.max())] = 0.0
    for weight, part in parts:
        if not isinstance(part, KroneckerFactors):
            values.add_(left.square().T @ part @ right.square() if part.dim() else part, alpha=weight)
    inverses = torch.where(values > 0, 1 / values, 0.0)
    return lambda x: left @ ((left.T @ x @ right).mul_(inverses)) @ right.T


def _along(vectors: Tensor, matrix: Tensor) -> Tensor:
    """The diagonal of Uᵀ M U."""
    return (vectors * (matrix @ vectors)).sum(0).clamp_(min=0)


def sound(hessian: LayerHessian) -> LayerHessian:
    """Remove the negative eigenvalues that rounding to float32 gives a singular factor."""
    if not isinstance(hessian, KroneckerFactors):
        return hessian
    return KroneckerFactors(_positive(hessian.outputs), _positive(hessian.inputs), hessian.scale)


def _positive(matrix: Tensor) -> Tensor:
    if not torch.linalg.cholesky_ex(matrix).info:
        return matrix
    values, vectors = torch.linalg.eigh(matrix)
    # Rounding moves zeros as far above 0 as below. A bound from the matrix size would be hundreds of times larger.
    noise = max(-4 * float(values[0]), ROUNDING * float(values[-1]), 0.0)
    kept = vectors[:, values > noise] * values[values > noise].sqrt()
    product: Tensor = kept @ kept.T
    return product
