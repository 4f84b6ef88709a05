from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.recipe import Identity, load_recipe, make_recipe, reduction_factor
from gradmerge.yaml import parse_yaml

FULL = """
method: gradient-matching
base:
  model: ./imdb
  curvature: ./imdb-curvature
models:
  - model: ./yelp
    curvature: {identity: 2}
    weight: 0.5
  - ./sst2
reduction: mean
damping: 1e-8
include: ["*"]
exclude: ["classifier.*"]
options: {}
output:
  dtype: bfloat16
  shard_size: 500MB
  curvature: true
"""


def test_a_full_recipe_is_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yml"
    path.write_text(FULL)
    recipe = load_recipe(path)
    assert recipe.folder == tmp_path
    assert recipe.base is not None
    assert recipe.base.curvature == "./imdb-curvature"
    assert recipe.weights == [0.5, 1.0]
    assert recipe.models[0].curvature.identity == 2.0
    assert recipe.models[1].model == "./sst2"
    assert (recipe.damping, recipe.output.shard_size) == (1e-8, 500_000_000)


def test_defaults_are_those_of_the_design() -> None:
    recipe = make_recipe({"method": "task-arithmetic", "base": "b", "models": ["a"]})
    assert (recipe.reduction, recipe.damping, recipe.include, recipe.exclude) == ("sum", "auto", ["*"], [])
    assert (recipe.output.dtype, recipe.output.shard_size, recipe.output.curvature) == ("auto", 5_000_000_000, False)
    assert recipe.missing == "error"


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5e9), ("500MB", 5e8), ("2GiB", 2**31), ("1.5 kB", 1500), (1234, 1234), ("7", 7)]
)
def test_sizes_are_read(text: str | int, size: float) -> None:
    recipe = make_recipe({"method": "average", "models": ["a"], "output": {"shard_size": text}})
    assert recipe.output.shard_size == size


BASE = {"method": "ties", "base": "b", "models": ["a"]}
REMOVAL = BASE | {"method": "removal"}
UNKNOWN = [
    # recipe, where it is wrong, and the nearest key
    (BASE | {"modles": []}, "modles", "models"),
    (BASE | {"models": [{"model": "a", "wieght": 1}]}, "models[0].wieght", "weight"),
    (BASE | {"base": {"model": "b", "curvatur": "c"}}, "base.curvatur", "curvature"),
    (BASE | {"output": {"dtyp": "auto"}}, "output.dtyp", "dtype"),
    (BASE | {"options": {"densty": 0.1}}, "densty", "density"),
    (BASE | {"method": "tyes"}, "method", "ties"),
    (BASE | {"reduction": {"mean_time": 2}}, "mean_time", "mean_times"),
]
WRONG = [
    (BASE | {"options": {"density": 1.5}}, "density"),
    (BASE | {"options": {"density": "much"}}, "density"),
    (BASE | {"options": {"scope": "layer"}}, "scope"),
    (BASE | {"options": {"cap": 1}}, "cap"),
    ({"base": "b", "models": ["a"]}, "method"),
    ({"method": "ties", "base": "b"}, "models"),
    (BASE | {"models": []}, "models"),
    ({"method": "ties", "models": ["a"]}, "base"),
    ({"method": "slerp", "base": "b", "models": ["a", "c"]}, "model"),
    (BASE | {"models": [{"model": "a", "weight": float("nan")}]}, "models[0].weight"),
    ({"method": "average", "models": [{"model": "a", "weight": 2}]}, "weight"),
    (BASE | {"models": [{"model": "a", "curvature": {"identity": -1}}]}, "identity"),
    (BASE | {"base": {"model": "b", "weight": 1}}, "base.weight"),
    (BASE | {"base": {"model": "b", "penalty": "p"}}, "base.penalty"),
    (REMOVAL | {"base": {"model": "b", "penalty": 3}}, "base.penalty"),
    (BASE | {"base": {"model": "b", "examples": 9}}, "base.examples"),
    (REMOVAL | {"base": {"model": "b", "examples": 0}}, "base.examples"),
    (REMOVAL | {"base": {"model": "b", "examples": 9, "curvature": {"identity": 1}}}, "base.examples"),
    (REMOVAL | {"base": {"model": "b", "examples": 9}, "reduction": "mean"}, "base.examples"),
    *((BASE | {"damping": damping}, "damping") for damping in (-1, "car", None)),
    *((REMOVAL | {"options": {"cap": cap}}, "cap") for cap in (-0.1, None)),
    (BASE | {"reduction": "median"}, "reduction"),
    (BASE | {"reduction": {"mean_times": 0}}, "reduction.mean_times"),
    (BASE | {"output": {"shard_size": "big"}}, "shard_size"),
    (BASE | {"output": {"curvature": True}}, "curvature"),
]


