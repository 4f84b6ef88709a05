"""The studies of curvature: a tiny run, and merges of linear models, which the theory knows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from experiments.studies.data import Rows, digits
from experiments.studies.linear import compare
from experiments.studies.run import EXPERIMENT
from experiments.studies.settings import FACTORS

from .making import smoke_run


def test_a_tiny_run_has_every_study(tmp_path: Path) -> None:
    (seed,) = smoke_run(EXPERIMENT, [], tmp_path)["seeds"]
    assert seed["studies"].keys() == FACTORS.keys()
    for (case,) in seed["studies"].values():
        assert {"average", "joint", "joint again", "kronecker, P = 0", "diagonal, P = H_0"} <= case["scores"].keys()
        assert all(one["kl"] == 0 for one in case["scores"]["joint"].values())
        assert all(one["kl"] > 0 for one in case["scores"]["average"].values())


def parts() -> list[Rows]:
    rows = digits().select(torch.arange(60))
    rows = Rows(rows.pixels.double(), rows.labels)
    return [rows.select(torch.arange(start, start + 20)) for start in (0, 20, 40)]


def test_matching_is_joint_training_for_linear_regression_and_not_by_diagonals() -> None:
    base, *tasks = parts()
    found = compare("linear regression", 1.0, base, tasks, [base, *tasks])
    for name in ("full", "kronecker", "all data", "joint, from elsewhere"):
        assert found[name]["distance"] < 1e-8 and found[name]["loss"] == pytest.approx(found["joint"]["loss"])
    assert min(found[name]["distance"] for name in ("average", "task-arithmetic", "diagonal", "base")) > 0.1
