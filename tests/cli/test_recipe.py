"""mergekit recipes on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from ..making import run

RECIPES = Path(__file__).parent.parent / "golden" / "recipes"


def test_a_recipe_of_mergekits_can_be_changed_on_the_command_line_and_planned(tmp_path: Path) -> None:
    changed = ["--set", "density=0.9", "--set", "models[0].weight=2", "--dry-run", "--json"]
    plan = json.loads(run("merge", RECIPES / "ties-rescale.yml", *changed).stdout)
    assert (plan["method"], plan["options"]["density"], plan["options"]["rescale"]) == ("ties", 0.9, "norm")
