"""The `gradmerge calibrate` command that fits a recipe's merge, for reports to show."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from ..cards.provenance import model_paths
from ..compare.settings import BASE, task_names
from ..recipe import Recipe
from ..refinement.inputs import model_reference, recorded_models as models_of_folder
from ..text import one_line
from ..urls import redact

#: Placeholders for a merged model and for rows that are not known.
OUT, ROWS = "OUT", "ROWS"


def calibrate_command(
    recipe: Recipe,
    data: Mapping[str, str],
    merged: str | None = None,
    columns: Mapping[str, str] | None = None,
    out: str = OUT,
) -> str:
    """Return the command that calibrates the merge of a recipe, to paste into a shell.

    It is empty for recipes whose merge cannot be calibrated: a removal, or models of other layers or another vocabulary
    than the merge. ``ROWS`` is the placeholder for missing rows.

    Args:
        recipe: The recipe.
        data: Task (as `diagnose` and `preview` name it, or `base`) → data source.
        merged: The merged model, if it is written.
        columns: Which column of the data is what.
        out: Without ``merged``: the folder that the merge will be written to, by default the placeholder ``OUT``.

    >>> calibrate_command(recipe, {"yelp": "yelp.jsonl"})  # doctest: +SKIP
    'gradmerge calibrate OUT --data yelp=yelp.jsonl --data imdb=ROWS -o calibrated'
    """
    models = model_paths(recipe, Path.cwd())
    tasks = task_names(recipe)
    if recipe.method == "removal" or recipe.slices or recipe.tokenizer is not None or len(models) != len(tasks):
        return ""
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
    for name, model in teachers:
        words += ["--teacher", f"{name}={model}"]
    if columns:
        words += ["--columns", ",".join(f"{key}={column}" for key, column in columns.items())]
    command = redact(shlex.join([*words, "-o", "calibrated"]))
    # Reports mark code with backticks and bold with asterisks.
    return command if "`" not in command and "**" not in command and one_line(command) == command else ""
