"""`gradmerge preview` as a user runs it: the best setting is merged and its recipe kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import gradmerge as gm
from tests.making import run, three_models, weight_bytes, write_recipe


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A recipe with curvature of a base and two models; its paths are relative."""
    three_models(tmp_path, curvature=True)
    recipe = {
        "method": "gradient-matching",
        "base": "./base",
        "models": [{"model": "./a", "weight": 1.0}, {"model": "./b", "weight": 0.5}],
        "exclude": ["classifier.*"],
    }
    write_recipe(tmp_path / "recipe.yml", recipe)
    return tmp_path


def test_the_best_setting_is_merged_and_its_recipe_kept(place: Path) -> None:
    out, merged = place / "report", place / "deep" / "merged"
    result = run("preview", place / "recipe.yml", "-w", "a=0,0.3,1", "-o", out, "--save-best", merged, "--json")
    facts = json.loads(result.stdout)
    assert facts["saved"] == str(merged) and facts["report"] == str(out / "report.html")
    raw = gm.load_recipe(place / "recipe.yml").model_dump(exclude_unset=True)
    for model, weight in zip(raw["models"], facts["winner"]["weights"].values(), strict=True):
        model["weight"] = weight
    write_recipe(place / "by-hand.yml", raw)
    (place / "again").mkdir()
    gm.merge(place / "by-hand.yml", place / "again" / "merged")
    assert weight_bytes(merged) == weight_bytes(place / "again" / "merged")
    gm.merge(out / "recipe.yml", place / "third")
    assert (place / "third/model.safetensors").read_bytes() == (merged / "model.safetensors").read_bytes()
    assert "../a" in (out / "recipe.yml").read_text()
