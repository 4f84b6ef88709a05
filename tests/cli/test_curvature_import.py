"""`gradmerge curvature import` as a user runs it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradmerge as gm

from ..checkpoints.families import save
from ..curvature.training import Run, fresh, train
from ..making import read_model, run, write_recipe


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("trained"), "vit")


#: N and B of the training run.
NUMBERS = ("--dataset-size", "10", "--batch-size", "4")


def test_an_imported_curvature_merges_by_gradient_matching(trained: Run, tmp_path: Path) -> None:
    base = save(fresh("vit"), tmp_path / "base")
    run("curvature", "import", trained.checkpoint, "-o", tmp_path / "c", *NUMBERS)
    curvature = gm.Curvature.load(tmp_path / "c")
    recipe = {
        "method": "gradient-matching",
        "base": {"model": "base", "curvature": {"identity": 0.5}},
        "models": [{"model": str(trained.checkpoint), "curvature": "c", "weight": 0.7}],
    }
    run("merge", write_recipe(tmp_path / "r.yml", recipe), "-o", tmp_path / "out")
    got, old, new = read_model(tmp_path / "out"), read_model(base), trained.weights
    for name, theta in old.items():
        h = curvature[name].double()
        want = theta + 0.7 * (0.5 + h) / (0.5 + 0.7 * h) * (new[name] - theta)
        assert torch.allclose(got[name].double(), want, atol=1e-6), name
