"""What is changed in each study, and what stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..common.training import Training


@dataclass(frozen=True)
class Dial:
    """The one thing that a study changes."""

    title: str
    label: str
    """Of the axis."""
    values: tuple[float | str, ...]


TRANSFORMER = "transformer"
GENTLE = "transformer, tuned gently"
DIALS: Mapping[str, Dial] = {
    "kinds": Dial(
        "Tasks that differ in their inputs", "rows that go to the task of their kind, %", (0, 25, 50, 75, 100)
    ),
    "labels": Dial("Tasks that contradict each other", "digits of ten on which the labels differ", (0, 2, 5, 10)),
    "sizes": Dial("Sizes", "rows of the larger task for one of the smaller", (1, 3, 10, 30)),
    "epochs": Dial("Fine-tuned without a penalty", "epochs of plain Adam", (3, 10, 30, 100)),
    "penalty": Dial("Fine-tuned to convergence under the penalty", "strength of the penalty", (1, 10, 100, 1000)),
    "base": Dial("A base that has memorized its data", "epochs of the base's training", (10, 30, 100, 300)),
    "network": Dial("The network", "hidden layers", (0, 1, 2, 4, 8, TRANSFORMER, GENTLE)),
}

BASE = Training(3e-3, 30, 32)
TUNING = Training(1e-3, 30, 32)
HELD = Training(3e-3, 1000, 10_000)
HELD_AGAIN = Training(3e-3, 100, 62)
LONG = Training(1e-3, 100, 32)
GENTLY = Training(3e-4, 8, 32)


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers, besides the seed and the versions of packages."""

    dials: Mapping[str, tuple[float | str, ...]]
    test: int = 577
    valid: int = 300
    """Upright rows that task arithmetic's weight is chosen on, and that F_0 is estimated on where it is held out."""
    base_rows: int = 300
    rows: int = 620
    """Of both tasks together; other digits than the base's."""
    turn: float = 30.0
    """Degrees to the left in one task, and to the right in the other."""
    shape: tuple[int, ...] = (64, 32, 32, 10)
    """Widths of the layers, pixels and classes included."""
    base: Training = BASE
    tuning: Training = TUNING
    """Of tasks and of joint training."""
    held: Training = HELD
    """The same under the penalty: all rows in every step."""
    held_again: Training = HELD_AGAIN
    """The noise floor of that: in batches."""
    transformer: Training = LONG
    """Of a base that is a transformer: as the others it would not learn its task."""
    gentle: Training = GENTLY
    """Of its tasks and of joint training, where they are tuned gently."""
    damping: float = 0.1
    """δ of the penalty, beside an F_0 of some units on average: H_0 = strength · (F_0 + δ)."""
    ridge: float = 1.0
    """Of the linear models: H_0 = the Hessian of the base's losses + ridge."""
    weights: tuple[float, ...] = tuple(n / 10 for n in range(1, 16))
    """Of task arithmetic, to choose from."""


SCALES = {
    "small": Settings({name: dial.values for name, dial in DIALS.items()}),
    "tiny": Settings(
        {name: dial.values[-1:] for name, dial in DIALS.items()} | {"network": (1,)},
        test=60,
        valid=60,
        base_rows=60,
        rows=62,
        base=Training(3e-3, 4, 32),
        tuning=Training(1e-3, 2, 32),
        held=Training(3e-3, 20, 10_000),
        held_again=Training(3e-3, 2, 62),
        weights=(0.5, 1.0),
    ),
}
