"""P_t, the matrix of the penalty that each model was tuned under: from the recipe, recorded beside a model, or H_0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.compat.rename import RenamedCheckpoint
from ...checkpoints.views import beneath
from ...curvature.format import CurvatureFile, open_curvature
from ...errors import InputError
from ...io.small_files import read_json, require_within
from ...notes import Kind, Note
from ...recipe import NONE, Identity, Recipe, check_penalty
from ...rules.kronecker_matching import OF_MERGES
from ...text import one_line
from .inputs import CurvatureInput, Inputs
from .plan import Plan

#: The file beside a tuned model that says what it was tuned under: `base.penalty` as in a recipe, with paths that start
#: from the model's folder.
PENALTY = "gradmerge_penalty.json"
PENALTY_FORMAT = "gradmerge-penalty/1"


def recorded_penalty(model: Checkpoint) -> CurvatureInput | None:
    """The penalty that is recorded beside a model. A file holds P itself, whatever the recipe's reduction is."""
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
            f"{label}: names the penalty {one_line(source[:80])!r}, which is nothing in the model's folder"
        )
    require_within(inside, model.folder)
    file = open_curvature(str(inside), relative_to=Path())
    file.label = f"{model.label}/{source}"
    follow_rename(file, model)
    return CurvatureInput(file.label, file=file)


def follow_rename(file: CurvatureFile, model: Checkpoint) -> None:
    """Give the curvature of a model that a recipe renames the same names, unless it was measured under those."""
    for layer in reversed([*beneath(model)]):
        if isinstance(layer, RenamedCheckpoint) and file.parameters & layer.inner.tensors.keys():
            file.rename(layer.new_name)


def incomplete(inputs: Inputs) -> Iterator[Note]:
    """A warning where a penalty is recorded beside some models and not beside others."""
    pairs = list(zip(inputs.tuned, inputs.penalty, strict=False))
    lacking = [model.label for model, penalty in pairs if penalty is None]
    if lacking:
        having = [model.label for model, penalty in pairs if penalty is not None]
        yield Note(
            f"a penalty is recorded beside {', '.join(having)}, and none beside {', '.join(lacking)}: the latter "
            "counts as tuned under H_0. If that is wrong, set base.penalty for all models, or write a "
            f'{PENALTY} beside the model: {{"format": "{PENALTY_FORMAT}", "penalty": "none"}} if it was tuned without '
            "a penalty.",
            Kind.PENALTIES,
            lacking=lacking,
        )


def mismatched(recipe: Recipe, inputs: Inputs) -> Iterator[Note]:
    """A warning where penalties of sums of losses meet curvature that is a mean."""
    recorded = recipe.base is not None and recipe.base.penalty is None
    some = any(one is not None and one.constant != 0 for one in inputs.penalty)
    if recorded and some and recipe.reduction == "mean":
        yield Note(
            "the penalties recorded beside the models go with the sum of the losses over all examples and are taken as "
            "they are, but `reduction: mean` divides the curvature by the number of examples. Set `reduction: sum` (or "
            "{mean_times: N} with the number of examples in training), or base.penalty for mean losses.",
            Kind.PENALTIES,
            lacking=[],
        )


def used(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """For the record: δ as a number, and where each model's P came from."""
    inputs = plan.inputs
    found: dict[str, Any] = {}
    if "damping" in plan.rule.inputs:
        found["damping"] = inputs.damping_of(plan.rule)
        if plan.layers and inputs.damps_layers and plan.rule.auto_damping != "mean-curvature":
            found["damping_of_layers"] = f"{OF_MERGES:g} × the mean curvature of the layer"
    if "penalty" in plan.rule.inputs:
        found["penalty"] = [_used_penalty(recipe, inputs, place) for place in range(len(inputs.tuned))]
    return found


def _used_penalty(recipe: Recipe, inputs: Inputs, place: int) -> dict[str, Any]:
    source = inputs.penalty[place] if inputs.penalty else None
    model = inputs.tuned[place].label
    if source is None:
        return {"model": model, "penalty": "H_0", "from": "default"}
    origin = "recipe" if recipe.base is not None and recipe.base.penalty is not None else "recorded"
    if source.constant is not None:
        value: Any = {"identity": source.constant} if source.constant else NONE
    else:
        value = source.label
    return {"model": model, "penalty": value, "from": origin}
