"""Weights that differ between layers: shown wherever weights are, and found where the best lists are known."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.diagnostics.evaluator import Evaluator
from gradmerge.diagnostics.grid import Setting
from gradmerge.diagnostics.layer_weights import (
    Quadratics,
    held_back,
    prepare_for_layers,
    smallest_at,
    suggest_by_layers,
)
from gradmerge.diagnostics.preview import Outcome
from gradmerge.diagnostics.suggest import search_ranges, suggest
from gradmerge.progress import NoProgress
from gradmerge.recipe import make_recipe
from tests.diagnostics.making import memory_plan
from tests.making import assert_close, random_curvature, read_model, three_models, write_recipe

LAYERS, SIZE = 4, 6
NAMES = ["embed.weight", *(f"layers.{i}.mlp.weight" for i in range(LAYERS))]
LISTS = [0.2, 0.9], [{"filter": "layers.1*", "value": [0.3, 0.5]}, {"value": 0.1}]


class Quadratic:
    """Models of some layers whose losses are exactly ½(θ − θ_t)ᵀ H_t (θ − θ_t), H_t diagonal."""

    def __init__(self, path: Path, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal() -> dict[str, Tensor]:
            return {name: torch.randn(SIZE, generator=generator, dtype=torch.float64) for name in NAMES}

        self.models = {name: normal() for name in ("base", "a", "b")}
        # What matters to the tasks differs between layers, so that lists over the layers help.
        self.hessians = {name: {key: value.square() + 0.1 for key, value in normal().items()} for name in self.models}
        for place, name in enumerate(NAMES):
            self.hessians["a"][name] *= 3.0 ** (place - 2)
            self.hessians["b"][name] *= 3.0 ** (2 - place)
        parts = []
        for name, state in self.models.items():
            save_file(state, path / f"{name}.safetensors")
            floats = {key: value.float() for key, value in self.hessians[name].items()}
            gm.Curvature(floats, 1, "exact", name).save(path / f"{name}-curvature")
            parts.append({"model": str(path / f"{name}.safetensors"), "curvature": str(path / f"{name}-curvature")})
        self.recipe: dict[str, Any] = {"method": "task-arithmetic", "base": parts[0], "models": parts[1:]}

    def merged(self, method: str, lists: Tensor) -> dict[str, Tensor]:
        """Lists of both models → the merge, one layer at a time."""
        found = {}
        base, a, b = self.models.values()
        prior, *hs = self.hessians.values()
        for name in NAMES:
            place = 0 if name.startswith("embed") else int(name.split(".")[1])
            at = place / (LAYERS - 1) * (lists.shape[1] - 1)
            first = min(int(at), lists.shape[1] - 2)
            weights = lists[:, first] + (at - first) * (lists[:, first + 1] - lists[:, first])
            tuned = list(zip(weights, (a, b), hs, strict=True))
            if method == "task-arithmetic":
                found[name] = base[name] + sum(w * (model[name] - base[name]) for w, model, _ in tuned)
            elif method == "weighted-average":
                found[name] = sum(w * model[name] for w, model, _ in tuned) / weights.sum()
            else:
                top = sum(w * (prior[name] + h[name]) * (model[name] - base[name]) for w, model, h in tuned)
                found[name] = base[name] + top / (prior[name] + sum(w * h[name] for w, _, h in tuned))
        return found

    def losses(self, merged: dict[str, Tensor]) -> Tensor:
        """Those of a, b and the base."""
        found = []
        for task in ("a", "b", "base"):
            off = {name: merged[name] - self.models[task][name] for name in NAMES}
            found.append(sum((0.5 * self.hessians[task][name] * off[name].square()).sum() for name in NAMES))
        return torch.stack(found)

    def score(self, method: str, lists: Tensor, objective: str) -> Tensor:
        losses = self.losses(self.merged(method, lists))
        return losses.amax() if objective == "worst" else losses.sum()

    def best(self, method: str, objective: str, points: int) -> float:
        """Slow and obvious: every number of both lists in turn on a grid that becomes finer, from several starts."""
        least = float("inf")
        for start in (0.2, 0.8):
            lists = torch.full((2, points), start, dtype=torch.float64)
            for step in (0.1, 0.02, 0.004):
                moves = torch.tensor(_moves(2 * points), dtype=torch.float64).view(-1, 2, points) * step
                while True:
                    tried = (lists + moves).clamp(0, 1.5)
                    scores = torch.vmap(lambda one: self.score(method, one, objective))(tried)
                    if float(scores.min()) >= float(self.score(method, lists, objective)) - 1e-9:
                        break
                    lists = tried[scores.argmin()]
            least = min(least, float(self.score(method, lists, objective)))
        return least


def _moves(count: int) -> list[tuple[float, ...]]:
    """All directions in which up to three coordinates go up or down."""
    return [move for move in itertools.product((-1.0, 0.0, 1.0), repeat=count) if 0 < sum(map(abs, move)) <= 3]


def lists_of(found: gm.Suggestion, points: int) -> Tensor:
    rows = [list(one) if isinstance(one, tuple) else [one] * points for one in found.weights.values()]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("method", ["task-arithmetic", "gradient-matching"])
@pytest.mark.parametrize("objective", ["worst", "sum"])
def test_the_lists_are_those_of_brute_force_where_the_curvature_is_the_whole_truth(
    tmp_path: Path, method: str, objective: str
) -> None:
    problem = Quadratic(tmp_path)
    recipe = {**problem.recipe, "method": method}
    found = gm.suggest_weights(recipe, by="layers", points=2, objective=objective)
    over = found.over_layers
    assert over is not None and over.taken and over.layers == LAYERS and over.judged is None
    reached = float(problem.score(method, lists_of(found, 2), objective))
    assert over.layered.score == pytest.approx(reached, rel=1e-4), "curvature is stored in float32"
    assert over.plain.score > 1.01 * reached
    assert reached <= 1.005 * problem.best(method, objective, 2)
    plain = gm.suggest_weights(recipe, objective=objective)
    best = plain.evaluated.best()
    assert best is not None and over.plain.setting.weights == best.setting.weights, (
        "the search without layers is as it was"
    )


def test_the_smallest_sum_of_task_arithmetic_is_that_of_the_normal_equations(tmp_path: Path) -> None:
    problem = Quadratic(tmp_path, seed=1)
    found = gm.suggest_weights(problem.recipe, by="layers", points=LAYERS, objective="sum", weights="-5:5")
    want = torch.zeros(2, LAYERS, dtype=torch.float64)
    base, a, b = problem.models.values()
    for layer in range(LAYERS):  # as many points as layers: every layer has an optimum of its own, in closed form
        names = [NAMES[layer + 1], *([NAMES[0]] if layer == 0 else [])]
        deltas = torch.stack([torch.cat([model[n] - base[n] for n in names]) for model in (a, b)])
        hs = [torch.cat([problem.hessians[task][n] for n in names]) for task in ("a", "b", "base")]
        right = torch.stack(
            [
                (d * h * d).sum() + (other * h2 * d).sum()
                for d, h, other, h2 in [(deltas[0], hs[0], deltas[1], hs[1]), (deltas[1], hs[1], deltas[0], hs[0])]
            ]
        )
        want[:, layer] = torch.linalg.solve(deltas @ torch.diag(sum(hs)) @ deltas.T, right)
    assert lists_of(found, LAYERS).flatten().tolist() == pytest.approx(want.flatten().tolist(), abs=0.03)
    assert float(problem.score("task-arithmetic", lists_of(found, LAYERS), "sum")) == pytest.approx(
        float(problem.score("task-arithmetic", want, "sum")), rel=1e-4
    )


@pytest.mark.parametrize("method", ["ties", "dare", "weighted-average"])
def test_other_methods_with_weights_gain_too(tmp_path: Path, method: str) -> None:
    problem = Quadratic(tmp_path, seed=1)
    found = gm.suggest_weights(problem.recipe, methods=method, by="layers", samples=16, objective="sum")
    over = found.over_layers
    assert over is not None and over.taken and over.layered.score < over.plain.score
    assert all(len(weight) == 3 for weight in found.weights.values() if isinstance(weight, tuple))
    if method == "weighted-average":
        reached = problem.score(method, lists_of(found, 3), "sum")
        assert over.layered.score == pytest.approx(float(reached), rel=1e-4)


def test_the_same_seed_gives_the_same_lists_whatever_the_threads(tmp_path: Path) -> None:
    recipe = Quadratic(tmp_path).recipe
    one, same = (gm.suggest_weights(recipe, by="layers", samples=16, seed=3, threads=threads) for threads in (1, 3))
    assert one.weights == same.weights and one.over_layers == same.over_layers
    shared = gm.suggest_weights(recipe, by="layers", samples=16, shared=True)
    assert len(set(shared.weights.values())) == 1


@pytest.mark.parametrize("objective", ["worst", "sum"])
def test_a_box_is_kept_to_where_the_quadratics_are_smallest_outside(objective: str) -> None:
    goal, far = torch.tensor([0.3, 2.0], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    # |x − goal|² and 0.1 |x|²
    both = Quadratics(
        torch.stack([goal @ goal, torch.zeros_like(goal[0])]),
        torch.stack([-2 * goal, 0 * goal]),
        torch.stack([2 * far, 0.2 * far]),
    )
    at = torch.tensor([[0.2, 0.7]], dtype=torch.float64)
    assert both.at(at)[0].tolist() == [pytest.approx([0.1**2 + 1.3**2, 0.1 * (0.2**2 + 0.7**2)])]
    starts, low, high = torch.full((2, 2), 0.5, dtype=torch.float64), 0 * goal, 0 * goal + 1
    found = smallest_at(both, starts, low, high, objective)
    assert found[0].tolist() == pytest.approx([0.3 if objective == "worst" else 0.3 / 1.1, 1.0], abs=0.003)


def test_on_data_rows_held_back_decide(texts: Path, tmp_path: Path) -> None:
    data = {name: str(texts / f"{name}.jsonl") for name in ("a", "b")}
    options: dict[str, Any] = {"data": data, "samples": 2, "device": "cpu", "batch_size": 4, "by": "layers"}
    found = gm.suggest_weights(texts / "recipe.yml", tmp_path / "report", **options)
    over = found.over_layers
    assert over is not None and over.judged is not None
    judged = over.judged
    held, shares = held_back(10), {}
    assert held.tolist() == [False, False, True] * 3 + [False]

    def losses(model: Path, task: str) -> list[float]:
        """On all rows, and on those held back."""
        few = tmp_path / "few.jsonl"
        lines = Path(data[task]).read_text().splitlines()
        few.write_text("\n".join(line for line, kept in zip(lines, held, strict=True) if kept) + "\n")
        rows = (data[task], str(few))
        return [gm.evaluate(str(model), one, device="cpu")["loss_per_example"] for one in rows]

    alone = {task: (losses(texts / "base", task), losses(texts / task, task)) for task in data}
    for name, row in (("plain", judged.plain), ("layered", judged.layered)):
        recipe = {
            "method": "task-arithmetic",
            "base": str(texts / "base"),
            "models": [
                {"model": str(texts / task), "weight": list(w) if isinstance(w, tuple) else w}
                for task, w in zip("ab", row.setting.weights, strict=True)
            ],
            "exclude": ["bert.pooler.*"],
        }
        gm.merge(recipe, tmp_path / name, progress=False)
        shares[name] = []
        for task, (base, own) in alone.items():
            merged = losses(tmp_path / name, task)
            gain = max(base[0] - own[0], 0.01 * max(base[0], own[0]))
            shares[name].append((merged[1] - own[1]) / gain)
            assert row.costs[task] == pytest.approx((merged[0] - own[0]) / gain, rel=1e-3, abs=1e-4)
    assert judged.gain == pytest.approx(max(shares["plain"]) - max(shares["layered"]), rel=1e-3, abs=1e-4)
    assert over.taken == any(isinstance(weight, tuple) for weight in found.weights.values())
    assert not over.taken or (judged.gain > 2 * judged.error and over.layered.score < over.plain.score)
    best, leading = found.evaluated.best(), found.evaluated.leading()
    assert best is not None and leading is not None and found.evaluated.among_best(best)
    assert leading.score <= over.plain.score, "never worse on the rows than plain weights"
    facts = json.loads((tmp_path / "report" / "preview.json").read_text())["over_layers"]
    assert facts["gain"] == pytest.approx(judged.gain) and facts["standard_error"] == pytest.approx(judged.error)
    assert "held back from the choice of both" in (tmp_path / "report" / "report.html").read_text()
    again = gm.suggest_weights(texts / "recipe.yml", **options)
    assert again.weights == found.weights and again.over_layers == over


class Rows(Evaluator):
    """Rows of known losses: the truth of a task, what all settings share, and what depends on row and weights."""

    alone: dict[str, Any] = {}  # type: ignore[assignment]  # noqa: RUF012

    def __init__(self, truth: Callable[[Tensor], Tensor], noise: float) -> None:
        state = {name: torch.zeros(1) for name in NAMES}
        self.plan = memory_plan([state] * 3, [state] * 3, [1.0, 1.0], 0.0)
        self.tasks, self.examples = ["a", "b"], {"a": 60, "b": 60}
        generator = torch.Generator().manual_seed(0)
        self.truth, self.offsets = truth, torch.randn(2, 60, generator=generator, dtype=torch.float64)
        self.slopes = noise * torch.randn(2, 60, 2, 3, generator=generator, dtype=torch.float64)

    def look(self, settings: Sequence[Setting], advance: Callable[[int], None]) -> list[Outcome]:
        rows = []
        for setting in settings:
            lists = torch.tensor([w if isinstance(w, tuple) else [w] * 3 for w in setting.weights], dtype=torch.float64)
            losses = self.truth(lists)[:, None] + self.offsets + (self.slopes * (lists - 0.5)).sum((2, 3))
            by_task = dict(zip("ab", losses, strict=True))
            costs = {task: float(one.mean()) for task, one in by_task.items()}
            rows.append(Outcome(setting, dict(costs), {t: {"mse": c} for t, c in costs.items()}, costs, shares=by_task))
        return rows

    def notes(self) -> list[str]:
        return []


def search_rows(rows: Rows, objective: str) -> gm.Suggestion:
    recipe = make_recipe({"method": "task-arithmetic", "base": "base", "models": ["a", "b"]})
    ranges = search_ranges(None, ["a", "b"], recipe, False)
    prepare_for_layers(rows, ["task-arithmetic"], ranges, 3)
    plain = suggest(recipe, rows, ["task-arithmetic"], ranges, objective=objective, progress=NoProgress())
    return suggest_by_layers(rows, plain, ranges, points=3, progress=NoProgress())


@pytest.mark.parametrize("objective", ["worst", "sum"])
def test_on_rows_lists_are_found_where_they_help(objective: str) -> None:
    goal = torch.tensor([[0.2, 0.5, 1.1], [0.9, 0.7, 0.1]], dtype=torch.float64)

    def truth(lists: Tensor) -> Tensor:
        """Both tasks have their optimum at the same lists, and points depend on one another."""
        off = lists - goal
        return torch.stack([off.square().sum() + off.sum().square(), 2 * off.square().sum() + off[0].sum() * off[1, 1]])

    found = search_rows(Rows(truth, noise=0.01), objective)
    over = found.over_layers
    assert over is not None and over.judged is not None and over.taken and over.judged.gain > 5 * over.judged.error
    got = torch.tensor(list(found.weights.values()), dtype=torch.float64)
    plain = torch.tensor(over.plain.setting.weights, dtype=torch.float64)[:, None].expand(2, 3)
    assert truth(got).sum() < 0.1 * truth(plain).sum(), "most of the way, within the budget of evaluations"


@pytest.mark.parametrize("objective", ["worst", "sum"])
def test_lists_that_only_fit_the_noise_of_the_rows_are_not_taken(objective: str) -> None:
    found = search_rows(Rows(lambda lists: (lists - 0.5).square().sum(1), noise=1.0), objective)
    over = found.over_layers
    assert over is not None and over.judged is not None and not over.taken
    assert over.judged.layered.setting != over.judged.plain.setting, (
        "on the rows that they were chosen on, lists are better"
    )
    assert over.plain is found.evaluated.leading() and found.weights == {"a": 0.5, "b": 0.5}, "tied, and simpler"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"by": "layer"}, "weights can differ by layers; did you mean 'layers'"),
        ({"by": "layers", "points": 1}, "between 2 and 16 points"),
        ({"points": 4}, "--points goes with --by layers"),
        ({"by": "layers", "methods": "average"}, "average takes no weights that could differ"),
        ({"by": "layers", "weights": "0.3"}, "every task has a single weight"),
    ],
)
def test_what_cannot_differ_between_layers_is_said(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(gm.InputError, match=says):
        gm.suggest_weights(Quadratic(tmp_path).recipe, **options)


def test_models_without_layers_and_data_of_few_rows_are_refused(tmp_path: Path, texts: Path) -> None:
    for name in ("base", "a"):
        save_file({"weight": torch.randn(3)}, tmp_path / f"{name}.safetensors")
        gm.Curvature({"weight": torch.ones(3)}, 1, "exact", name).save(tmp_path / f"{name}-curvature")
    base, model = (
        {"model": f"{tmp_path}/{n}.safetensors", "curvature": f"{tmp_path}/{n}-curvature"} for n in ("base", "a")
    )
    with pytest.raises(gm.InputError, match="the models have no numbered layers"):
        gm.suggest_weights({"method": "task-arithmetic", "base": base, "models": [model]}, by="layers")
    with pytest.raises(gm.InputError, match="the data of a has 5 rows; at least 6"):
        gm.suggest_weights(texts / "recipe.yml", data={"a": str(texts / "a.jsonl")}, by="layers", limit=5, device="cpu")


@pytest.fixture
def varied(tmp_path: Path) -> Path:
    """A recipe whose own weights vary over the layers and by filter."""
    folders, states = three_models(tmp_path)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        random_curvature(seed + 5, state).save(folder / "curvature")
    models = [{"model": f"./{name}", "weight": weight} for name, weight in zip("ab", LISTS, strict=True)]
    write_recipe(tmp_path / "recipe.yml", {"method": "gradient-matching", "base": "./base", "models": models})
    return tmp_path


def test_a_recipe_whose_weights_vary_is_the_reference_of_a_preview(varied: Path) -> None:
    every = ["task-arithmetic", "gradient-matching"]
    for weights in ("a=0:1:0.5", ["a=0,1", "b=0,1"]):
        found = gm.preview(varied / "recipe.yml", varied / "out", weights=weights, methods=every, force=True)
        assert found.reference.setting.weights_in_words == (
            "(0.2, 0.9) over the layers, layers.1*: (0.3, 0.5) over the layers; else: 0.1"
        )
        assert found.relative_score(found.reference) == 1
        page = (varied / "out" / "report.html").read_text()
        assert "(0.2, 0.9) over the layers" in page and found._repr_html_()
        facts = json.loads((varied / "out" / "preview.json").read_text())
        assert facts["reference"]["weights"] == {"a": LISTS[0], "b": LISTS[1]}
        cells = [row["weight b"] for row in csv.DictReader((varied / "out" / "preview.csv").open())]
        if weights == "a=0:1:0.5":
            assert set(cells) == {"layers.1*: (0.3, 0.5) over the layers; else: 0.1"}
            assert facts["winner"]["weights"]["b"] == LISTS[1]
            assert facts["winner"]["weights"]["a"] == LISTS[0], "the recipe's own, which is better than what was asked"
            [other] = set(every) - {found.recipe.method}
            assert set(facts["best"][other]["within_1_percent"]["weights"]) == {"a"}
            gm.merge(varied / "out" / "recipe.yml", varied / "merged", progress=False)
        else:
            assert {float(cell) for cell in cells} == {0, 1} and list((varied / "out").glob("map-*.csv"))


def test_suggestions_and_diagnoses_take_a_recipe_whose_weights_vary(varied: Path) -> None:
    found = gm.suggest_weights(varied / "recipe.yml", varied / "suggested", samples=8)
    assert all(isinstance(weight, float) for weight in found.weights.values()) and found._repr_html_()
    assert found.evaluated.reference.setting.weights[0] == (0.2, 0.9)
    one = gm.suggest_weights(varied / "recipe.yml", varied / "layers", samples=8, by="layers")
    assert one.over_layers is not None and "over the layers" in one._repr_html_()
    diagnosis = gm.diagnose(varied / "recipe.yml", varied / "diagnosis")
    gm.merge(varied / "recipe.yml", varied / "merged", progress=False)
    again = gm.diagnose(varied / "recipe.yml", varied / "again", merged=str(varied / "merged"))
    for task in ("a", "b", "base"):
        own, merged = (d.prediction.excess(d.own, task) for d in (diagnosis, again))
        assert own == pytest.approx(merged, rel=1e-4), "what is diagnosed is what is merged"


def test_the_written_recipe_merges_what_was_suggested(tmp_path: Path) -> None:
    problem = Quadratic(tmp_path)
    found = gm.suggest_weights(problem.recipe, tmp_path / "report", by="layers")
    text = (tmp_path / "report" / "recipe.yml").read_text()
    assert text.startswith(
        "# Weights over the layers, found from curvature by gradmerge preview --suggest --by layers."
    )
    gm.merge(tmp_path / "report" / "recipe.yml", tmp_path / "merged", progress=False)
    assert_close(read_model(tmp_path / "merged"), problem.merged("task-arithmetic", lists_of(found, 3)), 1e-12)
    assert (tmp_path / "report" / "layers.csv").exists() and (tmp_path / "report" / "over-layers.csv").exists()
