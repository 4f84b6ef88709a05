"""Recipes from files and mappings, checked as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..arguments import checked
from ..errors import InputError
from ..rules import RULES
from ..safe_yaml import parse_yaml
from ..text import nearest
from .explaining import explain
from .schema import Base, Recipe
from .values import CurvatureSource, Identity

MAX_BYTES = 1_000_000


@checked()
def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe file. Relative paths in it start from its folder.

    Args:
        path: The YAML file.

    Returns:
        The recipe, with defaults filled in.

    >>> load_recipe("recipe.yml").weights  # doctest: +SKIP
    [0.3, 0.5]
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; a recipe is a YAML file")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES} bytes; that is no recipe")
    recipe = make_recipe(parse_yaml(raw, str(path)), folder=path.parent, where=str(path))
    recipe._file = path
    return recipe


def make_recipe(value: Any, *, folder: Path | None = None, where: str = "recipe") -> Recipe:
    """Check a recipe that is given as a mapping."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a recipe is a mapping with method, base and models, not {type(value).__name__}")
    method = value.get("method")
    if method is not None and (not isinstance(method, str) or method not in RULES):
        known = f"{nearest(str(method), RULES)}\n  Known are {', '.join(RULES)}."
        raise InputError(f"{where}: method: there is no method {str(method)[:60]!r}{known}")
    try:
        recipe = Recipe.model_validate(dict(value))
        _check_fit(recipe)
    except ValidationError as error:
        raise InputError(explain(error, where, Recipe)) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    recipe._folder = folder or Path()
    return recipe


def _check_fit(recipe: Recipe) -> None:
    """Weights and penalties that the method does not use are errors; the plan notes curvature that it does not use."""
    rule = recipe.rule
    if not recipe.models and not recipe.slices:
        raise InputError("models: is missing; name at least one")
    if recipe.models and recipe.slices:
        raise InputError("slices: stand instead of `models`; leave one of the two out")
    needs = rule.needs(recipe.resolved_options)
    if recipe.base is None and "base" in needs - rule.optional:
        raise InputError(f"{rule.name} needs a base")
    if recipe.base and recipe.base.weight is not None and "base_weight" not in needs:
        raise InputError(f"base.weight: {rule.name} does not use it; only weighted-average does")
    if recipe.base and recipe.base.penalty is not None and "penalty" not in needs:
        raise InputError(f"base.penalty: {rule.name} does not use it; only removal and gradient-matching do")
    if recipe.base and recipe.base.examples is not None:
        if "prior" not in needs:
            raise InputError(f"base.examples: {rule.name} does not use the base's curvature")
        if isinstance(recipe.base.curvature, Identity):
            raise InputError("base.examples: {identity: c} is taken as it is; only a curvature file is scaled")
        if recipe.reduction == "mean":
            raise InputError("base.examples: with `reduction: mean` no number of examples counts; leave one out")
    if "weights" not in needs and any(weight != 1 for weight in recipe.weights):
        instead = "; weighted-average has" if rule.name == "average" else ""
        raise InputError(f"models: {rule.name} has no weights{instead}")
    if rule.only_one_model and len(recipe.models) != 1:
        raise InputError(f"models: {rule.name} takes the base and one model, not {len(recipe.models)}")
    if recipe.output.curvature and rule.precision is None:
        have = ", ".join(r.name for r in RULES.values() if r.precision)
        raise InputError(f"output.curvature: a {rule.name} merge has no curvature of its own; methods with one: {have}")
    if recipe.output.rank is not None and recipe.output.format != "adapter":
        raise InputError("output.rank: a whole model has none; set `format: adapter` beside it, or leave it out")


def check_penalty(value: Any, where: str) -> CurvatureSource:
    """A penalty as `base.penalty` takes it, from elsewhere."""
    try:
        found = Base.model_validate({"model": "", "penalty": value}).penalty
    except ValidationError as error:
        raise InputError(explain(error, where, Base)) from None
    if found is None:
        raise InputError(f"{where}: names no penalty")
    return found
