"""Merges and removals with Kronecker curvature, on disk and in memory, against matrices that are written out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.compare.candidates import derive_plan
from gradmerge.compare.predict import open_for_prediction, predict
from gradmerge.compare.settings import make_setting, recipe_with
from gradmerge.curvature.curvature import Curvature, KroneckerFactors
from gradmerge.recipe import make_recipe

from ..making import assert_close, near, random_curvature, random_state, read_model, write_model
from ..rules import slow

EMBEDDING = "model.embed_tokens.weight"
SHAPES = {
    EMBEDDING: (9, 4),
    "lm_head.weight": (9, 4),
    "norm.weight": (4,),
    "linear.weight": (3, 4),
    "linear.bias": (3,),
    "plain.weight": (4, 4),
    "turned.weight": (5, 4),
    "turned.bias": (4,),
    "convolution.weight": (3, 2, 2, 2),
    "convolution.bias": (3,),
}
#: Weight → (out, in) and whether there is a bias.
LAYERS = {
    "linear.weight": (3, 4, True),
    "plain.weight": (4, 4, False),
    "turned.weight": (4, 5, True),
    "convolution.weight": (3, 8, True),
}
WEIGHTS = [1.0, 0.4]
Sources = list[Any]


def kronecker(seed: int, tokens: int = 30, examples: int = 10) -> Curvature:
    generator = torch.Generator().manual_seed(seed)

    def square(size: int) -> Tensor:
        rows = torch.randn(tokens, size, generator=generator)
        square = rows.T @ rows
        return (square + square.T) / 2

    layers = {
        n: KroneckerFactors(square(i + bias), square(o), tokens, n.startswith("turned"))
        for n, (o, i, bias) in LAYERS.items()
    }
    rest = {n: torch.rand(SHAPES[n], generator=generator) for n in (EMBEDDING, "norm.weight")}
    return Curvature({**layers, **rest}, examples, "sampled", "test")


@pytest.fixture
def states() -> list[dict[str, Tensor]]:
    base = random_state(0, SHAPES, torch.float64)
    base["lm_head.weight"] = base[EMBEDDING].clone()
    models = [base, near(base, 1), near(base, 2)]
    for model in models:
        model["lm_head.weight"] = model[EMBEDDING].clone()
    return models


@pytest.fixture
def folders(tmp_path: Path, states: list[dict[str, Tensor]]) -> list[str]:
    config = {"tie_word_embeddings": True}
    return [str(write_model(tmp_path / f"m{i}", state, config=config)) for i, state in enumerate(states)]


def saved(source: Any, place: Path) -> Any:
    if isinstance(source, float):
        return {"identity": source}
    source.save(place)
    return str(place)


def recipe_of(folders: list[str], sources: Sources, place: Path, method: str, **more: Any) -> dict[str, Any]:
    paths = [saved(source, place / f"curvature{i}") for i, source in enumerate(sources)]
    base = {"model": folders[0], "curvature": paths[0], **more.pop("base", {})}
    models = [
        {"model": f, "curvature": p, "weight": w} for f, p, w in zip(folders[1:], paths[1:], WEIGHTS, strict=True)
    ]
    return {"method": method, "base": base, "models": models, "damping": 0.01, **more}


def matrix(name: str, state: dict[str, Tensor]) -> Tensor:
    """[W b], out × in + 1."""
    weight = state[name].T if name == "turned.weight" else state[name].flatten(1)
    bias = state.get(name.replace("weight", "bias")) if LAYERS[name][2] else None
    return weight if bias is None else torch.cat([weight, bias[:, None]], 1)


def written_out(name: str, source: Any, factor: float) -> Tensor:
    numel = LAYERS[name][0] * (LAYERS[name][1] + LAYERS[name][2])
    if isinstance(source, Curvature) and source.layers:
        layer = source.layers[name]
        return torch.kron(layer.outputs.double(), layer.inputs.double()) * factor / layer.tokens
    if isinstance(source, float):
        return source * torch.eye(numel, dtype=torch.float64)
    return torch.diag(matrix(name, {n: v.double() for n, v in source.items()}).reshape(-1)) * factor


def expected(states: list[dict[str, Tensor]], sources: Sources, method: str, reduction: str = "sum", damping=0.01):
    """Every layer by its own dense matrices, every other parameter by the rule for single entries."""
    factors = [1.0 if reduction == "sum" or isinstance(s, float) else 1 / s.examples for s in sources]
    want: dict[str, Tensor] = {}
    for name in LAYERS:
        x0, *xs = (matrix(name, state) for state in states)
        h0, *hs = (written_out(name, source, factor) for source, factor in zip(sources, factors, strict=True))
        h0 = h0 + damping * torch.eye(len(h0), dtype=torch.float64)
        pull = sum(w * (h0 + h) @ (x - x0).reshape(-1) for w, h, x in zip(WEIGHTS, hs, xs, strict=True))
        whole = h0 if method == "removal" else h0 + sum(w * h for w, h in zip(WEIGHTS, hs, strict=True))
        step = torch.linalg.solve(whole, pull).reshape(x0.shape)
        merged = x0 - step if method == "removal" else x0 + step
        _, columns, bias = LAYERS[name]
        weight = merged[:, :columns]
        want[name] = weight.T if name == "turned.weight" else weight.reshape(SHAPES[name])
        if bias:
            want[name.replace("weight", "bias")] = merged[:, -1]
    for name in (EMBEDDING, "lm_head.weight", "norm.weight"):
        numel = states[0][name].numel()
        diagonals = [
            [s] * numel if isinstance(s, float) else (s.get(name, s[EMBEDDING]).double() * f).reshape(-1).tolist()
            for s, f in zip(sources, factors, strict=True)
        ]
        flat = [state[name].reshape(-1).tolist() for state in states]
        given = (flat[0], flat[1:], WEIGHTS, diagonals[0], diagonals[1:], damping)
        rule = slow.removal if method == "removal" else slow.gradient_matching
        want[name] = torch.tensor(rule(*given), dtype=torch.float64).reshape(SHAPES[name])
    return want


def bases(states: list[dict[str, Tensor]]) -> dict[str, Any]:
    return {"kronecker": kronecker(3), "diagonal": random_curvature(4, states[0], examples=10), "identity": 0.5}


@pytest.mark.parametrize(
    ("base", "reduction", "method"),
    [
        ("kronecker", "sum", "gradient-matching"),
        ("diagonal", "mean", "gradient-matching"),
        ("identity", "sum", "gradient-matching"),
        ("kronecker", "mean", "removal"),
    ],
)
def test_every_layer_is_solved_and_every_other_parameter_divided(
    tmp_path: Path, states: Any, folders: Any, base: str, reduction: str, method: str
) -> None:
    sources = [bases(states)[base], kronecker(5), kronecker(6, tokens=40)]
    want = expected(states, sources, method, reduction)
    options: Any = {"reduction": reduction, "options": {"cap": "none"} if method == "removal" else {}}
    gm.merge(recipe_of(folders, sources, tmp_path, method, **options), tmp_path / "out", accept_untrusted=True)
    assert_close(read_model(tmp_path / "out"), want, 1e-8)
    got = gm.merge_state_dicts(
        states[0],
        states[1:],
        method,
        prior=sources[0],
        curvature=sources[1:],
        weights=WEIGHTS,
        damping=0.01,
        **options,
    )
    assert_close(got, want, 1e-8)


def layer_damping(name: str, sources: Sources) -> float:
    traces = (w * float(written_out(name, s, 1.0).diagonal().mean()) for w, s in zip(WEIGHTS, sources[1:], strict=True))
    return sum(traces)


@pytest.mark.parametrize("base", ["kronecker", "identity"])
def test_open_damping_goes_by_the_layer_in_a_merge(tmp_path: Path, states: Any, folders: Any, base: str) -> None:
    """δ is a fifth of the layer's mean eigenvalue of Σ α_t H_t; entries outside of layers have the usual 1e-10.

    A base of curvature c · I needs no more.
    """
    sources = [bases(states)[base], kronecker(5), kronecker(6)]
    recipe = recipe_of(folders, sources, tmp_path, "gradient-matching", damping="auto")
    gm.merge(recipe, tmp_path / "out")
    got = read_model(tmp_path / "out")
    for name in LAYERS:
        damping = 0.2 * layer_damping(name, sources) if base == "kronecker" else 1e-10
        want = expected(states, sources, "gradient-matching", damping=damping)
        names = {name, name.replace("weight", "bias")} & want.keys()
        assert_close({n: got[n] for n in names}, {n: want[n] for n in names}, 1e-8)
    want = expected(states, sources, "gradient-matching", damping=1e-10)
    assert_close({"norm.weight": got["norm.weight"]}, {"norm.weight": want["norm.weight"]}, 1e-8)


def test_a_removal_is_damped_by_the_mean_over_all_entries(tmp_path: Path, states: Any, folders: Any) -> None:
    """Also over those of layers, by the traces of their factors; cap holds for entries outside of layers."""
    sources = [kronecker(3), kronecker(5), kronecker(6)]
    total = sum(float(written_out(name, s, 1.0).trace()) for s in sources[1:] for name in LAYERS)
    total += sum(float(s[n].double().sum()) for s in sources[1:] for n in (EMBEDDING, EMBEDDING, "norm.weight"))
    damping = total / sum(value.numel() for value in states[0].values())
    gm.merge(recipe_of(folders, sources, tmp_path, "removal", damping="auto"), tmp_path / "out", accept_untrusted=True)
    got, want = read_model(tmp_path / "out"), expected(states, sources, "removal", damping=damping)
    layers = {n for name in LAYERS for n in (name, name.replace("weight", "bias")) if n in want}
    assert_close({n: got[n] for n in layers}, {n: want[n] for n in layers}, 1e-8)
    step, negated = (
        (got["norm.weight"] - states[0]["norm.weight"]).abs(),
        sum(w * (s["norm.weight"] - states[0]["norm.weight"]).abs() for w, s in zip(WEIGHTS, states[1:], strict=True)),
    )
    assert bool((step <= 2 * negated + 1e-12).all())


def without(name: str, **layers: KroneckerFactors) -> Curvature:
    """Curvature with another layer in the place of one, or with none."""
    source = kronecker(5)
    kept = {n: layer for n, layer in source.layers.items() if n != name} | layers
    return Curvature({**kept, **source.diagonal}, 10, "sampled", "t")


def other_model() -> Curvature:
    a, g, tokens, _ = kronecker(5).layers["linear.weight"]
    return without("linear.weight", **{"linear.weight": KroneckerFactors(a[:-2, :-2].contiguous(), g, tokens)})


BAD: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "another model's": ("linear.weight", other_model, {}),
    "lacking a layer": ("linear.weight", lambda: without("linear.weight"), {}),
    "another kind": ("curvature", lambda: random_curvature(4, random_state(0, SHAPES)), {}),
    "bias excluded": ("linear", None, {"exclude": ["linear.bias"]}),
    "weight excluded": ("linear", None, {"exclude": ["linear.weight"]}),
    "output.curvature": ("output.curvature", None, {"output": {"curvature": True}}),
    "another method": ("fisher-averaging", None, {"method": "fisher-averaging"}),
    "base_saw_removed": ("base_saw_removed", None, {"method": "removal", "options": {"base_saw_removed": True}}),
    "cap": ("options.cap", None, {"method": "removal", "options": {"cap": 1.0}}),
    "regmean": ("regmean", None, {"method": "regmean"}),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused(tmp_path: Path, folders: Any, case: str) -> None:
    message, make, more = BAD[case]
    sources = [kronecker(3), make() if make else kronecker(5), kronecker(6)]
    recipe = recipe_of(folders, sources, tmp_path, more.get("method", "gradient-matching"))
    with pytest.raises(gm.InputError, match=message):
        gm.merge(recipe | more, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_predicted_costs_are_those_of_written_out_matrices(tmp_path: Path, states: Any, folders: Any) -> None:
    sources = [kronecker(3), kronecker(5), kronecker(6)]
    recipe = make_recipe(recipe_of(folders, sources, tmp_path, "gradient-matching"))
    plan = open_for_prediction(recipe)
    with contextlib.closing(plan.inputs):
        methods = ("gradient-matching", "task-arithmetic")
        merges = {method: derive_plan(plan, recipe_with(recipe, make_setting(recipe, method))) for method in methods}
        found = predict(plan, ["a", "b"], merges, threads=2)
    gm.merge(recipe, tmp_path / "out")
    for method, merged in (
        ("gradient-matching", read_model(tmp_path / "out")),
        ("task-arithmetic", gm.merge_state_dicts(states[0], states[1:], "task-arithmetic", weights=WEIGHTS)),
    ):
        for place, task in ((1, "a"), (2, "b"), (0, "base")):
            state, source = states[place], sources[place]
            excess = mismatch = 0.0
            for name in LAYERS:
                off = (matrix(name, merged) - matrix(name, state)).reshape(-1)
                pull = written_out(name, source, 1.0) @ off
                excess, mismatch = excess + 0.5 * float(pull @ off), mismatch + float(pull @ pull)
            for name in (EMBEDDING, "lm_head.weight", "norm.weight"):
                off = (merged[name] - state[name]).reshape(-1)
                pull = source.get(name, source[EMBEDDING]).double().reshape(-1) * off
                excess, mismatch = excess + 0.5 * float(pull @ off), mismatch + float(pull @ pull)
            assert found.excess(method, task) == pytest.approx(excess, rel=1e-8)
            assert found.mismatch(method, task) == pytest.approx(mismatch**0.5, rel=1e-8)
