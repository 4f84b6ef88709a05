"""Gradient matching with the whole Gauss-Newton matrix of a network, which no file could hold: by products with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.func import functional_call, jvp, vjp

from ..common.states import State
from .data import Rows
from .models import Shape, network

STEPS = 100
#: Conjugate gradients end when the residual has fallen to this share of the first.
TOLERANCE = 1e-4


def match_whole(
    shape: Shape, base: State, tuned: Sequence[State], base_rows: Rows, tasks: Sequence[Rows], damping: float
) -> dict[str, Tensor]:
    """θ_0 + (G_0 + δ + Σ G_t)⁻¹ Σ G_t Δ_t: P = 0, and G = Σ_i Jᵀ (diag p − ppᵀ) J of every model on its rows."""
    own = [products(shape, state, rows) for state, rows in zip(tuned, tasks, strict=True)]
    every = [products(shape, base, base_rows), *own]
    start = _flat(base)
    right = torch.stack([by(_flat(state) - start) for by, state in zip(own, tuned, strict=True)]).sum(0)
    step = torch.zeros_like(start)
    rest, direction = right, right
    for _ in range(STEPS):
        image = sum((by(direction) for by in every), damping * direction)
        length = rest @ rest / (direction @ image)
        step, left = step + length * direction, rest - length * image
        if left.norm() < TOLERANCE * right.norm():
            break
        direction = left + (left @ left) / (rest @ rest) * direction
        rest = left
    return _shaped(start + step, base)


def products(shape: Shape, state: State, rows: Rows) -> Callable[[Tensor], Tensor]:
    """v → G v."""
    model, weights = network(shape, state), dict(state)

    def outputs(values: Mapping[str, Tensor]) -> Tensor:
        found: Tensor = functional_call(model, dict(values), (rows.pixels,))
        return found

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
