"""P_t, the matrix of the penalty in each model's training: from the recipe, recorded with a model, or H_0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..checkpoints.checkpoint import Checkpoint, RenamedCheckpoint, unwrap_chain
from ..curvature.format import CurvatureFile, open_curvature
from ..errors import InputError
from ..io.small_files import read_json, require_within
from ..notes import Kind, Note
from ..recipe import NONE, Identity, Recipe, check_penalty
from ..rules.kronecker_matching import OF_MERGES
from ..text import one_line
from .inputs import CurvatureInput, Inputs
from .plan import Plan

PENALTY = "gradmerge_penalty.json"
"""The file in a model's folder with the penalty of its training: `base.penalty` as in a recipe, with paths relative to
the folder."""
PENALTY_FORMAT = "gradmerge-penalty/1"


def recorded_penalty(model: Checkpoint) -> CurvatureInput | None:
    """Return the penalty that is recorded in a model's folder. Its file holds P, whatever the recipe's reduction is."""
    path = None if model.folder is None else model.folder / PENALTY
    if path is None or model.folder is None or not path.is_file():
        return None
    require_within(path, model.folder)
    record, label = read_json(path), f"{model.label}/{PENALTY}"
    if record.get("format") != PENALTY_FORMAT:
        raise InputError(f"{label}: its format is {str(record.get('format'))[:40]!r}, not {PENALTY_FORMAT!r}")
    source = check_penalty(record.get("penalty"), label)
    if isinstance(source, Identity):
        return CurvatureInput(label, constant=source.identity)
    if source == NONE:
        return CurvatureInput(label, constant=0.0)
    inside = model.folder / source
    if Path(source).is_absolute() or ".." in Path(source).parts or not inside.exists():
        raise InputError(
            f"{label}: names the penalty {one_line(source[:80])!r}, which is not a file or folder in the model's folder"
        )
    require_within(inside, model.folder)
    file = open_curvature(str(inside), relative_to=Path())
    file.label = f"{model.label}/{source}"
    follow_rename(file, model)
    return CurvatureInput(file.label, file=file)


def follow_rename(file: CurvatureFile, model: Checkpoint) -> None:
    """Rename the curvature of a model that a recipe renames, unless it has the new names already."""
    for layer in reversed([*unwrap_chain(model)]):
        if isinstance(layer, RenamedCheckpoint) and file.parameters & layer.inner.tensors.keys():
            file.rename(layer.new_name)


def penalty_notes(recipe: Recipe, inputs: Inputs) -> Iterator[Note]:
    """Yield warnings if only some models have a recorded penalty, or if the penalties do not match the reduction."""
    pairs = list(zip(inputs.tuned, inputs.penalty, strict=False))
    lacking = [model.label for model, penalty in pairs if penalty is None]
    if lacking:
        recorded = [model.label for model, penalty in pairs if penalty is not None]
        yield Note(
            f"{', '.join(recorded)} recorded the penalty of the training, and {', '.join(lacking)} did not: the latter "
            "count as trained under H_0. If that is wrong, set base.penalty for all models, or write a "
            f'{PENALTY} into the model\'s folder: {{"format": "{PENALTY_FORMAT}", "penalty": "none"}} for training '
            "without a penalty.",
            Kind.PENALTIES,
            lacking=lacking,
        )
    from_models = recipe.base is not None and recipe.base.penalty is None
    nonzero = any(penalty is not None and penalty.constant != 0 for penalty in inputs.penalty)
    if from_models and nonzero and recipe.reduction == "mean":
        yield Note(
            "the recorded penalties belong to the sum of the losses over all examples and are used unchanged, but "
            "`reduction: mean` divides the curvature by the number of examples. Set `reduction: sum` (or "
            "{mean_times: N} with the number of examples in training), or base.penalty for mean losses.",
            Kind.PENALTIES,
            lacking=[],
        )


def used(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the damping and the penalty of every model, for the record."""
    inputs = plan.inputs
    facts: dict[str, Any] = {}
    if "damping" in plan.rule.inputs:
        facts["damping"] = inputs.damping_of(plan.rule)
        if plan.layers and inputs.damps_layers and plan.rule.auto_damping != "mean-curvature":
            facts["damping_of_layers"] = f"{OF_MERGES:g} × the mean curvature of the layer"
    if "penalty" in plan.rule.inputs:
        penalties = inputs.penalty or [None] * len(inputs.tuned)
        facts["penalty"] = [
            {"model": model.label, **_used_penalty(recipe, penalty)}
            for model, penalty in zip(inputs.tuned, penalties, strict=True)
        ]
    return facts


def _used_penalty(recipe: Recipe, penalty: CurvatureInput | None) -> dict[str, Any]:
    if penalty is None:
        return {"penalty": "H_0", "from": "default"}
    origin = "recipe" if recipe.base is not None and recipe.base.penalty is not None else "recorded"
    if penalty.constant is None:
        return {"penalty": penalty.label, "from": origin}
    return {"penalty": {"identity": penalty.constant} if penalty.constant else NONE, "from": origin}
