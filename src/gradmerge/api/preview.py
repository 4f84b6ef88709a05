"""Compare many settings of a recipe before merging, from Python.

Heavy modules are imported in the functions: the command line reads the signature of :func:`preview` without PyTorch.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..arguments import checked
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..progress import Progress, shown
from ..report.page import write_report
from ..text import to_json
from ..urls import redact
from .diagnose import provenance, recipe_with_defaults, report_folder
from .merge import merge_named_recipes, number_of_threads, recipe_without_slices

if TYPE_CHECKING:
    from ..compare.evaluate import Evaluator
    from ..compare.ranking import Outcome, Preview
    from ..compare.settings import Overrides, Weights
    from ..recipe import Recipe
    from ..tasks import LoadOptions


@checked()
def preview(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    weights: Weights | None = None,
    methods: Sequence[str] | str | None = None,
    sweep: Overrides | None = None,
    suggest: bool = False,
    changes: Overrides | None = None,
    data: Mapping[str, str] | None = None,
    threads: int | None = None,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    allow_code: bool = False,
    force: bool = False,
    progress: bool | Progress = True,
    command: str = "",
    save_best: str | Path | None = None,
    **loading: Unpack[LoadOptions],
) -> Preview:
    """Compare many weights and methods of a recipe, without writing any model.

    With data, each setting is merged in memory and evaluated. Without data, losses are predicted from curvature. They
    rank merges, and are not losses in nats.

    Args:
        recipe: A recipe file, a mapping with its keys, or a :class:`Recipe`.
        out: A new folder for a report; by default none is written.
        weights: `"0:1:0.1"` (both ends, one weight for all tasks), `["yelp=0:1:0.25", "sst2=0.5"]`, or task → range.
            With ``suggest``, the ranges to search, by default 0 to 1.5.
        methods: The methods to compare, a list or `"ties,dare"`; by default the recipe's.
        sweep: Other keys of the recipe with a range or a list of values: `{"density": "0.1:0.9:0.2"}`,
            `{"damping": [1e-6, 1e-3]}`, or `["density=0.1:0.9:0.2"]`. Weights are then the recipe's, unless given.
        suggest: Search the best weights, one for each task, instead of evaluating a grid. With data, the search
            minimizes the share that the worst task loses of what fine-tuning gained: (loss − loss of the task's
            model) / (loss of the base − loss of the task's model).
        changes: Keys of the recipe to set first, as `--set` does: `{"damping": 1e-3}`, or `["damping=1e-3"]`. An
            option is set for every method that knows it.
        data: Task (the name of its model's folder, or `base`) → data.
        threads, allow_pickle, allow_config, dequantize, allow_code, force: As of :func:`gradmerge.merge`.
        progress: Show a bar, or report progress to this object, in merges.
        command: The command that the report says to repeat.
        save_best: The folder that you will merge the best setting into. Nothing is written there: the folder is only
            checked, and named in the suggested ``calibrate`` command.
        loading: How models and data are loaded: the keywords of :class:`gradmerge.LoadOptions`.

    Returns:
        Every setting with its results and rank. ``.best()`` is the one to take: the recipe's own if the data does not
        distinguish it from the best, else the simplest of the settings tied with the best.

    >>> preview("recipe.yml", weights="0:1:0.25").best().setting.name  # doctest: +SKIP
    'gradient-matching 0.75'
    """
    from ..compare.evaluate import DataEvaluator
    from ..compare.predict import Predictor
    from ..compare.ranking import compare
    from ..compare.search import search, search_grid
    from ..compare.settings import (
        DEFAULT_WEIGHTS,
        Grid,
        check_methods,
        method_names,
        parse_sweeps,
        parse_weights,
        with_changes,
    )
    from ..tasks import complete, tokenizer_of

    options = complete(loading, preview)
    reading: dict[str, Any] = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    recipe = recipe_without_slices(recipe, "preview", allow_code)
    recipe, fixed = with_changes(recipe, changes, method_names(methods))
    chosen = check_methods(methods, recipe)
    if suggest and sweep:
        raise InputError("suggest: searches only weights; use it without sweep")
    if suggest:
        grid = search_grid(weights, recipe, chosen, fixed)
    else:
        default = None if sweep else DEFAULT_WEIGHTS
        ranges = parse_weights(weights, recipe, chosen, default)
        grid = Grid(recipe, chosen, [*fixed, *parse_sweeps(sweep, chosen), *ranges])
        grid.settings()
    threads = number_of_threads(threads)
    if save_best is not None and out is not None and Path(save_best).absolute() == Path(out).absolute():
        raise InputError(f"save_best {save_best}: is the folder of the report; name another one")
    # Check before any work that the best setting can be written to its folder.
    with report_folder(recipe, save_best, data or {}, force, kind="merge") as unused:
        if unused is not None:
            unused.temporary = True
    with report_folder(recipe, out, data or {}, force, tokenizer_of(options)) as folder:
        with shown(progress, "merges") as bar, merge_named_recipes(recipe, out, threads, reading) as ready:
            evaluator: Evaluator
            if data:
                evaluator = DataEvaluator(ready, chosen, data, options, threads=threads, **reading)
            else:
                evaluator = Predictor(ready, chosen, threads=threads, **reading)
            grid = replace(grid, recipe=ready)
            with contextlib.closing(evaluator):
                run = search if suggest else compare
                result = run(grid, evaluator, progress=bar)
        result.recipe = recipe  # not the one that reads the temporary folders of its named recipes
        write_preview(folder, result, data or {}, command, options["columns"], save_best)
    return result


def best_recipe(preview: Preview) -> Recipe:
    """Return the recipe of the best setting."""
    from ..compare.settings import recipe_with

    best = preview.best()
    if best is None:
        raise InputError("no setting is best, so none can be merged. Choose the strength of a removal yourself")
    return recipe_with(preview.recipe, best.setting)


def write_preview(
    folder: AtomicDir | None,
    preview: Preview,
    data: Mapping[str, str],
    command: str,
    columns: Mapping[str, str] | None = None,
    save_best: str | Path | None = None,
) -> None:
    """Set the verdict and commands of a preview. If there is a folder, write the report and recipe.yml into it."""
    from ..report.advice import OUT, next_commands, preview_verdict
    from ..report.comparison import preview_page, settings_table
    from .recipe_yaml import recipe_documents

    merged = "merged" if folder is not None else OUT
    preview.commands = next_commands(preview.recipe, data, columns=columns, out=str(save_best or merged))
    preview.commands.pop("merge", None)
    if folder is not None and save_best is None:
        written = os.path.relpath(folder.out / "recipe.yml")
        preview.commands["merge"] = shlex.join(["gradmerge", "merge", written, "-o", merged])
    preview.verdict = preview_verdict(preview)
    if folder is None:
        return
    facts = provenance(preview.recipe, data)
    write_report(
        folder.folder, preview_page(preview, recipe_with_defaults(preview.recipe), facts, [command] if command else [])
    )
    (folder.folder / "preview.csv").write_text(settings_table(preview).csv(), "utf-8")
    (folder.folder / "preview.json").write_text(redact(to_json(as_json(preview))) + "\n", "utf-8")
    if (best := preview.best()) is not None:
        header = f"# {best.setting.name}\n# gradmerge merge recipe.yml -o merged\n"
        (folder.folder / "recipe.yml").write_text(header + recipe_documents(best_recipe(preview), folder.out), "utf-8")


def as_json(preview: Preview) -> dict[str, Any]:
    """Return what ``--json`` prints. Predictions are ranks and multiples of the reference's, not losses."""
    result: dict[str, Any] = {
        "measured": preview.measured,
        "compared_by": preview.criterion.name,
        "higher_is_better": preview.criterion.higher,
        "tasks": preview.tasks,
        "models": preview.models,
        "reference": _row(preview, preview.reference),
        "best": {method: _best(preview, method) for method in preview.methods},
        "winner": _best(preview, None),
        "settings": [_row(preview, row) for row in preview.rows],
        "notes": preview.notes,
    }
    if preview.measured:
        result["tied_with_best"] = sum(map(preview.among_best, preview.rows))
        result["metrics"] = {task: preview.metric(task) for task in preview.tasks}
        result |= {"alone": preview.alone, "examples": preview.examples}
    return result


def _row(preview: Preview, row: Outcome) -> dict[str, Any]:
    from ..compare.ranking import lost_share
    from ..recipe import plain

    weights = {task: plain(weight) for task, weight in preview.weights(row).items()}
    facts: dict[str, Any] = {"method": row.setting.method, "weights": weights}
    if row.setting.changes:
        facts["changes"] = {key: plain(value) for key, value in row.setting.changes.items()}
    facts["rank"] = row.rank
    if not preview.measured:
        tasks = {task: {"times_reference": preview.shown_value(row, task)} for task in preview.tasks}
        return {**facts, "times_reference": preview.shown_score(row), "tasks": tasks}
    leading = preview.leading()
    apart = preview.difference(row, leading) if leading is not None and row is not leading else None
    facts |= {
        "score": row.score,
        "standard_error": getattr(preview.shown_score(row), "error", None),
        "tied_with_best": preview.among_best(row),
        "more_than_best": None if apart is None else {"value": apart.value, "standard_error": apart.error},
        "metrics": row.metrics,
    }
    if preview.criterion.shares:
        shares = {task: lost_share(row, task) for task in preview.tasks}
        errors = {task: getattr(share, "error", None) for task, share in shares.items()}
        facts["lost_share"] = {t: {"value": share, "standard_error": errors[t]} for t, share in shares.items()}
    return facts


def _best(preview: Preview, method: str | None) -> dict[str, Any] | None:
    best = preview.best(method)
    if best is None:
        return None
    close = preview.as_good(method)
    spans = preview.spans([row for row in close if row.setting.method == best.setting.method])
    tied = "tied" if preview.measured else "within_1_percent"
    weights = {task: list(span) for task, span in spans.items()}
    return {**_row(preview, best), tied: {"settings": len(close), "weights": weights}}
