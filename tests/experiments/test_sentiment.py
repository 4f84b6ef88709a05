"""The sentiment experiment: tiny runs, and merges against their formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import experiments.sentiment.__main__ as program
import pytest
import torch
from experiments.sentiment import grid, report
from experiments.sentiment.data import BASE, SETS, TASKS
from experiments.sentiment.merging import RULES, SWEPT, Parts
from experiments.sentiment.settings import ALL_DATA, JOINT

from .making import smoke_run

CELLS = [
    grid.Cell("plain", "diagonal", "sampled", "N · mean", "none"),
    grid.Cell("prior", "kronecker", "sampled", "mean", "none"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny run with two cells of the table of Hessians."""
    out = tmp_path_factory.mktemp("runs") / "sentiment"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "cells", lambda: CELLS)
        return out, smoke_run(program.main, ["--grid"], out)


def test_a_tiny_run_scores_every_model_and_merge_on_every_set(run: tuple[Path, dict[str, Any]]) -> None:
    (seed,) = run[1]["seeds"]
    assert set(seed["scores"]) == {*SETS, ALL_DATA, JOINT, *RULES} and len(seed["grid"]["cells"]) == len(CELLS)
    for one in [*seed["scores"].values(), *(s for method in SWEPT for s in seed["sweep"][method])]:
        assert all(one[name]["test"]["rows"] == run[1]["rows"][name]["test"] for name in SETS)
    assert report.accuracy(seed["scores"][BASE], BASE) > 80 and report.average(seed["scores"][ALL_DATA]) > 80


def test_merges_are_what_their_formulas_say(run: tuple[Path, dict[str, Any]]) -> None:
    folder, rows = run[0] / "seed-0", {name: counts["train"] for name, counts in run[1]["rows"].items()}
    curvatures, grams = ({n: folder / f"{what}-{n}" / what for n in SETS} for what in ("curvature", "gram"))
    parts = Parts({n: folder / n for n in SETS}, curvatures, grams, rows, damping=1e-10, density=0.2)
    name = "bert.encoder.layer.1.output.dense.weight"
    theta = {n: s[name].double() for n, s in zip(SETS, [parts.base, *parts.tuned], strict=True)}
    fisher = {n: c[name].double() for n, c in zip(SETS, [parts.prior, *parts.curvature], strict=True)}
    prior, change = fisher[BASE] + 1e-10, {n: theta[n] - theta[BASE] for n in TASKS}
    total = prior + sum(0.6 * fisher[n] for n in TASKS)
    slow = theta[BASE] + sum(0.6 * (prior + fisher[n]) / total * change[n] for n in TASKS)
    torch.testing.assert_close(parts.swept("gradient-matching", 0.6)[name].double(), slow, rtol=1e-4, atol=1e-6)
    means = {n: fisher[n] / rows[n] + 1e-10 for n in SETS}
    slow = sum(means[n] * theta[n] for n in SETS) / sum(means.values())
    torch.testing.assert_close(parts.merged("fisher-averaging-mean")[name].double(), slow, rtol=1e-4, atol=1e-6)
