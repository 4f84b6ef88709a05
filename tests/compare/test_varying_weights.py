"""Recipes whose weights differ between layers, in previews, suggestions and diagnoses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

import gradmerge as gm
from tests.making import three_models, write_recipe

LISTS = [0.2, 0.9], [{"filter": "layers.1*", "value": [0.3, 0.5]}, {"value": 0.1}]


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    """A recipe whose own weights vary over the layers and by filter."""
    three_models(tmp_path, curvature=True)
    models = [{"model": f"./{name}", "weight": weight} for name, weight in zip("ab", LISTS, strict=True)]
    write_recipe(tmp_path / "recipe.yml", {"method": "gradient-matching", "base": "./base", "models": models})
    return tmp_path


def test_a_recipe_whose_weights_vary_is_the_reference_of_a_preview(varied: Path) -> None:
    methods = ["task-arithmetic", "gradient-matching"]
    found = gm.preview(varied / "recipe.yml", varied / "out", weights="a=0:1:0.5", methods=methods)
    name = "(0.2, 0.9) over the layers, layers.1*: (0.3, 0.5) over the layers; else: 0.1"
    assert found.reference.setting.weights_text == name and found.shown_score(found.reference) == 1
    assert "(0.2, 0.9) over the layers" in (varied / "out" / "report.html").read_text() and found._repr_html_()
    facts = json.loads((varied / "out" / "preview.json").read_text())
    assert facts["reference"]["weights"] == {"a": LISTS[0], "b": LISTS[1]}
    cells = [row["weight b"] for row in csv.DictReader((varied / "out" / "preview.csv").open())]
    assert set(cells) == {"layers.1*: (0.3, 0.5) over the layers; else: 0.1"}
    assert facts["winner"]["weights"] == {"a": LISTS[0], "b": LISTS[1]}, "the recipe's own is the best"
    assert set(facts["best"]["task-arithmetic"]["within_1_percent"]["weights"]) == {"a"}
    gm.merge(varied / "out" / "recipe.yml", varied / "merged", progress=False)
