"""What a model answers to single rows: a class and how sure it is of it, a number, or a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.batches import moved
from ..curvature.losses import labels_of, logits_of
from .generation import generate, prompts
from .loading import LoadedTask


@dataclass(frozen=True)
class Reply:
    """What a model says to one row."""

    text: str
    """The name of a class, a number, or a text."""
    probability: float | None = None
    """What the model gives the class that it names."""
    right: bool | None = None
    """None where there is no right and wrong, as for a text that goes on."""


@dataclass(frozen=True)
class Question:
    """A row as people see it, and what would be right."""

    text: str | None
    image: Any
    """A PIL image, for a task on images."""
    truth: str


def questions(loaded: LoadedTask, rows: Sequence[int]) -> list[Question]:
    """Rows of the data: their text or image, and the label, target or completion."""
    return [_question(loaded, row) for row in rows]


def _question(loaded: LoadedTask, row: int) -> Question:
    data: Any = loaded.data
    if loaded.task == "image":
        return Question(None, data.seen(row), _truth(loaded, row))
    if _writes(loaded):
        asked = data.prompt(row)
        return Question(asked.text, None, asked.reference or "")
    fields = loaded.columns
    roles = [role for role in ("text", "text2", "anchor", "positive", "negative") if role in fields]
    texts = [data.rows.text(row, [name]) for role in roles for name in fields[role]]
    return Question("\n— ".join(texts), None, _truth(loaded, row))


def _truth(loaded: LoadedTask, row: int) -> str:
    label = loaded.data.batch([row])["labels"][0]
    if loaded.output.name == "ranking":
        return "the first is nearest"
    return _named(loaded, label)


def _named(loaded: LoadedTask, label: Tensor) -> str:
    """A label as people read it."""
    if loaded.output.name == "classes":
        return class_name(loaded.model, int(label))
    if loaded.output.name == "labels":
        return ", ".join(class_name(loaded.model, int(n)) for n in (label > 0.5).nonzero().flatten()) or "none"
    return ", ".join(f"{float(value):.3g}" for value in label.reshape(-1))


def class_name(model: Any, number: int) -> str:
    """What the config calls a class; a name that says nothing, LABEL_3, is 3."""
    names = getattr(model.config, "id2label", None) or {}
    return str(names.get(number, names.get(str(number), number))).removeprefix("LABEL_")


def _writes(loaded: LoadedTask) -> bool:
    return loaded.task in ("causal-lm", "seq2seq")


def _same(text: str, right: str | None) -> bool | None:
    """Whether an answer is the one in the data, but for spaces around it."""
    return None if right is None else text.strip() == right.strip()


def has_right_and_wrong(loaded: LoadedTask) -> bool:
    return loaded.output.name in ("classes", "labels", "ranking")


@torch.no_grad()
def replies(loaded: LoadedTask, model: nn.Module, rows: Sequence[int]) -> list[Reply]:
    """What a model says to some rows of the data; a language model writes."""
    if _writes(loaded):
        wanted = [one.reference for one in prompts(loaded, rows)]
        written = generate(loaded, model, rows)
        return [Reply(text, None, _same(text, right)) for text, right in zip(written, wanted, strict=True)]
    found: list[Reply] = []
    for first in range(0, len(rows), loaded.batch_size):
        some = rows[first : first + loaded.batch_size]
        batch = moved(loaded.data.batch(some), loaded.device)
        logits, labels = logits_of(model, batch).double().cpu(), labels_of(batch).cpu()
        found += [_reply(loaded, said, label) for said, label in zip(logits, labels, strict=True)]
    return found


def _reply(loaded: LoadedTask, said: Tensor, label: Tensor) -> Reply:
    if loaded.output.name == "classes":
        best = int(said.argmax())
        return Reply(class_name(loaded.model, best), float(said.softmax(-1)[best]), best == int(label))
    if loaded.output.name == "labels":
        told = said > 0
        sure = float(torch.where(told, said.sigmoid(), 1 - said.sigmoid()).prod())
        return Reply(_named(loaded, told.double()), sure, bool((told == (label > 0.5)).all()))
    if loaded.output.name == "ranking":
        best, chance = int(said.argmax()), said.softmax(-1)
        right = int((said >= said[int(label)]).sum()) == 1
        return Reply(
            "the first is nearest" if best == 0 else f"number {best + 1} is nearest", float(chance[best]), right
        )
    return Reply(", ".join(f"{float(value):.3g}" for value in said.reshape(-1)))
