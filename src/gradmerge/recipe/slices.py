"""Check the key `slices` of a recipe, and resolve the options of each slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .method import check_options
from .schedules import Case

if TYPE_CHECKING:
    from .schema import Recipe

MAX_LAYERS = 1000


def options_of_slices(recipe: Recipe) -> list[dict[str, Any]]:
    """Return the options of each slice, including those of the recipe and defaults."""
    options = []
    for number, part in enumerate(recipe.slices):
        where = f"slices[{number}].models[{{}}].options"
        try:
            shared = {**recipe.options, **part.options}
            options.append(check_options(recipe.rule, shared, [model.options for model in part.models], where))
        except InputError as error:
            in_slice = part.options and str(error).startswith("options")
            raise InputError(f"slices[{number}].{error}" if in_slice else str(error)) from None
    return options


def options_in_common(recipe: Recipe) -> dict[str, Any]:
    """Return the options of a recipe with slices. An option that differs between slices has one case per slice."""
    options = options_of_slices(recipe)
    common = dict(options[0])
    for name, first in common.items():
        values = [own[name] for own in options]
        if all(value == first for value in values):
            continue
        if name == "scope":  # thresholds are computed over all slices
            raise InputError(f"slices: options.{name} differs between slices. Set it once, in `options` of the recipe")
        common[name] = tuple(Case(filter=f"slices[{i}]", value=value) for i, value in enumerate(values))
    return common


def slice_lengths(recipe: Recipe) -> list[int]:
    """Return the number of layers of each slice."""
    return [part.models[0].layers[1] - part.models[0].layers[0] for part in recipe.slices]


def check_slices(recipe: Recipe) -> None:
    """Raise an error if the layers or models of slices are inconsistent."""
    lengths = slice_lengths(recipe)
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
    if sum(lengths) > MAX_LAYERS:
        raise InputError(f"slices: {sum(lengths)} layers; at most {MAX_LAYERS} are possible")
    counts = [len(part.models) for part in recipe.slices]
    if len(set(counts)) > 1 and options_in_common(recipe).get("scope") == "model":
        number = next(i for i, count in enumerate(counts) if count != counts[0])
        raise InputError(
            f"slices: slices[0] merges {counts[0]} and slices[{number}] {counts[number]} models, but `scope: model` "
            "needs each model in all slices. Set `scope: tensor`"
        )
    if recipe.slices and recipe.output.format == "adapter":
        raise InputError("output.format: an adapter cannot have other layers than its base; write a model")
