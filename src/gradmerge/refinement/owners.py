"""Owners: a task as refinement sees it, which answers questions about a model and keeps its rows to itself."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..curvature.batches import Placed, batch_rows, examples_in, moved, with_places
from ..curvature.estimate import estimate_curvature
from ..curvature.gradients import Gradient, estimate_gradient
from ..curvature.kronecker import WIDEST, KroneckerCurvature
from ..curvature.losses import ExampleLoss, TokenLoss, labels_of, logits_of, loss_of
from ..curvature.together import Together
from ..curvature.trial import Trial
from ..processes import ALONE, Processes
from ..tasks.uncertainty import standard_errors
from .along import curvature_along
from .points import Point, evaluated, moving
from .splitting import RowBatches, rows_in, sample_batches, share_of_rows
from .teaching import Teacher, with_labels

#: Up to so many outputs, the curvature's expectation over labels is taken exactly, one backward pass for each; beyond,
#: labels are drawn from the model.
FEW_CLASSES = 16
#: At most so many rows of a task answer for its curvature, drawn by the seed: it says where to go and how far at first,
#: and needs no more. Gradients and losses, which decide, are those of all rows.
CURVATURE_ROWS = 1000
#: Of these, at most so many for the curvature along directions: few numbers, and every one costs a pass with tangents.
ALONG_ROWS = 250
#: How often labels are dealt out anew to see what chance gives.
SHUFFLES = 200


class Owner(Protocol):
    """The questions that refinement asks of a task, about a model that it sends: tensors out, tensors and numbers back.

    Rows that are held back answer nothing but ``losses``.
    """

    name: str
    examples: int
    """How many examples the task stands for; its rows may be fewer."""
    rows: int
    """How many rows answer, without those that are held back."""
    held: int
    """How many are held back."""
    held_error: float | None
    """The standard error of the last mean loss of those that ``losses`` told, where it is known."""

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        """Kronecker curvature, a sum over its rows or a sample of them; it says how many."""
        ...

    def gradient(self, model: nn.Module) -> Gradient:
        """Gradient and loss, sums over its rows."""
        ...

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        """Vᵀ GGN V in float64: the Gauss-Newton curvature along a few directions, a sum over its rows.

        Of a sample of them, scaled to all.
        """
        ...

    def losses(
        self, model: nn.Module, directions: Sequence[Point] = (), points: Tensor | None = None, *, held: bool
    ) -> list[float]:
        """Its loss at a few points θ + Σ_k c_k v_k, a row c of ``points`` each; without any, at θ.

        ``held``: the mean loss of a row held back; otherwise the sum of the losses of its rows.
        """
        ...

    def label_score(self, model: nn.Module, held: bool) -> float:
        """By how many standard deviations its labels fit the model better than the same labels dealt out at random."""
        ...


class DataOwner:
    """A task whose rows are batches that can be gone through again and again.

    With a ``teacher``, gradients and losses are of the taught loss. Its answers are kept, a few numbers for each row;
    those for tokens, as large as logits, are asked for whenever rows are gone through.
    """

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
        advance: Callable[[int], None] = lambda rows: None,
        processes: Processes = ALONE,
        teacher: Teacher | None = None,
    ) -> None:
        self._few_classes, self._widest = few_classes, widest
        self.name, self._seed, self._advance = name, seed, advance
        self._batches, self._valid, self._output = batches, valid, output
        sizes = [] if isinstance(batches, RowBatches) else list(map(examples_in, batches))
        self._starts = [0, *itertools.accumulate(sizes)][: len(sizes)]
        self.rows, self.held = rows_in(batches), rows_in(valid)
        self._processes = processes
        curved, along = (sample_batches(batches, most, seed) for most in (CURVATURE_ROWS, ALONG_ROWS))
        self._curved_rows, self._along_rows = rows_in(curved), rows_in(along)
        self._own, self._own_valid, self._own_curved, self._own_along = (
            share_of_rows(some, processes) for some in (batches, valid, curved, along)
        )
        self.examples = self.rows if examples is None else examples
        self.held_error: float | None = None
        self.held_losses = torch.empty(0)
        """Of every row held back, the last that ``losses`` told the mean of."""
        self._trial = Trial()
        self._taught = teacher.loss if teacher is not None else None
        self._teacher = teacher if teacher is not None and isinstance(teacher.loss.given, TokenLoss) else None
        self._answers: dict[bool, Tensor] = {}
        if teacher is not None and self._teacher is None:
            for held, own in ((False, self._own), (True, self._own_valid)):
                found = []
                for batch in own:
                    found.append(teacher.targets(batch))
                    advance(examples_in(batch))
                self._answers[held] = processes.rows([torch.cat(found)] if found else [])[0]

    def curvature(self, model: nn.Module) -> KroneckerCurvature:
        return estimate_curvature(
            model,
            self._placed(),
            self._likelihood(model),
            output=self._output,
            seed=self._seed,
            structure="kronecker",
            trial=self._trial,
            widest=self._widest,
            together=Together(self._processes),
        )

    def gradient(self, model: nn.Module) -> Gradient:
        loss = self._taught or self._output
        return estimate_gradient(model, self._learned(model, held=False), output=loss, processes=self._processes)

    def along(self, model: nn.Module, directions: Sequence[Point]) -> Tensor:
        batches = self._on_device(model, self._own_along, times=len(directions))

        def given(model: nn.Module, logits: Tensor, batch: Any) -> Tensor:
            return self._loss(model, batch).losses(logits, labels_of(batch))

        found = curvature_along(model, batches, directions, given)
        self._processes.add([found])
        return found * (self.rows / self._along_rows)

    def losses(
        self, model: nn.Module, directions: Sequence[Point] = (), points: Tensor | None = None, *, held: bool
    ) -> list[float]:
        if held and points is None:
            self.held_losses = self.row_losses(model, held=True)
            self.held_error = standard_errors({"loss": self.held_losses})["loss"]
            return [fmean(self.held_losses.tolist())]  # the same bits wherever it is computed
        found = []
        with evaluated(model), torch.no_grad(), moving(model, directions) as move:
            for point in points if points is not None else [torch.zeros(len(directions))]:
                move(point)
                batches = self._learned(model, held=held)
                found.append(sum(float(self._losses(model, b, check=points is None).sum()) for b in batches))
        totals = [sum(parts) for parts in zip(*self._processes.gather(found), strict=True)]
        return [total / self.held for total in totals] if held else totals

    def row_losses(self, model: nn.Module, *, held: bool) -> Tensor:
        """The loss of every row, or of every one held back."""
        with evaluated(model), torch.no_grad():
            found = [self._losses(model, batch, check=True).cpu() for batch in self._learned(model, held=held)]
        return self._processes.rows([torch.cat(found)] if found else [])[0]

    def batches_of(self, rows: Sequence[int]) -> list[Any]:
        """Some rows as batches, few of them, where they lie, with the answers that are kept."""
        if isinstance(self._batches, RowBatches):
            return [self._answered(self._batches.rows(rows), rows, held=False)] if rows else []
        by_batch: dict[int, list[int]] = {}
        for row in rows:
            number = bisect_right(self._starts, row) - 1
            by_batch.setdefault(number, []).append(row - self._starts[number])
        parts = []
        for number, own in by_batch.items():
            places = [self._starts[number] + row for row in own]
            parts.append(self._answered(batch_rows(self._batches[number], torch.tensor(own)), places, held=False))
        return parts

    def learned_from(self, model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
        """Batches of its rows where the model is, and counted, with what a teacher answers now."""
        for batch in self._on_device(model, batches):
            yield batch if self._teacher is None else self._teacher.taught(model, batch)

    def rows_alone(self, model: nn.Module, *, held: bool) -> Iterator[Any]:
        """Every row, or every one held back, as a batch of its own: not even its padding depends on the others."""
        batches = self._valid if held else self._batches
        if isinstance(batches, RowBatches):
            rows = (batches.rows([place]) for place in range(batches.count_rows))
        else:
            rows = (batch_rows(b, slice(place, place + 1)) for b in batches for place in range(examples_in(b)))
        return self._on_device(model, rows)

    def label_score(self, model: nn.Module, held: bool) -> float:
        """By how many standard deviations the labels fit the model better than the same labels dealt out at random.

        Near 0 for labels that are noise, whatever the model's confidence. Only where an example has a label of its own:
        for tokens it is infinite, and where a teacher alone is learned from.
        """
        alone = self._taught is not None and self._taught.share == 1
        if isinstance(output := self.loss_of_rows(model), TokenLoss) or alone:
            return float("inf")
        logits, labels = [], []
        with evaluated(model), torch.no_grad():
            for batches in (self._own_valid, *([] if held else [self._own])):
                pairs = [(logits_of(model, batch), labels_of(batch)) for batch in self._on_device(model, batches)]
                of_all = self._processes.rows([torch.cat(parts) for parts in zip(*pairs, strict=True)])
                logits.append(of_all[0])
                labels.append(of_all[1])
            outputs, wanted = torch.cat(logits), torch.cat(labels)
            order = torch.Generator().manual_seed(self._seed)
            dealt = [torch.randperm(len(wanted), generator=order).to(wanted.device) for _ in range(SHUFFLES)]
            chance = torch.stack([output.losses(outputs, wanted[places]).double().mean() for places in dealt])
            true = output.losses(outputs, wanted).double().mean()
        spread = float(chance.std())
        return float(chance.mean() - true) / spread if spread > 0 else 0.0

    def loss_of_rows(self, model: nn.Module) -> ExampleLoss:
        """What the loss of a row is, by its label."""
        return self._loss(model, self._batches[0])

    def losses_at(self, model: nn.Module, logits: Tensor, batch: Any) -> Tensor:
        """The loss of every example that is learned from, from the model's logits."""
        return (self._taught or self._loss(model, batch)).losses(logits, labels_of(batch))

    def _likelihood(self, model: nn.Module) -> str:
        batch = next(iter(self._on_device(model, self._batches)))
        with evaluated(model), torch.no_grad():
            logits = logits_of(model, batch)
        tokens = isinstance(self._loss(model, batch), TokenLoss)
        return "exact" if not tokens and logits[0].numel() <= self._few_classes else "sampled"

    def _placed(self) -> Placed:
        """This process's rows for curvature, each batch with its place among those of all processes, and counted."""

        def make() -> Iterator[tuple[int, Any]]:
            first = self._processes.share(self._curved_rows).start
            for place, batch in with_places(self._own_curved, first):
                yield place, batch
                self._advance(examples_in(batch))

        return Placed(make)

    def _learned(self, model: nn.Module, *, held: bool) -> Iterator[Any]:
        """This process's rows, where the model is, and counted, with a teacher's answers if there is one."""
        own, rows = (self._own_valid, self.held) if held else (self._own, self.rows)
        placed = with_places(own, self._processes.share(rows).start)
        return self.learned_from(
            model, (self._answered(b, range(place, place + examples_in(b)), held=held) for place, b in placed)
        )

    def _answered(self, batch: Any, rows: Sequence[int], *, held: bool) -> Any:
        """A batch of these rows with the answers that are kept, if there are any."""
        if not self._answers:
            return batch
        return with_labels(batch, self._answers[held][torch.tensor(rows, dtype=torch.long)].to(labels_of(batch).device))

    def _on_device(self, model: nn.Module, batches: Iterable[Any], times: int = 1) -> Iterator[Any]:
        place = next(model.parameters()).device
        for batch in batches:
            yield moved(batch, place)
            self._advance(times * examples_in(batch))

    def _losses(self, model: nn.Module, batch: Any, check: bool) -> Tensor:
        logits = logits_of(model, batch)
        if check:
            (self._taught or self._loss(model, batch)).check(logits.shape, labels_of(batch))
        return self.losses_at(model, logits, batch).double()

    def _loss(self, model: nn.Module, batch: Any) -> ExampleLoss:
        return self._output or loss_of(model, labels_of(batch))
