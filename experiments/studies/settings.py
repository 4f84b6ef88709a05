"""What is changed in each study, and what stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..common.training import Training


@dataclass(frozen=True)
class Factor:
    """What a study varies."""

    title: str
    label: str
    """Label of the axis."""
    values: tuple[float | str, ...]


TRANSFORMER = "transformer"
GENTLE = "transformer, tuned gently"
FACTORS: Mapping[str, Factor] = {
    "kinds": Factor(
        "Tasks that differ in their inputs", "rows that go to the task of their kind, %", (0, 25, 50, 75, 100)
    ),
    "labels": Factor("Tasks that contradict each other", "digits of ten on which the labels differ", (0, 2, 5, 10)),
    "sizes": Factor("Sizes", "rows of the larger task for one of the smaller", (1, 3, 10, 30)),
    "epochs": Factor("Fine-tuned without a penalty", "epochs of plain Adam", (3, 10, 30, 100)),
    "penalty": Factor("Fine-tuned to convergence under the penalty", "strength of the penalty", (1, 10, 100, 1000)),
    "base": Factor("A base that has memorized its data", "epochs of the base's training", (10, 30, 100, 300)),
    "network": Factor("The network", "hidden layers", (0, 1, 2, 4, 8, TRANSFORMER, GENTLE)),
}

BASE_TRAINING = Training(3e-3, 30, 32)
FINE_TUNING = Training(1e-3, 30, 32)
PENALIZED = Training(3e-3, 1000, 10_000)
PENALIZED_IN_BATCHES = Training(3e-3, 100, 62)
TRANSFORMER_TRAINING = Training(1e-3, 100, 32)
GENTLE_FINE_TUNING = Training(3e-4, 8, 32)


@dataclass(frozen=True)
class Settings:
    """All settings of the studies."""

    factors: Mapping[str, tuple[float | str, ...]]
    test: int = 577
    validation: int = 300
    """Upright rows: the weight of task arithmetic is chosen on them, and a held-out F_0 is estimated on them."""
    base_rows: int = 300
    rows: int = 620
    """Rows of both tasks together; the base has other rows."""
    degrees: float = 30.0
    """Rotation to the left in one task, and to the right in the other."""
    shape: tuple[int, ...] = (64, 32, 32, 10)
    """Widths of the layers, with inputs and classes."""
    base_training: Training = BASE_TRAINING
    fine_tuning: Training = FINE_TUNING
    """Fine-tuning of tasks, and joint training."""
    penalized: Training = PENALIZED
    """The same under the penalty, with all rows in every step."""
    penalized_in_batches: Training = PENALIZED_IN_BATCHES
    """The same in batches, which gives the noise floor."""
    transformer_training: Training = TRANSFORMER_TRAINING
    """Training of a base that is a transformer, which needs more steps."""
    gentle_fine_tuning: Training = GENTLE_FINE_TUNING
    """Fine-tuning of a transformer with few steps at a small learning rate."""
    damping: float = 0.1
    """δ of the penalty H_0 = strength · (F_0 + δ); the mean entry of F_0 is some units."""
    ridge: float = 1.0
    """Ridge of the linear models: H_0 = Hessian of the base's losses + ridge."""
    weights: tuple[float, ...] = tuple(n / 10 for n in range(1, 16))
    """Weights that task arithmetic chooses from."""


SCALES = {
    "small": Settings({name: factor.values for name, factor in FACTORS.items()}),
    "tiny": Settings(
        {name: factor.values[-1:] for name, factor in FACTORS.items()} | {"network": (1,)},
        test=60,
        validation=60,
        base_rows=60,
        rows=62,
        base_training=Training(3e-3, 4, 32),
        fine_tuning=Training(1e-3, 2, 32),
        penalized=Training(3e-3, 20, 10_000),
        penalized_in_batches=Training(3e-3, 2, 62),
        weights=(0.5, 1.0),
    ),
}
