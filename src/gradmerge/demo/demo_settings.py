"""Settings of the demonstration."""

from __future__ import annotations

from dataclasses import dataclass

BASE = "upright"
"""The data of the base: unchanged digits."""
TASKS = ("tilted", "thick", "blurred")
"""Fine-tuning tasks, each a change of the same digits."""
REMOVED = "tilted"
"""The task that is removed from the jointly trained model."""


@dataclass(frozen=True)
class Settings:
    """Sizes, seed and hyperparameters."""

    seed: int = 0
    """Seed of the split, the initial weights and the order of the batches."""
    train: int = 997
    """Images for training and curvature."""
    valid: int = 300
    """Images for choosing weights."""
    test: int = 500
    """Images for the accuracies in the tables."""
    base_epochs: int = 30
    base_rate: float = 1e-3
    noise: float = 0.5
    """Standard deviation of the augmentation noise for the base; pixels are from −1 to 1."""
    epochs: int = 8
    """Epochs of every fine-tuning run."""
    rate: float = 3e-4
    weight_decay: float = 0.01
    batch_size: int = 64
    hidden: int = 64
    layers: int = 2
    unlabeled: int = 200
    """Unlabeled images per task for calibration and distillation."""
    distillation_steps: int = 800
    """More than by default, since a step of this model takes a hundredth of a second."""
    weights: str = "0:1.2:0.1"
    """Weights of the preview."""
