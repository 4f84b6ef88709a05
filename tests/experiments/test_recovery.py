"""The recovery experiment on a tiny image model: it runs, and its shares are those of its accuracies."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers as t
from experiments.recovery.report import shares, write_report
from experiments.recovery.run import run_seed
from experiments.recovery.settings import IMAGES, tiny
from experiments.recovery.workloads import Images


@pytest.fixture
def workload(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = t.ViTConfig(**sizes, image_size=16, patch_size=8)
    t.ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    generator = np.random.default_rng(0)
    for task in IMAGES.tasks[:2]:
        arrays = {}
        for part, count in (("train", 60), ("test", 20)):
            arrays[f"y_{part}"] = np.arange(count) % 3
            noise = generator.integers(0, 100, (count, 8, 8))
            arrays[f"x_{part}"] = (noise + 50 * arrays[f"y_{part}"][:, None, None]).astype(np.uint8)
        np.savez(tmp_path / f"{task}.npz", **arrays)
    settings = dataclasses.replace(tiny(IMAGES), size=16)
    return Images(settings, 0, tmp_path / "model", tmp_path)


def test_a_seed_has_results_of_every_method(workload, tmp_path):
    results = run_seed(workload, workload.settings, lambda found: None, robustness=True)
    for name in ("average", "regmean", "calibrate", "distill", "calibrate, distill"):
        assert set(results[name]["tasks"]) == set(workload.settings.tasks)
    found = {"workload": "images", "metric": "loss", "seed": 0, "command": "", "device": "cpu", "results": results}
    (tmp_path / "images-0.json").write_text(json.dumps(found), "utf-8")
    means = {
        name: np.mean([results[name]["tasks"][task]["loss"] for task in workload.settings.tasks])
        for name in ("base", "average", "joint training")
    }
    expected = 100 * (means["average"] - means["base"]) / (means["joint training"] - means["base"])
    assert shares(found)["average"][0] == pytest.approx(expected)
    [row] = [line for line in write_report(tmp_path).splitlines() if line.startswith("| average |")]
    assert row.split("|")[3].strip() == f"{expected:.0f}"
