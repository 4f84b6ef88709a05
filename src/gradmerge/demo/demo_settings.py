"""How large the demonstration is, and how its models are trained."""

from __future__ import annotations

from dataclasses import dataclass

BASE = "upright"
"""The base's own data: the digits as they are."""
TASKS = ("tilted", "thick", "blurred")
"""What the base is tuned on, each a change of the same digits."""
REMOVED = "tilted"
"""The task that is taken out of the jointly trained model again."""


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers, besides the versions of the packages."""

    seed: int = 0
    """Of the split, the initial weights and the order of the batches."""
    train: int = 997
    """Images for training and curvature."""
    valid: int = 300
    """Images that weights are tuned on."""
    test: int = 500
    """Images behind every accuracy in the tables."""
    base_epochs: int = 30
    base_rate: float = 1e-3
    noise: float = 0.5
    """Standard deviation of the noise added to the pixels (from −1 to 1) while the base is trained, as augmentation."""
    epochs: int = 8
    """Of every fine-tuning."""
    rate: float = 3e-4
    weight_decay: float = 0.01
    batch_size: int = 64
    hidden: int = 64
    layers: int = 2
    unlabeled: int = 200
    """Images per task that the merge is calibrated and distilled on. Their labels are not read."""
    weights: str = "0:1.2:0.1"
    """What the preview sweeps."""
