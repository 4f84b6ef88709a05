"""The gradient, curvature and losses of a model on rows of one data set."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import moved
from ..curvature.estimate import estimate_curvature
from ..curvature.gradients import Gradient, estimate_gradient
from ..curvature.kronecker import MAX_KRONECKER_DIM as WIDEST, KroneckerCurvature
from ..curvature.losses import ExampleLoss, TokenLoss, labels_of, logits_of, loss_of
from ..curvature.trial import Trial
from .along import curvature_along
from .points import Point, evaluated, moving
from .splitting import rows_in, sample_batches

#: Up to so many outputs, the curvature is the exact expectation over labels, with one backward pass for each. With
#: more outputs, labels are sampled from the model.
FEW_CLASSES = 16
#: Most rows for curvature, sampled with the seed. Gradients and losses are those of all rows.
CURVATURE_ROWS = 1000
#: Most rows for the curvature along a direction.
ALONG_ROWS = 250


class DataOwner:
    """Rows as batches that can be read several times, and rows that are held out."""

    def __init__(
        self,
        name: str,
        batches: Sequence[Any],
        valid: Sequence[Any],
        *,
        examples: int | None = None,
        output: ExampleLoss | None = None,
        seed: int = 0,
        few_classes: int = FEW_CLASSES,
        widest: int = WIDEST,
    ) -> None:
        self._few_classes, self._widest = few_classes, widest
        self.name, self._seed = name, seed
        self._batches, self._valid, self._output = batches, valid, output
        self.rows, self.held = rows_in(batches), rows_in(valid)
        self._curved, self._along = (sample_batches(batches, most, seed) for most in (CURVATURE_ROWS, ALONG_ROWS))
        self.examples = self.rows if examples is None else examples
        self._trial = Trial()

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        return estimate_curvature(
            model,
            self._curved,
            self._likelihood(model),
            output=self._output,
            seed=self._seed,
            structure="kronecker",
            trial=self._trial,
            max_kronecker_dim=self._widest,
        )

    def gradient(self, model: nn.Module) -> Gradient:
        return estimate_gradient(model, self._on_device(model, self._batches), output=self._output)

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        def losses(model: nn.Module, logits: Tensor, batch: Any) -> Tensor:
            return self._loss(model, batch).losses(logits, labels_of(batch))

        found = curvature_along(model, self._on_device(model, self._along), directions, losses)
        return found * (self.rows / rows_in(self._along))

    def losses(
        self, model: nn.Module, directions: Sequence[Point] = (), points: Tensor | None = None, *, held: bool
    ) -> list[float]:
        """The loss at a few points θ + Σ_k c_k v_k, one row c of ``points`` each; without ``points``, at θ.

        ``held``: the mean loss of a held-out row; otherwise the sum of the losses of all other rows.
        """
        if held and points is None:
            return [fmean(self.row_losses(model, held=True).tolist())]
        found = []
        batches = self._valid if held else self._batches
        with evaluated(model), torch.no_grad(), moving(model, directions) as move:
            for point in points if points is not None else [torch.zeros(len(directions))]:
                move(point)
                on_device = self._on_device(model, batches)
                found.append(sum(float(self._losses(model, b, check=points is None).sum()) for b in on_device))
        return [total / self.held for total in found] if held else found

    def row_losses(self, model: nn.Module, *, held: bool) -> Tensor:
        """The loss of every row, or of every held-out row."""
        batches = self._valid if held else self._batches
        with evaluated(model), torch.no_grad():
            return torch.cat([self._losses(model, b, check=True).cpu() for b in self._on_device(model, batches)])

    def _likelihood(self, model: nn.Module) -> str:
        batch = next(iter(self._on_device(model, self._batches)))
        with evaluated(model), torch.no_grad():
            logits = logits_of(model, batch)
        tokens = isinstance(self._loss(model, batch), TokenLoss)
        return "exact" if not tokens and logits[0].numel() <= self._few_classes else "sampled"

    def _on_device(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
        device = next(model.parameters()).device
        for batch in batches:
            yield moved(batch, device)

    def _losses(self, model: nn.Module, batch: Any, check: bool) -> Tensor:
        logits, labels, loss = logits_of(model, batch), labels_of(batch), self._loss(model, batch)
        if check:
            loss.check(logits.shape, labels)
        return loss.losses(logits, labels).double()

    def _loss(self, model: nn.Module, batch: Any) -> ExampleLoss:
        return self._output or loss_of(model, labels_of(batch))
