"""The commands that a diagnosis or a preview advises to run next."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cards.provenance import model_paths
from ..compare.settings import BASE, task_names
from ..recipe import Recipe
from ..refinement.inputs import model_reference, recorded_models as models_of_folder
from ..text import one_line
from ..urls import redact

#: Placeholders for a merged model, for rows and for a recipe that are not known.
OUT, ROWS, RECIPE = "OUT", "ROWS", "RECIPE"


def next_commands(
    recipe: Recipe,
    data: Mapping[str, str],
    *,
    merged: str | None = None,
    columns: Mapping[str, str] | None = None,
    changes: Sequence[str] | Mapping[str, Any] | None = None,
    out: str = OUT,
) -> dict[str, str]:
    """Return the beginnings of `gradmerge merge` and `gradmerge preview`, and `gradmerge calibrate`, as shell commands.

    Recipes whose merge cannot be calibrated have no `calibrate`: a removal, or models of other layers or another
    vocabulary than the merge. Commands that a report cannot show have no entry either.

    Args:
        recipe: The recipe.
        data: Task (as `diagnose` and `preview` name it, or `base`) → data source.
        merged: The merged model, if it is written.
        columns: Which column of the data is what.
        changes: The keys that were set in the recipe.
        out: Without ``merged``: the folder that the merge will be written to, by default the placeholder ``OUT``.

    >>> next_commands(recipe, {"yelp": "yelp.jsonl"})["calibrate"]  # doctest: +SKIP
    'gradmerge calibrate OUT --data yelp=yelp.jsonl --data imdb=ROWS -o calibrated'
    """
    file = RECIPE if recipe.file is None else os.path.relpath(recipe.file)
    given = [f"{key}={value}" for key, value in changes.items()] if isinstance(changes, Mapping) else changes or ()
    settings = [word for text in given for word in ("--set", text)]
    named = ["--columns", ",".join(f"{key}={column}" for key, column in columns.items())] if columns else []
    sources = [word for name, source in data.items() for word in ("--data", f"{name}={source}")]
    commands = {
        "merge": ["gradmerge", "merge", file, *settings],
        "preview": ["gradmerge", "preview", file, *settings, *sources, *(named if data else [])],
    }
    if calibrate := _calibrate(recipe, data, merged, out):
        commands["calibrate"] = [*calibrate, *named, "-o", "calibrated"]
    found = {name: redact(shlex.join(words)) for name, words in commands.items()}
    # Reports mark code with backticks and bold with asterisks.
    return {k: text for k, text in found.items() if "`" not in text and "**" not in text and one_line(text) == text}


def _calibrate(recipe: Recipe, data: Mapping[str, str], merged: str | None, out: str) -> list[str]:
    """The words of `gradmerge calibrate`; empty if the merge cannot be calibrated."""
    models = model_paths(recipe, Path.cwd())
    tasks = task_names(recipe)
    if recipe.method == "removal" or recipe.slices or recipe.tokenizer is not None or len(models) != len(tasks):
        return []
    known = models
    if merged is not None:
        known = models_of_folder(Path(merged)) if Path(merged).is_dir() else {}
    words = ["gradmerge", "calibrate", merged or out]
    teachers = []
    for task, (name, model) in zip(tasks, models.items(), strict=True):
        words += ["--data", f"{name}={data.get(task, ROWS)}"]
        if name not in known:
            teachers.append((name, model))
    if BASE in data and recipe.base is not None:
        words += ["--data", f"{BASE}={data[BASE]}"]
        teachers.append((BASE, model_reference(recipe.base.model, recipe.folder, Path.cwd())))
    return [*words, *(word for name, model in teachers for word in ("--teacher", f"{name}={model}"))]
