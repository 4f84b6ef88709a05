"""Previews: predictions against a loop, data against a merge on disk, and what reports say."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.compare import evaluate, predict
from gradmerge.compare.settings import recipe_with

from .making import ThreeModels, setting


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_predicted_sweep_is_a_loop_over_the_formula(tmp_path: Path, reduction: str) -> None:
    place = ThreeModels(tmp_path, reduction=reduction, damping=0.01)
    if reduction == "mean":
        for examples, curvature in zip(place.examples, place.curvature, strict=True):
            curvature |= {n: v / examples for n, v in curvature.items()}
        place.examples = [1, 1, 1]
    found = gm.preview(place.recipe, weights="0:1:0.25", methods="gradient-matching,task-arithmetic", threads=2)
    assert found.tasks == ["a", "b", "base"] and len(found.rows) == 11 and not found.measured
    for row in found.rows:
        want = place.predicted(place.merged(row.setting.method, row.setting.weights))
        assert [row.values[task] for task in found.tasks] == pytest.approx(want, rel=1e-6, abs=1e-12)
        assert row.score == pytest.approx(max(want), rel=1e-6)
    assert found.reference.setting == setting("gradient-matching", (1.0, 0.5))
    for row in found.rows:
        assert max(found.shown_value(row, task) or 0 for task in found.tasks) == found.shown_score(row)
    assert found.shown_score(found.reference) == 1
    best = min(found.rows, key=lambda row: row.score or 0)
    assert found.best() is best and best.rank == 1


def test_predictions_do_not_depend_on_threads_or_on_how_many_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = ThreeModels(tmp_path).recipe
    methods = "gradient-matching,ties,dare,fisher-averaging,average"
    one = gm.preview(recipe, weights="a=0:1:0.5", methods=methods, threads=1)
    more = gm.preview(recipe, weights="a=0:1:0.5", methods=methods, threads=3)
    assert [row.values for row in one.rows] == [row.values for row in more.rows]
    monkeypatch.setattr(predict, "CANDIDATES_PER_PASS", 4)
    apart = gm.preview(recipe, weights="a=0:1:0.5", methods=methods, threads=2)
    assert [row.values for row in apart.rows] == [pytest.approx(row.values, rel=1e-9) for row in one.rows]


def test_rules_without_weights_appear_once_and_impossible_settings_are_left_out_with_a_note(tmp_path: Path) -> None:
    found = gm.preview(ThreeModels(tmp_path).recipe, methods="average,weighted-average", weights="0:1:0.25")
    assert [row.setting.name for row in found.rows] == [
        "average",
        *(f"weighted-average {w}" for w in (0.25, 0.5, 0.75, 1)),
    ]
    assert sum("weighted-average" in note for note in found.notes) == 1
    assert {row.rank for row in found.rows} == {1}, "always the same merge"


def test_what_curvature_cannot_say_is_refused(tmp_path: Path) -> None:
    place = ThreeModels(tmp_path)
    plain = {"base": str(place.base), "models": [str(place.a), str(place.b)]}
    with pytest.raises(gm.InputError):
        gm.preview({"method": "task-arithmetic", **plain})
    without_prior = {**place.recipe, "base": str(place.base), "method": "fisher-averaging"}
    assert gm.preview(without_prior, weights="a=0:1:0.5").tasks == ["a", "b"]
    with pytest.raises(gm.InputError):
        gm.preview({**without_prior, "method": "gradient-matching"})
    with pytest.raises(gm.InputError):
        gm.preview({**place.recipe, "method": "fa1"})


def test_measured_settings_are_those_of_a_merge_on_disk(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "MAX_MEMORY", 1)  # one merge at a time
    data = {name: str(texts / f"{name}.jsonl") for name in ("a", "b")} | {"base": str(texts / "a.jsonl")}
    found = gm.preview(
        texts / "recipe.yml",
        weights=["a=0.3,1.2"],
        methods="task-arithmetic,ties",
        data=data,
        device="cpu",
        batch_size=4,
    )
    assert found.tasks == ["a", "b", "base"] and found.examples == {"a": 10, "b": 10, "base": 10}
    recipe = gm.load_recipe(texts / "recipe.yml")
    for number, row in enumerate(found.rows):
        out = tmp_path / f"{number}"
        gm.merge(recipe_with(recipe, row.setting), out)
        assert row.metrics["base"] == row.metrics["a"], "the same rows"
        for task in ("a", "b"):
            want = gm.evaluate(str(out), data[task], device="cpu")
            for name, value in row.metrics[task].items():
                assert value == pytest.approx(want[name], abs=1e-6), (row.setting, task, name)
        average = sum(row.metrics[task]["accuracy"] for task in data) / 3
        assert row.score == pytest.approx(average)
    for name in ("base", "b"):
        want = gm.evaluate(str(texts / name), data["b"], device="cpu")
        assert found.alone[name]["b"]["loss_per_example"] == pytest.approx(want["loss_per_example"], abs=1e-6)
    assert found.criterion.name == "average accuracy" and found.criterion.higher
