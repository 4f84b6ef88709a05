"""Gradient matching with the full Gauss-Newton matrix of a network, which is used through matrix-vector products."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from ..common.states import State
from .data import Rows
from .models import Shape, make_network

STEPS = 100
#: Conjugate gradients stop at this relative residual.
TOLERANCE = 1e-4


def match_gauss_newton(
    shape: Shape, base: State, tuned: Sequence[State], base_rows: Rows, tasks: Sequence[Rows], damping: float
) -> dict[str, Tensor]:
    """Return θ_0 + (G_0 + δ + Σ G_t)⁻¹ Σ G_t Δ_t, which has P = 0. G of a model is Σ_i Jᵀ (diag p − ppᵀ) J."""
    task_products = [products(shape, state, rows) for state, rows in zip(tuned, tasks, strict=True)]
    all_products = [products(shape, base, base_rows), *task_products]
    start = _flat(base)
    right = torch.stack(
        [product(_flat(state) - start) for product, state in zip(task_products, tuned, strict=True)]
    ).sum(0)
    step = torch.zeros_like(start)
    residual, direction = right, right
    for _ in range(STEPS):
        image = sum((product(direction) for product in all_products), damping * direction)
        length = residual @ residual / (direction @ image)
        step, following = step + length * direction, residual - length * image
        if following.norm() < TOLERANCE * right.norm():
            break
        direction = following + (following @ following) / (residual @ residual) * direction
        residual = following
    return _shaped(start + step, base)


def products(shape: Shape, state: State, rows: Rows) -> Callable[[Tensor], Tensor]:
    """Return the function v → G v."""
    model, weights = make_network(shape, state), dict(state)

    def outputs(values: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = functional_call(model, dict(values), (rows.pixels,))
        return logits

    logits, back = vjp(outputs, weights)
    p = logits.softmax(-1).detach()

    def product(vector: Tensor) -> Tensor:
        moved = p * jvp(outputs, (weights,), (_shaped(vector, weights),))[1]
        return _flat(back(moved - p * moved.sum(-1, keepdim=True))[0])

    return product


def _flat(state: State) -> Tensor:
    return torch.cat([value.flatten() for value in state.values()])


def _shaped(vector: Tensor, like: State) -> dict[str, Tensor]:
    parts = vector.split([value.numel() for value in like.values()])
    return {name: part.view_as(value) for (name, value), part in zip(like.items(), parts, strict=True)}
