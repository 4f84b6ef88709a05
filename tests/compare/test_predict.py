"""Predicted costs against a slow loop over entries, as the definitions read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.compare.candidates import Candidate
from gradmerge.compare.predict import open_for_prediction, predict
from gradmerge.compare.settings import BASE, task_names
from gradmerge.engine.plan import Plan
from gradmerge.engine.randomness import keep_mask
from gradmerge.recipe import make_recipe

from ..making import SHAPES, near, random_state, three_models, write_model
from ..rules import slow
from .making import State, memory_plan

WEIGHTS = [0.7, 1.3]
DAMPING = 0.05
TASKS = ["a", "b"]
GROUPS = {
    "embed": ["embed.weight"],
    "layers.0": ["layers.0.linear.weight", "layers.0.linear.bias"],
    "layers.1": ["layers.1.linear.weight", "layers.1.norm.weight"],
    "classifier": ["classifier.weight"],
}

CANDIDATES = [
    Candidate("average", "average"),
    Candidate("task-arithmetic", "task-arithmetic"),
    Candidate("other weights", "task-arithmetic", [-0.5, 2.0]),
    Candidate("fisher-averaging", "fisher-averaging"),
    Candidate("fisher with base", "fisher-averaging", options={"include_base": True}),
    Candidate("gradient-matching", "gradient-matching"),
    Candidate("removal", "removal"),
    Candidate("removal without bounds", "removal", options={"cap": "none"}),
    Candidate("ties", "ties", options={"density": 0.3}),
    Candidate("ties by tensor", "ties", options={"density": 0.3, "scope": "tensor"}),
    Candidate("dare", "dare", options={"density": 0.4, "seed": 3}),
    Candidate("dare twice", "dare", options={"density": 0.4, "seed": 4, "combine": "ties"}),
]


def slow_merge(candidate: Candidate, states: Sequence[State], curvature: Sequence[State], damping: float) -> State:
    """A candidate entry by entry, over the whole model at once, or over each tensor for a rule that asks for it."""
    options = dict(candidate.options or {})
    names = [[name] for name in SHAPES] if options.pop("scope", "model") == "tensor" else [list(SHAPES)]
    result: dict[str, Tensor] = {}
    for part in names:
        base, *tuned = [[float(v) for n in part for v in state[n].reshape(-1)] for state in states]
        prior, *fishers = [[float(v) for n in part for v in c[n].reshape(-1)] for c in curvature]
        weights = candidate.weights or WEIGHTS
        if candidate.method == "dare":
            seed = options.pop("seed")
            kept = [
                [bool(k) for n in part for k in keep_mask(seed, i, n, 0, math.prod(SHAPES[n]), options["density"])]
                for i in range(2)
            ]
            values = slow.dare(base, tuned, weights, kept, **options)
        elif candidate.method == "gradient-matching":
            values = slow.gradient_matching(base, tuned, weights, prior, fishers, damping)
        elif candidate.method == "removal":
            values = slow.removal(base, tuned, weights, prior, fishers, damping, **({"cap": 1.0} | options))
        elif candidate.method == "fisher-averaging":
            values = slow.fisher_averaging(base, tuned, weights, fishers, damping, prior, **options)
        elif candidate.method == "average":
            values = slow.average(base, tuned)
        else:
            values = getattr(slow, candidate.method.replace("-", "_"))(base, tuned, weights, **options)
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


def plan_of(states: Sequence[State], curvature: Sequence[State], damping: float = DAMPING) -> Plan:
    return memory_plan(states, curvature, WEIGHTS, damping)


@pytest.fixture
def models() -> tuple[list[State], list[State]]:
    base = random_state(0, dtype=torch.float64)
    states: list[State] = [base, near(base, 1), near(base, 2)]
    curvature: list[State] = [
        {n: v.square() for n, v in random_state(seed, dtype=torch.float64).items()} for seed in (10, 11, 12)
    ]
    return states, curvature


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: c.name)
def test_costs_are_those_of_a_slow_loop(models: tuple[list[State], list[State]], candidate: Candidate) -> None:
    states, curvature = models
    found = predict(plan_of(states, curvature), TASKS, [candidate])
    assert found.tasks == [*TASKS, BASE]
    merged = slow_merge(candidate, states, curvature, DAMPING)
    for task, at, h in zip(found.tasks, [*states[1:], states[0]], [*curvature[1:], curvature[0]], strict=True):
        for group, names in [*GROUPS.items(), (None, list(SHAPES))]:
            excess, mismatch = slow_cost(merged, at, h, names)
            assert found.excess(candidate.name, task, group) == pytest.approx(excess, rel=1e-9)
            assert found.mismatch(candidate.name, task, group) == pytest.approx(mismatch, rel=1e-9)


def test_interference_is_its_definition_entry_by_entry(
    models: tuple[list[State], list[State]],
) -> None:
    states, curvature = models
    found = predict(plan_of(states, curvature), TASKS, [Candidate("average", "average")])
    for group, names in GROUPS.items():
        overlap, opposed = [], []
        for name in names:
            columns = [value[name].reshape(-1).tolist() for value in (*states, *curvature[1:])]
            for base, a, b, ha, hb in zip(*columns, strict=True):
                shared = math.sqrt(ha * hb) * abs((a - base) * (b - base))
                overlap.append(shared)
                if (a - base) * (b - base) < 0:
                    opposed.append(shared)
        got = found.interference["a", "b", group]
        assert got.overlap == pytest.approx(math.fsum(overlap), rel=1e-9)
        assert got.opposed == pytest.approx(math.fsum(opposed), rel=1e-9)
    every = found.between("b", "a")
    assert every == found.between("a", "b")
    assert every.share == pytest.approx(sum(v.opposed for v in found.interference.values()) / every.overlap)


def test_tiny_curvature_does_not_vanish_from_the_mismatch() -> None:
    """(H (θ̂ − θ_t))² is below the smallest float32 where H is, as a mean, 1e-18."""
    base = random_state(0)
    states = [base, near(base, 1, 1e-5), near(base, 2, 1e-5)]
    curvature = [{n: torch.full_like(v, 1e-18) for n, v in base.items()}] * 3
    found = predict(plan_of(states, curvature, 0.0), TASKS, [Candidate("ta", "task-arithmetic", [1.0, 1.0])])
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
    plan = plan_of(*models)
    for candidate, named in (
        (Candidate("s", "slerp", options={"t": 0.5}), "slerp"),
        (Candidate("r", "regmean"), "regmean"),
        (Candidate("w", "weighted-average", [1.0, -1.0]), "weighted-average"),
        (Candidate("t", "ties", options={"densty": 0.1}), "'density'"),
        (Candidate("t", "task-arithmetic", [1.0]), "t: 1 weights"),
    ):
        with pytest.raises(gm.InputError, match=named):
            predict(plan, TASKS, [candidate])
    other = write_model(tmp_path / "other", {"embed.weight": torch.ones(2)})
    with gm.open_checkpoint(str(other)) as model, pytest.raises(gm.InputError, match=str(other)):
        predict(plan, TASKS, [Candidate("m", model=model)])


def test_tasks_are_named_by_their_folder_or_by_all_of_the_path_where_that_is_not_unique() -> None:
    models = ["x/yelp", "y/sst2", "z/sst2", "org/name@main", "q/base"]
    recipe = make_recipe({"method": "average", "base": "b", "models": models})
    assert task_names(recipe) == ["yelp", "y/sst2", "z/sst2", "name", "q/base"]
