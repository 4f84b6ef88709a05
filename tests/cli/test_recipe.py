"""`gradmerge recipe convert`, and recipes of mergekit's on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from gradmerge.cli.app import app
from gradmerge.recipe import load_recipe

RECIPES = Path(__file__).parent.parent / "golden" / "recipes"
runner = CliRunner()


def run(*arguments: str | Path, status: int = 0) -> str:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output


def test_convert_says_where_it_came_from_and_what_should_be_known(tmp_path: Path) -> None:
    out = tmp_path / "new" / "recipe.yml"
    shown = json.loads(run("recipe", "convert", RECIPES / "ties.yml", "-o", out, "--json"))
    assert (shown["method"], shown["out"], len(shown["notes"])) == ("ties", str(out), 1)
    first, second, *_ = out.read_text().splitlines()
    assert first.startswith("# A recipe of gradmerge")
    assert first.endswith("from ties.yml")
    assert second.endswith("int8_mask changes no result")
    assert load_recipe(out).models[1].options == {"density": 0.3}


def test_convert_replaces_only_what_it_wrote_and_only_when_told(tmp_path: Path) -> None:
    source, out = RECIPES / "linear.yml", tmp_path / "recipe.yml"
    run("recipe", "convert", source, "-o", out)
    assert "exists already" in run("recipe", "convert", source, "-o", out, status=2)
    run("recipe", "convert", RECIPES / "slerp.yml", "-o", out, "--force")
    assert load_recipe(out).method == "slerp"
    out.write_text("mine")
    assert "was not written by this command" in run("recipe", "convert", source, "-o", out, "--force", status=2)
    assert "is a folder" in run("recipe", "convert", source, "-o", tmp_path, status=2)
    copy = tmp_path / "copy.yml"
    copy.write_text(source.read_text())
    assert "is the recipe that is read" in run("recipe", "convert", copy, "-o", copy, "--force", status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.yml", "recipe.yml"]


def test_several_recipes_are_written_one_after_the_other(tmp_path: Path) -> None:
    out = tmp_path / "recipe.yml"
    run("recipe", "convert", RECIPES / "multi.yml", "-o", out)
    recipe = load_recipe(out)
    assert (recipe.method, list(recipe.merges)) == ("task-arithmetic", ["mean", "turned"])


def test_a_recipe_of_mergekits_can_be_changed_on_the_command_line_and_planned(tmp_path: Path) -> None:
    changed = ["--set", "density=0.9", "--set", "models[0].weight=2", "--dry-run", "--json"]
    plan = json.loads(run("merge", RECIPES / "ties-rescale.yml", *changed))
    assert (plan["method"], plan["options"]["density"], plan["options"]["rescale"]) == ("ties", 0.9, "norm")


def test_a_dry_run_of_several_recipes_merges_none(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = json.loads(run("merge", RECIPES / "multi.yml", "-o", out, "--dry-run", "--json"))
    assert [source["source"] for source in plan["inputs"]] == ["../models/base", "mean", "turned"]
    assert any("in this plan ../models/a stands for it" in note for note in plan["notes"])
    assert list(tmp_path.iterdir()) == []


def test_what_is_wrong_ends_with_status_2_and_its_line(tmp_path: Path) -> None:
    recipe = tmp_path / "config.yml"
    recipe.write_text((RECIPES / "ties.yml").read_text().replace("density: 0.3", "density: 3"))
    for command in ("merge", "diagnose", "preview"):
        assert "line 7: density: 3 is above 1" in run(command, recipe, "-o", tmp_path / "out", status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yml"]
