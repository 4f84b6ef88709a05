"""`gradmerge diagnose` as a user runs it: predictions against slow sums, data against evaluate, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import gradmerge as gm
from tests.checkpoints.families import double
from tests.compare.making import summed_gradient
from tests.making import read_model, run, write_recipe
from tests.tasks.making import labelled, tiny_bert_checkpoint, write_jsonl

DAMPING = 1e-3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and two models with curvature, data, a recipe and a report of all of it."""
    folder = tmp_path_factory.mktemp("diagnose")
    for seed, name in enumerate(("first", "one", "two", "joint")):
        tiny_bert_checkpoint(folder / name, seed=seed)
        write_jsonl(folder / f"{name}.jsonl", labelled(10, seed=seed))
        gm.estimate_curvature(str(folder / name), str(folder / f"{name}.jsonl"), out=folder / f"{name}-c", device="cpu")
    write_recipe(folder / "recipe.yml", recipe())
    data = ["--data", f"one={folder / 'one.jsonl'}", "--data", f"two={folder / 'two.jsonl'}"]
    more = ["--target", folder / "joint", "--device", "cpu"]
    run("diagnose", folder / "recipe.yml", "-o", folder / "report", *data, *more)
    return folder


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "method": "gradient-matching",
        "base": {"model": "./first", "curvature": "./first-c"},
        "models": [
            {"model": "./one", "curvature": "./one-c", "weight": 0.8},
            {"model": "./two", "curvature": "./two-c", "weight": 0.5},
        ],
        "damping": DAMPING,
    } | changes


def found(place: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((place / "report" / "diagnosis.json").read_text())
    return result


@pytest.fixture(scope="module")
def merged(place: Path) -> dict[str, Tensor]:
    gm.merge(place / "recipe.yml", place / "merged")
    return double(read_model(place / "merged"))


def test_predictions_are_shown_relative_to_task_arithmetic(place: Path) -> None:
    predicted = found(place)["predicted"]
    assert set(predicted) == {"gradient-matching", "task-arithmetic", "average", "fisher-averaging"}
    for task in ("one", "two", "base"):
        forms = {name: predicted[name][task]["quadratic_form"] for name in predicted}
        for name, form in forms.items():
            assert predicted[name][task]["relative_loss"] == pytest.approx(form / forms["task-arithmetic"])
            assert predicted[name][task]["rank"] == 1 + sum(other < form for other in forms.values())


def test_measured_numbers_are_those_of_evaluate(place: Path, merged: dict[str, Tensor]) -> None:
    measured = found(place)["measured"]
    for task in ("one", "two"):
        for name, model in (
            ("gradient-matching", "merged"),
            ("base", "first"),
            ("fine-tuned model", task),
            ("target", "joint"),
        ):
            want = gm.evaluate(str(place / model), str(place / f"{task}.jsonl"), device="cpu")
            assert measured[name][task]["accuracy"] == want["accuracy"]
            assert measured[name][task]["loss_per_example"] == pytest.approx(want["loss_per_example"], rel=1e-5)


def test_the_residual_and_the_true_mismatch_are_what_their_formulas_say(place: Path, merged: dict[str, Tensor]) -> None:
    base, prior = double(read_model(place / "first")), gm.Curvature.load(place / "first-c")
    h = {task: gm.Curvature.load(place / f"{task}-c") for task in ("one", "two")}
    weights = {"one": 0.8, "two": 0.5}
    here = {task: summed_gradient(place / "merged", place / f"{task}.jsonl") for task in weights}
    residual = away = 0.0
    for n in prior:
        h0 = prior[n].double() + DAMPING
        r = h0 * (merged[n] - base[n]) + sum(w * here[t][n] for t, w in weights.items())
        residual += float((r**2).sum())
        away += float(((r / (h0 + sum(w * h[t][n].double() for t, w in weights.items()))) ** 2).sum())
    got = found(place)["residuals"]["gradient-matching"]
    assert got["residual"] == pytest.approx(residual**0.5, rel=1e-3)
    assert got["distance"] == pytest.approx(away**0.5, rel=1e-3)
    for task in weights:
        there = summed_gradient(place / "joint", place / f"{task}.jsonl")
        want = sum(float(((here[task][n] - there[n]) ** 2).sum()) for n in there) ** 0.5 / 10
        norms = {(m["merge"], m["task"]): m["norm"] for m in found(place)["true_mismatch"]}
        assert norms["gradient-matching", task] == pytest.approx(want, rel=1e-3)


def test_removal_is_compared_with_negation(place: Path) -> None:
    write_recipe(place / "removal.yml", recipe(method="removal", damping=1.0))
    done = run("diagnose", place / "removal.yml", "-o", place / "of-removal", "--json")
    assert json.loads(done.stdout)["candidates"] == ["removal", "task-arithmetic (negated)"]
