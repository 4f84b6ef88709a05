"""Compare a model with fine-tuned models: representations, and answers where they share a head."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..curvature.batches import examples_in
from ..curvature.losses import MASKED, unwrapped
from ..tasks.models import representation_modules
from .blocks import Batch, RowStream, counted_positions, forward, input_of


@dataclass
class Distances:
    """How far a model is from the fine-tuned model of each task."""

    blocks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Block → task → ‖h − h_t‖² / ‖h_t‖² of the block's output."""
    representations: dict[str, float] = field(default_factory=dict)
    """Task → the same of the last representation."""
    answers: dict[str, float] = field(default_factory=dict)
    """Task → KL of the answers from the fine-tuned model's, in nats per row or token. Empty without a shared head."""

    @property
    def total(self) -> float:
        """The mean over tasks, of the representations plus the answers."""
        values = [value + self.answers.get(task, 0.0) for task, value in self.representations.items()]
        return sum(values) / len(values)


def relative_distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """‖h − h_t‖² / ‖h_t‖² over all pairs."""
    difference = size = 0.0
    for own, other in pairs:
        difference += float((own.double() - other.double()).square().sum())
        size += float(other.double().square().sum())
    return difference / max(size, 1e-300)


@torch.no_grad()
def measure_outputs(
    distances: Distances, task: str, stream: RowStream, targets: Iterable[Outputs], shared_head: bool
) -> None:
    """Measure the distances of what a model returns for the rows of a stream from what the fine-tuned model returns."""
    pairs, divergence, terms = [], 0.0, 0
    for found, target in zip(stream_outputs(stream), targets, strict=True):
        pairs.append((found.representation, target.representation))
        if shared_head and found.logits is not None and target.logits is not None:
            divergences = answer_divergence(stream.model.module, found.logits, target.logits)
            divergence, terms = divergence + float(divergences.double().sum()), terms + len(divergences)
    distances.representations[task] = relative_distance(pairs)
    if terms:
        distances.answers[task] = divergence / terms


def stream_outputs(stream: RowStream) -> Iterator[Outputs]:
    """What the model of a stream returns for every batch, after the last block."""
    for number, batch in enumerate(stream.batches):
        yield Outputs.of(stream.model.module, batch, partial(stream.finish, number))


@dataclass
class Outputs:
    """What a model returns for a batch, without padding."""

    representation: Tensor
    """The input of the language-model head, or else the encoder's output: positions × width."""
    logits: Tensor | None
    """Rows or positions × classes; None without a head for the task."""
    positions: list[int] | None = None
    """For every row its number of positions in the representation; None for one entry per row."""
    answers: list[int] | None = None
    """The same of the logits."""

    @staticmethod
    def of(module: nn.Module, batch: Batch, run: Callable[[], Any] | None = None, with_head: bool = True) -> Outputs:
        """Run a model on a batch, and keep the representation on the way."""
        kept: list[Tensor] = []
        head, encoder = representation_modules(module)

        def before_head(child: nn.Module, args: Any, kwargs: Any) -> None:
            kept.append(input_of(args, kwargs))

        def after_encoder(child: nn.Module, args: Any, result: Any) -> None:
            kept.append(_first(result))

        handle = None
        if head is not None:
            handle = head.register_forward_pre_hook(before_head, with_kwargs=True)
        elif encoder is not None:
            handle = encoder.register_forward_hook(after_encoder)
        try:
            result = forward(module, batch) if run is None else run()
        finally:
            if handle is not None:
                handle.remove()
        logits = getattr(result, "logits", None)
        logits = _first(result) if logits is None else logits
        representation = kept[-1] if kept else logits
        counted = counted_positions(module, batch, representation)
        answered = None
        if not (with_head and kept):
            logits = None
        elif logits.dim() > 2:
            same = counted is not None and counted.shape == logits.shape[:2]
            answered = answer_positions(module, batch, logits, counted if same else None)
            logits = logits[answered]
        if counted is not None:
            representation = representation[counted]
        rows = examples_in(batch)
        return Outputs(representation, logits, _positions_of_rows(counted, rows), _positions_of_rows(answered, rows))

    def split(self, rows: Sequence[int]) -> list[Outputs]:
        """Split into parts with so many rows."""
        if len(rows) == 1:
            return [self]
        representations = _split(self.representation, self.positions, rows)
        logits = [None] * len(rows) if self.logits is None else _split(self.logits, self.answers, rows)
        return [Outputs(*parts) for parts in zip(representations, logits, strict=True)]

    @property
    def nbytes(self) -> int:
        return self.representation.nbytes + (0 if self.logits is None else self.logits.nbytes)


def _first(result: Any) -> Tensor:
    value: Tensor = next(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))
    return value


def _positions_of_rows(counted: Tensor | None, rows: int) -> list[int] | None:
    return None if counted is None else counted.reshape(rows, -1).sum(1).tolist()


def _split(values: Tensor, positions: list[int] | None, rows: Sequence[int]) -> list[Tensor]:
    if positions is None:
        return list(values.split(list(rows)))
    ends = list(itertools.accumulate(rows))
    return list(values.split([sum(positions[end - number : end]) for number, end in zip(rows, ends, strict=True)]))


def answer_positions(module: nn.Module, batch: Batch, logits: Tensor, counted: Tensor | None) -> Tensor:
    """Which positions of the answers are compared.

    Args:
        module: The model.
        batch: Its inputs. In a causal language model, labels say which tokens count: those of the completion.
        logits: Rows × positions × classes.
        counted: The positions that are not padding; None for all.
    """
    everything = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device) if counted is None else counted
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    encoder_decoder = getattr(getattr(unwrapped(module), "config", None), "is_encoder_decoder", False)
    if not isinstance(labels, Tensor) or encoder_decoder or labels.shape != logits.shape[:2]:
        return everything
    predicted = F.pad(labels[:, 1:] != MASKED, (0, 1))  # a position predicts the next token
    return torch.where(predicted.any(1, keepdim=True), predicted, everything)


def answer_divergence(module: nn.Module, logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """For every row or token the KL from the teacher's answers to the model's; of a regression the squared error."""
    logits, teacher_logits = logits.float(), teacher_logits.float()
    problem = getattr(getattr(unwrapped(module), "config", None), "problem_type", None)
    if problem == "regression" or logits.shape[-1] == 1:
        return (logits - teacher_logits).square().sum(-1)
    if problem == "multi_label_classification":
        p = teacher_logits.sigmoid()
        cross = F.binary_cross_entropy_with_logits(logits, p, reduction="none")
        return (cross - F.binary_cross_entropy_with_logits(teacher_logits, p, reduction="none")).sum(-1)
    return F.kl_div(logits.log_softmax(-1), teacher_logits.log_softmax(-1), reduction="none", log_target=True).sum(-1)
