"""Predictions for single rows, as people read them: a class with its probability, a number, or a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import moved
from ..curvature.losses import labels_of, logits_of
from .generation import generate, prompts
from .lm_eval import MODEL_TASKS
from .loading import LoadedTask


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for one row."""

    text: str
    """The name of a class, a number, or a generated text."""
    probability: float | None = None
    """The probability of the class."""
    right: bool | None = None
    """Whether the prediction is right; None for numbers, and for texts without a reference."""


@dataclass(frozen=True)
class DisplayRow:
    """A row and its label, as people read them."""

    text: str | None
    image: Any
    """A PIL image, for a task on images."""
    label: str


def display_rows(loaded: LoadedTask, rows: Sequence[int]) -> list[DisplayRow]:
    """Return rows of the data: their text or image, and the label, target or completion."""
    return [_display_row(loaded, row) for row in rows]


def _display_row(loaded: LoadedTask, row: int) -> DisplayRow:
    data: Any = loaded.data
    if loaded.task in MODEL_TASKS:
        prompt = data.prompt(row)
        return DisplayRow(prompt.text, None, prompt.reference or "")
    label = _text_of(loaded, data.batch([row])["labels"][0])
    if loaded.task == "image":
        return DisplayRow(None, data.image(row), label)
    roles = [role for role in ("text", "text2", "anchor", "positive", "negative") if role in loaded.columns]
    texts = [data.rows.text(row, [name]) for role in roles for name in loaded.columns[role]]
    return DisplayRow("\n— ".join(texts), None, label)


def _text_of(loaded: LoadedTask, label: Tensor) -> str:
    """Return a label, or a prediction in the form of one, as people read it."""
    if loaded.loss.name == "classes":
        return class_label(loaded.model, int(label))
    if loaded.loss.name == "ranking":
        return f"candidate {int(label) + 1} is nearest"
    if loaded.loss.name == "labels":
        return ", ".join(class_label(loaded.model, int(n)) for n in (label > 0.5).nonzero().flatten()) or "none"
    return ", ".join(f"{float(value):.3g}" for value in label.reshape(-1))


def class_label(model: Any, number: int) -> str:
    """Return the name of a class in the config, or the number of a class called LABEL_3."""
    names = getattr(model.config, "id2label", None) or {}
    return str(names.get(number, names.get(str(number), number))).removeprefix("LABEL_")


def has_right_and_wrong(loaded: LoadedTask) -> bool:
    """Whether every prediction is right or wrong."""
    return loaded.loss.name in ("classes", "labels", "ranking")


@torch.no_grad()
def predict(loaded: LoadedTask, model: nn.Module, rows: Sequence[int]) -> list[Prediction]:
    """Predict some rows of the data. A language model generates text, which must equal the reference."""
    if loaded.task in MODEL_TASKS:
        references = [prompt.reference for prompt in prompts(loaded, rows)]
        return [
            Prediction(text, None, None if reference is None else text.strip() == reference.strip())
            for text, reference in zip(generate(loaded, model, rows), references, strict=True)
        ]
    result: list[Prediction] = []
    for first in range(0, len(rows), loaded.batch_size):
        batch = moved(loaded.data.batch(rows[first : first + loaded.batch_size]), loaded.device)
        logits, labels = logits_of(model, batch).double().cpu(), labels_of(batch).cpu()
        result += [_prediction(loaded, *pair) for pair in zip(logits, labels, strict=True)]
    return result


def _prediction(loaded: LoadedTask, logits: Tensor, label: Tensor) -> Prediction:
    if loaded.loss.name in ("classes", "ranking"):
        best = logits.argmax()
        return Prediction(_text_of(loaded, best), float(logits.softmax(-1)[best]), bool(best == label))
    if loaded.loss.name == "labels":
        chosen = (logits > 0).double()
        probability = float((chosen * logits.sigmoid() + (1 - chosen) * (1 - logits.sigmoid())).prod())
        return Prediction(_text_of(loaded, chosen), probability, bool((chosen == label).all()))
    return Prediction(_text_of(loaded, logits))
