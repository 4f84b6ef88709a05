"""The same rows answered by the base, a tuned model and a merge, and rows on which two of them differ."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..tasks.predictions import Prediction, display_rows, has_right_and_wrong, predict
from ..tasks.standard_errors import SHARES
from .interactive import InteractiveEvaluator
from .ranking import Rows, loss_name
from .settings import BASE, Setting

#: Rows shown of a task without right and wrong: those whose loss changed most.
MOST_CHANGED = 20
#: Models whose replies are kept.
KEPT = 64


@dataclass(frozen=True)
class Answer:
    """One row of the data, and what the base, the task's own tuned model and a merge say to it."""

    row: int
    """Its number in the data, from 0."""
    text: str | None
    image: Any
    """A PIL image, for a task on images."""
    truth: str
    """What would be right; empty for a text that goes on."""
    base: Prediction | None
    tuned: Prediction | None
    """Of the task's own model; None for the base's data, or where its head does not fit."""
    merged: Prediction


@dataclass(frozen=True)
class Flip:
    """A row that one model gets right and another wrong; of texts, one that a model finds more or less likely."""

    row: int
    text: str | None
    image: Any
    truth: str
    before: Prediction
    after: Prediction
    turned: str
    """`right` or `wrong`; `better` or `worse` where there is only a loss."""


class Answering:
    """Asks models for single rows, and remembers what they said."""

    def __init__(self, moves: InteractiveEvaluator) -> None:
        self._moves = moves
        self._said: OrderedDict[tuple[str | Setting, str], dict[int, Prediction]] = OrderedDict()

    def answers(self, task: str, rows: Sequence[int], setting: Setting) -> list[Answer]:
        """Some rows, and what is said to them."""
        asked = display_rows(self._moves.data[task].loaded, rows)
        base = self._ask(BASE, task, rows)
        tuned = self._ask(task, task, rows) if task != BASE else [None] * len(rows)
        merged = self._ask(setting, task, rows)
        found = []
        for row, one, *said in zip(rows, asked, base, tuned, merged, strict=True):
            assert said[2] is not None
            found.append(Answer(row, one.text, one.image, one.label, said[0], said[1], said[2]))
        return found

    def flips(self, task: str, one: Setting | str, before: Rows, other: Setting, after: Rows) -> list[Flip]:
        """Rows that two models see differently, by the numbers that both have for every row."""
        loaded = self._moves.data[task].loaded
        every = list(range(loaded.examples))
        share = next((name for name in SHARES if name in before and name in after), None)
        if share is not None:
            turned = (before[share] != after[share]).nonzero().flatten().tolist()
        elif not has_right_and_wrong(loaded):
            return self._changed(task, before[loss_name(before)], after[loss_name(after)])
        else:
            pairs = zip(self._ask(one, task, every), self._ask(other, task, every), strict=True)
            turned = [row for row, (a, b) in enumerate(pairs) if a and b and a.right != b.right]
        old, new = self._ask(one, task, turned), self._ask(other, task, turned)
        found = []
        for row, asked, a, b in zip(turned, display_rows(loaded, turned), old, new, strict=True):
            if a is not None and b is not None:
                better = b.right if share is None else after[share][row] > before[share][row]
                how = "right" if better else "wrong"
                found.append(Flip(row, asked.text, asked.image, asked.label, a, b, how))
        return found

    def _changed(self, task: str, before: Tensor, after: Tensor) -> list[Flip]:
        apart = (after - before).tolist()
        rows = sorted((row for row in range(len(apart)) if apart[row]), key=lambda row: -abs(apart[row]))[:MOST_CHANGED]
        found = []
        for row, asked in zip(rows, display_rows(self._moves.data[task].loaded, rows), strict=True):
            old, new = (Prediction(f"loss {float(losses[row]):.4g}") for losses in (before, after))
            turned = "better" if apart[row] < 0 else "worse"
            found.append(Flip(row, asked.text, asked.image, asked.label, old, new, turned))
        return found

    def _ask(self, who: Setting | str, task: str, rows: Sequence[int]) -> list[Prediction | None]:
        """What a model says; None for each where there is no such model."""
        known = self._said.setdefault((who, task), {})
        self._said.move_to_end((who, task))
        if len(self._said) > KEPT:
            self._said.popitem(last=False)
        lacking = [row for row in rows if row not in known]
        if lacking:
            model = self._moves.model_of(who)
            if model is None:
                return [None] * len(rows)
            known |= zip(lacking, predict(self._moves.data[task].loaded, model, lacking), strict=True)
        return [known[row] for row in rows]
