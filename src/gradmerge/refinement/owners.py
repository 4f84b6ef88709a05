"""Owners: a task as refinement sees it, which answers questions about a model and keeps its rows to itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..curvature.batches import examples_in, moved
from ..curvature.estimate import estimate_curvature
from ..curvature.gradients import Gradient, estimate_gradient
from ..curvature.kronecker import KroneckerCurvature
from ..curvature.losses import ExampleLoss, labels_of, logits_of, loss_of as loss_for

Point = Mapping[str, Tensor]
"""Values by the names of a model's parameters: weights, a gradient, or a direction."""


class Owner(Protocol):
    """The questions that refinement asks of a task, about a model that it sends."""

    name: str
    examples: int
    """How many examples the task stands for; its rows may be fewer."""
    rows: int
    """How many rows answer; the others are held back to judge by."""

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        """Kronecker curvature on its rows."""
        ...

    def gradient(self, model: nn.Module) -> Gradient:
        """Gradient and loss on its rows."""
        ...

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        """Vᵀ GGN V in float64: the Gauss-Newton curvature along a few directions, a sum over its rows."""
        ...

    def losses(self, model: nn.Module, points: Sequence[Point]) -> list[tuple[float, float]]:
        """At each of these weights the sum of the losses of its rows, and the mean loss of a row held back."""
        ...


class DataOwner:
    """A task whose rows are batches in memory."""

    def __init__(
        self,
        name: str,
        batches: Sequence[Any],
        valid: Sequence[Any],
        *,
        examples: int | None = None,
        loss: ExampleLoss | None = None,
        likelihood: str = "sampled",
        seed: int = 0,
    ) -> None:
        self.name = name
        self.rows = sum(map(examples_in, batches))
        self.examples = examples or self.rows
        self._batches, self._valid, self._loss = batches, valid, loss
        self._likelihood, self._seed = likelihood, seed

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        found = estimate_curvature(
            model, self._batches, self._likelihood, output=self._loss, seed=self._seed, structure="kronecker"
        )
        assert isinstance(found, KroneckerCurvature)
        return found

    def gradient(self, model: nn.Module) -> Gradient:
        return estimate_gradient(model, self._batches, output=self._loss)

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        matrix = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        with _evaluated(model), sdpa_kernel(SDPBackend.MATH):
            for batch in self._moved(model, self._batches):
                changes = []
                for direction in directions:
                    logits, change = _change(model, parameters, direction, batch)
                    changes.append(change)
                z = logits.detach().requires_grad_(True)
                slope = torch.autograd.grad(self._of(model, z, batch).sum(), z, create_graph=True)[0]
                for a, change in enumerate(changes):
                    curved = torch.autograd.grad((slope * change).sum(), z, retain_graph=True)[0]
                    for b in range(a + 1):
                        matrix[a, b] += float((curved.double() * changes[b].double()).sum())
        return matrix.tril() + matrix.tril(-1).T

    def losses(self, model: nn.Module, points: Sequence[Point]) -> list[tuple[float, float]]:
        found = []
        with _evaluated(model), torch.no_grad():
            for point in points:
                with placed(model, point):
                    rows = sum(float(self._losses(model, b).sum()) for b in self._moved(model, self._batches))
                    held = sum(float(self._losses(model, b).sum()) for b in self._moved(model, self._valid))
                found.append((rows, held / max(1, sum(map(examples_in, self._valid)))))
        return found

    def _moved(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
        place = next(model.parameters()).device
        return (moved(batch, place) for batch in batches)

    def _losses(self, model: nn.Module, batch: Any) -> Tensor:
        return self._of(model, logits_of(model, batch), batch)

    def _of(self, model: nn.Module, logits: Tensor, batch: Any) -> Tensor:
        labels = labels_of(batch)
        return (self._loss or loss_for(model, labels)).losses(logits, labels)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are refined."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}


@contextmanager
def placed(model: nn.Module, point: Point) -> Iterator[None]:
    """The model at other weights inside, and at its own again afterwards."""
    parameters = dict(model.named_parameters())
    kept = {name: parameters[name].detach().clone() for name in point}
    try:
        with torch.no_grad():
            for name, value in point.items():
                parameters[name].copy_(value)
        yield
    finally:
        with torch.no_grad():
            for name, value in kept.items():
                parameters[name].copy_(value)


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """The model without dropout inside."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _change(model: nn.Module, parameters: Mapping[str, Tensor], direction: Point, batch: Any) -> tuple[Tensor, Tensor]:
    """The logits, and how they change along a direction: a forward pass with dual numbers."""

    with forward_ad.dual_level(), torch.no_grad():
        weights = {
            name: forward_ad.make_dual(value, direction[name].to(value)) if name in direction else value
            for name, value in parameters.items()
        }
        logits, change = forward_ad.unpack_dual(logits_of(_Standing(model, weights), batch))
    return logits, torch.zeros_like(logits) if change is None else change


class _Standing:
    """Stands for a model whose weights are others, where logits are asked for."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._model, self._weights = model, weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return functional_call(self._model, dict(self._weights), args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
