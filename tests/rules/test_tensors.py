"""Rules that look at rows or whole tensors, through the engine, against their slow twins."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.api.state_dicts import StateDictOutput
from gradmerge.checkpoints.checkpoint import Checkpoint
from gradmerge.engine import statistics
from gradmerge.engine.executor import LocalExecutor
from gradmerge.engine.plan import inputs_of, make_plan
from gradmerge.engine.randomness import keep_mask, uniform
from gradmerge.engine.statistics import compute_statistics
from gradmerge.recipe import make_recipe
from gradmerge.rules import METHODS

from . import slow_tensors as slow

State = dict[str, Tensor]
SHAPES: dict[str, tuple[int, ...]] = {
    "matrix": (9, 14),
    "tall": (31, 3),
    "row": (1, 6),
    "vector": (23,),
    "cube": (3, 5, 4),
    "scalar": (),
    "same": (4, 4),
    "zero": (5, 3),
}
W, POSITIVE = [0.7, -0.4, 0.5], [0.7, 0.4, 0.5]
SEED = 3


def states(dtype: torch.dtype = torch.float64, models: int = 3) -> tuple[State, list[State]]:
    """`same` is what nobody changed, `zero` is 0 in the base, and one model has an entry that no other changed."""
    generator = torch.Generator().manual_seed(0)

    def normal(shape: Sequence[int]) -> Tensor:
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64)

    base = {name: normal(shape) * (name != "zero") for name, shape in SHAPES.items()}
    tuned = [{n: b + 0.3 * normal(b.shape) * (n != "same") for n, b in base.items()} for _ in range(models)]
    for model in tuned[1:]:
        model["matrix"][2] = base["matrix"][2]
    every = [{n: v.to(dtype) for n, v in state.items()} for state in (base, *tuned)]
    return every[0], every[1:]


def recipe_of(
    method: str, count: int, weights: Sequence[float] | None, options: Mapping[str, Any], base: bool = True
) -> dict[str, Any]:
    models: list[dict[str, Any]] = [{"model": f"m{i}"} for i in range(count)]
    for place, model in enumerate(models):
        if weights is not None:
            model["weight"] = weights[place]
        model["options"] = {name: value[place] for name, value in options.items() if isinstance(value, list)}
    shared = {name: value for name, value in options.items() if not isinstance(value, list)}
    return {"method": method, "models": models, "options": shared} | ({"base": "base"} if base else {})


def merge(
    base: State | None,
    tuned: list[State],
    method: str,
    weights: Sequence[float] | None,
    options: Mapping[str, Any],
    block: int = 1 << 18,
    threads: int = 1,
    given: Mapping[str, Any] | None = None,
) -> State:
    """A merge in memory; options that are lists hold one number for every model, but for those ``given``."""
    recipe = recipe_of(method, len(tuned), weights, options, base is not None)
    recipe["options"] |= given or {}
    made = make_recipe(recipe, where="test")
    opened = [Checkpoint(f"m{i}", memory=model) for i, model in enumerate(tuned)]
    inputs = inputs_of(made, Checkpoint("base", memory=base) if base is not None else None, opened)
    plan = make_plan(made, inputs)
    plan.block = block
    result = {name: torch.empty_like(value) for name, value in (base or tuned[0]).items()}
    plan.statistics = compute_statistics(plan, LocalExecutor(threads))
    LocalExecutor(threads).merge(plan, plan.blocks(), StateDictOutput(result))
    return result


def draws(name: str, shape: tuple[int, ...], models: int) -> list[np.ndarray]:
    return [uniform(SEED, i, name, 0, int(np.prod(shape))).numpy() for i in range(models)]


def masks(name: str, shape: tuple[int, ...], density: Sequence[float]) -> list[np.ndarray]:
    size = int(np.prod(shape))
    return [keep_mask(SEED, i, name, 0, size, d).numpy().reshape(shape) for i, d in enumerate(density)]


HALF = [0.5, 0.5]
D, D2, D3 = [0.5, 0.3, 1.0], [0.5, 0.0, 1.0], [0.6, 0.4, 1.0]
G, E = [0.1, 0.02, 0.3], [0.2, 0.1, 0.3]
CASES: dict[str, tuple[str, int, Sequence[float] | None, dict[str, Any]]] = {}


def case(name: str, models: int, weights: Sequence[float] | None, **options: Any) -> None:
    label = " ".join([name, *(str(v) for k, v in options.items() if k not in ("seed", "density", "gamma", "epsilon"))])
    label += " negative" * (weights is not None and min(weights) < 0)
    CASES[label] = (name, models, weights, options)


def twin(label: str, tensor: str, base: np.ndarray, tuned: list[np.ndarray]) -> Tensor:
    """What the slow function of the rule's name gives for a tensor; it gets the arguments that it names."""
    method, models, weights, options = CASES[label]
    known = {"base": base, "tuned": tuned, "weights": weights, "uniform": draws(tensor, base.shape, models), **options}
    if isinstance(options.get("density"), float):
        known["density"] = [options["density"]] * models
    if method == "dare":
        known["kept"] = masks(tensor, base.shape, options["density"])
    function: Callable[..., np.ndarray] = getattr(slow, method.replace("-", "_"))
    return torch.as_tensor(function(**{n: known[n] for n in inspect.signature(function).parameters if n in known}))


