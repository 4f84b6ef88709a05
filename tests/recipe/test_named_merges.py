"""Several recipes in a file: named ones are merged first, used by name, and not kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gradmerge as gm
from gradmerge.api.preview import best_recipe
from gradmerge.recipe import load_recipe

from ..forked import forked

OURS = """
name: mean
method: average
models: [./a, ./b]
---
method: task-arithmetic
base: ./base
models:
  - {model: ./c, weight: 0.5}
  - {model: mean, weight: 2.0}
---
name: idle
method: average
models: [mean, ./c]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    for name in ("base", "a", "b", "c"):
        (tmp_path / name).mkdir()
        save_file({"x.weight": torch.randn(6, 5, generator=generator)}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "recipe.yml").write_text(OURS)
    return tmp_path


def weights(folder: Path) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["x.weight"].double()


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"base", "a", "b", "c", "recipe.yml"}


def test_a_named_recipe_is_merged_first_and_not_kept(folder: Path) -> None:
    result = gm.merge(folder / "recipe.yml", folder / "out", progress=False)
    base, a, b, c = (weights(folder / name) for name in ("base", "a", "b", "c"))
    expected = base + 0.5 * (c - base) + 2 * ((a + b) / 2 - base)
    assert torch.allclose(weights(folder / "out"), expected, atol=1e-6)
    assert left(folder) == {"out"}
    assert any(note.endswith("not used, and not merged: idle") for note in result.notes)
    record = json.loads((folder / "out" / "gradmerge.json").read_text())
    assert [source["source"] for source in record["inputs"]] == ["./base", "./c", "mean"]
    assert record["merges"]["mean"]["models"][0]["model"] == "./a"
    assert "name: mean" in (folder / "out" / "README.md").read_text()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (("./b]", "idle]"), "mean → idle → mean"),
        (("./a", "mean"), "mean → mean"),
        (("model: mean", "model: maen"), "maen"),
        (("name: idle", "name: mean"), "'mean'"),
        (("name: idle\n", ""), "without a `name`"),
    ],
)
def test_cycles_and_unknown_names_are_refused(folder: Path, change: tuple[str, str], named: str) -> None:
    (folder / "recipe.yml").write_text(OURS.replace(*change))
    with pytest.raises(gm.InputError, match=named):
        gm.merge(folder / "recipe.yml", folder / "out")
    assert left(folder) == set()


def test_after_an_error_nothing_is_left_but_with_resume_what_was_made(folder: Path) -> None:
    save_file({"x.weight": torch.full((6, 5), torch.nan)}, folder / "c" / "model.safetensors")
    for resume in (False, True):
        with pytest.raises(gm.InputError, match=r"x\.weight"):
            gm.merge(folder / "recipe.yml", folder / "out", resume=resume, progress=False)
        assert any("named" in name for name in left(folder)) == resume
    save_file({"x.weight": torch.zeros(6, 5)}, folder / "c" / "model.safetensors")
    gm.merge(folder / "recipe.yml", folder / "out", resume=True, progress=False)
    assert left(folder) == {"out"}
    assert gm.merge(folder / "recipe.yml", folder / "out", resume=True, progress=False).already_done
    assert left(folder) == {"out"}


def test_a_killed_merge_of_several_recipes_goes_on_and_ends_with_the_same_bytes(folder: Path) -> None:
    gm.merge(folder / "recipe.yml", folder / "whole", progress=False)
    script = "import os, gradmerge as gm, gradmerge.engine.run as t\n"
    script += "write = t.write_cards\n"
    script += "is_last = lambda plan: plan.recipe.method.startswith('task')\n"
    script += "t.write_cards = lambda *a: os._exit(9) if is_last(a[0]) else write(*a)\n"
    script += "gm.merge('recipe.yml', 'out', progress=False)\n"
    killed = forked(code=script, cwd=folder)
    assert killed.returncode == 9
    assert left(folder) == {"whole", "out.gradmerge-partial", "out.named.gradmerge-partial"}
    gm.merge(folder / "recipe.yml", folder / "out", resume=True, progress=False)
    assert left(folder) == {"whole", "out"}
    same = [(folder / name / "model.safetensors").read_bytes() for name in ("whole", "out")]
    assert same[0] == same[1]


def test_preview_and_diagnose_look_at_named_recipes_and_what_preview_writes_can_be_merged(folder: Path) -> None:
    text = OURS.replace("./c,", "./c, curvature: {identity: 1.0},").replace(
        "model: mean,", "model: mean, curvature: {identity: 2.0},"
    )
    (folder / "recipe.yml").write_text(
        text.replace("base: ./base", "base: {model: ./base, curvature: {identity: 1.0}}")
    )
    found = gm.preview(folder / "recipe.yml", folder / "report", weights="0:1:0.5", progress=False)
    assert found.tasks == ["c", "mean", "base"]
    gm.diagnose(folder / "recipe.yml", folder / "diagnosis", progress=False)
    assert left(folder) == {"report", "diagnosis"}
    gm.merge(folder / "diagnosis" / "recipe.yml", folder / "diagnosed", progress=False)
    gm.merge(folder / "recipe.yml", folder / "merged", progress=False)
    assert weights(folder / "diagnosed").equal(weights(folder / "merged"))
    again = load_recipe(folder / "report" / "recipe.yml")
    assert list(again.merges) == ["mean"]
    gm.merge(best_recipe(found), folder / "saved", progress=False)
    gm.merge(again, folder / "best", progress=False)
    assert weights(folder / "saved").equal(weights(folder / "best"))
    base, a, b, c = (weights(folder / name) for name in ("base", "a", "b", "c"))
    one, two = (model.weight for model in again.models)
    expected = base + one * (c - base) + two * ((a + b) / 2 - base)
    assert torch.allclose(weights(folder / "best"), expected, atol=1e-6)
