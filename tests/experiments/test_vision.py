"""The image experiment: a tiny run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from experiments.vision.report import at
from experiments.vision.run import EXPERIMENT
from experiments.vision.settings import TINY

from .making import smoke_run

CLASSES = {"gtsrb": 7, "intel_scenes": 3}
SHAPES = {"usps": (16, 16), "gtsrb": (32, 32, 3), "intel_scenes": (32, 32, 3)}


def archive(path: Path, classes: int, shape: tuple[int, ...], seed: int) -> None:
    """Images of one brightness a class, with noise, and labels in order."""
    random = np.random.default_rng(seed)
    found: dict[str, Any] = {}
    for split, rows in (("train", 60), ("test", 20)):
        labels = np.sort(np.arange(rows) % classes)
        level = (40 + 200 * labels / classes).reshape(-1, *[1] * len(shape))
        noise = random.normal(0, 15, (rows, *shape))
        found |= {f"x_{split}": np.clip(level + noise, 0, 255).astype(np.uint8), f"y_{split}": labels.astype(np.uint8)}
    np.savez(path, **found)


def test_a_tiny_run_has_every_merge_and_starts_from_the_base(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number, task in enumerate(TINY.tasks):
        archive(data / f"{task}.npz", CLASSES.get(task, 10), SHAPES.get(task, (28, 28)), number)
    results = smoke_run(EXPERIMENT, ["--data-dir", str(data)], tmp_path / "out")
    assert results["data"]["gtsrb"] == {"classes": 7, "train": 54, "validation": 6, "test": 20}
    (seed,) = results["seeds"]
    assert {"task-arithmetic", "gradient-matching", "ties", "tsv", "iso-c"} < seed["curves"].keys()
    assert {"average", "regmean", "fisher-averaging, mean"} < seed["fixed"].keys()
    assert all(at(curve, 0) == seed["references"]["base"] for curve in seed["curves"].values())
