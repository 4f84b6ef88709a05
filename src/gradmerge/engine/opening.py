"""From a recipe to a plan: every model and curvature file that it names, opened and compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..checkpoints.model import Checkpoint
from ..checkpoints.opening import open_checkpoint
from ..curvature.files import CurvatureFile, default_curvature, open_curvature
from ..errors import InputError
from ..recipe import CurvatureSource, Identity, Recipe
from .inputs import CurvatureInput, Inputs
from .plan import Plan, make_plan


def open_plan(recipe: Recipe, *, allow_pickle: bool = False, allow_config: Sequence[str] = ()) -> Plan:
    """Open what a recipe names and plan its merge. Close ``plan.inputs`` when done.

    ``allow_config`` are keys in which the configs of the models may differ.
    """
    inputs = open_inputs(recipe, allow_pickle=allow_pickle)
    try:
        plan = make_plan(
            recipe.rule,
            inputs,
            include=recipe.include,
            exclude=recipe.exclude,
            missing=recipe.missing,
            dtype=recipe.output.dtype,
            write_precision=recipe.output.curvature,
            allow_config=allow_config,
        )
        plan.notes += _unused(recipe)
        return plan
    except BaseException:
        inputs.close()
        raise


def _unused(recipe: Recipe) -> list[str]:
    """Curvature that the recipe names and the rule does not look at: fine for a comparison of rules, but worth a note."""
    needs = recipe.rule.needs(recipe.resolved_options)
    named = ["base.curvature"] if recipe.base and recipe.base.curvature is not None and "prior" not in needs else []
    if not needs & {"curvature", "grams"}:
        named += [f"models[{i}].curvature" for i, model in enumerate(recipe.models) if model.curvature is not None]
    return [f"{recipe.method} does not use {', '.join(named)}"] if named else []


def open_inputs(recipe: Recipe, *, allow_pickle: bool = False) -> Inputs:
    """The models of a recipe, and the curvature that its rule needs."""
    opened: list[Checkpoint | CurvatureInput] = []
    needs = recipe.rule.needs(recipe.resolved_options)

    def checkpoint(reference: str, base: Checkpoint | None) -> Checkpoint:
        found = open_checkpoint(reference, relative_to=recipe.folder, adapter_base=base, allow_pickle=allow_pickle)
        opened.append(found)
        return found

    def curvature(source: CurvatureSource | None, model: Checkpoint, key: str) -> CurvatureInput:
        found = _open_curvature(source, model, key, recipe)
        opened.append(found)
        return found

    try:
        base = checkpoint(recipe.base.model, None) if recipe.base else None
        tuned = [checkpoint(model.model, base) for model in recipe.models]
        inputs = Inputs(
            template=base or tuned[0],
            base=base,
            tuned=tuned,
            weights=recipe.weights,
            base_weight=recipe.base.weight if recipe.base else None,
            damping=recipe.damping,
            options=recipe.resolved_options,
        )
        if base is not None and recipe.base is not None:
            if "prior" in needs:
                inputs.prior = curvature(recipe.base.curvature, base, "base.curvature")
            if "penalty" in needs and recipe.base.penalty is not None:
                inputs.penalty = curvature(recipe.base.penalty, base, "base.penalty")
        if needs & {"curvature", "grams"}:
            every = [curvature(m.curvature, c, f"models[{i}].curvature")
                     for i, (m, c) in enumerate(zip(recipe.models, tuned, strict=True))]  # fmt: skip
            if "grams" in needs:
                inputs.grams = every
            else:
                inputs.curvature = every
        return inputs
    except BaseException:
        for source in opened:
            source.close()
        raise


def _open_curvature(source: CurvatureSource | None, model: Checkpoint, key: str, recipe: Recipe) -> CurvatureInput:
    if isinstance(source, Identity):
        return CurvatureInput(label=f"{key} (identity)", constant=source.identity)
    file: CurvatureFile
    if source is not None:
        file = open_curvature(source, relative_to=recipe.folder)
    else:
        inside = default_curvature(model.folder)
        if inside is None:
            raise InputError(
                f"{key}: {recipe.method} needs the curvature of {model.label}, the recipe names none, and the model folder has no "
                "curvature/ folder. Measure it with `gradmerge curvature estimate`, name a curvature folder or file, or give "
                "{identity: 1.0} in a recipe (identity:1.0 on the command line) for the same number everywhere."
            )
        file = open_curvature(str(inside), relative_to=Path())
        file.label = f"{model.label}/{inside.name}"
    factor = 1.0 / file.examples if recipe.reduction == "mean" else 1.0
    return CurvatureInput(file.label, file=file, factor=factor, examples=file.examples, likelihood=file.likelihood)
