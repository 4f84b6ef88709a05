"""Recipes written anew: as ours, and to be read from another folder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._version import __version__
from ..arguments import checked
from ..engine.card import recipe_as_written
from ..errors import InputError
from ..markdown import to_yaml
from ..recipe import NONE, Identity, Recipe, load_recipe
from ..report.whole_file import whole_file
from ..storage.tensorfile import local_path
from ..text import one_line
from ..urls import is_url, place_of

#: The first line of what is written, so that --force replaces nothing else.
MARK = "# A recipe of gradmerge"


@checked()
def convert_recipe(source: str | Path | Recipe, out: str | Path, *, force: bool = False) -> Recipe:
    """Write a recipe of mergekit's as ours. Merged with it, models are the same byte for byte.

    Args:
        source: A recipe file of mergekit's (or of ours, which is written with what it says and no more), or one that
            has been read.
        out: The file to write. Relative paths in it start from its folder.
        force: Replace ``out`` if this wrote it, or it is empty.

    Returns:
        The recipe, whose ``notes`` say what was read otherwise than one might think.

    >>> convert_recipe("mergekit-config.yml", "recipe.yml").method  # doctest: +SKIP
    'ties'
    """
    out = place_of(out)
    recipe = source if isinstance(source, Recipe) else load_recipe(source)
    _check_place(recipe.file, out, force)
    origin = "" if recipe.file is None else f", from {one_line(recipe.file.name)}"
    head = [f"{MARK} {__version__}{origin}", *map(one_line, recipe.notes)]
    text = "\n".join([head[0], *(f"# {line}" for line in head[1:])]) + "\n" + recipe_documents(recipe, out.parent)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(out) as partial:
            partial.write_text(text, "utf-8")
    except OSError as error:
        raise InputError(f"{out}: cannot be written: {error.strerror}") from error
    return recipe


def _check_place(source: Path | None, out: Path, force: bool) -> None:
    if is_url(out):
        raise InputError(f"{out}: a recipe is written to this machine; give a file here, and copy it there")
    if out.is_dir():
        raise InputError(f"{out}: is a folder; name the file to write")
    if not out.exists() and not out.is_symlink():
        return
    if source is not None and source.exists() and out.exists() and out.samefile(source):
        raise InputError(f"{out}: is the recipe that is read; choose another place")
    if not force:
        raise InputError(f"{out}: exists already. Choose another place, or pass --force to replace it.")
    with out.open("rb") as file:
        begins = file.read(len(MARK))
    if begins not in (b"", MARK.encode()):
        raise InputError(f"{out}: was not written by this command, and --force replaces only what was")


def recipe_documents(recipe: Recipe, folder: Path) -> str:
    """A recipe as YAML to be read from a folder, after the named ones that it uses."""
    every = [*recipe.merges.values(), recipe]
    return "---\n".join(to_yaml(_moved(one, folder, recipe.merges)) for one in every)


def _moved(recipe: Recipe, folder: Path, names: dict[str, Recipe]) -> dict[str, Any]:
    """The recipe as it reads from another folder: paths that are relative start from there."""

    def moved(reference: str) -> str:
        if is_url(reference) or reference in names:
            return reference
        path = local_path(reference, recipe.folder)
        if is_url(recipe.folder) and path.exists():
            from ..storage.remote import url_of

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
    return recipe_as_written(copy)


def _moved_word(text: str, moved: Callable[[str], str]) -> str:
    """A word such as `union`, or a place."""
    return text if text in ("auto", "base", "common", "union", "zero") else moved(text)
