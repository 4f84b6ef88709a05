"""Write recipes as YAML, with paths relative to the folder of the file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..cards.card import recipe_as_written
from ..io.reader import local_path
from ..recipe import Recipe
from ..urls import is_url, url_of
from ..yaml import to_yaml

#: Keys whose values are paths, and keys whose values are paths or one of these words.
PATHS = {"model", "adapter", "curvature"}
PATHS_OR_WORDS = {"penalty", "tokenizer", "source", "chat_template"}
WORDS = {"auto", "base", "common", "none", "union", "zero"}


def recipe_documents(recipe: Recipe, folder: Path) -> str:
    """Return a recipe as YAML for a file in ``folder``; the named recipes that it uses come first."""
    documents = []
    for document in (*recipe.merges.values(), recipe):

        def move(reference: str, start: Path = document.folder) -> str:
            return reference if reference in recipe.merges else relative_reference(reference, start, folder)

        written = _with_references(recipe_as_written(document), move)
        documents.append(to_yaml(written | ({"method": move(file)} if (file := document.rule.file) else {})))
    return "---\n".join(documents)


def relative_reference(reference: str, start: Path, folder: Path) -> str:
    """Rewrite a model path relative to ``start`` as one relative to ``folder``. Absolute paths, ids and URLs stay."""
    if is_url(reference) or Path(reference).expanduser().is_absolute():
        return reference
    path = local_path(reference, start)
    if not path.exists():
        return reference
    if is_url(start):
        return url_of(path) or reference
    relative = os.path.relpath(path.resolve(), folder.resolve())
    return relative if relative.startswith(".") else f"./{relative}"


def _with_references(value: Any, move: Callable[[str], str], key: str = "") -> Any:
    """Return a recipe with ``move`` applied to every path. The values of `tokens` are sources of rows."""
    if isinstance(value, Mapping):
        return {k: _with_references(v, move, "source" if key == "tokens" else k) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_references(item, move, key) for item in value]
    is_path = key in PATHS or (key in PATHS_OR_WORDS and value not in WORDS and "{" not in str(value))
    return move(value) if is_path and isinstance(value, str) else value
