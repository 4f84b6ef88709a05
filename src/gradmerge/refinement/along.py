"""The Gauss-Newton curvature along a few directions: Vᵀ Jᵀ H J V, J how the logits change and H the loss's Hessian."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..curvature.batches import batch_rows, examples_in, is_out_of_memory
from ..curvature.losses import logits_of
from .points import Point, evaluated, moving, norm

#: Numbers that the logits of some examples, and their changes along every direction, may take together.
MOST_NUMBERS = 1 << 28

LossesOf = Callable[[nn.Module, Tensor, Any], Tensor]
"""(model, logits, batch) → the loss of every example."""


def curvature_along(
    model: nn.Module, batches: Iterable[Any], directions: Sequence[Point], losses_of: LossesOf
) -> Tensor:
    """Vᵀ GGN V in float64, a sum over the examples of ``batches``."""
    matrix = torch.zeros(len(directions), len(directions), dtype=torch.float64)
    changes_of: Changes = _by_dual_numbers
    with evaluated(model):
        for batch in _parts(model, batches, len(directions)):
            try:
                logits, changes = changes_of(model, batch, directions)
            except (RuntimeError, NotImplementedError) as error:
                # Some operations have no forward-mode derivative: fused attention, grouped products of experts.
                if changes_of is _by_differences or is_out_of_memory(error):
                    raise
                changes_of = _by_differences
                logits, changes = changes_of(model, batch, directions)
            matrix += _form(model, batch, logits, changes, losses_of)
    return matrix


Changes = Callable[[nn.Module, Any, Sequence[Point]], tuple[Tensor, list[Tensor]]]


def _form(model: nn.Module, batch: Any, logits: Tensor, changes: Sequence[Tensor], losses_of: LossesOf) -> Tensor:
    """(J v_a)ᵀ H (J v_b) for all pairs, summed over the examples."""
    found = torch.zeros(len(changes), len(changes), dtype=torch.float64)
    with torch.enable_grad():
        z = logits.detach().requires_grad_(True)
        slope = torch.autograd.grad(losses_of(model, z, batch).sum(), z, create_graph=True)[0]
        for a, change in enumerate(changes):
            curved = torch.autograd.grad((slope * change).sum(), z, retain_graph=True)[0].double()
            for b in range(a + 1):
                found[a, b] = found[b, a] = float((curved * changes[b]).sum())
    return found


def _parts(model: nn.Module, batches: Iterable[Any], directions: int) -> Iterator[Any]:
    """The batches, cut where logits over a large vocabulary would be too many to hold for every direction."""
    rows: int | None = None
    for batch in batches:
        size = examples_in(batch)
        if rows is None:
            with torch.no_grad():
                one = logits_of(model, batch_rows(batch, slice(0, 1))).numel()
            rows = max(1, MOST_NUMBERS // (one * (directions + 4)))
        for first in range(0, size, rows):
            yield batch if size <= rows else batch_rows(batch, slice(first, first + rows))


def _by_dual_numbers(model: nn.Module, batch: Any, directions: Sequence[Point]) -> tuple[Tensor, list[Tensor]]:
    """The logits and their change along each direction, by a forward pass with dual numbers for each."""
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    changes = []
    for direction in directions:
        with forward_ad.dual_level(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            dual = {
                name: forward_ad.make_dual(value, direction[name].to(value)) if name in direction else value
                for name, value in weights.items()
            }
            standing: Any = _Standing(model, dual)
            logits, change = forward_ad.unpack_dual(logits_of(standing, batch))
        changes.append(torch.zeros_like(logits) if change is None else change)
    return logits, changes


def _by_differences(model: nn.Module, batch: Any, directions: Sequence[Point]) -> tuple[Tensor, list[Tensor]]:
    """The same by central differences, of a width at which rounding and curvature of the logits cost about as much."""
    changes = []
    with torch.no_grad():
        logits = logits_of(model, batch)
        # Of float32 also where the model is wider: some layers, such as T5's norms, compute in float32 all the same.
        wanted = torch.finfo(torch.float32).eps ** (1 / 3) * float(logits.float().norm())
        for direction in directions:
            with moving(model, [direction]) as move:

                def at(width: float, move: Callable[[Tensor], None] = move) -> Tensor:
                    move(torch.tensor([width], dtype=torch.float64))
                    return logits_of(model, batch)

                width = 1e-3 / max(norm(direction), 1e-30)
                for _ in range(2):  # as far as the logits change by what is wanted; the first guess knows nothing
                    change = float((at(width) - logits).float().norm())
                    width *= min(1e3, max(1e-3, wanted / max(change, 1e-30)))
                changes.append((at(width) - at(-width)) / (2 * width))
    return logits, changes


class _Standing:
    """Stands for a model whose weights are others, where logits are asked for."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._model, self._weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, dict(self._weights), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
