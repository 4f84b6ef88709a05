"""Keys of the recipe that are swept or set: read as `merge --set` reads them, and merged to the same bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app
from gradmerge.compare.grid import Setting, Space, grid, recipe_with
from gradmerge.compare.in_memory import materialise
from gradmerge.compare.plans import OPEN, Candidates, open_for
from gradmerge.compare.predict import task_names
from gradmerge.compare.sweeps import as_changes, parse_sweeps, with_changes
from gradmerge.compare.weight_ranges import parse_weights
from gradmerge.recipe import Case, make_recipe

from ..making import read_model, write_recipe
from .test_preview import Place, two_tasks


def space_of(recipe: gm.Recipe, *sweeps: str, methods: list[str] | None = None) -> Space:
    ranges = parse_weights(None, task_names(recipe), recipe, None)
    return Space(ranges, parse_sweeps(sweeps, methods or [recipe.method]))


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("options.density=0.1:0.9:0.4", [0.1, 0.5, 0.9]),
        ("density=0.9,0.1", [0.9, 0.1]),
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
    assert parse_sweeps({"options.seed": "0:3:1"}, ["dare"]) == [found]
    assert parse_sweeps({"density": [0.1, 0.5]}, ["ties"])[0].values == (0.1, 0.5)
    assert as_changes("reduction", {"mean_times": 5}) == (("reduction.mean_times", 5),)
    cases = (Case(filter="mlp", value=(0.1, 1.0)), Case(value=0.5))
    given = [{"filter": "mlp", "value": [0.1, 1.0]}, {"value": 0.5}]
    assert as_changes("models.0.weight", given) == (("models.0.weight", cases),)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("dampng=1", "'damping'"),
        ("options.densty=0.5", "'density'"),
        ("method=a,b", "--methods"),
        ("weight=0,1", "--weights"),
        ("models.0.model=a", "models.0.model"),
        ("density", "density"),
        ("density=[", "density"),
        ("damping=0,1", "damping"),
        ("density=0:1:0", "density=0:1:0"),
    ],
)
def test_a_wrong_sweep_is_refused(text: str, named: str) -> None:
    with pytest.raises(gm.InputError, match=re.escape(named)):
        parse_sweeps([text], ["ties"])


def test_a_value_that_does_not_suit_the_method_is_refused_before_any_work() -> None:
    recipe = two_tasks(method="ties")
    for text in ("density=0.5,2", "vote=some", "models.7.options.density=0.5"):
        with pytest.raises(gm.InputError, match=text.partition("=")[0]):
            space_of(recipe, text).check(["ties"], recipe)
    with pytest.raises(gm.InputError, match="density"):
        parse_sweeps(["density=0.1", "options.density=0.2"], ["ties"])


def test_a_grid_has_every_combination_for_methods_that_know_the_key() -> None:
    recipe = two_tasks(method="ties")
    methods = ["ties", "task-arithmetic", "average"]
    space = space_of(recipe, "density=0.1:0.5:0.2", "normalize=true,false", methods=methods)
    settings = grid(methods, space)
    names = [setting.name for setting in settings]
    assert names[:2] == ["ties 1 density 0.1, normalize True", "ties 1 density 0.1, normalize False"]
    assert len(settings) == 6 + 2 + 1 and names[-1] == "average"
    assert space.axis == "density" and settings[0].position == 0.1 and settings[0].series == "ties normalize True"
    assert any("options.density" in note for note in space.notes(methods))
    for sweeps in (("density=0:1:0.01", "scale=0:1:0.01"), ("density=0:1",)):
        with pytest.raises(gm.InputError, match="--sweep"):
            grid(["ties"], space_of(recipe, *sweeps))


def test_weights_of_a_model_that_are_swept_are_weights_of_the_setting() -> None:
    recipe = two_tasks((0.5, 0.25))
    space = space_of(recipe, "models.1.weight=[0, 1],0.75")
    assert [s.weights for s in grid(["task-arithmetic"], space)] == [(0.5, (0.0, 1.0)), (0.5, 0.75)]
    assert all(setting.changes == () for setting in grid(["task-arithmetic"], space))


def test_set_changes_the_recipe_and_options_of_all_methods_that_know_them() -> None:
    recipe = two_tasks(method="gradient-matching")
    changed, others = with_changes(recipe, ["damping=1e-3", "density=0.4", "models.0.weight=0.2"], ["ties", "average"])
    assert (changed.damping, changed.weights, changed.options) == (1e-3, [0.2, 1.0], {})
    assert others == {"ties": (("options.density", 0.4),)}
    ties, others = with_changes(two_tasks(method="ties"), {"density": 0.4}, ["dare"])
    assert ties.options == {"density": 0.4} and others == {"dare": (("options.density", 0.4),)}
    for text, named in (("densty=1", "'density'"), ("damping=-1", "damping")):
        with pytest.raises(gm.InputError, match=named):
            with_changes(recipe, [text], ["ties"])
    assert with_changes(recipe, None, None) == (recipe, {})


CHANGES = {
    "gradient-matching": [
        *("damping=1e-1", "damping=auto", "reduction=mean", "reduction={mean_times: 7}", "base.penalty=none"),
        *("base.examples=50", "base.curvature={identity: 2.0}", "models.1.curvature={identity: 0.5}"),
        *("exclude=[classifier.*]", "include=['*weight']", "output.dtype=bfloat16"),
        *("models.0.weight=[0, 1]", "models.1.weight=[{filter: bias, value: 0.3}, {value: 1.0}]"),
    ],
    "removal": ["cap=none", "base_saw_removed=true", "damping=auto", "cap=0.1"],
    "ties": ["density=0.5", "models.0.options.density=0.7", "vote=mergekit", "rescale=norm", "scope=tensor"],
    "breadcrumbs": ["density=[0.2, 0.9]", "gamma=0.05"],
    "dare": ["seed=3", "density=0.25"],
    "della": ["epsilon=0.05", "seed=2"],
    "fisher-averaging": ["include_base=true", "damping=3"],
    "weighted-average": ["base.weight=0.3", "normalize=false"],
    "karcher": ["steps=1"],
    "sparse-finetuning": ["density=0.4"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("sweeps"))


@pytest.mark.parametrize("method", CHANGES)
def test_a_swept_setting_is_the_merge_with_the_same_set_bit_for_bit(place: Place, method: str, tmp_path: Path) -> None:
    file = write_recipe(place.path / f"{method}.yml", {**place.recipe, "method": method})
    recipe = gm.load_recipe(file)
    plain, opened = open_for(recipe, [method]), []

    def again(changed: gm.Recipe) -> Any:
        opened.append(open_for(changed, [changed.method]))
        return opened[-1]

    candidates = Candidates(recipe, plain, again)
    seen = [read_of(candidates, Setting(method, tuple(recipe.weights)))]
    for number, text in enumerate(CHANGES[method]):
        key, _, value = text.partition("=")
        (setting,) = grid([method], space_of(recipe, f"{key}={value}"))
        got = read_of(candidates, setting)
        out = tmp_path / f"{number}"
        done = CliRunner().invoke(app, ["merge", str(file), "--set", text, "-o", str(out), "--accept-untrusted"])
        assert done.exit_code == 0, (text, done.output)
        want = read_model(out)
        assert got.keys() == want.keys(), text
        for name, tensor in want.items():
            assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), (text, name)
        gm.merge(recipe_with(recipe, setting), out, force=True, accept_untrusted=True)
        assert all(torch.equal(tensor, want[name]) for name, tensor in read_model(out).items()), "its own recipe"
        seen.append(got)
    differ = [any(not torch.equal(one[name], seen[0][name]) for name in one) for one in seen[1:]]
    assert sum(differ) >= len(differ) - 1, "a change that changes nothing tests nothing"
    assert len(candidates._plans) <= OPEN + 1
    candidates.close()


def read_of(candidates: Candidates, setting: Setting) -> dict[str, torch.Tensor]:
    plan, known = candidates.plan_for(setting)
    (state,) = materialise(plan, [candidates.candidate(setting)], 2, known)
    return state


def test_one_number_over_layers_needs_no_other_plan(tmp_path: Path) -> None:
    place = Place(tmp_path)
    one = {**place.recipe, "method": "slerp", "models": place.recipe["models"][:1]}
    one["models"][0].pop("weight")
    file = write_recipe(tmp_path / "recipe.yml", one)
    recipe = gm.load_recipe(file)
    candidates = Candidates(recipe, open_for(recipe, ["slerp"]), lambda changed: pytest.fail("opens files anew"))
    for number, setting in enumerate(grid(["slerp"], space_of(recipe, "t=[0, 1],0.25"))):
        gm.merge(recipe_with(recipe, setting), tmp_path / f"{number}")
        got = read_of(candidates, setting)
        assert all(torch.equal(got[name], value) for name, value in read_model(tmp_path / f"{number}").items())
    candidates.close()


def test_a_list_over_layers_that_the_merge_refuses_is_left_out(place: Place) -> None:
    recipe = {**place.recipe, "method": "ties"}
    found = gm.preview(recipe, sweep={"density": ["0.3", [0.2, 0.9]]}, progress=False)
    assert [row.setting.changes_in_words for row in found.rows] == ["density 0.3"]


def test_predictions_of_a_swept_damping_are_a_loop_over_the_formula(place: Place) -> None:
    found = gm.preview(place.recipe, sweep=["damping=0.01,0.5,4"], progress=False)
    assert found.axis == "damping" and [row.setting.position for row in found.rows] == [0.01, 0.5, 4]
    assert found.reference is found.rows[0], "the recipe's own damping is one of them"
    for row in found.rows:
        for tensor in place.curvature[0].values():  # the prior of the slow formula has 0.01 added
            tensor += row.setting.position - 0.01
        merged = place.merged("gradient-matching", (1.0, 0.5))
        for tensor in place.curvature[0].values():
            tensor -= row.setting.position - 0.01
        want = place.predicted(merged)
        assert [row.values[task] for task in found.tasks] == pytest.approx(want, rel=1e-6, abs=1e-12)


def test_predictions_are_per_example_whatever_the_reduction(place: Place) -> None:
    found = gm.preview(place.recipe, sweep=["reduction=sum,{mean_times: 100}"], progress=False)
    alone = gm.preview({**place.recipe, "reduction": {"mean_times": 100}}, weights="b=0.5", progress=False)
    assert found.rows[1].values == pytest.approx(alone.reference.values)
    with pytest.raises(gm.InputError, match="exclude"):
        gm.preview(place.recipe, sweep=["exclude=[],[classifier.*]"], progress=False)


def test_settings_that_read_other_files_are_evaluated_too(texts: Path, tmp_path: Path) -> None:
    data = {"a": str(texts / "a.jsonl")}
    sweep = {"exclude": [[], ["bert.pooler.*"], ["classifier.*"]], "scale": "0.5,1"}
    options: dict[str, Any] = {"sweep": sweep, "data": data, "device": "cpu", "progress": False}
    found = gm.preview(texts / "recipe.yml", changes={"models.0.weight": 0.7}, **options)
    assert len(found.rows) == 6 and found.reference is found.rows[3], "the recipe's own excludes the pooler"
    recipe = gm.load_recipe(texts / "recipe.yml").model_copy(deep=True)
    recipe.models[0].weight = 0.7
    for number, row in enumerate(found.rows):
        gm.merge(recipe_with(recipe, row.setting), tmp_path / f"{number}")
        want = gm.evaluate(str(tmp_path / f"{number}"), data["a"], device="cpu", progress=False)
        assert row.metrics["a"]["loss_per_example"] == pytest.approx(want["loss_per_example"], abs=1e-6)
    assert len({row.metrics["a"]["loss_per_example"] for row in found.rows}) == 6


def test_reports_and_recipes_of_a_sweep_name_what_was_changed(place: Place, tmp_path: Path) -> None:
    file = write_recipe(place.path / "shown.yml", place.recipe)
    out = tmp_path / "report"
    words = ["preview", str(file), "--methods", "gradient-matching,ties", "--sweep", "damping=0.01,2"]
    done = CliRunner().invoke(
        app, [*words, "--set", "density=0.5", "--save-best", str(tmp_path / "best"), "-o", str(out)]
    )
    assert done.exit_code == 0, done.output
    facts = json.loads((out / "preview.json").read_text())
    assert [row.get("changes") for row in facts["settings"]] == [
        {"damping": 0.01},
        {"damping": 2},
        {"options.density": 0.5},
    ]
    best = make_recipe(facts["winner"] and gm.load_recipe(out / "recipe.yml").model_dump(mode="json"))
    changed = facts["winner"]["changes"]
    assert best.damping == changed["damping"]
    gm.merge(out / "recipe.yml", tmp_path / "again")
    want, got = read_model(tmp_path / "again"), read_model(tmp_path / "best")
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    refused = CliRunner().invoke(app, [*words, "--suggest", "-o", str(tmp_path / "no")])
    assert refused.exit_code == 2
    assert not (tmp_path / "no").exists()


def test_a_search_for_weights_takes_what_is_set(place: Place) -> None:
    options: dict[str, Any] = {"progress": False, "methods": "gradient-matching,ties"}
    found = gm.suggest_weights(place.recipe, changes=["damping=5", "density=0.9"], **options)
    want = gm.suggest_weights({**place.recipe, "damping": 5}, methods="gradient-matching", progress=False)
    assert found.evaluated.best("gradient-matching").values == want.evaluated.best().values  # type: ignore[union-attr]
    ties = [row for row in found.evaluated.rows if row.setting.method == "ties"]
    assert ties and all(row.setting.changes == (("options.density", 0.9),) for row in ties)


def test_a_diagnosis_looks_at_other_values_too(place: Place) -> None:
    found = gm.diagnose(place.recipe, sweep=["damping=0.5,4"], changes=["models.1.weight=1"], progress=False)
    names = ["gradient-matching", "gradient-matching 1 damping 0.5", "gradient-matching 1 damping 4"]
    assert found.candidates[:3] == names
    for name, damping in zip(names, (0.01, 0.5, 4), strict=True):
        models = [{**model, "weight": 1.0} for model in place.recipe["models"]]
        alone = gm.diagnose({**place.recipe, "models": models, "damping": damping}, progress=False)
        for task in ("a", "b", "base"):
            assert found.prediction.excess(name, task) == pytest.approx(alone.prediction.excess(alone.own, task))
    for sweep in ("reduction=sum,mean", "damping=0:12:1"):
        with pytest.raises(gm.InputError):
            gm.diagnose(place.recipe, sweep=[sweep], progress=False)


def test_layers_with_kronecker_curvature_are_swept_to_the_same_bits(texts: Path, tmp_path: Path) -> None:
    models = []
    for name in ("base", "a", "b"):
        rows = str(texts / f"{'a' if name == 'base' else name}.jsonl")
        curvature = tmp_path / f"{name}-kronecker"
        gm.estimate_curvature(str(texts / name), rows, kind="kronecker", out=curvature, device="cpu", progress=False)
        models.append({"model": str(texts / name), "curvature": str(curvature)})
    raw = {"method": "gradient-matching", "base": models[0], "models": models[1:]}
    recipe = gm.load_recipe(write_recipe(tmp_path / "recipe.yml", raw))
    candidates = Candidates(recipe, open_for(recipe, ["gradient-matching"]), lambda changed: pytest.fail("opens files"))
    states = []
    for number, setting in enumerate(grid(["gradient-matching"], space_of(recipe, "damping=auto,0.1"))):
        gm.merge(recipe_with(recipe, setting), tmp_path / f"{number}")
        states.append(read_of(candidates, setting))
        want = read_model(tmp_path / f"{number}")
        assert all(torch.equal(states[-1][name], tensor) for name, tensor in want.items()), setting
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    candidates.close()