for normalize, rescale, vote, ws in (
    (True, "none", "mergekit", POSITIVE),
    (True, "norm", "mergekit", W),
    (False, "norm", "strict", POSITIVE),
    (False, "none", "mergekit", W),
):
    how = {"normalize": normalize, "rescale": rescale, "scale": 0.8, "vote": vote}
    case("ties", 3, ws, density=D, scope="tensor", **how)
    for combine in ("task-arithmetic", "ties"):
        case("breadcrumbs", 3, ws, density=D, gamma=G, combine=combine, **how)
for rescale, combine, over in (
    ("expectation", "ties", "auto"),
    ("norm", "task-arithmetic", True),
    ("none", "ties", False),
    ("norm", "ties", True),
    ("expectation", "task-arithmetic", "auto"),
):
    how = {"combine": combine, "normalize": over, "rescale": rescale, "scale": 0.9}
    case("dare", 3, W, density=D2, seed=SEED, **how)
    case("della", 3, W, density=D3, epsilon=E, seed=SEED, **how)
case("task-arithmetic", 3, W, normalize=True, scale=0.7)
case("ties", 2, HALF, rescale="norm", density=0.5, scope="tensor")
case("model-stock", 3, None)
case("model-stock", 3, None, filter_wise=True)
for axis in ("all", "last", "first"):
    case("nuslerp", 2, [0.7, 0.4], axis=axis)
for normalize in (True, False):
    case("multislerp", 3, POSITIVE, normalize=normalize)
case("karcher", 3, POSITIVE)
case("karcher", 3, POSITIVE, steps=1)
case("slerp", 1, None, t=0.3)
case("slerp", 1, None, t=0.3, zeros="arc")
case("nearswap", 1, None, t=0.1)
case("arcee-fusion", 1, None)
for share in (1.0, 0.3, 0.0):
    case("sce", 3, None, select_topk=share)
case("ram", 3, None, epsilon=0.2)
case("ram", 3, None, epsilon=0.2, r=0.5, alpha=3.0)
case("tsv", 3, W, scale=0.8)
case("iso-c", 3, W, scale=0.8)
case("passthrough", 1, None, scale=1.5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 2e-5)], ids=["f64", "f32"])
@pytest.mark.parametrize("label", CASES)
def test_a_rule_is_its_slow_twin(label: str, dtype: torch.dtype, tolerance: float) -> None:
    method, models, weights, options = CASES[label]
    base, tuned = states(dtype, models)
    got = merge(base, tuned, method, weights, options)
    for name, values in base.items():
        want = twin(label, name, values.double().numpy(), [state[name].double().numpy() for state in tuned])
        error = float((got[name].double() - want).abs().max())
        assert error < tolerance, f"{name}: {error}"


