"""Previews over weights: the grid, predictions against a loop, data against a merge on disk, and what is best."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.compare import evaluator, predictor
from gradmerge.compare.grid import Setting, Space, check_methods, grid, recipe_with
from gradmerge.compare.preview import Outcome, score_all
from gradmerge.compare.scores import headline
from gradmerge.compare.weight_ranges import parse_range, parse_weights
from gradmerge.recipe import make_recipe
from gradmerge.report.preview_page import pareto_front
from tests.making import random_curvature, three_models

State = dict[str, Tensor]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0:1:0.1", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ("0:1:0.3", [0.0, 0.3, 0.6, 0.9]),
        ("1:0:-0.5", [0.0, 0.5, 1.0]),
        ("-0.2:0.1:0.1", [-0.2, -0.1, 0.0, 0.1]),
        ("0,0.3,1", [0.0, 0.3, 1.0]),
        ("0.5", [0.5]),
        ("0.7:0.7:0.1", [0.7]),
    ],
)
def test_a_range_has_both_ends_and_no_dust(text: str, values: list[float]) -> None:
    assert list(parse_range(text).values) == values


@pytest.mark.parametrize(
    "text", ["0:1:0", "0:1:-0.1", "a:1:0.1", "0:1:", "0:1:0.1:2", "", "nan", "0:inf:1", "0:1:1e-300"]
)
def test_a_bad_range_is_refused(text: str) -> None:
    with pytest.raises(gm.InputError, match=f"^--weights {text}"):
        parse_range(text)


def two_tasks(weights: Sequence[float] = (1.0, 1.0), method: str = "task-arithmetic") -> gm.Recipe:
    models = [{"model": name, "weight": weight} for name, weight in zip(("x/a", "x/b"), weights, strict=True)]
    return make_recipe({"method": method, "base": "x/base", "models": models})


def test_a_grid_is_the_product_and_tasks_without_a_range_keep_the_recipes_weight() -> None:
    recipe = two_tasks((0.25, 0.75))

    def weights(*given: str) -> list[tuple[float, ...]]:
        return [s.weights for s in grid(["task-arithmetic"], Space(parse_weights(given, ["a", "b"], recipe)))]

    assert weights("0:1:0.5") == [(0, 0), (0.5, 0.5), (1, 1)]
    assert weights("a=0:1:0.5") == [(0, 0.75), (0.5, 0.75), (1, 0.75)]
    assert weights("a=0,1", "b=0.5,2") == list(itertools.product((0, 1), (0.5, 2)))
    assert weights("0:1:0.5", "b=0.3") == [(0, 0.3), (0.5, 0.3), (1, 0.3)]
    both = grid(["average", "task-arithmetic"], Space(parse_weights("0:1:0.5", ["a", "b"], recipe)))
    assert [s.name for s in both] == ["average", "task-arithmetic 0", "task-arithmetic 0.5", "task-arithmetic 1"]
    ranges = Space(parse_weights(["0:1:0.5", "b=0.3"], ["a", "b"], recipe))
    assert [s.position for s in grid(["task-arithmetic"], ranges)] == [0, 0.5, 1]


@pytest.mark.parametrize("weights", [["a=0:1:0.01", "b=0:1:0.01"], "0:1"])
def test_a_grid_that_is_too_large_or_has_no_step_is_refused(weights: Any) -> None:
    with pytest.raises(gm.InputError):
        grid(["task-arithmetic"], Space(parse_weights(weights, ["a", "b"], two_tasks())))


def test_another_rule_of_a_recipe_drops_what_only_its_own_understands() -> None:
    raw = {
        "method": "ties",
        "base": "x/base",
        "models": ["x/a", {"model": "x/b", "weight": 0.5}],
        "options": {"density": 0.3},
        "exclude": ["head.*"],
    }
    recipe = make_recipe(raw)
    assert recipe_with(recipe, Setting("ties", (0.2, 0.4))).options == {"density": 0.3}
    changed = recipe_with(recipe, Setting("average", ()))
    assert (changed.options, changed.weights, changed.exclude) == ({}, [1.0, 1.0], ["head.*"])
    for methods, named in (("slerp", "slerp"), ("regmean", "regmean"), ("task-arithmetic,tie", "'ties'")):
        with pytest.raises(gm.InputError, match=named):
            check_methods(methods, recipe)


class Place:
    """A base and two tuned models in float64, with curvature of unequal numbers of examples."""

    def __init__(self, path: Path, **keys: Any) -> None:
        self.path = path
        (self.base, self.a, self.b), self.states = three_models(path, torch.float64)
        self.examples = [100, 40, 250]
        self.curvature = []
        for seed, (name, state, count) in enumerate(zip(("base", "a", "b"), self.states, self.examples, strict=True)):
            curvature = random_curvature(seed + 20, state, count)
            curvature.save(path / f"{name}-curvature")
            self.curvature.append({n: v.double() for n, v in curvature.items()})
        self.recipe: dict[str, Any] = {
            "method": "gradient-matching",
            "base": {"model": str(self.base), "curvature": str(path / "base-curvature")},
            "models": [
                {"model": str(path / name), "curvature": str(path / f"{name}-curvature"), "weight": weight}
                for name, weight in (("a", 1.0), ("b", 0.5))
            ],
            "damping": 0.01,
        } | keys

    def merged(self, method: str, weights: Sequence[float]) -> State:
        base, tuned = self.states[0], self.states[1:]
        merged = {}
        for name, start in base.items():
            prior = self.curvature[0][name] + 0.01
            hs = [c[name] for c in self.curvature[1:]]
            whole = prior + sum(w * h for w, h in zip(weights, hs, strict=True))
            total = start.clone()
            for model, h, weight in zip(tuned, hs, weights, strict=True):
                share = (prior + h) / whole if method == "gradient-matching" else torch.ones_like(whole)
                total += weight * share * (model[name] - start)
            merged[name] = total
        return merged

    def predicted(self, merged: State) -> list[float]:
        """½ Σ H (θ − θ_t)² / N of a, b and the base."""
        values = []
        for i in (1, 2, 0):
            sums = [0.5 * float((self.curvature[i][n] * (merged[n] - self.states[i][n]) ** 2).sum()) for n in merged]
            values.append(sum(sums) / self.examples[i])
        return values


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_predicted_sweep_is_a_loop_over_the_formula(tmp_path: Path, reduction: str) -> None:
    place = Place(tmp_path, reduction=reduction, damping=0.01)
    if reduction == "mean":
        for examples, curvature in zip(place.examples, place.curvature, strict=True):
            curvature |= {n: v / examples for n, v in curvature.items()}
        place.examples = [1, 1, 1]
    found = gm.preview(place.recipe, weights="0:1:0.25", methods="gradient-matching,task-arithmetic", threads=2)
    assert found.tasks == ["a", "b", "base"] and len(found.rows) == 10 and not found.measured
    for row in [*found.rows, found.reference]:
        want = place.predicted(place.merged(row.setting.method, row.setting.weights))
        assert [row.values[task] for task in found.tasks] == pytest.approx(want, rel=1e-6, abs=1e-12)
        assert row.score == pytest.approx(max(want), rel=1e-6)
    assert found.reference.setting == Setting("gradient-matching", (1.0, 0.5))
    assert max(found.relative(found.reference, task) or 0 for task in found.tasks) == 1
    for row in found.rows:
        assert max(found.relative(row, task) or 0 for task in found.tasks) == found.relative_score(row)
    best = min(found.rows, key=lambda row: row.score or 0)
    assert found.best() is best and best.rank == 1
    smallest = gm.preview(place.recipe, weights="0:1:0.25", objective="sum").best()
    every = [place.predicted(place.merged("gradient-matching", (w, w))) for w in (0, 0.25, 0.5, 0.75, 1)]
    assert smallest is not None and smallest.setting.position == 0.25 * int(np.argmin([sum(v) for v in every]))


def test_predictions_do_not_depend_on_threads_or_on_how_many_are_looked_at_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Place(tmp_path).recipe
    methods = "gradient-matching,ties,dare,fisher-averaging,average"
    one = gm.preview(recipe, weights="a=0:1:0.5", methods=methods, threads=1)
    more = gm.preview(recipe, weights="a=0:1:0.5", methods=methods, threads=3)
    assert [row.values for row in one.rows] == [row.values for row in more.rows]
    monkeypatch.setattr(predictor, "PASS", 4)
    apart = gm.preview(recipe, weights="a=0:1:0.5", methods=methods, threads=2)
    assert [row.values for row in apart.rows] == [pytest.approx(row.values, rel=1e-9) for row in one.rows]


def test_rules_without_weights_appear_once_and_impossible_settings_are_left_out_with_a_note(tmp_path: Path) -> None:
    found = gm.preview(Place(tmp_path).recipe, methods="average,weighted-average", weights="0:1:0.25")
    assert [row.setting.name for row in found.rows] == [
        "average",
        *(f"weighted-average {w}" for w in (0.25, 0.5, 0.75, 1)),
    ]
    assert sum("weighted-average" in note for note in found.notes) == 2
    assert {row.rank for row in found.rows} == {1}, "five times the same merge"


def test_where_the_reference_costs_nothing_multiples_are_of_the_largest(tmp_path: Path) -> None:
    recipe = Place(tmp_path, method="task-arithmetic").recipe
    recipe["models"] = recipe["models"][:1]
    recipe["base"].pop("curvature")
    found = gm.preview(recipe, weights="0:1:0.5")
    assert found.reference.values == {"a": 0} and found.notes
    assert [found.relative(row, "a") for row in found.rows] == [1, pytest.approx(0.25), 0]


def test_what_curvature_cannot_say_is_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    plain = {"base": str(place.base), "models": [str(place.a), str(place.b)]}
    with pytest.raises(gm.InputError, match=r"models\[0\]\.curvature"):
        gm.preview({"method": "task-arithmetic", **plain})
    without_prior = {**place.recipe, "base": str(place.base), "method": "fisher-averaging"}
    assert gm.preview(without_prior, weights="a=0:1:0.5").tasks == ["a", "b"]
    with pytest.raises(gm.InputError, match="gradient-matching"):
        gm.preview({**without_prior, "method": "gradient-matching"})
    with pytest.raises(gm.InputError, match="fa1"):
        gm.preview({**place.recipe, "method": "fa1"})


def test_a_removal_has_no_best_setting_and_uses_its_penalty(tmp_path: Path) -> None:
    place = Place(tmp_path)
    plain = gm.preview({**place.recipe, "method": "removal"}, weights="0,1")
    assert plain.best() is None and plain.rows[0].rank is not None
    base = {**place.recipe["base"], "penalty": {"identity": 3.0}}
    with_penalty = gm.preview({**place.recipe, "method": "removal", "base": base}, weights="0,1")
    assert with_penalty.rows[1].values != plain.rows[1].values


def test_measured_settings_are_those_of_a_merge_on_disk(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluator, "MEMORY", 1)  # one merge at a time
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


def rows_of(*metrics: dict[str, dict[str, float]]) -> list[Outcome]:
    rows = []
    for number, by_task in enumerate(metrics):
        values: dict[str, float | None] = {task: found[headline(found)] for task, found in by_task.items()}
        rows.append(Outcome(Setting("task-arithmetic", (float(number),)), values, by_task))
    return rows


def test_metrics_of_one_kind_are_averaged_and_others_are_ranked() -> None:
    accuracies = rows_of(
        {"a": {"accuracy": 0.5}, "b": {"accuracy": 0.9}}, {"a": {"accuracy": 0.8}, "b": {"accuracy": 0.5}}
    )
    criterion = score_all(accuracies, True, "worst")
    assert criterion.higher and [row.score for row in accuracies] == [pytest.approx(0.7), pytest.approx(0.65)]
    mixed = rows_of(
        {"a": {"accuracy": 0.5}, "b": {"loss_per_token": 2.0}},
        {"a": {"accuracy": 0.8}, "b": {"loss_per_token": 2.0}},
        {"a": {"accuracy": 0.6}, "b": {"loss_per_token": 3.0}},
    )
    criterion = score_all(mixed, True, "worst")
    assert criterion.by_rank and not criterion.higher
    assert [row.score for row in mixed] == [(3 + 1.5) / 2, (1 + 1.5) / 2, (2 + 3) / 2]


def test_the_front_is_what_no_other_point_beats() -> None:
    generator = np.random.default_rng(0)
    points = [(float(a), float(b)) for a, b in generator.integers(0, 12, (40, 2))]
    for higher in itertools.product((False, True), repeat=2):
        signs = [-1 if up else 1 for up in higher]

        def beats(one: tuple[float, float], other: tuple[float, float], signs: list[int] = signs) -> bool:
            pairs = list(zip(one, other, signs, strict=True))
            return all(s * a <= s * b for a, b, s in pairs) and any(s * a < s * b for a, b, s in pairs)

        want = {p for p in points if not any(beats(q, p) for q in points)}
        assert set(pareto_front(points, higher)) == want
