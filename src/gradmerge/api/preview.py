"""Previews of many merges, the search for weights, and writing what was found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from ..arguments import checked
from ..compare.evaluator import Evaluator
from ..compare.grid import Space, check_methods, grid, method_names, recipe_with
from ..compare.lm_eval_data import HarnessTasks
from ..compare.predict import task_names
from ..compare.predictor import Predictor
from ..compare.preview import Looker, Outcome, Preview, compare
from ..compare.search import Suggestion, check_objective, search_ranges, suggest
from ..compare.significance import lost_share
from ..compare.sweeps import Sweeps, parse_sweeps, with_changes
from ..compare.weight_ranges import DEFAULT, Weights, parse_weights
from ..engine.run import MergeResult
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..progress import Progress, shown
from ..recipe import Recipe, plain
from ..report.page import write_report
from ..report.preview_page import preview_page
from ..report.preview_tables import settings_table
from ..report.preview_text import verdict
from ..tasks import Generation, LoadOptions, complete, tokenizer_of
from ..text import to_json
from .calibrate_command import OUT, calibrate_command
from .diagnose import provenance, recipe_text, report_folder
from .merge import default_threads, merge, merged_first, recipe_of_models
from .recipe_yaml import recipe_documents


@checked()
def preview(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    weights: Weights | None = None,
    methods: Sequence[str] | str | None = None,
    sweep: Sweeps | None = None,
    changes: Sweeps | None = None,
    data: Mapping[str, str] | None = None,
    generation: Generation | None = None,
    lm_eval: Sequence[str] | str | None = None,
    lm_eval_tasks: str | Path | None = None,
    objective: str = "worst",
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
    """Look at a recipe's merge under many weights and methods, without writing any model.

    Without data, losses are predicted from curvature: they rank merges, and are no losses in nats.

    Args:
        recipe: A recipe file, a mapping with its keys, or a :class:`Recipe`.
        out: A new folder for a report; without it none is written.
        weights: `"0:1:0.1"` (both ends, one weight for all tasks), `["yelp=0:1:0.25", "sst2=0.5"]`, or task → range.
        methods: Those to compare, a list or `"ties,dare"`; by default the recipe's.
        sweep: Other keys of the recipe to try values of, each with a range or a list: `{"density": "0.1:0.9:0.2"}`,
            `{"damping": [1e-6, 1e-3]}`, or `["density=0.1:0.9:0.2"]`. Weights are then the recipe's, unless given.
        changes: Keys of the recipe to set before, as `--set` does: `{"damping": 1e-3}`, or `["damping=1e-3"]`. An
            option is set for every method that knows it.
        data: Task (the name of its model's folder, or `base`) → data. Each merge is then formed in memory and
            evaluated, and the best has the best average metric.
        generation: With data, have every merge write answers too: what these are worth then decides.
        lm_eval: Tasks of the lm-evaluation-harness to evaluate every merge on, a list or `"arc_easy,hellaswag"`.
        lm_eval_tasks: A folder with task files of the harness.
        objective: Without data, the best has the smallest loss of its worst task ("worst") or of all ("sum").
        threads, allow_pickle, allow_config, dequantize, allow_code, force: As of :func:`gradmerge.merge`.
        progress: A bar on long work; False for none; or what is told how far it is, in merges.
        command: What the report says to repeat it with.
        save_best: The folder that you will merge the best setting into, for the ``calibrate`` command of the advice.
        loading: How models and data are loaded: the keywords of :class:`gradmerge.LoadOptions`.

    Returns:
        Every setting with its results and rank; ``.best()`` is the one to take: of those that the data do not tell from
        the best (``.all_tied()``, all of rank 1) the recipe's own, else the simplest.

    >>> preview("recipe.yml", weights="0:1:0.25").best().setting.name  # doctest: +SKIP
    'gradient-matching 0.75'
    """
    options = complete(loading, preview)
    allowed = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    recipe = recipe_of_models(recipe, "preview", allow_code)
    recipe, fixed = with_changes(recipe, changes, method_names(methods))
    chosen = check_methods(methods, recipe)
    sweeps = parse_sweeps(sweep, chosen)
    space = Space(parse_weights(weights, task_names(recipe), recipe, None if sweeps else DEFAULT), sweeps, fixed)
    space.check(chosen, recipe)
    check_objective(objective)
    settings = grid(chosen, space)
    if generation is not None and not data:
        raise InputError("--generate: answers are held against data of the tasks; give some with --data NAME=SRC")
    if lm_eval_tasks is not None and lm_eval is None:
        raise InputError("--lm-eval-tasks: goes with --lm-eval TASK, which names tasks of the folder")
    harness = None if lm_eval is None else HarnessTasks(lm_eval, lm_eval_tasks)
    with report_folder(recipe, out, data or {}, force, tokenizer_of(options)) as staging:
        with (
            shown(progress, "merges") as told,
            merged_first(recipe, out, threads, allowed) as ready,
            _looker(ready, chosen, data, options, threads, allowed, generation, harness) as looker,
        ):
            found = compare(recipe, looker, settings, space.axis, objective=objective, fixed=fixed, progress=told)
            found.notes += space.notes(chosen)
        tell(staging, found, None, data or {}, command, options["columns"], save_best)
    return found


@checked()
def suggest_weights(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    data: Mapping[str, str] | None = None,
    objective: str = "worst",
    weights: Weights | None = None,
    methods: Sequence[str] | str | None = None,
    changes: Sweeps | None = None,
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
) -> Suggestion:
    """Search the weights with which the worst task (``objective`` "worst") or the sum over tasks ("sum") loses least.

    Without data what is lost is predicted from curvature, on the base's data too. With a few labelled rows of each task
    it is measured, as a share: (loss − loss of the tuned model) / (loss of the base − loss of the tuned model), mean
    losses per example.

    Args:
        recipe, out, data, methods, changes: As of :func:`gradmerge.preview`.
        objective: What is to be small.
        weights: Ranges to search, by default 0 to 1.5.
        threads, allow_pickle, allow_config, dequantize, allow_code, force, progress, command, save_best, loading: As of
            :func:`gradmerge.preview`.

    Returns:
        The method, a weight for each task, and every setting that was looked at.

    >>> suggest_weights("recipe.yml").weights  # doctest: +SKIP
    {'yelp': 0.62, 'sst2': 0.9}
    """
    options = complete(loading, suggest_weights)
    allowed = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    recipe = recipe_of_models(recipe, "preview", allow_code)
    recipe, fixed = with_changes(recipe, changes, method_names(methods))
    tasks = task_names(recipe)
    chosen = check_methods(methods, recipe)
    given = parse_weights(weights, tasks, recipe) if weights is not None else None
    ranges = search_ranges(given, tasks, recipe)
    Space(ranges, fixed=fixed).check(chosen, recipe)
    with report_folder(recipe, out, data or {}, force, tokenizer_of(options)) as staging:
        with (
            shown(progress, "merges") as told,
            merged_first(recipe, out, threads, allowed) as ready,
            _looker(ready, chosen, data, options, threads, allowed) as looker,
        ):
            found = suggest(
                recipe,
                looker,
                chosen,
                ranges,
                objective=objective,
                fixed=fixed,
                progress=told,
            )
        tell(staging, found.evaluated, found, data or {}, command, options["columns"], save_best)
    return found


def merge_best(found: Preview, out: str | Path, **settings: Any) -> MergeResult:
    """Merge the best setting to disk; ``settings`` are those of :func:`gradmerge.merge`."""
    return merge(best_recipe(found), out, **settings)


def best_recipe(found: Preview) -> Recipe:
    """The recipe with the rule and weights of the best setting."""
    best = found.best()
    if best is None:
        none = "no setting is the best one, so that none can be merged"
        raise InputError(f"{none}; a removal's strength is yours to choose")
    return recipe_with(found.recipe, best.setting)


@contextlib.contextmanager
def _looker(
    recipe: Recipe,
    methods: Sequence[str],
    data: Mapping[str, str] | None,
    loading: LoadOptions,
    threads: int | None,
    allowed: dict[str, Any],
    generation: Generation | None = None,
    harness: HarnessTasks | None = None,
) -> Iterator[Looker]:
    threads = threads or default_threads()
    looker: Looker
    if data or harness is not None:
        more: dict[str, Any] = {"generation": generation, "harness": harness}
        looker = Evaluator(recipe, methods, data or {}, loading, threads=threads, **more, **allowed)
    else:
        looker = Predictor(recipe, methods, threads=threads, **allowed)
    try:
        yield looker
    finally:
        looker.close()


def tell(
    staging: AtomicDir | None,
    found: Preview,
    suggestion: Suggestion | None,
    data: Mapping[str, str],
    command: str,
    columns: Mapping[str, str] | None = None,
    save_best: str | Path | None = None,
) -> None:
    """The verdict, and the report if one is wanted."""
    found.calibrate_command = calibrate_command(found.recipe, data, columns=columns, out=str(save_best or OUT))
    found.verdict = verdict(found, suggestion)
    if staging is None:
        return
    folder = staging.folder
    page = preview_page(
        found, suggestion, recipe_text(found.recipe), provenance(found.recipe, data), [command] if command else []
    )
    write_report(folder, page)
    (folder / "preview.csv").write_text(settings_table(found).csv(), "utf-8")
    (folder / "preview.json").write_text(to_json(as_json(found, suggestion)) + "\n", "utf-8")
    best = found.best()
    if best is not None:
        what = f"# {_chosen(found, best)}: {best.setting.name}\n"
        header = f"{what}# gradmerge merge recipe.yml -o merged\n"
        written = recipe_documents(best_recipe(found), staging.out)
        (folder / "recipe.yml").write_text(header + written, "utf-8")


def _chosen(found: Preview, best: Outcome) -> str:
    """What the recipe of a preview is, in a line."""
    tied = len(found.all_tied())
    if tied <= 1:
        return "The best setting of the preview"
    which = "the recipe's own" if best is found.own else "the simplest"
    return f"Of {tied} settings that are tied in the preview, {which}"


def as_json(found: Preview, suggestion: Suggestion | None = None) -> dict[str, Any]:
    """Everything that was found, for machines. Predictions are ranks and multiples of the reference's, not losses."""
    result: dict[str, Any] = {
        "measured": found.measured,
        "compared_by": found.criterion.name,
        "higher_is_better": found.criterion.higher,
        "tasks": found.tasks,
        "models": found.models,
        "reference": _row(found, found.reference),
        "best": {method: _best(found, method) for method in found.methods},
        "winner": _best(found, None),
        "settings": [_row(found, row) for row in found.rows],
    }
    if found.measured:
        leading = found.leading()
        result["leading"] = None if leading is None else _row(found, leading)
        result["tied_with_best"] = sum(map(found.among_best, found.rows))
        result["metrics"] = {task: found.metric(task) for task in found.tasks}
        result["alone"] = found.alone
        result["examples"] = found.examples
    if suggestion is not None:
        result["suggestion"] = {
            "method": suggestion.method,
            "weights": {task: plain(weight) for task, weight in suggestion.weights.items()},
            "objective": suggestion.objective,
            "lost_share" if suggestion.measured else "times_reference": suggestion.costs,
        }
    result["notes"] = found.notes
    return result


def _row(found: Preview, row: Outcome) -> dict[str, Any]:
    weights = {task: plain(weight) for task, weight in found.weights(row).items()}
    shown: dict[str, Any] = {"method": row.setting.method, "weights": weights}
    if row.setting.changes:
        shown["changes"] = {key: plain(value) for key, value in row.setting.changes}
    shown["rank"] = row.rank
    if found.measured:
        leading = found.leading()
        apart = found.difference(row, leading) if leading is not None and row is not leading else None
        return {
            **shown,
            "score": row.score,
            "standard_error": getattr(found.shown_score(row), "error", None),
            "tied_with_best": found.among_best(row),
            "more_than_best": None if apart is None else {"value": apart.value, "standard_error": apart.error},
            **({"lost_share": _shares(found, row)} if found.criterion.shares else {}),
            "metrics": row.metrics,
        }
    return {
        **shown,
        "times_reference": found.relative_score(row),
        "tasks": {t: {"times_reference": found.relative(row, t), "rank": row.ranks.get(t)} for t in found.tasks},
    }


def _shares(found: Preview, row: Outcome) -> dict[str, Any]:
    shares = {task: lost_share(row, task) for task in found.tasks}
    return {task: {"value": one, "standard_error": getattr(one, "error", None)} for task, one in shares.items()}


def _best(found: Preview, method: str | None) -> dict[str, Any] | None:
    best = found.best(method)
    if best is None:
        return None
    close = found.as_good(method if found.measured else best.setting.method)
    same = [row for row in close if row.setting.method == best.setting.method]
    flat = {task: list(span) for task, span in found.spans(same).items()}
    return {
        **_row(found, best),
        "tied" if found.measured else "within_1_percent": {"settings": len(close), "weights": flat},
    }
