"""Load recipes from files and mappings, and check them as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..arguments import checked
from ..errors import InputError
from ..io.reader import local_path
from ..io.small_files import read_bounded
from ..notes import Note
from ..rules import METHODS
from ..text import nearest
from ..urls import UrlPath, is_url, remote_url, strip_file_scheme
from ..yaml import parse_documents
from .fields import CurvatureSource, Identity, explain
from .method import is_rule_file, load_rule
from .schema import Base, Origin, Recipe

MAX_BYTES = 1_000_000


@checked()
def load_recipe(path: str | Path, *, allow_code: bool = False) -> Recipe:
    """Read and check a recipe file, of gradmerge or of mergekit. Relative paths in it start from its folder.

    A file may hold several recipes, as YAML documents. The one without a `name` is the result, or else the last one.
    It can use the others by name, as if they were models.

    Args:
        path: The YAML file, or its URL.
        allow_code: Run the Python file that a recipe names as its method (``method: ./my_rule.py``).

    Returns:
        The recipe, with defaults filled in.

    >>> load_recipe("recipe.yml").weights  # doctest: +SKIP
    [0.3, 0.5]
    """
    if (url := remote_url(path)) is not None:
        from ..io.remote import read_whole

        file: Path = UrlPath(url)
        return recipe_of_text(read_whole(url, MAX_BYTES), file.parent, url, file, allow_code)
    path = Path(strip_file_scheme(path))
    return recipe_of_text(read_bounded(path, MAX_BYTES), path.parent, str(path), path, allow_code)


def recipe_of_text(raw: bytes, folder: Path, where: str, file: Path | None = None, allow_code: bool = False) -> Recipe:
    """Parse a text with one or several recipes; ``where`` names it in errors, relative paths start from ``folder``."""
    if len(raw) > MAX_BYTES:
        raise InputError(f"{where}: larger than {MAX_BYTES} bytes, the limit for a recipe")
    documents = parse_documents(raw, where)
    names = [str(value["name"]) for value in documents if isinstance(value, Mapping) and value.get("name")]
    recipes = [_read(value, folder, where, names, allow_code) for value in documents]
    for recipe in recipes:
        recipe._origin.file = file
    unnamed = [i for i, recipe in enumerate(recipes) if recipe.name is None]
    if len(unnamed) > 1:
        raise InputError(f"{where}: has {len(unnamed)} recipes without a `name`; only one recipe can be the result")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{where}: two recipes have the name {repeated[0]!r}")
    return _with_merges(recipes[unnamed[0] if unnamed else -1], recipes, where)


def make_recipe(value: Any, *, folder: Path | None = None, where: str = "recipe", allow_code: bool = False) -> Recipe:
    """Check a recipe that is a mapping, of gradmerge or of mergekit."""
    return _read(value, folder or Path(), where, (), allow_code)


def check_penalty(value: Any, where: str) -> CurvatureSource:
    """Validate a penalty that was recorded during training, by the rules of `base.penalty`."""
    try:
        penalty = Base.model_validate({"model": "", "penalty": value}).penalty
    except ValidationError as error:
        raise InputError(explain(error, where, Base)) from None
    if penalty is None:
        raise InputError(f"{where}: names no penalty")
    return penalty


def _with_merges(result: Recipe, recipes: list[Recipe], where: str) -> Recipe:
    """Return the resulting recipe with the named recipes that it uses, in the order in which to merge them."""
    named = {recipe.name: recipe for recipe in recipes if recipe.name is not None}
    for recipe in recipes:
        for reference in recipe.references:
            if named and reference not in named and "/" not in reference and not _exists(reference, recipe.folder):
                raise InputError(
                    f"{where}: {reference}: there is no such folder and no recipe of that name"
                    f"{nearest(reference, named)}; named are {', '.join(named)}"
                )
    uses = {name: [text for text in recipe.references if text in named] for name, recipe in named.items()}
    try:
        order = list(TopologicalSorter(uses).static_order())
    except CycleError as error:
        cycle = " → ".join(reversed(error.args[1]))
        raise InputError(f"{where}: recipes use each other in a cycle: {cycle}") from None
    used = {*result.references}
    for name in reversed(order):
        used.update(uses[name] if name in used else ())
    result._origin.merges = {name: named[name] for name in order if name in used}
    if unused := [name for name, recipe in named.items() if name not in used and recipe is not result]:
        result.notes.append(Note(f"{where}: not used, and not merged: {', '.join(unused)}"))
    for recipe in result.merges.values():
        result.notes.extend(note for note in recipe.notes if note not in result.notes)
    return result


def _exists(reference: str, folder: Path) -> bool:
    """Return whether a model reference is a URL or an existing path."""
    try:
        return is_url(reference) or local_path(reference, folder).exists()
    except InputError:
        return False


def _read(value: Any, folder: Path, where: str, names: Collection[str], allow_code: bool) -> Recipe:
    """Check one recipe; ``names`` are those of all recipes of the file."""
    origin = Origin(folder)

    def find(reference: str) -> str:
        """Look for a model of mergekit's recipe beside the recipe, then in the working folder."""
        elsewhere = reference not in names and not _exists(reference, folder) and _exists(reference, Path())
        return str(Path(reference).expanduser().absolute()) if elsewhere else reference

    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a recipe is a mapping with method, base and models, not {type(value).__name__}")
    try:
        if "merge_method" in value and "method" not in value:
            from .mergekit import translate

            value, notes = translate(value, find)
            origin.notes = [Note(f"{where}: {note}") for note in notes]
        method = value.get("method")
        if is_rule_file(method):
            origin.rule = load_rule(method, folder, allow_code=allow_code)
            value, method = {**value, "method": origin.rule.name}, origin.rule.name
        if method is not None and (not isinstance(method, str) or method not in METHODS):
            known = f"{nearest(str(method), METHODS)}\n  Known are {', '.join(METHODS)}."
            raise InputError(f"method: there is no method {str(method)[:60]!r}{known}")
        recipe = Recipe.model_validate(dict(value))
        recipe._origin = origin
        _check_fit(recipe)
    except ValidationError as error:
        raise InputError(explain(error, where, Recipe)) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    return recipe


