"""Predicted costs against a slow loop over entries, as the definitions read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.compare.predict import Prediction, open_for_prediction, predict
from gradmerge.compare.settings import BASE, task_names
from gradmerge.engine.randomness import keep_mask
from gradmerge.recipe import make_recipe

from ..making import SHAPES, near, random_state, three_models, write_model
from ..rules import slow
from .making import State, candidates, memory_plan

WEIGHTS = [0.7, 1.3]
DAMPING = 0.05
TASKS = ["a", "b"]
GROUPS = {
    "embed": ["embed.weight"],
    "layers.0": ["layers.0.linear.weight", "layers.0.linear.bias"],
    "layers.1": ["layers.1.linear.weight", "layers.1.norm.weight"],
    "classifier": ["classifier.weight"],
}

MERGES: dict[str, dict[str, Any]] = {
    "average": {"method": "average"},
    "task-arithmetic": {"method": "task-arithmetic"},
    "other weights": {"method": "task-arithmetic", "models.0.weight": -0.5, "models.1.weight": 2.0},
    "fisher-averaging": {"method": "fisher-averaging"},
    "fisher with base": {"method": "fisher-averaging", "options.include_base": True},
    "gradient-matching": {"method": "gradient-matching"},
    "removal": {"method": "removal"},
    "removal without bounds": {"method": "removal", "options.cap": "none"},
    "ties": {"method": "ties", "options.density": 0.3},
    "ties by tensor": {"method": "ties", "options.density": 0.3, "options.scope": "tensor"},
    "dare": {"method": "dare", "options.density": 0.4, "options.seed": 3},
    "dare twice": {"method": "dare", "options.density": 0.4, "options.seed": 4, "options.combine": "ties"},
}


def slow_merge(merge: dict[str, Any], states: Sequence[State], curvature: Sequence[State], damping: float) -> State:
    """A merge entry by entry, over the whole model at once, or over each tensor for a rule that asks for it."""
    method, weights = merge["method"], [merge.get(f"models.{i}.weight", WEIGHTS[i]) for i in range(2)]
    options = {key.removeprefix("options."): value for key, value in merge.items() if key.startswith("options.")}
    names = [[name] for name in SHAPES] if options.pop("scope", "model") == "tensor" else [list(SHAPES)]
    result: dict[str, Tensor] = {}
    for part in names:
        base, *tuned = [[float(v) for n in part for v in state[n].reshape(-1)] for state in states]
        prior, *fishers = [[float(v) for n in part for v in c[n].reshape(-1)] for c in curvature]
        if method == "dare":
            seed = options.pop("seed")
            kept = [
                [bool(k) for n in part for k in keep_mask(seed, i, n, 0, math.prod(SHAPES[n]), options["density"])]
                for i in range(2)
            ]
            values = slow.dare(base, tuned, weights, kept, **options)
        elif method == "gradient-matching":
            values = slow.gradient_matching(base, tuned, weights, prior, fishers, damping)
        elif method == "removal":
            values = slow.removal(base, tuned, weights, prior, fishers, damping, **({"cap": 1.0} | options))
        elif method == "fisher-averaging":
            values = slow.fisher_averaging(base, tuned, weights, fishers, damping, prior, **options)
        elif method == "average":
            values = slow.average(base, tuned)
        else:
            values = getattr(slow, method.replace("-", "_"))(base, tuned, weights, **options)
        place = 0
        for name in part:
            size = math.prod(SHAPES[name])
            result[name] = torch.tensor(values[place : place + size], dtype=torch.float64)
            place += size
    return result


def slow_cost(merged: State, at: State, curvature: State, names: Sequence[str]) -> tuple[float, float]:
    """½ Σ H (θ̂ − θ_t)² and √Σ (H (θ̂ − θ_t))²."""
    excess, mismatch = [], []
    for name in names:
        triples = zip(
            merged[name].reshape(-1).tolist(),
            at[name].reshape(-1).tolist(),
            curvature[name].reshape(-1).tolist(),
            strict=True,
        )
        for theta, place, h in triples:
            excess.append(0.5 * h * (theta - place) ** 2)
            mismatch.append((h * (theta - place)) ** 2)
    return math.fsum(excess), math.sqrt(math.fsum(mismatch))


def predicted(
    states: Sequence[State], curvature: Sequence[State], merges: dict[str, dict[str, Any]], damping: float = DAMPING
) -> Prediction:
    plan = memory_plan(states, curvature, WEIGHTS, damping)
    return predict(plan, TASKS, candidates(plan, WEIGHTS, damping, merges))


@pytest.fixture
def models() -> tuple[list[State], list[State]]:
    base = random_state(0, dtype=torch.float64)
    states: list[State] = [base, near(base, 1), near(base, 2)]
    curvature: list[State] = [
        {n: v.square() for n, v in random_state(seed, dtype=torch.float64).items()} for seed in (10, 11, 12)
    ]
    return states, curvature


@pytest.mark.parametrize("name", MERGES)
def test_costs_are_those_of_a_slow_loop(models: tuple[list[State], list[State]], name: str) -> None:
    states, curvature = models
    found = predicted(states, curvature, {name: MERGES[name]})
    assert found.tasks == [*TASKS, BASE]
    merged = slow_merge(MERGES[name], states, curvature, DAMPING)
    for task, at, h in zip(found.tasks, [*states[1:], states[0]], [*curvature[1:], curvature[0]], strict=True):
        for group, names in [*GROUPS.items(), (None, list(SHAPES))]:
            excess, mismatch = slow_cost(merged, at, h, names)
            assert found.excess(name, task, group) == pytest.approx(excess, rel=1e-9)
            assert found.mismatch(name, task, group) == pytest.approx(mismatch, rel=1e-9)


def test_interference_is_its_definition_entry_by_entry(
    models: tuple[list[State], list[State]],
) -> None:
    states, curvature = models
    found = predicted(states, curvature, {"average": MERGES["average"]})
    for group, names in GROUPS.items():
        overlap, opposed = [], []
        for name in names:
            columns = [value[name].reshape(-1).tolist() for value in (*states, *curvature[1:])]
            for base, a, b, ha, hb in zip(*columns, strict=True):
                shared = math.sqrt(ha * hb) * abs((a - base) * (b - base))
                overlap.append(shared)
                if (a - base) * (b - base) < 0:
                    opposed.append(shared)
        got = found.between("a", "b", group)
        assert got.overlap == pytest.approx(math.fsum(overlap), rel=1e-9)
        assert got.opposed == pytest.approx(math.fsum(opposed), rel=1e-9)
    every, parts = found.between("b", "a"), [found.between("a", "b", group) for group in GROUPS]
    assert every == found.between("a", "b")
    assert every.share == pytest.approx(sum(part.opposed for part in parts) / every.overlap)


def test_tiny_curvature_does_not_vanish_from_the_mismatch() -> None:
    """(H (θ̂ − θ_t))² is below the smallest float32 where H is, as a mean, 1e-18."""
    base = random_state(0)
    states = [base, near(base, 1, 1e-5), near(base, 2, 1e-5)]
    curvature = [{n: torch.full_like(v, 1e-18) for n, v in base.items()}] * 3
    ones = {"method": "task-arithmetic", "models.0.weight": 1.0, "models.1.weight": 1.0}
    found = predicted(states, curvature, {"ta": ones}, 0.0)
    off = [states[2][n].double() - base[n].double() for n in SHAPES]  # what task b adds to task a's model
    want = 1e-18 * math.sqrt(sum(float(v.square().sum()) for v in off))
    assert found.mismatch("ta", "a") == pytest.approx(want, rel=0.05, abs=0)


def test_a_recipe_without_a_base_or_without_curvature_cannot_be_looked_at(tmp_path: Path) -> None:
    folders, _ = three_models(tmp_path)
    models = [str(f) for f in folders[1:]]
    for base, named in (({}, "base"), ({"base": str(folders[0])}, r"models\[0\]\.curvature")):
        with pytest.raises(gm.InputError, match=named):
            open_for_prediction(make_recipe({"method": "average", "models": models, **base}))


def test_candidates_that_make_no_sense_are_refused(models: tuple[list[State], list[State]], tmp_path: Path) -> None:
    plan = memory_plan(*models, WEIGHTS, DAMPING)
    for merge in (
        {"method": "slerp", "options.t": 0.5},
        {"method": "regmean"},
        {"method": "weighted-average", "models.0.weight": 1.0, "models.1.weight": -1.0},
        {"method": "ties", "options.densty": 0.1},
    ):
        with pytest.raises(gm.InputError):
            candidates(plan, WEIGHTS, DAMPING, {"x": merge})
    other = write_model(tmp_path / "other", {"embed.weight": torch.ones(2)})
    with gm.open_checkpoint(str(other)) as model, pytest.raises(gm.InputError, match=str(other)):
        predict(plan, TASKS, {"m": model})


def test_tasks_are_named_by_their_folder_or_by_all_of_the_path_where_that_is_not_unique() -> None:
    models = ["x/yelp", "y/sst2", "z/sst2", "org/name@main", "q/base"]
    recipe = make_recipe({"method": "average", "base": "b", "models": models})
    assert task_names(recipe) == ["yelp", "y/sst2", "z/sst2", "name", "q/base"]
