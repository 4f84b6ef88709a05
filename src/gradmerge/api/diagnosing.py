"""Diagnosing a recipe, and writing what was found."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Unpack

from .._version import __version__
from ..diagnostics.diagnosis import Diagnosis, diagnose
from ..engine.card import to_yaml
from ..engine.progress import Progress
from ..engine.reads import model_paths, recipe_paths
from ..recipe import Recipe
from ..report.diagnosis_page import costliest, diagnosis_page, rank, reference_of, relative
from ..report.page import write_report
from ..storage.staging import Staging
from ..tasks import Loading, complete
from ..tasks.data_sources import data_paths
from ..text import to_json
from .merging import as_recipe, default_threads


def write_diagnosis(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path,
    *,
    merged: str | None = None,
    target: str | None = None,
    data: Mapping[str, str] | None = None,
    threads: int | None = None,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    force: bool = False,
    progress: Progress | None = None,
    command: str = "",
    **loading: Unpack[Loading],
) -> Diagnosis:
    """Diagnose a recipe's merge; write `report.html`, its figures and tables, and `diagnosis.json` into a new folder.

    The options are those of `gradmerge diagnose`; ``command`` is what the report says to repeat it with.
    How models and data are loaded: :class:`gradmerge.Loading`.
    """
    options = complete(loading, write_diagnosis)
    recipe = as_recipe(recipe)
    with report_folder(recipe, out, data or {}, force, merged, target, options["tokenizer"]) as staging:
        found = diagnose(
            recipe,
            merged=merged,
            target=target,
            data=data,
            threads=threads or default_threads(),
            allow_pickle=allow_pickle,
            allow_config=allow_config,
            progress=progress,
            **options,
        )
        text = recipe_text(recipe)
        page = diagnosis_page(found, provenance(recipe, data or {}), text, [command] if command else [])
        write_report(staging.folder, page)
        (staging.folder / "recipe.yml").write_text(text, "utf-8")
        (staging.folder / "diagnosis.json").write_text(to_json(as_json(found)) + "\n", "utf-8")
    return found


def report_folder(
    recipe: Recipe, out: str | Path, data: Mapping[str, str], force: bool, *models: str | None
) -> Staging:
    """A folder for a report on a recipe, which appears if all goes well; ``models`` are others that are read."""
    reads = recipe_paths(recipe)
    reads += [path for model in models for path in model_paths(model)]
    reads += [path for source in data.values() for path in data_paths(source)]
    return Staging(Path(out), "report", force=force, reads=reads)


def recipe_text(recipe: Recipe) -> str:
    """The full recipe, defaults filled in."""
    return to_yaml(recipe.model_dump(mode="json"))


def provenance(recipe: Recipe, data: Mapping[str, str]) -> dict[str, str]:
    """Where a report comes from."""
    facts = {
        "made by": f"gradmerge {__version__}",
        "made at": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "recipe": recipe.file.name if recipe.file is not None else "given on the command line",
        "method": recipe.method,
        "reduction": recipe.reduction,
        "damping": f"{recipe.damping:g}",
    }
    return facts | {f"data of {name}": source for name, source in data.items()}


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Everything that was found, for machines. Predictions are quadratic forms in the curvature, not losses in nats."""
    prediction = found.prediction
    tasks = prediction.tasks
    return {
        "merge": found.own,
        "tasks": tasks,
        "candidates": found.candidates,
        "reference": reference_of(found),
        "predicted": {
            candidate: {
                task: {
                    "relative_loss": relative(found, candidate, task),
                    "rank": rank(found, candidate, task),
                    "quadratic_form": prediction.excess(candidate, task),
                    "mismatch_norm": prediction.mismatch(candidate, task),
                    "by_layer": {group: prediction.excess(candidate, task, group) for group in prediction.groups},
                }
                for task in tasks
            }
            for candidate in found.candidates
        },
        "costliest_layers": [{"layer": name, "share": share} for name, share in costliest(found)],
        "interference": [
            {"task": one, "other": other, "layer": group, "overlap": value.overlap, "opposed_share": value.share}
            for (one, other, group), value in prediction.interference.items()
        ],
        "measured": found.metrics,
        "examples": found.examples,
        "residuals": {name: asdict(residual) for name, residual in found.residuals.items()},
        "true_mismatch": [
            {"merge": candidate, "task": task, "norm": value} for (candidate, task), value in found.mismatch.items()
        ],
        "notes": found.notes,
    }
