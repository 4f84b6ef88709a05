"""Settings of the recovery experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Settings:
    """How models are trained, merged and recovered."""

    tasks: tuple[str, ...]
    learning_rate: float
    """Of fine-tuning and joint training."""
    epochs: int
    batch_size: int
    train_rows: int
    """Rows of a task for training, at most."""
    validation_rows: int
    test_rows: int
    length: int = 0
    """Tokens of a row, at most."""
    size: int = 0
    """Pixels of an image's side."""
    base_learning_rate: float = 0.0
    """Of the training of the base on the first task; 0: the pre-trained model is the base."""
    rows: int = 256
    """Unlabeled rows of a task for calibration and distillation."""
    row_counts: tuple[int, ...] = (16, 64, 256, 1024)
    """Numbers of rows that ``--robustness`` compares."""
    calibration_batch: int = 32
    distillation_batch: int = 16
    anchor: str = "average"
    """The merge that calibration and distillation start from."""
    task_arithmetic: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
    """Weights of which the best on validation rows is kept."""
    rate_factors: tuple[float, ...] = (0.25, 0.5, 2.0)
    """Multiples of distillation's learning rate that ``--sweep`` tries."""
    head_steps: int = 200
    """Steps of L-BFGS for the head of an image task."""


LANGUAGE_MODEL = Settings(
    tasks=("dialogue", "reviews", "code", "encyclopedia", "sentiment"),
    learning_rate=1e-4,
    epochs=2,
    batch_size=32,
    train_rows=2500,
    validation_rows=64,
    test_rows=400,
    length=256,
    distillation_batch=8,
)
SENTIMENT = Settings(
    tasks=("imdb", "yelp", "rotten_tomatoes", "sst2", "amazon"),
    learning_rate=1e-5,
    base_learning_rate=2e-5,
    epochs=2,
    batch_size=32,
    train_rows=20000,
    validation_rows=200,
    test_rows=2500,
    length=128,
)
IMAGES = Settings(
    tasks=("mnist", "fashion_mnist", "kmnist", "notmnist", "usps", "gtsrb", "cifar10", "intel_scenes"),
    learning_rate=1e-4,
    epochs=4,
    batch_size=128,
    train_rows=10**9,
    validation_rows=400,
    test_rows=10**9,
    size=224,
    anchor="iso-c",
    task_arithmetic=(0.05, 0.1, 0.15, 0.2, 0.3),
)
ALL = {"language-model": LANGUAGE_MODEL, "sentiment": SENTIMENT, "images": IMAGES}


def small(settings: Settings) -> Settings:
    """Return settings for a CPU: fewer, shorter and smaller rows, to compare hyperparameters of calibration."""
    if settings is SENTIMENT:  # for a model of MiniLM's size
        changes: dict[str, Any] = {"train_rows": 600, "test_rows": 300, "length": 64, "rows": 64}
        changes |= {"learning_rate": 5e-5, "base_learning_rate": 5e-5}
    elif settings is IMAGES:
        changes = {"train_rows": 400, "test_rows": 250, "validation_rows": 100, "epochs": 3, "size": 112, "rows": 64}
        changes |= {"batch_size": 32, "task_arithmetic": (0.1, 0.2)}
    else:
        changes = {"tasks": ("dialogue", "encyclopedia", "sentiment"), "length": 48, "task_arithmetic": (0.3, 0.5)}
        changes |= {"train_rows": 64, "test_rows": 48, "validation_rows": 12, "rows": 16}
        changes |= {"batch_size": 8, "distillation_batch": 4}
    counts = tuple(count for count in settings.row_counts if count <= 4 * changes["rows"])
    return replace(settings, rate_factors=(), row_counts=counts, **changes)


def tiny(settings: Settings) -> Settings:
    """Return settings for a rehearsal on a CPU, in a minute or two."""
    return replace(
        settings,
        tasks=settings.tasks[:2],
        epochs=1,
        batch_size=8,
        train_rows=48,
        validation_rows=8,
        test_rows=16,
        length=min(settings.length, 48),
        rows=24,
        row_counts=(8, 24),
        calibration_batch=8,
        distillation_batch=4,
        task_arithmetic=settings.task_arithmetic[:2],
        head_steps=5,
    )


SCALES: Mapping[str, Callable[[Settings], Settings]] = {"full": lambda settings: settings, "small": small, "tiny": tiny}
