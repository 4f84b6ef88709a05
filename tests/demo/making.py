"""The demonstration at a size for tests: every step, on few images and for few steps."""

from __future__ import annotations

from gradmerge.demo import Settings


def tiny(seed: int = 0) -> Settings:
    return Settings(
        seed=seed,
        train=128,
        valid=40,
        test=60,
        base_epochs=2,
        epochs=1,
        hidden=16,
        layers=1,
        unlabeled=20,
        distillation_steps=30,
        weights="0:1:0.5",
    )
