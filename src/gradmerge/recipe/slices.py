"""What of a recipe in slices can be checked before any model is opened, and the options of each slice."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import InputError
from .rule_options import check_options
from .schedules import Case

if TYPE_CHECKING:
    from .schema import Recipe

#: More layers than any model has.
MOST_LAYERS = 1000


def options_of_slices(recipe: Recipe) -> list[dict[str, Any]]:
    """The options of every slice, with those of the recipe and defaults filled in."""
    found = []
    for place, part in enumerate(recipe.slices):
        own = [model.options for model in part.models]
        where = f"slices[{place}].models[{{}}].options"
        try:
            found.append(check_options(recipe.rule, {**recipe.options, **part.options}, own, where))
        except InputError as error:
            here = f"slices[{place}]." if part.options and str(error).startswith("options") else ""
            raise InputError(f"{here}{error}") from None
    return found


def options_in_common(recipe: Recipe) -> dict[str, Any]:
    """The options of a recipe in slices; where they differ in one, a case for each of them."""
    each = options_of_slices(recipe)
    common = dict(each[0])
    for name in common:
        values = [options[name] for options in each]
        if all(value == values[0] for value in values):
            continue
        if name == "scope":  # of what is measured over all of them
            raise InputError(f"slices: options.{name} is not the same in all of them; give it once, for the recipe")
        common[name] = tuple(Case(filter=f"slices[{place}]", value=value) for place, value in enumerate(values))
    return common


def check_slices(recipe: Recipe) -> None:
    """Layers that are none, and slices whose models do not fit together."""
    for place, part in enumerate(recipe.slices):
        ranges = [(f"slices[{place}].models[{i}].layers", model.layers) for i, model in enumerate(part.models)]
        if part.base is not None:
            if recipe.base is None:
                raise InputError(f"slices[{place}].base: these are layers of the base, but the recipe has no base")
            ranges.append((f"slices[{place}].base", part.base))
        for where, (first, stop) in ranges:
            if not 0 <= first < stop:
                none = "are none: give the first, counted from 0, and one past the last"
                raise InputError(f"{where}: layers [{first}, {stop}] {none}")
            if stop - first != (expected := part.models[0].layers[1] - part.models[0].layers[0]):
                given = f"{stop - first} layers, but slices[{place}].models[0] gives {expected}"
                raise InputError(f"{where}: gives {given}; all models of a slice give as many")
    total = sum(part.models[0].layers[1] - part.models[0].layers[0] for part in recipe.slices)
    if total > MOST_LAYERS:
        raise InputError(f"slices: make a model of {total} layers; {MOST_LAYERS} is the limit")
    several = [len(part.models) for part in recipe.slices]
    if len(set(several)) > 1 and options_in_common(recipe).get("scope") == "model":
        place = next(i for i, number in enumerate(several) if number != several[0])
        raise InputError(
            f"slices: slices[0] merges {several[0]} and slices[{place}] {several[place]} models, but `scope: model` "
            "finds a threshold for each over all tensors. Set `scope: tensor`, or let all slices merge as many"
        )
    if recipe.slices and recipe.output.format == "adapter":
        raise InputError("output.format: layers in slices make another model than the base, which no adapter can")
