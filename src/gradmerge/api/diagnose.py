"""Diagnose what a merge costs, from Python.

Heavy modules are imported in the functions: the command line reads the signature of :func:`diagnose` without PyTorch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..arguments import checked
from ..io.atomic_dir import AtomicDir
from ..progress import Progress, shown
from ..report.page import write_report
from ..text import to_json
from ..urls import redact
from ..yaml import to_yaml
from .merge import merge_named_recipes, number_of_threads, recipe_without_slices

if TYPE_CHECKING:
    from ..compare.diagnose import Diagnosis
    from ..compare.ranking import Preview
    from ..compare.settings import Overrides
    from ..recipe import Recipe
    from ..tasks import LoadOptions


@checked()
def diagnose(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path | None = None,
    *,
    merged: str | Path | None = None,
    target: str | Path | None = None,
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
    **loading: Unpack[LoadOptions],
) -> Diagnosis:
    """Find out what a recipe's merge costs: which task loses, in which layers, and which tasks conflict.

    Args:
        recipe: A recipe file, a mapping with its keys, or a :class:`Recipe`, with curvature of every model.
        out: A new folder for `report.html`, its figures and tables, and `diagnosis.json`; by default none is written.
        merged: A merged model to diagnose instead of the recipe's merge.
        target: A model that was trained on all tasks, which the merges are compared with. It requires ``data``.
        changes: Keys of the recipe to set first: `{"damping": 1e-3}`.
        data: Task (the name of its model's folder, or `base`) → data to evaluate the merges on.
        threads, allow_pickle, allow_config, dequantize, allow_code, force, progress: As of :func:`gradmerge.merge`.
        command: The command that the report says to repeat.
        loading: How models and data are loaded: the keywords of :class:`gradmerge.LoadOptions`.

    Returns:
        Predictions (multiples of a reference merge's, and ranks), results on the data, and a verdict in sentences.

    >>> print(*diagnose("recipe.yml", "./report").verdict)  # doctest: +SKIP
    """
    from ..compare.diagnose import find_costs
    from ..compare.settings import with_changes
    from ..report.advice import diagnosis_verdict, next_commands
    from ..report.comparison import diagnosis_page
    from ..tasks import complete, tokenizer_of
    from .recipe_yaml import recipe_documents

    options = complete(loading, diagnose)
    recipe, _ = with_changes(recipe_without_slices(recipe, "diagnose", allow_code), changes)
    threads = number_of_threads(threads)
    reading: dict[str, Any] = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    merged, target = (None if model is None else str(model) for model in (merged, target))
    with (
        report_folder(recipe, out, data or {}, force, merged, target, tokenizer_of(options)) as staging,
        shown(progress) as bar,
        merge_named_recipes(recipe, out, threads, reading) as ready,
    ):
        result = find_costs(
            ready,
            options,
            merged=merged,
            target=target,
            data=data,
            threads=threads,
            progress=bar,
            **reading,
        )
        result.commands = next_commands(recipe, data or {}, merged=merged, columns=options["columns"], changes=changes)
        result.verdict = diagnosis_verdict(result)
        if staging is not None:
            text = recipe_with_defaults(recipe)
            facts = provenance(recipe, data or {})
            write_report(staging.folder, diagnosis_page(result, text, facts, [command] if command else []))
            (staging.folder / "recipe.yml").write_text(recipe_documents(recipe, staging.out), "utf-8")
            (staging.folder / "diagnosis.json").write_text(redact(to_json(as_json(result))) + "\n", "utf-8")
    return result


def report_folder(
    recipe: Recipe,
    out: str | Path | None,
    data: Mapping[str, str],
    force: bool,
    *models: str | None,
    kind: str = "report",
) -> AbstractContextManager[AtomicDir | None]:
    """Return the folder of a report, or a context manager of None without ``out``.

    The folder must not overlap the recipe's inputs, the data, or the further ``models``.
    """
    from ..engine.input_state import model_paths, recipe_paths
    from ..tasks.data import data_paths

    if out is None:
        return nullcontext()
    reads = recipe_paths(recipe)
    reads += [path for model in models for path in model_paths(model)]
    reads += [path for source in data.values() for path in data_paths(source)]
    return AtomicDir(Path(out), kind, force=force, reads=reads)


def recipe_with_defaults(recipe: Recipe) -> str:
    """Return the recipe as YAML with defaults filled in."""
    return to_yaml(recipe.to_dict())


def provenance(recipe: Recipe, data: Mapping[str, str]) -> dict[str, str]:
    """Return what a report names as its origin: recipe, method and data."""
    facts = {
        "recipe": recipe.file.name if recipe.file is not None else "given on the command line",
        "method": recipe.method,
        "reduction": str(recipe.reduction),
        "damping": recipe.damping if isinstance(recipe.damping, str) else f"{recipe.damping:g}",
    }
    return facts | {f"data of {name}": source for name, source in data.items()}


def as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return what ``--json`` prints. Predictions are quadratic forms in the curvature, not losses in nats."""
    from ..report.advice import costliest_layers

    prediction = diagnosis.prediction
    tasks = prediction.tasks
    return {
        "merge": diagnosis.own,
        "tasks": tasks,
        "candidates": diagnosis.candidates,
        "reference": diagnosis.reference,
        "predicted": {
            candidate: {
                task: {
                    "relative_loss": diagnosis.relative(candidate, task),
                    "rank": diagnosis.rank(candidate, task),
                    "excess_loss": prediction.excess(candidate, task),
                    "quadratic_form": prediction.cost(candidate, task).quadratic,
                    "first_order": prediction.cost(candidate, task).first_order,
                    "mismatch_norm": prediction.mismatch(candidate, task),
                    "by_layer": {group: prediction.excess(candidate, task, group) for group in prediction.groups},
                }
                for task in tasks
            }
            for candidate in diagnosis.candidates
        },
        "costliest_layers": [{"layer": name, "share": share} for name, share in costliest_layers(diagnosis)],
        "interference": [
            {
                "task": one,
                "other": other,
                "layer": group,
                "overlap": prediction.between(one, other, group).overlap,
                "opposed_share": prediction.between(one, other, group).share,
            }
            for group in prediction.groups
            for one, other in itertools.combinations(diagnosis.tuned, 2)
        ],
        "measured": {name: outcome.metrics for name, outcome in diagnosis.outcomes.items()},
        **({"compared": _compared(diagnosis, diagnosis.measured)} if diagnosis.measured is not None else {}),
        "examples": diagnosis.examples,
        "residuals": {name: asdict(residual) for name, residual in diagnosis.residuals.items()},
        "penalty_checks": {task: asdict(check) for task, check in diagnosis.penalty_checks.items()},
        "true_mismatch": [
            {"merge": candidate, "task": task, "norm": value} for (candidate, task), value in diagnosis.mismatch.items()
        ],
        "notes": diagnosis.notes,
        "verdict": diagnosis.verdict,
    }


def _compared(diagnosis: Diagnosis, compared: Preview) -> dict[str, Any]:
    """Return the scores of all merges on the same rows, and their differences from the diagnosed merge."""
    merges = {}
    for name, row in diagnosis.merges.items():
        apart = compared.difference(row, compared.reference)
        merges[name] = {
            "score": row.score,
            "standard_error": getattr(compared.shown_score(row), "error", None),
            "more_than_own": None if apart is None else {"value": apart.value, "standard_error": apart.error},
            "tied_with_own": compared.are_alike(row, compared.reference),
        }
    return {"by": compared.criterion.name, "higher_is_better": compared.criterion.higher, "merges": merges}