@pytest.mark.parametrize(("value", "field", "nearest"), UNKNOWN)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(value: Any, field: str, nearest: str) -> None:
    with pytest.raises(gm.InputError, match=f"{re.escape(field)}.*'{nearest}'"):
        make_recipe(value)


@pytest.mark.parametrize(("value", "field"), WRONG)
def test_a_wrong_value_is_refused_by_its_place(value: Any, field: str) -> None:
    with pytest.raises(gm.InputError, match=re.escape(field)):
        make_recipe(value)


@pytest.mark.parametrize("method", ["gradient-matching", "removal"])
@pytest.mark.parametrize(
    ("text", "penalty"),
    [("none", "none"), ("None", "none"), ("null", None), ("~", None), ("{identity: 2}", 2.0), ("./none", "./none")],
)
def test_none_is_a_word_for_no_penalty_and_null_leaves_it_open(method: str, text: str, penalty: object) -> None:
    raw = parse_yaml(f"{{method: {method}, base: {{model: b, penalty: {text}}}, models: [a]}}", "r")
    recipe = make_recipe(raw)
    assert recipe.base is not None
    found = recipe.base.penalty
    assert (found.identity if isinstance(found, Identity) else found) == penalty


def test_words_and_numbers_stay_what_they_are_when_a_recipe_is_written_and_read_again() -> None:
    raw = REMOVAL | {"options": {"cap": "none"}, "damping": "1e-8", "reduction": {"mean_times": 50}}
    recipe = make_recipe(raw | {"base": {"model": "b", "penalty": "none", "examples": 7}})
    assert (recipe.damping, recipe.resolved_options["cap"]) == (1e-8, "none")
    again = make_recipe(recipe.model_dump(mode="json") | {"options": recipe.resolved_options})
    assert again.resolved_options == recipe.resolved_options
    assert (again.base, again.reduction, again.damping) == (recipe.base, recipe.reduction, recipe.damping)
    assert make_recipe(REMOVAL).resolved_options["cap"] == 1.0
    assert make_recipe(REMOVAL | {"options": {"cap": "0.5"}}).resolved_options["cap"] == 0.5


def test_reductions_are_factors_of_the_sum() -> None:
    recipe = make_recipe(BASE | {"reduction": {"mean_times": 50}})
    factors = [reduction_factor(reduction, 200) for reduction in ("sum", "mean", recipe.reduction)]
    assert factors == [1.0, 1 / 200, 50 / 200]


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(gm.InputError) as caught:
        make_recipe(BASE | {"damping": -1, "reduction": "median", "foo": 1})
    assert all(word in str(caught.value) for word in ("damping", "reduction", "foo"))


def test_yaml_that_is_not_a_recipe_is_refused() -> None:
    for text in ("a: 1\na: 2", "a: [1, 2", "!!python/object/apply:os.getcwd []", "", "[" * 5000, b"\xc3\x28"):
        with pytest.raises(gm.InputError, match=r"recipe\.yml"):
            parse_yaml(text, "recipe.yml")
