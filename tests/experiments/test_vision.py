"""The image experiment: a tiny run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.vision.__main__ import main
from experiments.vision.report import at
from experiments.vision.settings import LOCAL, SCALES

from .making import smoke_run

TASKS = ("mnist", "usps", "gtsrb", "intel_scenes")
CLASSES = {"gtsrb": 7, "intel_scenes": 3}
SHAPES = {"usps": (16, 16), "gtsrb": (32, 32, 3), "cifar10": (32, 32, 3), "intel_scenes": (32, 32, 3)}


def archive(path: Path, classes: int, shape: tuple[int, ...], seed: int) -> None:
    """Images of one brightness a class, with noise, and labels in order."""
    random = np.random.default_rng(seed)
    found: dict[str, Any] = {"classes": np.array([f"kind_{k}" for k in range(classes)])}
    for split, rows in (("train", 60), ("test", 20)):
        labels = np.sort(np.arange(rows) % classes)
        level = (40 + 200 * labels / classes).reshape(-1, *[1] * len(shape))
        noise = random.normal(0, 15, (rows, *shape))
        found |= {f"x_{split}": np.clip(level + noise, 0, 255).astype(np.uint8), f"y_{split}": labels.astype(np.uint8)}
    np.savez(path, **found)


def test_a_tiny_run_has_every_merge_and_starts_from_the_base(tmp_path: Path) -> None:
    data, tiny = tmp_path / "data", SCALES["tiny"]
    data.mkdir()
    for number, task in enumerate(LOCAL):
        archive(data / f"{task}.npz", CLASSES.get(task, 10), SHAPES.get(task, (28, 28)), number)
    short = replace(tiny.fine_tuning, epochs=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SCALES, "tiny", replace(tiny, tasks=TASKS, fine_tuning=short, joint=short))
        results = smoke_run(main, ["--data-dir", str(data)], tmp_path / "out")
    assert results["data"]["gtsrb"] == {"classes": 7, "train": 54, "validation": 6, "test": 20}
    (seed,) = results["seeds"].values()
    assert {"task-arithmetic", "gradient-matching", "ties", "tsv", "iso-c"} < seed["curves"].keys()
    assert {"average", "regmean", "fisher-averaging, mean"} < seed["fixed"].keys()
    for curve in seed["curves"].values():
        assert at(curve["test"], 0) == seed["references"]["base"]["test"]
