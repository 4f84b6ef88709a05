"""Models and data that tests of diagnoses and previews share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..making import tuned_from, write_recipe
from ..tasks.making import labelled, tiny_bert_checkpoint, write_jsonl


def write_texts(folder: Path) -> Path:
    """A tiny BERT, two models tuned from it, rows for both, and a recipe."""
    tiny_bert_checkpoint(folder / "base", labels=3)
    for seed, name in enumerate("ab", 1):
        tuned_from(folder / "base", folder / name, seed)
        write_jsonl(folder / f"{name}.jsonl", labelled(10, 3, seed))
    recipe = {"method": "task-arithmetic", "base": "./base", "models": ["./a", "./b"], "exclude": ["bert.pooler.*"]}
    write_recipe(folder / "recipe.yml", recipe)
    return folder


@pytest.fixture(scope="package")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))
