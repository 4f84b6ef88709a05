"""Write recipes as YAML, with paths relative to the folder of the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..cards.card import recipe_as_written
from ..io.reader import local_path
from ..recipe import NONE, Identity, Recipe
from ..urls import is_url, url_of
from ..yaml import to_yaml


def recipe_documents(recipe: Recipe, folder: Path) -> str:
    """Return a recipe as YAML for a file in ``folder``; the named recipes that it uses come first."""
    documents = [*recipe.merges.values(), recipe]
    return "---\n".join(to_yaml(_moved(document, folder, recipe.merges)) for document in documents)


def _moved(recipe: Recipe, folder: Path, names: dict[str, Recipe]) -> dict[str, Any]:
    """The keys of a recipe for another folder: relative paths start there."""

    def moved(reference: str) -> str:
        if is_url(reference) or reference in names:
            return reference
        path = local_path(reference, recipe.folder)
        if is_url(recipe.folder) and path.exists():
            return url_of(path) or reference
        if Path(reference).expanduser().is_absolute() or not path.exists():
            return reference
        relative = os.path.relpath(path.resolve(), folder.resolve())
        return relative if relative.startswith(".") else f"./{relative}"

    copy = recipe.model_copy(deep=True)
    for part in (copy.base, *copy.sources):
        if part is not None:
            part.model = moved(part.model)
            part.adapter = moved(part.adapter) if part.adapter is not None else None
            if part.curvature is not None and not isinstance(part.curvature, Identity):
                part.curvature = moved(part.curvature)
    if copy.base is not None and isinstance(copy.base.penalty, str) and copy.base.penalty != NONE:
        copy.base.penalty = moved(copy.base.penalty)
    if copy.tokenizer is not None:
        copy.tokenizer.source = _moved_word(copy.tokenizer.source, moved)
        for rule in copy.tokenizer.tokens.values():
            if isinstance(rule.source, str):
                rule.source = _moved_word(rule.source, moved)
            elif rule.source is not None:
                rule.source.model = moved(rule.source.model)
    if "{" not in copy.chat_template:
        copy.chat_template = _moved_word(copy.chat_template, moved)
    written = recipe_as_written(copy)
    return written | ({"method": moved(recipe.rule.file)} if recipe.rule.file else {})


def _moved_word(text: str, moved: Callable[[str], str]) -> str:
    """Return a word such as `union` unchanged, and move a reference."""
    return text if text in ("auto", "base", "common", "union", "zero") else moved(text)
