"""Open the models of a recipe with slices as stacks of layers, and resolve the settings of each slice."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.layers import Layer, StackedCheckpoint, is_before_layers, layer_of, layer_stack
from ..errors import InputError
from ..recipe import Base, Model, Recipe
from ..recipe.slices import options_of_slices, slice_lengths
from .settings import LayerRange, LayerSettings

CURVATURE = frozenset({"prior", "curvature", "penalty", "grams"})


def opened_once(recipe: Recipe, base: Checkpoint | None, open_model: Callable[[Model], Checkpoint]) -> list[Checkpoint]:
    """Return a checkpoint for each source of the slices; a model in several slices is opened once."""

    def key(part: Base | Model) -> str:
        return repr((part.model, part.adapter, part.rename))

    known = {} if recipe.base is None or base is None else {key(recipe.base): base}
    for model in recipe.sources:
        if key(model) not in known:
            known[key(model)] = open_model(model)
    return [known[key(model)] for model in recipe.sources]


def stacked_models(
    recipe: Recipe, base: Checkpoint | None, opened: Sequence[Checkpoint], needs: frozenset[str]
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """Return the base and the models of a recipe with slices, each a stack of layers.

    The first stack has the first model of each slice, and so on; a slice with fewer models is left out of the others.
    A base that the method does not read only gives config and tokenizer.

    Args:
        recipe: The recipe.
        base: The opened base.
        opened: The checkpoint of each source, in the order of the recipe.
        needs: Inputs that the method reads.
    """
    if needs & CURVATURE:
        raise InputError(f"slices: {recipe.method} needs curvature, which cannot be cut into slices; use `models`")
    remaining = iter(opened)
    slices = [
        [
            _layers(next(remaining), model.layers, f"slices[{i}].models[{j}].layers")
            for j, model in enumerate(part.models)
        ]
        for i, part in enumerate(recipe.slices)
    ]
    front = slices[0][0][0][0] if base is None else base
    stacks: list[Checkpoint] = []
    for number in range(max(map(len, slices))):
        layers: list[Layer] = []
        left_out: set[int] = set()
        for models in slices:
            if number >= len(models):
                left_out |= set(range(len(layers), len(layers) + len(models[0])))
            layers += models[number] if number < len(models) else models[0]
        stacks.append(StackedCheckpoint(layers, front, left_out))
    if base is None or not reads_base(recipe, needs):
        return None, stacks
    layers = []
    for i, part in enumerate(recipe.slices):
        layers += _layers(base, part.base or part.models[0].layers, f"slices[{i}].base")
    return StackedCheckpoint(layers, base), stacks


def _layers(checkpoint: Checkpoint, layers: tuple[int, int], where: str) -> list[Layer]:
    """Return the layers of a range, which is ``where`` in the recipe."""
    count = len(layer_stack(checkpoint).layers)
    first, stop = layers
    if not 0 <= first < stop <= count:
        raise InputError(
            f"{where}: layers [{first}, {stop}] do not exist in {checkpoint.label}, which has {count}. Give the first, "
            f"counted from 0, and one past the last (at most {count})"
        )
    return [(checkpoint, number) for number in range(first, stop)]


def reads_base(recipe: Recipe, needs: frozenset[str]) -> bool:
    """Return whether a recipe with slices merges layers of the base."""
    has_weight = recipe.base is not None and recipe.base.weight is not None
    optional = "base" in recipe.rule.optional and "base_weight" in needs and not has_weight
    return ("base" in needs and not optional) or any(part.base is not None for part in recipe.slices)


def settings_of_slices(recipe: Recipe, template: Checkpoint, tuned: Sequence[Checkpoint]) -> LayerSettings:
    """Return the weights and options of each slice.

    Tensors before the layers have the settings of the first slice, tensors after them those of the last. They take the
    first value of a list.
    """
    base_weight = None if recipe.base is None else recipe.base.weight
    per_model = frozenset(option.name for option in recipe.rule.options if option.help.per_model)
    ranges = []
    for part, options in zip(recipe.slices, options_of_slices(recipe), strict=True):
        weights = [model.weight for model in part.models]
        ranges.append(LayerRange(weights, base_weight, options, list(tuned[: len(weights)]), per_model))
    prefix = layer_stack(template).prefix
    positions = [
        (number, layer / (length - 1) if length > 1 else 1.0)
        for number, length in enumerate(slice_lengths(recipe))
        for layer in range(length)
    ]

    def locate(name: str) -> tuple[int, float]:
        layer = layer_of(name, [prefix])
        if layer is not None:
            return positions[layer]
        return (0 if is_before_layers(name, prefix) else len(ranges) - 1), 0.0

    return LayerSettings(ranges, locate)
