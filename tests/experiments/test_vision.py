"""The image experiment: a tiny run, and its numbers against slow ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.vision.__main__ import main
from experiments.vision.data import Images, Part
from experiments.vision.merging import Measures, merged, merges, prior_scalar, scores
from experiments.vision.models import new_classifier
from experiments.vision.report import at
from experiments.vision.settings import LOCAL, SCALES
from PIL import Image

from tests.making import near, random_curvature, random_state

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


def test_merges_are_the_formula_with_the_mean_of_squared_gradients() -> None:
    base = random_state(0)
    tuned = [near(base, seed) for seed in (1, 2)]
    curvature = [random_curvature(seed, base, examples=30 * seed) for seed in (3, 4)]
    every = {m.name: m for m in merges({"empirical": Measures(random_curvature(5, base), curvature)}, [], (0.3,), ())}
    entries = [float(e) / one.examples for one in curvature for value in one.values() for e in value.flatten()]
    scalar = sum(entries) / len(entries)
    assert prior_scalar(curvature, "mean") == pytest.approx(scalar, rel=1e-9)
    found = merged(base, tuned, every["gradient-matching"], 0.3)
    for tensor, start in base.items():
        h = [c[tensor].double() / c.examples for c in curvature]
        steps = [(scalar + h[t]) * (tuned[t][tensor].double() - start.double()) for t in (0, 1)]
        expected = start.double() + 0.3 * (steps[0] + steps[1]) / (scalar + 0.3 * (h[0] + h[1]))
        torch.testing.assert_close(found[tensor].double(), expected, rtol=1e-5, atol=1e-6)


def test_accuracy_and_loss_are_those_of_the_rows_one_by_one() -> None:
    classifier = new_classifier(SCALES["tiny"].encoder, [3, 5]).eval()
    random = np.random.default_rng(1)
    parts = [
        Part(t, random.integers(0, 256, (11, 20, 20, 3), np.uint8), random.integers(0, 3 + 2 * t, 11)) for t in (0, 1)
    ]
    found = scores(classifier, {str(part.task): Images([part], 32) for part in parts}, 4, "cpu")
    for part in parts:
        right, losses = 0, []
        for row in range(11):
            image = Image.fromarray(part.pixels[row]).resize((32, 32), Image.Resampling.BICUBIC)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
            with torch.no_grad():
                logits = classifier(pixels, torch.tensor([part.task]))[0, : 3 + 2 * part.task]
            right += int(logits.argmax()) == part.labels[row]
            losses.append(-float(logits.double().log_softmax(-1)[part.labels[row]]))
        assert found[str(part.task)]["accuracy"] == pytest.approx(100 * right / 11)
        assert found[str(part.task)]["loss"] == pytest.approx(sum(losses) / 11, rel=1e-2)
