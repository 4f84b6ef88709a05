"""A recipe in slices as the engine sees it: as many models as each slice merges, every one a stack of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoints.checkpoint import Checkpoint
from ...checkpoints.compat.compare import Comparison
from ...checkpoints.layers.config import main_stack
from ...checkpoints.layers.names import is_before_layers, layer_of
from ...checkpoints.layers.stack import LayerRange, StackedCheckpoint, compare_parts
from ...errors import InputError
from ...recipe import Base, Model, Recipe, value_at
from ...recipe.slices import options_of_slices
from .per_layer import LayerSettings, Stretch, TensorSettings, varies

CURVATURE = frozenset({"prior", "curvature", "penalty", "grams"})


def opened_once(recipe: Recipe, base: Checkpoint | None, opened: Callable[[Model], Checkpoint]) -> list[Checkpoint]:
    """A checkpoint for each of the recipe's sources, opened once however many slices name it."""
    known = {} if recipe.base is None or base is None else {_reference(recipe.base): base}
    for model in recipe.sources:
        if _reference(model) not in known:
            known[_reference(model)] = opened(model)
    return [known[_reference(model)] for model in recipe.sources]


def stacked_models(
    recipe: Recipe, base: Checkpoint | None, opened: Sequence[Checkpoint], needs: frozenset[str]
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """The base and the models of a recipe in slices, from what is ``opened`` for each of its sources.

    A base that the method does not read only gives config and tokenizer.
    """
    if needs & CURVATURE:
        raise InputError(f"slices: {recipe.method} needs curvature, which slices do not cut; give `models` instead")
    left = iter(opened)
    sources = [[next(left) for _ in part.models] for part in recipe.slices]
    front = sources[0][0] if base is None else base
    stacks = []
    for place in range(max(len(part.models) for part in recipe.slices)):
        left_out = {number for number, part in enumerate(recipe.slices) if len(part.models) <= place}
        ranges = []
        for number, part in enumerate(recipe.slices):
            own = 0 if number in left_out else place
            where = recipe.where(f"slices[{number}].models[{own}].layers")
            ranges.append(LayerRange(sources[number][own], *part.models[own].layers, where))
        stacks.append(StackedCheckpoint(ranges, front, left_out))
    without_weight = "base_weight" in needs and (recipe.base is None or recipe.base.weight is None)
    idle = "base" not in needs or (without_weight and "base" in recipe.rule.optional)
    if base is None or (idle and all(part.base is None for part in recipe.slices)):
        return None, [*stacks]
    below = [
        LayerRange(base, *(part.base or part.models[0].layers), recipe.where(f"slices[{number}].base"))
        for number, part in enumerate(recipe.slices)
    ]
    return StackedCheckpoint(below, base), [*stacks]


def compared_parts(
    checkpoints: Sequence[Checkpoint],
    exclude: Sequence[str],
    allow_config: Sequence[str],
    resolved_keys: Sequence[str] = (),
) -> list[str]:
    """Notes on the models that layers are taken from; refused if these do not fit together."""
    stacks = [checkpoint for checkpoint in checkpoints if isinstance(checkpoint, StackedCheckpoint)]
    found = compare_parts(stacks, exclude, allow_config, resolved_keys) if stacks else Comparison()
    if found.problems:
        raise InputError("these cannot be merged:\n" + "\n".join(f"• {problem}" for problem in found.problems))
    return found.notes


def stacked_notes(notes: Sequence[str], on_parts: Sequence[str]) -> list[str]:
    """Notes on stacks with those on the models that they are made of, whose configs are those that may differ."""
    return [note for note in notes if not note.startswith("--allow-config")] + list(on_parts)


def _reference(part: Base | Model) -> str:
    """What tells models apart."""
    return repr((part.model, part.adapter, part.rename))


@dataclass(frozen=True)
class SliceStretch(Stretch):
    """A slice. Filters of what each model has of its own are held against the names in that model."""

    stacks: Sequence[Checkpoint] = ()
    own: frozenset[str] = frozenset()
    """Options that may differ between models."""

    def names_of(self, name: str) -> list[str]:
        return [name, *map(self._stored(name), self.stacks)]

    def _stored(self, name: str) -> Callable[[Checkpoint], str]:
        return lambda stack: stack.places.get(name, (stack, name))[1] if isinstance(stack, StackedCheckpoint) else name

    def at(self, name: str, position: float) -> TensorSettings:
        names = self.names_of(name)[1:]

        def each(values: Any) -> list[Any]:
            values = values if isinstance(values, list) else [values] * len(names)
            return [value_at(value, stored, position) for value, stored in zip(values, names, strict=True)]

        common = super().at(name, position)
        own = {key: each(value) for key, value in self.options.items() if key in self.own and varies(value)}
        return replace(common, weights=each(list(self.weights)), options=common.options | own)


def settings_of_slices(recipe: Recipe, template: Checkpoint, tuned: Sequence[Checkpoint]) -> LayerSettings:
    """The weights and options of each slice, for its own layers.

    Tensors before the layers have those of the first slice, and tensors after them those of the last, each with the
    first value of a list.
    """
    base_weight = None if recipe.base is None else recipe.base.weight
    options = options_of_slices(recipe)
    per_model = frozenset(option.name for option in recipe.rule.options if option.help.per_model)
    stretches = [
        SliceStretch(
            [model.weight for model in part.models], base_weight, own, list(tuned[: len(part.models)]), per_model
        )
        for part, own in zip(recipe.slices, options, strict=True)
    ]
    stack = main_stack(template)[0]
    places = [
        (number, layer / (length - 1) if length > 1 else 1.0)
        for number, length in enumerate(lengths(recipe))
        for layer in range(length)
    ]

    def place(name: str) -> tuple[int, float]:
        layer = layer_of(name, [stack])
        if layer is not None:
            return places[layer]
        return (0 if is_before_layers(name, stack) else len(stretches) - 1), 0.0

    return LayerSettings(stretches, place)


def lengths(recipe: Recipe) -> list[int]:
    """The number of layers of each slice."""
    return [part.models[0].layers[1] - part.models[0].layers[0] for part in recipe.slices]


def layer_table(recipe: Recipe) -> list[dict[str, Any]]:
    """Which layers of the result come from where, slice by slice: ranges of the first and one past the last."""
    rows: list[dict[str, Any]] = []
    first = 0
    base = recipe.base if "base" in recipe.rule.needs(recipe.resolved_options) else None
    for part, length in zip(recipe.slices, lengths(recipe), strict=True):
        row: dict[str, Any] = {"layers": [first, first + length]}
        row["from"] = [{"model": model.model, "layers": list(model.layers)} for model in part.models]
        if base is not None:
            row["base"] = {"model": base.model, "layers": list(part.base or part.models[0].layers)}
        rows.append(row)
        first += length
    return rows
