"""Teachers: models that know a task, whose answers on its rows count beside the labels.

The loss of a row becomes (1 − s) ℓ(label) + s ℓ(answer). ℓ(answer) is the cross-entropy to the teacher's distribution,
of the class, of every label, or of every token that counts; for numbers it is the squared error to the teacher's.
Curvature is that of ℓ: the Hessian on the logits depends on neither labels nor answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.configs import labels as classes_in
from ..checkpoints.model import Checkpoint
from ..checkpoints.token_differences import token_difference
from ..curvature.batches import batch_rows, is_out_of_memory, moved
from ..curvature.losses import (
    MASKED,
    ClassLoss,
    ExampleLoss,
    LabelsLoss,
    SquaredLoss,
    TokenLoss,
    Uniform,
    decoder_inputs,
    labels_of,
    logits_of,
    loss_of,
    unwrapped,
)
from ..curvature.reaching import input_device
from ..errors import InputError
from ..tasks import LoadingInfo, load_model
from ..tasks.folders import folder_of
from ..text import first_line, some
from .points import evaluated, trained
from .saving import Start


class TaughtLoss(ExampleLoss):
    """(1 − s) ℓ(label) + s ℓ(answer), of labels that :meth:`targets` has put in the place of those given."""

    def __init__(self, given: ExampleLoss, share: float) -> None:
        if type(given) not in (ClassLoss, LabelsLoss, SquaredLoss, TokenLoss):
            raise InputError(f"output {given.name}: a teacher's answers have no meaning for this loss")
        self.given, self.share, self.name = given, share, given.name

    def targets(self, answers: Tensor, labels: Tensor) -> Tensor:
        """From a teacher's logits and labels: distributions, 0 everywhere for a token that is masked; or two numbers.

        For the next token they begin with that of the second.
        """
        answers = answers.to(torch.promote_types(answers.dtype, torch.float32))
        if isinstance(self.given, SquaredLoss):
            answers = answers.to(torch.promote_types(answers.dtype, labels.dtype))
            return torch.stack([labels.to(answers).reshape(answers.shape), answers], 1)
        if isinstance(self.given, LabelsLoss):
            return labels.to(answers).lerp(answers.sigmoid(), self.share)
        if isinstance(self.given, TokenLoss):
            answers, labels = self.given.aligned(answers, labels)
        found = answers.softmax(-1).mul_(self.share)
        label = labels.clamp(min=0)[..., None]
        found.scatter_add_(-1, label, torch.full_like(label, 1 - self.share, dtype=found.dtype))
        return found.masked_fill_((labels == MASKED)[..., None], 0)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        if isinstance(self.given, SquaredLoss):
            own, answer = (self.given.losses(logits, one) for one in labels.unbind(1))
            return (1 - self.share) * own + self.share * answer
        if isinstance(self.given, LabelsLoss):
            return self.given.losses(logits, labels)
        if isinstance(self.given, TokenLoss):
            logits = self.given.aligned(logits, labels)[0]
        logs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        # A class that can be neither of the two may have a logit of −∞.
        return -(logs.masked_fill(labels == 0, 0) * labels).flatten(1).sum(-1)

    def draw(self, logits: Tensor, labels: Tensor, uniform: Uniform) -> Tensor:
        """Of labels as they were given."""
        return self.given.draw(logits, labels, uniform)

    def factors(self, logits: Tensor) -> Iterator[Tensor]:
        return self.given.factors(logits)

    def check(self, logits_shape: torch.Size, labels: Tensor) -> None:
        """Those given were checked when answers were put beside them."""


class Teacher:
    """A model that says what it would answer on a task's rows; it is not changed."""

    def __init__(self, task: str, model: nn.Module, loss: TaughtLoss) -> None:
        self._task, self._model, self.loss = task, model, loss

    def taught(self, model: nn.Module, batch: Any) -> Any:
        """A batch of the model that is taught, with answers beside its labels."""
        inputs = decoder_inputs(model, batch) if isinstance(batch, Mapping) else {}  # of the labels as they were given
        return with_labels(batch, self.targets(batch), **inputs)

    def targets(self, batch: Any) -> Tensor:
        """What takes the place of a batch's labels."""
        answers, labels = self._answers(batch)
        self.loss.given.check(answers.shape, labels)
        found = self.loss.targets(answers, labels)
        if not bool(found.sum().isfinite()):
            raise InputError(f"{self._task}: its teacher's answers have values that are not finite")
        return found.to(labels_of(batch).device)

    def _answers(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Its logits, and the batch's labels, where it is; inputs are given in the numbers that it computes with."""
        there = moved(batch, input_device(self._model))
        labels, real = labels_of(there), [p.dtype for p in self._model.parameters() if p.is_floating_point()]

        def fitting(value: Any) -> Any:
            numbers = isinstance(value, Tensor) and value.is_floating_point() and value is not labels
            return value.to(real[0]) if numbers and real else value

        named = isinstance(there, Mapping)
        inputs: Any = {n: fitting(v) for n, v in there.items()} if named else tuple(map(fitting, there))
        try:
            with evaluated(self._model), torch.no_grad():
                return logits_of(self._model, inputs), labels
        except (RuntimeError, ValueError, IndexError) as error:
            if isinstance(error, InputError) or is_out_of_memory(error):
                raise
            raise InputError(f"{self._task}: its teacher cannot take the model's rows: {first_line(error)}") from error

    def check(self, model: nn.Module, batch: Any) -> None:
        """Raise unless its outputs mean what those of a model do that it is to teach."""
        if {id(p) for p in trained(model).values()} & {id(p) for p in self._model.parameters()}:
            raise InputError(f"{self._task}: its teacher is the model itself, which is changed. Give a copy of it.")
        what, meant = f"{self._task}: its teacher", loss_of(self._model, labels_of(batch)).name
        configs = [getattr(unwrapped(one), "config", None) for one in (model, self._model)]
        if getattr(configs[1], "problem_type", None) and meant != self.loss.name:
            raise InputError(f"{what} has outputs that are {meant}, the model's are {self.loss.name}")
        words = [getattr(config, "vocab_size", None) for config in configs]
        if None not in words and words[0] != words[1]:
            raise InputError(f"{what} has a vocabulary of {words[1]} tokens, the model one of {words[0]}")
        ours, theirs = (classes_in(getattr(config, "to_dict", dict)()) for config in configs)
        if ours and theirs and ours != theirs:
            both = {name: (ours.get(name, "missing"), theirs.get(name, "missing")) for name in ours | theirs}
            other = [f"{name!r} is {one} and {two}" for name, (one, two) in both.items() if one != two]
            raise InputError(f"{what} has other classes than the model, or another order (id2label): {some(other)}")
        row = batch_rows(batch, slice(0, 1))
        with evaluated(model), torch.no_grad():
            own = logits_of(model, moved(row, input_device(model)))
        shapes = [list(logits.shape[1:]) for logits in (own, self._answers(row)[0])]
        if shapes[0] != shapes[1]:
            raise InputError(f"{what} has outputs of shape {shapes[1]} for a row, the model of {shapes[0]}")


def teacher_on_disk(start: Start, task: str, reference: str, loss: TaughtLoss) -> Teacher:
    """A teacher from a folder, a Hub id or an adapter, as it is stored; its inputs are made for the start."""
    model, info = load_model(reference, start.info.task, device=start.options["device"], attn=start.options["attn"])
    named = start.options["tokenizer"]
    own = _tokens(start.reference, start.info) if named is None else Checkpoint(named, folder=folder_of(named))
    if found := token_difference(own, _tokens(reference, info)):
        lines = "\n  ".join(found.lines)
        raise InputError(f"{task}: its teacher has another tokenizer than the model:\n  {lines}")
    return Teacher(task, model, loss)


def _tokens(reference: str, info: LoadingInfo) -> Checkpoint:
    folders = (info.folder, info.base_folder)
    return Checkpoint(reference, folder=next((f for f in folders if (f / "tokenizer.json").is_file()), None))


def with_labels(batch: Any, labels: Tensor, **inputs: Tensor) -> Any:
    """A batch with other labels."""
    return {**batch, "labels": labels, **inputs} if isinstance(batch, Mapping) else (*batch[:-1], labels)