def _check_fit(recipe: Recipe) -> None:
    """Raise if keys contradict each other or the method does not use them."""
    rule, base, output, tokenizer = recipe.rule, recipe.base, recipe.output, recipe.tokenizer
    if not recipe.models and not recipe.slices:
        raise InputError("models: is missing; give at least one model")
    if recipe.models and recipe.slices:
        raise InputError("slices: replace `models`; remove one of the two keys")
    _check_slices(recipe)
    needs = rule.needs(recipe.resolved_options)
    if base is None and "base" in needs - rule.optional:
        raise InputError(f"base: is missing; {rule.name} needs one")
    if base and base.weight is not None and "base_weight" not in needs:
        raise InputError(f"base.weight: {rule.name} does not use it")
    if base and base.penalty is not None and "penalty" not in needs:
        raise InputError(f"base.penalty: {rule.name} does not use it")
    if base and base.examples is not None:
        if "prior" not in needs:
            raise InputError(f"base.examples: {rule.name} does not use the base's curvature")
        if isinstance(base.curvature, Identity):
            raise InputError("base.examples: {identity: c} has no number of examples; remove one of the two keys")
        if recipe.reduction == "mean":
            raise InputError("base.examples: has no effect with `reduction: mean`; remove one of the two keys")
    if "weights" not in needs and any(weight != 1 for weight in recipe.weights):
        raise InputError(f"models: {rule.name} does not use weights")
    counts = {f"slices[{i}].models": len(part.models) for i, part in enumerate(recipe.slices)}
    for key, number in (counts or {"models": len(recipe.models)}).items():
        if rule.only_one_model and number != 1:
            raise InputError(f"{key}: {rule.name} takes {'the base and ' * ('base' in needs)}one model, not {number}")
    if output.format == "adapter" and tokenizer is not None and (tokenizer.source != "base" or tokenizer.tokens):
        raise InputError("output.format: an adapter has the base's vocabulary; remove `tokenizer`, or write a model")
    if output.curvature and rule.precision is None:
        have = ", ".join(r.name for r in METHODS.values() if r.precision)
        raise InputError(f"output.curvature: a {rule.name} merge has no curvature; methods with one: {have}")
    if output.rank is not None and output.format != "adapter":
        raise InputError("output.rank: applies only to adapters; set `format: adapter`, or remove it")


def _check_slices(recipe: Recipe) -> None:
    """Raise an error if the layers or models of slices are inconsistent."""
    lengths = recipe.slice_lengths
    for number, part in enumerate(recipe.slices):
        ranges = {f"slices[{number}].models[{i}].layers": model.layers for i, model in enumerate(part.models)}
        if part.base is not None:
            if recipe.base is None:
                raise InputError(f"slices[{number}].base: the recipe has no base")
            ranges[f"slices[{number}].base"] = part.base
        for where, (first, stop) in ranges.items():
            if not 0 <= first < stop:
                raise InputError(f"{where}: [{first}, {stop}] is not [first, one past the last], counted from 0")
            if stop - first != lengths[number]:
                raise InputError(
                    f"{where}: {stop - first} layers, but slices[{number}].models[0] has {lengths[number]}; all models "
                    "of a slice need the same number"
                )
    counts = [len(part.models) for part in recipe.slices]
    if len(set(counts)) > 1 and recipe.resolved_options.get("scope") == "model":
        number = next(i for i, count in enumerate(counts) if count != counts[0])
        raise InputError(
            f"slices: slices[0] merges {counts[0]} and slices[{number}] {counts[number]} models, but `scope: model` "
            "needs each model in all slices. Set `scope: tensor`"
        )
    if recipe.slices and recipe.output.format == "adapter":
        raise InputError("output.format: an adapter cannot have other layers than its base; write a model")