@pytest.mark.parametrize("method", ["nuslerp", "multislerp"])
def test_without_a_base_the_models_themselves_are_on_the_sphere(method: str) -> None:
    _, tuned = states(models=2)
    got = merge(None, tuned, method, [0.7, 0.4], {})
    for name, values in got.items():
        want = getattr(slow, method)(None, [state[name].numpy() for state in tuned], [0.7, 0.4])
        assert torch.allclose(values, torch.as_tensor(want), atol=1e-9), name


@pytest.mark.parametrize(
    ("method", "options"),
    [*(("nuslerp", {"axis": axis}) for axis in ("all", "last", "first")), ("multislerp", {})],
)
def test_an_arc_between_opposite_changes_is_not_made_of_rounding(method: str, options: dict[str, Any]) -> None:
    """As where a base is the mean of two models, or the rows of a token that it lacks are."""
    _, tuned = states(torch.float32, models=2)
    base = {name: (value + tuned[1][name]) / 2 for name, value in tuned[0].items()}
    got = merge(base, tuned, method, [1.0, 1.0], options)
    assert all(torch.allclose(got[name], base[name], atol=1e-6) for name in base)


def test_importance_is_not_lost_in_rounding_where_models_are_near() -> None:
    base, (far,) = states(torch.float32, models=1)
    near = {name: value + (far[name] - value) * 1e-3 for name, value in base.items()}
    got = merge(base, [near], "arcee-fusion", None, {})
    for name, values in got.items():
        want = torch.as_tensor(slow.arcee_fusion(base[name].double().numpy(), [near[name].double().numpy()]))
        assert torch.equal(values, want.float()), name


