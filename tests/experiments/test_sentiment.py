"""The sentiment experiment: a tiny run, and merges against their formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common.driver import Run
from experiments.sentiment import merges, report, run as program
from experiments.sentiment.settings import ALL_DATA, BASE, SCALES, SETS, TARGETS, TASKS

from .making import smoke_run

CELLS = [
    merges.Merge("gradient-matching", "diagonal", "sampled", "N · mean", "none"),
    merges.Merge("gradient-matching", "kronecker", "sampled", "mean", "none"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny run with two cells of the table of Hessians."""
    out = tmp_path_factory.mktemp("runs") / "sentiment"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "grid", lambda: CELLS)
        patch.setattr(report, "grid", list)
        return out, smoke_run(program.EXPERIMENT, ["--grid"], out)


def test_a_tiny_run_scores_every_model_and_merge_on_every_set(results: tuple[Path, dict[str, Any]]) -> None:
    (seed,) = results[1]["seeds"]
    assert set(seed["scores"]) == {*SETS, *TARGETS, *merges.MERGES} and len(seed["grid"]["cells"]) == len(CELLS)
    for one in [*seed["scores"].values(), *(s for method in merges.SWEPT for s in seed["sweep"][method])]:
        assert all(one[name]["test"]["rows"] == results[1]["rows"][name]["test"] for name in SETS)
    assert report.accuracy(seed["scores"][BASE], BASE) > 80 and report.average(seed["scores"][ALL_DATA]) > 80


def test_merges_are_what_their_formulas_say(results: tuple[Path, dict[str, Any]]) -> None:
    out, found = results
    shared = {"rows": found["rows"], "model": str(out / "model")}
    seed = program.SentimentSeed(Run(out, SCALES["tiny"], "cpu", None, None, shared), 0)
    name = "bert.encoder.layer.1.output.dense.weight"
    theta = {n: seed.state(n)[name].double() for n in SETS}
    fisher = {n: seed.curvature(n, kind="diagonal", labels="empirical", sample=False)[name].double() for n in SETS}
    prior, change = fisher[BASE] + 1e-10, {n: theta[n] - theta[BASE] for n in TASKS}
    total = prior + sum(0.6 * fisher[n] for n in TASKS)
    slow = theta[BASE] + sum(0.6 * (prior + fisher[n]) / total * change[n] for n in TASKS)
    merged = seed.merged(merges.swept("gradient-matching", 0.6))[name].double()
    torch.testing.assert_close(merged, slow, rtol=1e-4, atol=1e-6)
    means = {n: fisher[n] / found["rows"][n]["train"] + 1e-10 for n in SETS}
    slow = sum(means[n] * theta[n] for n in SETS) / sum(means.values())
    merged = seed.merged(merges.MERGES["fisher-averaging-mean"])[name].double()
    torch.testing.assert_close(merged, slow, rtol=1e-4, atol=1e-6)
