"""The model card: names in it are text, and what it says of the Hub is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from gradmerge.engine.card import model_card
from gradmerge.recipe import make_recipe
from gradmerge.text import printable

NASTY = [
    "a`b``c",
    "line\n---\nbase_model: x\n```\n# Heading",
    "<img src=x onerror=alert(1)>|<b>",
    "\x1b[31m\u202e\udce9",
    "```" + " word" * 60 + "\n```",
    "[link](javascript:alert(1)) ![i](x)",
]


@pytest.mark.parametrize("nasty", NASTY)
def test_a_name_is_text_wherever_it_stands(nasty: str) -> None:
    curvature = {"identity": 1.0}
    recipe = make_recipe(
        {
            "method": "gradient-matching",
            "base": {"model": nasty, "curvature": curvature},
            "models": [{"model": nasty, "curvature": nasty}],
        }
    )
    card = model_card(recipe, nasty, "transformers")
    assert printable(card) == card
    _, front, text = card.split("---\n", 2)
    assert yaml.safe_load(front) == {"library_name": "transformers", "tags": ["merge", "gradmerge"]}
    head, fence, rest = re.split(r"\n(`{3,})yaml\n", text)
    written, after = rest.split(f"\n{fence}\n")
    assert yaml.safe_load(written)["models"][0]["model"] == nasty
    assert fence not in written and after.strip().startswith("`gradmerge.json`")
    lines = [line for line in head.splitlines() if line]
    assert lines[0].startswith("# ") and not re.search(r"(?<!\\)[<\[`!]", lines[0])
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) == 4
    # Four cells each, and every model and curvature in code.
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    for row in rows[2:]:
        outside = re.sub(r"(?<!`)(`+)(?!`).*?(?<!`)\1(?!`)", "", row)
        assert re.fullmatch(r"\| (base|tuned) \|  \| 1? ?\| ?(1 · I)? *\|", outside), outside


def test_a_card_names_hub_ids_as_base_models_and_no_paths(tmp_path: Path) -> None:
    (tmp_path / "models" / "b").mkdir(parents=True)
    models = ["org/a@main", "org/a", "models/b", "./c", "/d/e"]
    recipe = make_recipe({"method": "average", "models": models}, folder=tmp_path)
    front = yaml.safe_load(model_card(recipe, "out", None).split("---\n")[1])
    assert front == {"base_model": ["org/a"], "tags": ["merge", "gradmerge"]}


def test_weights_by_filter_are_text_in_a_card() -> None:
    weight = [{"filter": "*|<b>[x](y)", "value": 2.0}, {"value": [0.5, 1.0]}]
    part = {"model": "./a", "weight": weight}
    recipes = (
        {"method": "task-arithmetic", "base": "./b", "models": [part]},
        {"method": "weighted-average", "slices": [{"models": [part | {"layers": [0, 2]}]}]},
    )
    for recipe in recipes:
        card = model_card(make_recipe(recipe), "out", None)
        row = next(line for line in card.splitlines() if line.startswith("|") and "./a" in line)
        assert r"\*\|\<b\>\[x\](y): 2; else: (0.5, 1) over the layers" in row
