"""Recipes from files and mappings, checked as a whole."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..arguments import checked
from ..errors import InputError
from ..io.reader import local_path
from ..notes import Note
from ..rules import METHODS
from ..text import nearest
from ..urls import UrlPath, is_url, redact_urls, remote_url, strip_file_scheme
from ..yaml import Lines, parse_documents
from .fields import CurvatureSource, Identity
from .mergekit.translate import is_mergekit, translate
from .rule_file import is_rule_file, load_rule
from .schema import Base, Recipe
from .slices import check_slices
from .validation_errors import explain
from .yaml_values import YamlValue

MAX_BYTES = 1_000_000


@checked()
def load_recipe(path: str | Path, *, allow_code: bool = False) -> Recipe:
    """Read and check a recipe file, of ours or of mergekit's. Relative paths in it start from its folder.

    A file may hold several recipes, as YAML documents: the one without a `name` is the result, or else the last; those
    with a name may be used by it, as if they were models.

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

        place = UrlPath(url)
        return recipe_of_text(read_whole(url, MAX_BYTES), place.parent, url, place, allow_code)
    path = Path(strip_file_scheme(path))
    if path.is_dir():
        raise InputError(f"{path}: is a folder; a recipe is a YAML file")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    return recipe_of_text(raw, path.parent, str(path), path, allow_code)


def recipe_of_text(raw: bytes, folder: Path, where: str, file: Path | None = None, allow_code: bool = False) -> Recipe:
    """The recipe that a text holds, wherever it came from. Relative paths in it start from the folder."""
    if len(raw) > MAX_BYTES:
        raise InputError(f"{where}: larger than {MAX_BYTES} bytes; that is no recipe")
    return of_documents(parse_documents(raw, where), folder, where, file, allow_code)


def make_recipe(value: Any, *, folder: Path | None = None, where: str = "recipe", allow_code: bool = False) -> Recipe:
    """Check a recipe that is given as a mapping: of ours, or of mergekit's."""
    return _make(value, {}, folder or Path(), where, names=(), allow_code=allow_code)


def of_documents(
    documents: Sequence[tuple[Any, Lines]], folder: Path, where: str, file: Path | None, allow_code: bool
) -> Recipe:
    """The recipe that one document or several make: the one without a name, or else the last.

    Named ones may be used by their names, and are kept with it in the order in which they have to be made.
    """
    names = [
        str(value["name"]) for value, _ in documents if isinstance(value, Mapping) and value.get("name") is not None
    ]
    recipes = [_make(value, lines, folder, where, names, allow_code) for value, lines in documents]
    for recipe in recipes:
        recipe._file = file
    unnamed = [recipe for recipe in recipes if recipe.name is None]
    if len(unnamed) > 1:
        at = [lines.get((), 1) for (_, lines), recipe in zip(documents, recipes, strict=True) if recipe.name is None]
        raise InputError(f"{where}, line {at[1]}: a second recipe without a `name`; only one of them can be the result")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"{where}: two recipes have the name {twice[0]!r}")
    result = unnamed[0] if unnamed else recipes[-1]
    named = {str(recipe.name): recipe for recipe in recipes if recipe.name is not None}
    order: list[str] = []
    for recipe in (result, *recipes):
        _follow(recipe, named, [], order, where)
        if recipe is result:
            result._merges = {name: named[name] for name in order if named[name] is not result}
    idle = [name for name in named if name not in result._merges and named[name] is not result]
    if idle:
        result._notes.append(Note(f"{where}: not used, and not made: {', '.join(idle)}"))
    for one in result._merges.values():
        result._notes += [note for note in one._notes if note not in result._notes]
    return result


def _follow(recipe: Recipe, named: Mapping[str, Recipe], above: list[str], order: list[str], where: str) -> None:
    """Put the named recipes that a recipe needs into the order in which they have to be made."""
    if recipe.name is not None:
        if recipe.name in above:
            circle = " → ".join([*above[above.index(recipe.name) :], recipe.name])
            raise InputError(f"{where}: merges need one another in a circle: {circle}")
        above = [*above, recipe.name]
    for reference in recipe.references:
        if reference in named:
            _follow(named[reference], named, above, order, where)
            if reference not in order:
                order.append(reference)
        elif named and "/" not in reference and not _is_there(reference, recipe.folder):
            raise InputError(
                f"{where}: {reference}: there is no such folder here, and no merge of that name"
                f"{nearest(reference, named)}; named are {', '.join(named)}"
            )


def _is_there(reference: str, folder: Path) -> bool:
    if is_url(reference):
        return True
    try:
        return local_path(reference, folder).exists()
    except InputError:
        return False


def _make(value: Any, lines: Lines, folder: Path, where: str, names: Collection[str], allow_code: bool) -> Recipe:
    notes: list[Note] = []
    layers: dict[str, str] = {}
    if is_mergekit(value):

        def find(reference: str) -> str:
            """Where a model is: beside the recipe, or else in the working folder."""
            elsewhere = reference not in names and not _is_there(reference, folder) and _is_there(reference, Path())
            return str(Path(reference).expanduser().absolute()) if elsewhere else reference

        value, notes, layers = translate(YamlValue(dict(value), lines, where), find)
    recipe = _checked(value, folder, where, allow_code)
    recipe._notes, recipe._layers = notes, layers
    return recipe


def _checked(value: Any, folder: Path, where: str, allow_code: bool) -> Recipe:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a recipe is a mapping with method, base and models, not {type(value).__name__}")
    method = value.get("method")
    rule = None
    if is_rule_file(method):
        try:
            rule = load_rule(method, folder, allow_code=allow_code)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        value, method = {**value, "method": rule.name}, rule.name
    if method is not None and (not isinstance(method, str) or method not in METHODS):
        known = f"{nearest(str(method), METHODS)}\n  Known are {', '.join(METHODS)}."
        raise InputError(f"{where}: method: there is no method {str(method)[:60]!r}{known}")
    try:
        recipe = Recipe.model_validate(redact_urls(dict(value)))
        recipe._rule = rule
        _check_fit(recipe)
    except ValidationError as error:
        raise InputError(explain(error, where, Recipe)) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    recipe._folder = folder
    return recipe


def _check_fit(recipe: Recipe) -> None:
    """Weights and penalties that the method does not use are errors; the plan notes curvature that it does not use."""
    rule = recipe.rule
    if not recipe.models and not recipe.slices:
        raise InputError("models: is missing; name at least one")
    if recipe.models and recipe.slices:
        raise InputError("slices: stand instead of `models`; leave one of the two out")
    check_slices(recipe)
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
    several = {f"slices[{place}].models": len(part.models) for place, part in enumerate(recipe.slices)}
    for where, number in (several or {"models": len(recipe.models)}).items():
        if rule.only_one_model and number != 1:
            taken = "the base and " if "base" in needs else ""
            raise InputError(f"{where}: {rule.name} takes {taken}one model, not {number}")
    tokenizer = recipe.tokenizer
    if recipe.output.format == "adapter" and tokenizer is not None and (tokenizer.source != "base" or tokenizer.tokens):
        other = "an adapter has the vocabulary of its base"
        raise InputError(f"output.format: {other}; leave tokenizer out, or write a model")
    if recipe.output.curvature and rule.precision is None:
        have = ", ".join(r.name for r in METHODS.values() if r.precision)
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
