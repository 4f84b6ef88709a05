"""The plot of a curvature file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradmerge as gm
from gradmerge.curvature.format import open_curvature
from gradmerge.report.curvature import count_decades, curvature_page

from ..making import random_curvature, random_state, run

EXAMPLES = 100


def test_a_plot_is_one_page_that_is_replaced(tmp_path: Path) -> None:
    random_curvature(0, random_state(0)).save(tmp_path / "c")
    for _ in range(2):
        run("curvature", "show", tmp_path / "c", "--plot", tmp_path / "plot.html")
    text = (tmp_path / "plot.html").read_text()
    assert "layers.0" in text and "Distribution of the curvature" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "plot.html"]


@pytest.mark.parametrize("name", ["plot.png", "missing/plot.html", "folder.html"])
def test_a_path_that_cannot_be_a_plot_is_refused_before_any_work(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.html").mkdir()
    run("curvature", "show", tmp_path / "no curvature", "--plot", tmp_path / name, status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.html"]


def test_counts_are_those_of_the_means_over_examples(tmp_path: Path) -> None:
    values = torch.tensor([0.0, 0.0, 1e-38, 0.02, 0.5, 5.0, 7.0, 30.0])
    sums = {"layers.0.weight": values * EXAMPLES, "layers.0.bias": torch.tensor([0.7]) * EXAMPLES}
    gm.Curvature(sums, EXAMPLES).save(tmp_path / "c")
    with open_curvature(str(tmp_path / "c")) as file:
        counts, totals = count_decades(file)
        (section,) = curvature_page(file).sections
    (layer,) = counts
    assert int(counts[layer].sum()) == 9 and int(counts[layer][0]) == 2
    assert totals[layer] == pytest.approx(float(values.sum()) + 0.7)
    cells = {row[1]: row[2] for row in section.figures[0].table().rows}
    assert cells["0"] == pytest.approx(100 * 2 / 9) and cells["1e0"] == pytest.approx(100 * 2 / 9)
    assert cells["1e-1"] == pytest.approx(100 * 2 / 9) and sum(cells.values()) == pytest.approx(100)
    assert section.tables[0].rows[0][1:] == [9, pytest.approx((float(values.sum()) + 0.7) / 9), pytest.approx(200 / 9)]


def test_all_zeros_can_be_plotted(tmp_path: Path) -> None:
    gm.Curvature({"a.weight": torch.zeros(3)}, 2).save(tmp_path / "c")
    run("curvature", "show", tmp_path / "c", "--plot", tmp_path / "plot.html")
