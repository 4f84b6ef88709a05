"""The picture of a curvature file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.curvature.curvature import KroneckerFactors
from gradmerge.curvature.format import open_curvature
from gradmerge.curvature.summary import group_of
from gradmerge.report.curvature_plot import LayerRow, draw, legible, spread

from ..forked import forked
from ..making import random_curvature, random_state

runner = CliRunner()
MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


def saved(folder: Path, sums: Mapping[str, Tensor] | None = None, precision: str = "float32") -> Path:
    curvature = random_curvature(0, random_state(0))
    if sums is not None:
        curvature = gm.Curvature(sums, 100)
    curvature.save(folder, precision=precision)
    return folder


def show(path: Path, plot: Path, status: int = 0) -> str:
    done = runner.invoke(app, ["curvature", "show", str(path), "--plot", str(plot)])
    assert done.exit_code == status, done.output
    return done.output


@pytest.mark.parametrize("ending", MAGIC)
def test_a_plot_is_written_in_the_format_of_its_ending(tmp_path: Path, ending: str) -> None:
    one, two = tmp_path / f"one{ending}", tmp_path / f"two{ending.upper()}"
    assert "embed" in show(saved(tmp_path / "c"), one)
    show(tmp_path / "c", two)
    assert one.read_bytes().startswith(MAGIC[ending])
    assert one.read_bytes() == two.read_bytes()
    show(tmp_path / "c", one)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["c", one.name, two.name])


def test_a_plot_says_what_it_shows(tmp_path: Path) -> None:
    saved(tmp_path / "yelp-curvature")
    with open_curvature(str(tmp_path / "yelp-curvature")) as file:
        figure = draw(spread(file), "yelp-curvature", "mean over 100 examples · likelihood empirical")
    texts = [t.get_text() for t in figure.texts] + [figure.get_suptitle(), *(a.get_xlabel() for a in figure.axes)]
    words = "\n".join(texts)
    for expected in ("yelp-curvature", "100 examples", "likelihood empirical"):
        assert expected in words
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["classifier", "embed", "layers.0", "layers.1"]


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "log8"])
def test_rows_count_what_is_in_the_file(tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmerge.curvature.summary._CHUNK", 7)  # every tensor in pieces
    sums = random_curvature(0, random_state(0)).sum()
    sums["embed.weight"][3:] = 0
    saved(tmp_path / "c", sums, precision)
    stored = gm.Curvature.load(tmp_path / "c")
    with open_curvature(str(tmp_path / "c")) as file:
        rows = {row.label: row for row in spread(file)}
    for label, row in rows.items():
        values = [float(v) / 100 for n, t in stored.items() if group_of(n) == label for v in t.reshape(-1)]
        above = [math.log10(v) for v in values if v > 0]
        want, _ = np.histogram(above, bins=np.linspace(-64, 40, 2081))
        assert row.entries == len(values) and row.zeros == len(values) - len(above)
        assert row.mean == pytest.approx(sum(values) / len(values))
        # A value on the edge of two bins may fall into either.
        assert np.abs(np.cumsum(row.counts - want)).max() <= 1 and row.counts.sum() == len(above)


def rows(labels: list[str]) -> list[LayerRow]:
    return [LayerRow(label, np.eye(1, 2080, i, dtype=np.int64)[0], 10, 2, 0.5) for i, label in enumerate(labels)]


@pytest.mark.parametrize("number", [1, 60, 65, 200, 1000])
def test_many_layers_share_rows(number: int) -> None:
    layers = rows(["embed", *(f"model.layers.{i}" for i in range(number)), "norm"])
    few = legible(layers)
    assert len(few) <= 64
    assert (few[0].label, few[-1].label) == ("embed", "norm")
    assert sum(row.entries for row in few) == 10 * (number + 2)
    assert sum(row.zeros for row in few) == 2 * (number + 2)
    assert np.array_equal(sum(row.counts for row in few), sum(row.counts for row in layers))
    if number == 200:
        assert few[1].label == "model.layers.0–3"
    if number <= 60:
        assert [row.label for row in few] == [row.label for row in layers]
    assert len(legible(rows([f"module_{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(150)]))) == 50


def test_a_wrong_place_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    for place in ("p.jpg", "p", "folder.png", "no/p.png"):
        assert "nothing" not in show(tmp_path / "nothing", tmp_path / place, status=2)


def test_of_kronecker_factors_the_diagonal_that_they_make_is_plotted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradmerge.curvature.summary._CHUNK", 7)  # two outputs at a time
    torch.manual_seed(0)
    rows, columns = torch.randn(7, 3), torch.randn(7, 5)
    layer = KroneckerFactors(rows.T @ rows, columns.T @ columns, 7)
    gm.Curvature({"a.0.weight": layer, "a.0.scale": torch.tensor([0.0, 2.0])}, 2).save(tmp_path / "k")
    with open_curvature(str(tmp_path / "k")) as file:
        (row,) = spread(file)
    made = layer.outputs.diagonal()[:, None] * layer.inputs.diagonal()[None] / 7
    assert (row.label, row.entries, row.zeros) == ("a.0", 17, 1)
    assert math.isclose(row.total, float(made.double().sum() + 2) / 2, rel_tol=1e-6)
    want, _ = np.histogram(np.log10([*(made / 2).flatten(), 1.0]), bins=np.linspace(-64, 40, 2081))
    assert np.abs(row.counts - want).sum() <= 2, "but for what is on an edge"
    show(tmp_path / "k", tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(MAGIC[".png"])


def test_gram_matrices_are_not_plotted(tmp_path: Path) -> None:
    header = {"format": "gradmerge-curvature/1", "examples": "7", "kind": "gram"}
    save_file({"w": torch.ones(2, 2)}, tmp_path / "c.safetensors", metadata=header)
    show(tmp_path / "c.safetensors", tmp_path / "p.png", status=2)
    assert not (tmp_path / "p.png").exists()


def test_a_failed_plot_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.png").write_text("old")

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", fail)
    show(saved(tmp_path / "c"), tmp_path / "p.png", status=1)
    assert (tmp_path / "p.png").read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c", "p.png"]


def test_without_matplotlib_it_names_what_to_install(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"sys.argv = ['gradmerge', *{['curvature', 'show', str(tmp_path / 'c'), '--plot', str(tmp_path / 'p.png')]}]\n"
        "from gradmerge.cli import main\nmain()"
    )
    done = forked(code=code)
    assert done.returncode == 2
    assert "gradmerge[plot]" in done.stderr


def test_a_dollar_sign_in_a_name_begins_no_formula(tmp_path: Path) -> None:
    value = torch.ones(3)
    saved(tmp_path / "$c^{$", {"$\\frac{$.weight": value, "a\x1b[1m\nb.weight": value})
    show(tmp_path / "$c^{$", tmp_path / "plot.svg")
    with open_curvature(str(tmp_path / "$c^{$")) as file:
        figure = draw(spread(file), "$c^{$", "likelihood $x$")
    labels = figure.axes[0].get_yticklabels()
    assert sorted(t.get_text() for t in labels) == ["$\\frac{$", "a\\x1b[1m\\nb"]
    assert not any(t.get_parse_math() for t in [*labels, *figure.texts])
