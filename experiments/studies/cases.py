"""What the places of the dials are: rows of the base and of two tasks, and how models are trained on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..common.training import Training
from .data import Rows, dealt, digits, relabelled, turned
from .models import Shape
from .settings import GENTLE, Settings

Kind = Callable[[Rows], Rows]


@dataclass(frozen=True)
class Case:
    base_rows: Rows
    held_out: Rows
    """Upright too, and seen by no model."""
    tasks: Sequence[Rows]
    tests: Mapping[str, Rows]
    """The base's kind of rows, and those of the tasks."""
    valid: Mapping[str, Rows]
    trained_on: Mapping[str, int]
    """Kind → training rows of it."""
    base: Training
    tuning: Training
    shape: Shape
    strength: float = 0.0
    """Of the penalty that models are tuned under; 0 is plain Adam."""


def case_of(settings: Settings, seed: int, dial: str, value: Any) -> Case:
    """A dial at some value; everything else is as in the other cases of the seed."""
    order = torch.randperm(len(digits().labels), generator=torch.Generator().manual_seed(seed))
    sizes = [settings.test, settings.valid, settings.base_rows, settings.rows]
    test, valid, base, pool = (digits().take(part) for part in order[: sum(sizes)].split(sizes))
    kinds = _kinds(settings.turn, dial, value)
    first = round(settings.rows * value / (1 + value)) if dial == "sizes" else settings.rows // 2
    parts = [pool.take(places) for places in torch.arange(settings.rows).split([first, settings.rows - first])]
    tasks = [kind(part) for kind, part in zip(list(kinds.values())[1:], parts, strict=True)]
    if dial == "kinds":
        tasks = dealt(tasks, value / 100, seed)
    case = Case(
        base,
        valid,
        tasks,
        tests={name: kind(test) for name, kind in kinds.items()},
        valid={name: kind(valid) for name, kind in kinds.items()},
        trained_on=dict(zip(kinds, (settings.base_rows, *(len(part.labels) for part in parts)), strict=True)),
        base=replace(settings.base, epochs=value) if dial == "base" else settings.base,
        tuning=replace(settings.tuning, epochs=value) if dial == "epochs" else settings.tuning,
        shape=settings.shape,
        strength=value if dial == "penalty" else 0.0,
    )
    if dial != "network":
        return case
    if isinstance(value, str):
        tuning = settings.gentle if value == GENTLE else case.tuning
        return replace(case, shape=None, base=settings.transformer, tuning=tuning)
    first, *_, last = settings.shape
    return replace(case, shape=(first, *[settings.shape[1]] * int(value), last))


def _kinds(turn: float, dial: str, value: Any) -> dict[str, Kind]:
    """The base's and those of both tasks."""
    upright: dict[str, Kind] = {"upright": lambda rows: rows}
    right: dict[str, Kind] = {"right": lambda rows: turned(rows, turn)}
    if dial == "labels":
        return upright | right | {"relabelled": lambda rows: relabelled(turned(rows, turn), int(value))}
    if dial == "base":  # on either side of upright, tasks would keep the base's own up between them
        return upright | right | {"farther right": lambda rows: turned(rows, 2 * turn)}
    return upright | {"left": lambda rows: turned(rows, -turn)} | right
