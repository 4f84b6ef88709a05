"""Merges from disk to disk against the slow twins of the rules, applied to whole models."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.engine import statistics

from ..making import (
    SHAPES,
    assert_close,
    random_curvature,
    random_state,
    read_model,
    three_models,
    weight_bytes,
    write_model,
)
from ..rules import slow


def flat(state: dict[str, Tensor]) -> list[float]:
    return torch.cat([state[n].double().reshape(-1) for n in SHAPES]).tolist()


def flats(states: list[dict[str, Tensor]]) -> list[list[float]]:
    return [flat(state) for state in states]


def unflat(values: list[float]) -> dict[str, Tensor]:
    result, start = {}, 0
    for name, shape in SHAPES.items():
        numel = torch.Size(shape).numel()
        result[name] = torch.tensor(values[start : start + numel], dtype=torch.float64).reshape(shape)
        start += numel
    return result


W = [0.7, 1.2]
GAMMA = 1e-3


def curvatures(states: list[dict[str, Tensor]]) -> list[gm.Curvature]:
    return [random_curvature(seed, states[0], examples) for seed, examples in ((10, 50), (11, 100), (12, 200))]


def sums(some: list[gm.Curvature]) -> list[list[float]]:
    return flats([curvature.sum() for curvature in some])


#: Settings, and the slow twin of base, models and reduced curvature: on the whole model, or tensor by tensor.
CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "average": ({}, lambda b, t, f: slow.average(b, t)),
    "weighted-average": ({"weights": W}, lambda b, t, f: slow.weighted_average(b, t, W)),
    "sparse-finetuning": (
        {"weights": W, "options": {"density": 0.13}},
        lambda b, t, f: slow.sparse_finetuning(b, t, W, 0.13),
    ),
    "ties": ({"weights": W, "options": {"density": 0.4}}, lambda b, t, f: slow.ties(b, t, W, 0.4)),
    "ties by tensor": (
        {"weights": W, "options": {"density": 0.2, "scope": "tensor"}},
        lambda b, t, f: slow.ties(b, t, W, 0.2),
    ),
    "slerp by tensor": ({"models": 1, "options": {"t": 0.3}}, lambda b, t, f: slow.slerp(b, t[0], 0.3)),
    "fisher-averaging": (
        {"weights": W, "curvature": True, "damping": GAMMA, "reduction": "mean"},
        lambda b, t, f: slow.fisher_averaging(b, t, W, f[1:], GAMMA),
    ),
    "fa1": (
        {"weights": [0.7, -1.2], "curvature": True, "damping": GAMMA},
        lambda b, t, f: slow.fa1(b, t, [0.7, -1.2], f[0], f[1:], GAMMA),
    ),
    "gradient-matching": (
        {"weights": W, "curvature": True, "damping": GAMMA},
        lambda b, t, f: slow.gradient_matching(b, t, W, f[0], f[1:], GAMMA),
    ),
    "gradient-matching with 37 means under a penalty": (
        {"curvature": True, "damping": GAMMA, "penalty": {"identity": 2.5}, "reduction": {"mean_times": 37}},
        lambda b, t, f: slow.gradient_matching(b, t, [1.0, 1.0], f[0], f[1:], GAMMA, [[2.5] * len(b)] * 2),
    ),
    "removal": (
        {"curvature": True, "damping": 0.5, "options": {"base_saw_removed": True, "cap": "none"}},
        lambda b, t, f: slow.removal(b, t, [1.0, 1.0], f[0], f[1:], 0.5, None, True),
    ),
    "removal as by default": (
        {"weights": W, "curvature": True},
        lambda b, t, f: slow.removal(b, t, W, f[0], f[1:], sum(map(math.fsum, f[1:])) / len(b), cap=1.0),
    ),
}


def expected(case: str, states: list[dict[str, Tensor]], sources: list[gm.Curvature]) -> dict[str, Tensor]:
    settings, rule = CASES[case]
    states = states[: 1 + settings.get("models", 2)]
    if case.endswith("by tensor"):
        rows = {name: [state[name].double().reshape(-1).tolist() for state in states] for name in SHAPES}
        return unflat([value for base, *tuned in rows.values() for value in rule(base, tuned, [])])
    reduction = settings.get("reduction", "sum")
    times = {"sum": None, "mean": 1}[reduction] if isinstance(reduction, str) else reduction["mean_times"]
    factors = [1.0 if times is None else times / source.examples for source in sources]
    reduced = [[factor * value for value in one] for factor, one in zip(factors, sums(sources), strict=True)]
    return unflat(rule(flat(states[0]), flats(states[1:]), reduced))


def recipe_of(case: str, folders: list[Path]) -> dict[str, Any]:
    settings = dict(CASES[case][0])
    method = case.split(" ")[0]
    count = settings.pop("models", 2)
    weights = settings.pop("weights", [1.0] * count)
    base: dict[str, Any] = {"model": str(folders[0])}
    if "penalty" in settings:
        base["penalty"] = settings.pop("penalty")
    models = [{"model": str(f), "weight": w} for f, w in zip(folders[1 : 1 + count], weights, strict=True)]
    if settings.pop("curvature", False):
        for entry, number in zip([base, *models], range(3), strict=True):
            entry["curvature"] = str(folders[0].parent / f"curvature-{number}")
    return {"method": method, "base": base, "models": models, **settings}


Made = tuple[list[Path], list[dict[str, Tensor]], list[gm.Curvature]]


def make(tmp_path: Path, dtype: torch.dtype = torch.float32) -> Made:
    """A base and two fine-tuned models with curvature: folders, state dicts and curvature."""
    folders, states = three_models(tmp_path, dtype)
    sources = curvatures(states)
    for number, source in enumerate(sources):
        source.save(tmp_path / f"curvature-{number}", shard_size=10**9 if number else 900)
    return folders, states, sources


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 5e-6)])
def test_a_merge_on_disk_is_the_rule_on_the_whole_model(
    dtype: torch.dtype, tolerance: float, case: str, tmp_path: Path
) -> None:
    folders, states, sources = make(tmp_path, dtype)
    gm.merge(recipe_of(case, folders), tmp_path / "out", accept_untrusted=True)
    got = read_model(tmp_path / "out")
    assert all(tensor.dtype == dtype for tensor in got.values())
    assert_close(got, expected(case, states, sources), tolerance)


@pytest.mark.parametrize("case", CASES)
def test_the_bytes_do_not_depend_on_blocks_threads_or_shards(case: str, tmp_path: Path) -> None:
    folders, states, _ = make(tmp_path)
    recipe = recipe_of(case, folders)
    gm.merge(recipe, tmp_path / "one", threads=1, accept_untrusted=True)
    want = weight_bytes(tmp_path / "one")["model.safetensors"]
    for number, (block, threads) in enumerate([(7, 1), (64, 3), (1000, 2)]):
        gm.merge(recipe, tmp_path / f"out-{number}", threads=threads, block=block, accept_untrusted=True)
        assert weight_bytes(tmp_path / f"out-{number}")["model.safetensors"] == want
    again = [write_model(tmp_path / f"again-{i}", s, n) for i, (s, n) in enumerate(zip(states, (4, 5, 2), strict=True))]
    other = recipe_of(case, again)
    gm.merge(other, tmp_path / "again", accept_untrusted=True)
    assert weight_bytes(tmp_path / "again")["model.safetensors"] == want


@pytest.mark.parametrize("turned", [False, True])
def test_regmean_solves_linear_layers_and_averages_the_rest(tmp_path: Path, turned: bool) -> None:
    """Weights are (out, in), or (in, out) as in GPT-2's Conv1D; a square one is known from the file's header."""
    shapes = {"a.weight": (6, 4), "b.weight": (5, 5), "b.bias": (5,)}
    states = [random_state(seed, shapes, torch.float64) for seed in range(3)]
    if turned:
        states = [{n: t.T.contiguous() if n == "a.weight" else t for n, t in s.items()} for s in states]
    folders = [write_model(tmp_path / f"m{i}", s) for i, s in enumerate(states)]
    grams = []
    for seed in (5, 6):
        generator = torch.Generator().manual_seed(seed)
        inputs = {
            n: torch.randn(30, size, generator=generator, dtype=torch.float64)
            for n, size in (("a.weight", 4), ("b.weight", 5))
        }
        grams.append({n: (x.T @ x).float() for n, x in inputs.items()})
    write_grams(tmp_path, grams, json.dumps(["a.weight", "b.weight"] if turned else []))
    models = [
        {"model": str(f), "curvature": str(tmp_path / f"gram{i}.safetensors"), "weight": w}
        for i, (f, w) in enumerate(zip(folders[1:], (1.0, 0.5), strict=True))
    ]
    gm.merge({"method": "regmean", "base": str(folders[0]), "models": models}, tmp_path / "out")

    def turn(tensor: Tensor) -> Tensor:
        return tensor.T if turned else tensor

    want = {"b.bias": (states[1]["b.bias"] + 0.5 * states[2]["b.bias"]) / 1.5}
    for name in ("a.weight", "b.weight"):
        solved = slow.regmean(
            [turn(s[name]).numpy() for s in states[1:]], [g[name].double().numpy() for g in grams], [1.0, 0.5], 1e-10
        )
        want[name] = turn(torch.tensor(solved))
    assert_close(read_model(tmp_path / "out"), want, 1e-9)


def write_grams(folder: Path, grams: list[dict[str, Tensor]], transposed: str) -> None:
    from safetensors.torch import save_file

    header = {"format": "gradmerge-curvature/1", "examples": "30", "likelihood": "empirical", "model": "m"}
    header |= {"kind": "gram", "fan_in_fan_out": transposed}
    for number, gram in enumerate(grams):
        save_file(gram, folder / f"gram{number}.safetensors", metadata=header)


def test_state_dicts_merge_in_memory_to_the_same_values_as_on_disk(tmp_path: Path) -> None:
    folders, states, sources = make(tmp_path)
    for case in CASES:
        recipe = recipe_of(case, folders)
        gm.merge(recipe, tmp_path / "out", force=True, accept_untrusted=True)
        base, models = recipe["base"], recipe["models"]
        got = gm.merge_state_dicts(
            states[0],
            states[1 : 1 + len(models)],
            recipe["method"],
            prior=sources[0],
            curvature=sources[1 : 1 + len(models)],
            penalty=base["penalty"]["identity"] if isinstance(base.get("penalty"), dict) else base.get("penalty"),
            weights=[m["weight"] for m in models],
            base_weight=base.get("weight"),
            damping=recipe.get("damping", "auto"),
            reduction=recipe.get("reduction", "sum"),
            options=recipe.get("options"),
        )
        on_disk = read_model(tmp_path / "out")
        assert all(torch.equal(got[name], on_disk[name]) for name in on_disk), case


def test_missing_curvature_counts_as_zero_if_the_recipe_says_so(tmp_path: Path) -> None:
    folders, states = three_models(tmp_path)
    part = {n: states[0][n] for n in list(SHAPES)[:3]}
    for number in range(3):
        random_curvature(number, part).save(tmp_path / f"curvature-{number}")
    recipe = recipe_of("gradient-matching", folders)
    with pytest.raises(gm.InputError, match=list(SHAPES)[3]):
        gm.merge(recipe, tmp_path / "out")
    gm.merge(recipe | {"missing": "zero", "damping": 0.0}, tmp_path / "out")
    got = read_model(tmp_path / "out")
    for name in list(SHAPES)[3:]:  # all curvature is 0 there: task arithmetic
        want = states[0][name] + W[0] * (states[1][name] - states[0][name]) + W[1] * (states[2][name] - states[0][name])
        assert torch.allclose(got[name], want, atol=1e-6)


@pytest.mark.parametrize(
    ("method", "reduction"), [("gradient-matching", "mean"), ("fisher-averaging", "sum"), ("removal", "mean")]
)
def test_the_written_curvature_reads_back_as_the_merged_precision(tmp_path: Path, reduction: str, method: str) -> None:
    folders, _, sources = make(tmp_path)
    recipe = recipe_of("gradient-matching", folders)
    recipe |= {"method": method, "reduction": reduction, "damping": 0.25, "output": {"curvature": True}}
    gm.merge(recipe, tmp_path / "out", block=50, accept_untrusted=True)
    written = gm.Curvature.load(tmp_path / "out" / "curvature")
    f0, f1, f2 = (getattr(source, reduction)() for source in sources)
    got = getattr(written, reduction)()
    for name in SHAPES:
        want = {
            "gradient-matching": f0[name] + 0.25 + W[0] * f1[name] + W[1] * f2[name],
            "fisher-averaging": W[0] * (f1[name] + 0.25) + W[1] * (f2[name] + 0.25),
            "removal": f0[name] + 0.25,
        }[method]
        assert torch.allclose(got[name], want, rtol=1e-5), name


@pytest.mark.parametrize(
    ("bracket", "threads", "scope"),
    [
        (None, 1, "model"),
        (None, 3, "tensor"),
        ((0.0, 1e-9), 3, "model"),
        ((1.0, 1.0), 1, "tensor"),
        ((1e9, math.inf), 3, "model"),
    ],
)
def test_thresholds_are_exact_whether_the_sampled_bracket_holds_them_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bracket: Any, threads: int, scope: str
) -> None:
    if bracket is not None:
        monkeypatch.setattr(statistics, "bracket_of", lambda share, runs: bracket)
    monkeypatch.setattr(statistics, "RUN", 16)
    shapes = {f"layer.{i}.weight": (20, 30) for i in range(5)}
    base = {name: value.round() for name, value in random_state(0, shapes, scale=9.0).items()}
    states = [base, *({n: v + random_state(s, shapes)[n].round() for n, v in base.items()} for s in (1, 2))]
    folders = [write_model(tmp_path / f"m{i}", {n: v.bfloat16() for n, v in s.items()}) for i, s in enumerate(states)]
    recipe = {"method": "ties", "base": str(folders[0]), "models": [str(f) for f in folders[1:]]}
    recipe |= {"options": {"density": 0.3, "scope": scope}, "output": {"dtype": "float32"}}
    gm.merge(recipe, tmp_path / "out", threads=threads, block=77)
    read = [read_model(folder) for folder in folders]
    values = [[[float(v) for v in t.flatten()] for t in state.values()] for state in read]
    if scope == "model":
        values = [[[value for tensor in state for value in tensor]] for state in values]
    groups = [*zip(*values, strict=True)]
    want = [value for own, *others in groups for value in slow.ties(own, others, [1.0, 1.0], 0.3)]
    got = [float(v) for name in states[0] for v in read_model(tmp_path / "out")[name].flatten()]
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize(
    ("where", "bad", "weights"),
    [
        ("base", math.nan, [1.0, 0.0]),
        ("base", -math.inf, [-1.0, -1.0]),
        ("b", math.nan, [-1.0, -1.0]),
        ("b", -math.inf, [1.0, 0.0]),
    ],
)
def test_no_rule_swallows_a_value_that_is_not_finite(
    tmp_path: Path, bad: float, weights: list[float], where: str
) -> None:
    folders, states = three_models(tmp_path, shards=(1, 1, 1))
    state = states[["base", "a", "b"].index(where)]
    state["layers.0.linear.weight"][3, 2] = bad
    write_model(tmp_path / where, state)
    for number, source in enumerate(curvatures(states)):
        source.save(tmp_path / f"curvature-{number}")
    plain = ["task-arithmetic", "ties", "dare", "fisher-averaging", "fa1", "gradient-matching", "removal"]
    cases: list[tuple[str, dict[str, Any]]] = [
        *((method, {}) for method in plain),
        ("weighted-average", {"normalize": False}),
        ("sparse-finetuning", {"normalize": True}),
        ("dare", {"combine": "ties"}),
    ]
    for method, options in cases:
        if method == "weighted-average" and where == "base":
            continue  # which does not take part
        recipe = recipe_of("gradient-matching", folders) | {"method": method, "options": options}
        for entry, weight in zip(recipe["models"], weights, strict=True):
            entry["weight"] = weight
        with pytest.raises(gm.InputError, match=rf"{where}: layers\.0\.linear\.weight"):
            gm.merge(recipe, tmp_path / "out")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_result_that_is_too_large_for_its_type_is_refused(tmp_path: Path, dtype: str) -> None:
    kind = getattr(torch, dtype)
    limit = torch.finfo(kind).max
    wide = torch.float64 if kind == torch.float32 else torch.float32
    base = write_model(tmp_path / "base", {"w": torch.zeros(3, dtype=kind)})
    value = min(limit * 1.01, torch.finfo(wide).max)
    tuned = write_model(tmp_path / "a", {"w": torch.tensor([1.0, value, 0.0], dtype=wide)})
    with pytest.raises(gm.InputError, match=dtype):
        gm.merge({"method": "average", "base": str(base), "models": [str(tuned)]}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copied_tensor_that_is_not_finite_is_reported(tmp_path: Path) -> None:
    folders, states = three_models(tmp_path, shards=(1, 1, 1))
    states[0]["classifier.weight"][0, 0] = float("nan")
    write_model(tmp_path / "base", states[0])
    recipe = {"method": "average", "base": str(folders[0]), "models": [str(folders[1])], "exclude": ["classifier.*"]}
    with pytest.raises(gm.InputError, match=r"base: classifier\.weight"):
        gm.merge(recipe, tmp_path / "out")
    gm.merge(recipe, tmp_path / "out", allow_nonfinite=True)
    assert torch.isnan(read_model(tmp_path / "out")["classifier.weight"][0, 0])


HEADS = {"model.embed_tokens.weight": (6, 4), "lm_head.weight": (6, 4), "model.norm.weight": (4,)}


@pytest.mark.parametrize("case", ["another shape", "other values"])
def test_curvature_of_an_embedding_does_not_stand_for_a_head_that_is_not_tied(tmp_path: Path, case: str) -> None:
    shapes = HEADS | {"lm_head.weight": (12, 4)} if case == "another shape" else HEADS
    states = [random_state(seed, shapes) for seed in range(2)]
    folders = [write_model(tmp_path / f"m{i}", s) for i, s in enumerate(states)]
    part = {n: t for n, t in states[0].items() if n != "lm_head.weight"}
    for name in ("c0", "c1"):
        random_curvature(3, part).save(tmp_path / name)
    recipe = {
        "method": "gradient-matching",
        "base": {"model": str(folders[0]), "curvature": str(tmp_path / "c0")},
        "models": [{"model": str(folders[1]), "curvature": str(tmp_path / "c1")}],
    }
    with pytest.raises(gm.InputError, match=r"lm_head\.weight"):
        gm.merge(recipe, tmp_path / "out")
