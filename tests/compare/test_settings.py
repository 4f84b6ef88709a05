"""Settings: ranges, grids, keys that are swept or set, and that each is merged to the same bits as on disk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.compare.candidates import open_for_methods
from gradmerge.compare.evaluate import Evaluator, merge_in_memory
from gradmerge.compare.settings import (
    Axis,
    Grid,
    Setting,
    make_setting,
    parse_range,
    parse_sweeps,
    parse_weights,
    recipe_with,
    with_changes,
)
from gradmerge.recipe import Case

from ..making import read_model, write_recipe
from .making import ThreeModels, setting, two_tasks


def grid_of(recipe: gm.Recipe, *sweeps: str, methods: list[str] | None = None) -> Grid:
    methods = methods or [recipe.method]
    return Grid(recipe, methods, parse_sweeps(sweeps, methods))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("0:1:0.1", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        ("0:1:0.3", [0.0, 0.3, 0.6, 0.9]),
        ("1:0:-0.5", [0.0, 0.5, 1.0]),
        ("-0.2:0.1:0.1", [-0.2, -0.1, 0.0, 0.1]),
        ("0,0.3,1", [0.0, 0.3, 1.0]),
        ("0.7:0.7:0.1", [0.7]),
    ],
)
def test_a_range_has_both_ends_and_exact_decimals(text: str, values: list[float]) -> None:
    assert list(parse_range(text).values) == values


@pytest.mark.parametrize("text", ["0:1:0", "0:1:-0.1", "a:1:0.1", "0:1:0.1:2", "", "nan", "0:1:1e-300"])
def test_a_bad_range_is_refused(text: str) -> None:
    with pytest.raises(gm.InputError):
        parse_range(text)


def test_a_grid_is_the_product_and_tasks_without_a_range_keep_the_recipes_weight() -> None:
    recipe = two_tasks((0.25, 0.75))

    def grid(*given: str, methods: tuple[str, ...] = ("task-arithmetic",)) -> Grid:
        return Grid(recipe, methods, parse_weights(given, recipe, methods))

    def weights(*given: str) -> list[Any]:
        return [one.weights for one in grid(*given).settings()]

    assert weights("0:1:0.5") == [(0, 0), (0.5, 0.5), (1, 1)]
    assert weights("a=0:1:0.5") == [(0, 0.75), (0.5, 0.75), (1, 0.75)]
    assert weights("a=0,1", "b=0.5,2") == list(itertools.product((0, 1), (0.5, 2)))
    assert weights("0:1:0.5", "b=0.3") == [(0, 0.3), (0.5, 0.3), (1, 0.3)]
    both = grid("0:1:0.5", methods=("average", "task-arithmetic")).settings()
    assert [s.name for s in both] == ["average", "task-arithmetic 0", "task-arithmetic 0.5", "task-arithmetic 1"]
    shared = grid("0:1:0.5", "b=0.3")
    assert [shared.axis.position(one) for one in shared.settings()] == [0, 0.5, 1]


@pytest.mark.parametrize("weights", [["a=0:1:0.01", "b=0:1:0.01"], "0:1", "c=0:1:0.1", ["0.1", "0.2"]])
def test_a_wrong_grid_is_refused(weights: Any) -> None:
    with pytest.raises(gm.InputError):
        Grid(two_tasks(), ["task-arithmetic"], parse_weights(weights, two_tasks(), ["task-arithmetic"])).settings()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("density=0.1:0.9:0.4", [0.1, 0.5, 0.9]),
        ("density=[0.2, 0.9],0.5", [[0.2, 0.9], 0.5]),
        ("rescale=none,norm", ["none", "norm"]),
        ("normalize=true,false", [True, False]),
        ("density=1e-3,1e-1", [0.001, 0.1]),
        ("models[0].options.density=0.3", [0.3]),
        ("damping=auto,1e-6", ["auto", 1e-6]),
    ],
)
def test_values_are_ranges_lists_or_whatever_yaml_has(text: str, values: list[Any]) -> None:
    (found,) = parse_sweeps([text], ["ties", "gradient-matching"])
    assert list(found.values) == values and [type(v) for v in found.values] == [type(v) for v in values]


def test_whole_numbers_stay_whole_and_a_mapping_is_the_same() -> None:
    (found,) = parse_sweeps(["seed=0:3:1"], ["dare"])
    assert found.values == (0, 1, 2, 3) and all(isinstance(value, int) for value in found.values)
    assert parse_sweeps({"seed": "0:3:1"}, ["dare"]) == [found]
    assert parse_sweeps({"density": [0.1, 0.5]}, ["ties"])[0].values == (0.1, 0.5)
    cases = (Case(filter="mlp", value=(0.1, 1.0)), Case(value=0.5))
    given = [{"filter": "mlp", "value": [0.1, 1.0]}, {"value": 0.5}]
    made = make_setting(two_tasks(), "task-arithmetic", {"reduction": {"mean_times": 5}, "models.0.weight": given})
    assert made == setting("task-arithmetic", (cases, 1.0), {"reduction.mean_times": 5})


@pytest.mark.parametrize(
    "text",
    [
        "options.densty=0.5",
        "method=a,b",
        "models.0.model=a",
        "damping=0,1",
        "density=0:1:0",
    ],
)
def test_a_wrong_sweep_is_refused(text: str) -> None:
    with pytest.raises(gm.InputError):
        parse_sweeps([text], ["ties"])


def test_a_value_that_a_method_does_not_accept_is_refused_before_any_work() -> None:
    recipe = two_tasks(method="ties")
    for text in ("density=0.5,2", "vote=some", "models.7.options.density=0.5"):
        with pytest.raises(gm.InputError, match=text.partition("=")[0]):
            grid_of(recipe, text).settings()
    with pytest.raises(gm.InputError, match="density"):
        parse_sweeps(["density=0.1", "options.density=0.2"], ["ties"])


def test_a_sweep_has_every_combination_for_methods_that_know_the_key() -> None:
    recipe = two_tasks(method="ties")
    methods = ["ties", "task-arithmetic", "average"]
    grid = grid_of(recipe, "density=0.1:0.5:0.2", "normalize=true,false", methods=methods)
    settings = grid.settings()
    names = [one.name for one in settings]
    assert names[:2] == ["ties 1 density 0.1, normalize true", "ties 1 density 0.1, normalize false"]
    assert len(settings) == 6 + 2 + 1 and names[-1] == "average"
    assert grid.axis == Axis("density", ("options.density",)) and grid.axis.position(settings[0]) == 0.1
    assert grid.axis.curve(settings[0]) == "ties normalize true"
    for sweeps in (("density=0:1:0.01", "scale=0:1:0.01"), ("density=0:1",)):
        with pytest.raises(gm.InputError, match="sweep"):
            grid_of(recipe, *sweeps).settings()


def test_a_model_that_the_recipe_names_twice_has_two_weights(tmp_path: Path) -> None:
    place = ThreeModels(tmp_path)
    twice = [{**place.recipe["models"][0], "weight": 1.0}] * 2
    found = gm.preview({**place.recipe, "models": twice}, weights="0:1:0.5")
    assert len(set(found.models)) == 2
    assert {row.setting.weights for row in found.rows} == {(0, 0), (0.5, 0.5), (1, 1)}


def test_a_weight_is_a_key_like_any_other() -> None:
    recipe = two_tasks((0.5, 0.25))
    settings = grid_of(recipe, "models.1.weight=[0, 1],0.75").settings()
    assert [one.weights for one in settings] == [(0.5, (0.0, 1.0)), (0.5, 0.75)]
    assert not any(one.changes for one in settings)
    overrides = {"models.0.weight": 2, "damping": 0.1}
    made = make_setting(recipe, "task-arithmetic", overrides)
    assert made == setting("task-arithmetic", (2.0, 0.25), {"damping": 0.1})
    assert hash(made) == hash(setting("task-arithmetic", (2.0, 0.25), {"damping": 0.1}))


def test_set_changes_the_recipe_and_options_of_all_methods_that_know_them() -> None:
    recipe = two_tasks(method="gradient-matching")
    changed, others = with_changes(recipe, ["damping=1e-3", "density=0.4", "models.0.weight=0.2"], ["ties", "average"])
    assert (changed.damping, changed.weights, changed.options) == (1e-3, [0.2, 1.0], {})
    assert [(one.keys, one.values, one.methods) for one in others] == [(("options.density",), (0.4,), ("ties",))]
    ties, others = with_changes(two_tasks(method="ties"), {"density": 0.4}, ["dare"])
    assert ties.options == {"density": 0.4} and [one.methods for one in others] == [("dare",)]
    for text in ("densty=1", "damping=-1"):
        with pytest.raises(gm.InputError):
            with_changes(recipe, [text], ["ties"])
    assert with_changes(recipe, None) == (recipe, [])


CHANGES = {
    "gradient-matching": [
        *("damping=1e-1", "damping=auto", "reduction=mean", "reduction={mean_times: 7}", "base.penalty=none"),
        *("base.examples=50", "base.curvature={identity: 2.0}", "models.1.curvature={identity: 0.5}"),
        *("exclude=[classifier.*]", "include=['*weight']", "output.dtype=bfloat16"),
        *("models.0.weight=[0, 1]", "models.1.weight=[{filter: bias, value: 0.3}, {value: 1.0}]"),
    ],
    "removal": ["cap=none", "base_saw_removed=true", "damping=auto", "cap=0.1"],
    "ties": ["density=0.5", "models.0.options.density=0.7", "vote=mergekit", "rescale=norm", "scope=tensor"],
    "della": ["epsilon=0.05", "seed=2"],
    "fisher-averaging": ["include_base=true", "damping=3"],
    "weighted-average": ["base.weight=0.3", "normalize=false"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ThreeModels:
    return ThreeModels(tmp_path_factory.mktemp("sweeps"))


class Merger(Evaluator):
    """Merges settings in memory."""

    def evaluate(self, settings: Any, advance: Any) -> Any:
        raise NotImplementedError

    def merge(self, one: Setting) -> dict[str, torch.Tensor]:
        plan, known = self.shared_plan(one)
        (state,) = merge_in_memory(plan, [self.setting_plan(one)], 2, known)
        return state


@pytest.mark.parametrize("method", CHANGES)
def test_a_swept_setting_is_the_merge_on_disk_bit_for_bit(place: ThreeModels, method: str, tmp_path: Path) -> None:
    file = write_recipe(place.path / f"{method}.yml", {**place.recipe, "method": method})
    recipe = gm.load_recipe(file)
    merger = Merger(recipe, [method], open_for_methods, 2)
    seen = [merger.merge(make_setting(recipe, method))]
    for number, text in enumerate(CHANGES[method]):
        key, _, value = text.partition("=")
        (one,) = grid_of(recipe, f"{key}={value}").settings()
        got = merger.merge(one)
        out = tmp_path / f"{number}"
        done = CliRunner().invoke(app, ["merge", str(file), "--set", text, "-o", str(out), "--accept-untrusted"])
        assert done.exit_code == 0, (text, done.output)
        want = read_model(out)
        assert got.keys() == want.keys(), text
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), (text, name)
        gm.merge(recipe_with(recipe, one), out, force=True, accept_untrusted=True)
        assert all(torch.equal(tensor, want[name]) for name, tensor in read_model(out).items()), "its own recipe"
        seen.append(got)
    differ = [any(not torch.equal(one[name], seen[0][name]) for name in one) for one in seen[1:]]
    assert sum(differ) >= len(differ) - 1, "a change that changes nothing tests nothing"
    merger.close()