@pytest.mark.parametrize("label", CASES)
def test_neither_blocks_nor_threads_nor_chunks_change_a_result(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, models, weights, options = CASES[label]
    base, tuned = states(torch.float32, models)
    want = merge(base, tuned, method, weights, options)
    for block, threads in ((7, 1), (30, 3)):
        got = merge(base, tuned, method, weights, options, block, threads)
        assert all(torch.equal(got[name], want[name]) for name in want)
    monkeypatch.setattr(statistics, "CHUNK", 11)  # sums in other pieces: the same but for rounding
    other = merge(base, tuned, method, weights, options)
    assert all(torch.allclose(other[name], want[name], atol=1e-6) for name in want)


@pytest.mark.parametrize("label", {CASES[label][0]: label for label in CASES}.values())
def test_empty_tensors_stay_empty(label: str) -> None:
    method, models, weights, options = CASES[label]
    state = {"none": torch.empty(0), "rows": torch.empty(0, 3), "columns": torch.empty(3, 0), "one": torch.ones(2, 2)}
    got = merge(state, [state] * models, method, weights, options)
    assert {name: tuple(value.shape) for name, value in got.items()} == {n: tuple(v.shape) for n, v in state.items()}


@pytest.mark.parametrize("where", ["base", "model"])
@pytest.mark.parametrize("method", sorted({CASES[label][0] for label in CASES}))
def test_nan_is_found_in_whatever_a_rule_reads(method: str, where: str) -> None:
    label = next(label for label in CASES if CASES[label][0] == method)
    _, models, weights, options = CASES[label]
    base, tuned = states(torch.float32, models)
    (base if where == "base" else tuned[0])["matrix"][4, 4] = torch.nan
    if where == "base" and "base" not in METHODS[method].inputs:
        merge(base, tuned, method, weights, options)
        return
    with pytest.raises(gm.InputError, match=f"{'base' if where == 'base' else 'm0'}: matrix"):
        merge(base, tuned, method, weights, options)


def test_what_a_rule_cannot_work_with_is_said_before_anything_is_read() -> None:
    base, tuned = states(torch.float32)
    for method, weights, options in (
        ("model-stock", None, {}),
        ("della", [1.0], {"density": 0.9, "epsilon": 0.2}),
        ("nuslerp", [1.0], {}),
    ):
        with pytest.raises(gm.InputError, match=method if not options else "epsilon"):
            merge(base, tuned[:1], method, weights, options)
    for method in ("karcher", "multislerp"):
        with pytest.raises(gm.InputError, match=f"{method}|weight"):
            merge(base, tuned, method, [0.1, 0.2, -0.3], {})
    for method in ("slerp", "nearswap", "arcee-fusion", "passthrough"):
        with pytest.raises(gm.InputError, match=method):
            merge(base, tuned, method, None, {})


def test_special_cases_agree() -> None:
    """What one rule is in terms of another."""
    base, tuned = states()
    plain = merge(base, tuned, "task-arithmetic", W, {})
    alike = {
        "dare": {"density": 1.0},
        "della": {"density": 1.0, "combine": "task-arithmetic"},
        "breadcrumbs": {"density": 1.0, "gamma": 0.5},
    }
    for method, options in alike.items():
        got = merge(base, tuned, method, W, options)
        assert all(torch.allclose(got[n], plain[n], atol=1e-12) for n in plain), method
    same = merge(base, [tuned[0]] * 3, "model-stock", None, {})
    assert all(torch.allclose(same[n], tuned[0][n], atol=1e-6) for n in same)
    mean = merge(None, [base, tuned[0]], "nuslerp", [0.7, 0.3], {})
    flat = merge(base, tuned[:1], "slerp", None, {"t": 0.3, "zeros": "arc", "parallel": 1.0})
    assert all(torch.allclose(mean[n], flat[n], atol=1e-9) for n in flat if n != "scalar")
    single = merge(base, tuned[:1], "tsv", [1.0], {})
    assert all(torch.allclose(single[n], tuned[0][n], atol=1e-9) for n in single)


def test_directions_that_no_model_changed_get_nothing_from_singular_values() -> None:
    """The differences of adapters have a low rank: the rest of their singular vectors are arbitrary."""
    generator = torch.Generator().manual_seed(0)
    base = {"w": torch.randn(20, 30, generator=generator)}
    changes = [torch.randn(20, 2, generator=generator) @ torch.randn(2, 30, generator=generator) for _ in range(2)]
    tuned = [{"w": base["w"] + change} for change in changes]
    for method in ("tsv", "iso-c"):
        step = (merge(base, tuned, method, [1.0, 1.0], {})["w"] - base["w"]).double()
        assert int((torch.linalg.svdvals(step) > 1e-3).sum()) == 4
        stacked = torch.cat(changes, 1).double()
        inside = stacked @ torch.linalg.lstsq(stacked, step).solution
        assert torch.allclose(inside, step, atol=1e-4)


def test_options_that_differ_between_tensors_reach_what_is_measured() -> None:
    base, tuned = states(models=2)

    def vary(matrices: Any, others: Any) -> list[dict[str, Any]]:
        return [{"filter": "matrix", "value": matrices}, {"value": others}]

    options = {"rescale": "norm", "density": vary(0.3, 0.8), "scope": "tensor"}
    got = merge(base, tuned, "ties", HALF, {}, given=options)
    plus = merge(base, tuned, "ram", None, {"epsilon": 0.2}, given={"r": vary(0.5, 0.0)})
    for name in SHAPES:
        arrays = [state[name].numpy() for state in tuned]
        share, r = (0.3, 0.5) if name == "matrix" else (0.8, 0.0)
        want = slow.ties(base[name].numpy(), arrays, HALF, [share] * 2, rescale="norm")
        assert torch.allclose(got[name], torch.as_tensor(want), atol=1e-9), name
        want = slow.ram(base[name].numpy(), arrays, 0.2, r)
        assert torch.allclose(plus[name], torch.as_tensor(want), atol=1e-9), name


def test_one_threshold_for_a_whole_model_may_differ_between_models() -> None:
    base, tuned = states(models=2)
    got = merge(base, tuned, "breadcrumbs", HALF, {"density": [0.4, 0.2], "gamma": 0.05, "scope": "model"})
    whole = [torch.cat([state[name].reshape(-1) for name in SHAPES]).numpy() for state in (base, *tuned)]
    want = slow.breadcrumbs(whole[0], whole[1:], HALF, [0.4, 0.2], [0.05] * 2, "task-arithmetic", "auto", "none")
    assert np.allclose(torch.cat([got[name].reshape(-1) for name in SHAPES]).numpy(), want, atol=1e-9)
