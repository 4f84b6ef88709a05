"""What functions return shows itself: a line at a prompt, a table in a notebook."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.curvature.curvature import KroneckerFactors

from ..making import random_curvature, three_models, write_recipe

NAME = "<img src=x onerror=alert(1)>\nlines\x1b[2J" + "a-name-that-goes-on-" * 6


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every kind of result, of models with a long and hostile name."""
    name, folder = NAME, tmp_path_factory.mktemp("results")
    folders, states = three_models(folder)
    models = [folders[1].rename(folder / name.replace("/", "-")), folders[2]]
    for at, (path, state) in enumerate(zip([folders[0], *models], states, strict=True)):
        random_curvature(at, state).save(path / "curvature")
    path = write_recipe(
        folder / "recipe.yml",
        {"method": "gradient-matching", "base": str(folders[0]), "models": [str(model) for model in models]},
    )
    recipe = gm.load_recipe(folder / "recipe.yml")
    sums = {f"{name}.{i}.weight": torch.ones(2, 2) for i in range(60)}
    (folder / "rows.jsonl").write_text('{"text": "<b>x</b>", "label": 1}\n')
    with gm.open_checkpoint(models[0]) as checkpoint:
        return {
            "Recipe": recipe,
            "MergeResult": gm.merge(recipe, folder / f"{name.replace('/', '-')}-merged"),
            "Preview": gm.preview(path, weights="0:1:0.5"),
            "Diagnosis": gm.diagnose(path),
            "Curvature": gm.Curvature(sums, 7, name),
            "Curvature, gram": gm.Curvature(sums, 7, kind="gram"),
            "Curvature, kronecker": gm.Curvature(
                {key: KroneckerFactors(value, value, 9) for key, value in sums.items()}, 7, name
            ),
            "Estimate": gm.Estimate(Path(name), "diagonal", "classify", 7, 60, 240, 1.5, "cpu", notes=[name]),
            "Checkpoint": checkpoint,
            "Rows": gm.read_rows(folder / "rows.jsonl"),
        }


KINDS = ("Curvature", "Curvature, gram", "Curvature, kronecker")
TABLES = ("MergeResult", "Preview", "Diagnosis", *KINDS, "Estimate")


@pytest.mark.parametrize("kind", [*TABLES, "Recipe", "Checkpoint", "Rows"])
def test_a_result_is_a_line_at_a_prompt(results: dict[str, Any], kind: str) -> None:
    line = repr(results[kind])
    assert line.startswith(f"{kind.partition(', ')[0]}(") and line.endswith(")")
    assert len(line) < 120 and line.isprintable()


@pytest.mark.parametrize("kind", TABLES)
def test_a_result_is_a_table_in_a_notebook(results: dict[str, Any], kind: str) -> None:
    html = results[kind]._repr_html_()
    assert Tags(html).names <= {"div", "strong", "p", "table", "tr", "th", "td"}
    assert "<td>" in html and "\x1b" not in html
    assert len(html) < 50_000


def test_a_diagnosis_without_a_folder_writes_nothing_and_has_its_verdict(tmp_path: Path) -> None:
    folders, _ = three_models(tmp_path, curvature=True)
    recipe = {"method": "gradient-matching", "base": str(folders[0]), "models": [str(path) for path in folders[1:]]}
    before = sorted(tmp_path.iterdir())
    found = gm.diagnose(recipe)
    assert sorted(tmp_path.iterdir()) == before
    assert found.relative(found.reference, found.prediction.tasks[0]) == 1
    assert gm.diagnose(recipe, tmp_path / "report").verdict == found.verdict
    assert (tmp_path / "report" / "report.html").is_file()
