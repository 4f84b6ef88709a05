"""What a plan reads: what its method needs, or what somebody who looks at merges wants to see."""

from __future__ import annotations

from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.engine.plan import open_plan
from gradmerge.notes import Kind
from gradmerge.recipe import make_recipe

from ..making import random_curvature, three_models


@pytest.fixture
def recipe(tmp_path: Path) -> gm.Recipe:
    """An average, whose models have curvature and whose base has none."""
    folders, states = three_models(tmp_path)
    for seed, (folder, state) in enumerate(zip(folders[1:], states[1:], strict=True)):
        random_curvature(seed, state).save(folder / "curvature")
    models = [{"model": str(folder), "curvature": str(folder / "curvature")} for folder in folders[1:]]
    return make_recipe({"method": "weighted-average", "base": str(folders[0]), "models": models})


def test_a_plan_reads_what_its_method_needs_and_notes_what_it_does_not_use(recipe: gm.Recipe) -> None:
    plan = open_plan(recipe)
    assert plan.inputs.curvature == [] and "base" not in plan.needs
    assert [note.kind for note in plan.notes] == [Kind.UNUSED]
    plan.inputs.close()
