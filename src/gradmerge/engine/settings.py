"""The weights and options of a merge for each tensor, and the models of recipes with slices as stacks of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.layers import (
    Layer,
    StackedCheckpoint,
    find_layer,
    is_before_layers,
    layer_of,
    layer_stack,
    layer_stacks,
)
from ..errors import InputError
from ..recipe import Case, Recipe, Varying, leaves, value_at

CURVATURE = frozenset({"prior", "curvature", "penalty", "grams"})


@dataclass(frozen=True)
class TensorSettings:
    """The weights and options for one tensor."""

    weights: list[float]
    base_weight: float | None
    options: dict[str, Any]

    @property
    def all_weights(self) -> list[float]:
        """The weights of the models, and of the base if it has one."""
        return self.weights if self.base_weight is None else [*self.weights, self.base_weight]


@dataclass(frozen=True)
class LayerRange:
    """The weights and options of a recipe for some consecutive layers; they may vary between these."""

    weights: Sequence[Varying]
    base_weight: Varying | None
    options: Mapping[str, Any]
    """A list where models have different values."""
    stacks: Sequence[Checkpoint] = ()
    """The models of a slice. Filters of their values are compared with the names of the tensors that they stack."""
    per_model: frozenset[str] = frozenset()
    """Options of slices that may differ between models."""

    @property
    def values(self) -> list[Any]:
        """All values that may vary between tensors."""
        options = [v for value in self.options.values() for v in (value if isinstance(value, list) else [value])]
        return [*self.weights, *([] if self.base_weight is None else [self.base_weight]), *options]

    def names_of(self, name: str) -> list[str]:
        """Return the names of a tensor of the result in the models, with which filters are compared."""
        if not self.stacks:
            return [name] * len(self.weights)
        sources = (stack.sources.get(name) if isinstance(stack, StackedCheckpoint) else None for stack in self.stacks)
        return [name if source is None else source[1] for source in sources]

    def at(self, name: str, position: float) -> TensorSettings:
        """Return the settings of a tensor at a position from 0 (first layer) to 1 (last layer)."""
        names = self.names_of(name)

        def resolve(value: Any) -> Any:
            if isinstance(value, list):
                return [value_at(item, stored, position) for item, stored in zip(value, names, strict=True)]
            return value_at(value, name, position)

        options = {
            key: resolve([value] * len(names) if key in self.per_model and isinstance(value, tuple) else value)
            for key, value in self.options.items()
        }
        base_weight = None if self.base_weight is None else resolve(self.base_weight)
        return TensorSettings(resolve(list(self.weights)), base_weight, options)


class LayerSettings:
    """The weights and options of every tensor."""

    def __init__(self, ranges: Sequence[LayerRange], locate: Callable[[str], tuple[int, float]]) -> None:
        self._ranges = ranges
        self._locate = locate
        """Tensor → (number of its range, position in it)."""
        self._varies = any(isinstance(value, tuple) for range_ in ranges for value in range_.values)
        self._known: dict[tuple[str, float] | int, TensorSettings] = {}

    @classmethod
    def over(cls, names: Iterable[str], range_: LayerRange) -> LayerSettings:
        """Return one range over all layers of a model with these tensors."""
        stacks = layer_stacks(names)

        def locate(name: str) -> tuple[int, float]:
            layer = find_layer(name, stacks)
            return 0, 0.0 if layer is None else layer[1] / max(1, stacks[layer[0]] - 1)

        return cls([range_], locate)

    def changed(self, weights: Sequence[Varying] | None, options: Mapping[str, Any]) -> LayerSettings:
        """Return settings of the same layers with other weights (None: the same) and options."""
        ranges = [replace(old, weights=weights or old.weights, options=options) for old in self._ranges]
        return LayerSettings(ranges, self._locate)

    def of(self, name: str) -> TensorSettings:
        """Return the weights and options of a tensor."""
        range_, position = self._locate(name) if self._varies or len(self._ranges) > 1 else (0, 0.0)
        key = (name, position) if self._varies else range_
        if key not in self._known:
            self._known[key] = self._ranges[range_].at(name, position)
        return self._known[key]

    def distinct(self, names: Iterable[str]) -> list[TensorSettings]:
        """Return the different settings of some tensors."""
        settings = {id(some): some for some in map(self.of, names)}.values()
        return list({repr(some): some for some in settings}.values())

    def notes(self, names: Sequence[str]) -> list[str]:
        """Return a note for each filter that matches nothing."""
        values = [value for range_ in self._ranges for value in range_.values]
        cases = [item for value in values if isinstance(value, tuple) for item in value if isinstance(item, Case)]
        filtered = {n for range_ in self._ranges for name in names for n in (name, *range_.names_of(name))}
        filters = dict.fromkeys(case.filter for case in cases)
        unused = [f for f in filters if not any(Case(filter=f, value=0.0).fits(name) for name in filtered)]
        return [f"filter: {filter_!r} matches no tensor that is merged" for filter_ in unused]


def varies(value: Any) -> bool:
    """Return whether an option differs between tensors."""
    return any(map(varies, value)) if isinstance(value, list) else isinstance(value, tuple)


def smallest(values: Iterable[Any]) -> float:
    """Return the smallest number in values that may vary."""
    return float(min(leaf for value in values for leaf in leaves(value)))


# Slices


def stacked_models(
    recipe: Recipe, base: Checkpoint | None, sources: Sequence[Checkpoint], needs: frozenset[str]
) -> tuple[Checkpoint | None, list[Checkpoint]]:
    """Return the base and the models of a recipe with slices, each a stack of layers.

    The first stack has the first model of each slice, and so on; a slice with fewer models is left out of the others.
    A base that the method does not read only gives config and tokenizer.

    Args:
        recipe: The recipe.
        base: The opened base.
        sources: The models of all slices, in the order of the recipe.
        needs: Inputs that the method reads.
    """
    if needs & CURVATURE:
        raise InputError(f"slices: {recipe.method} needs curvature, which cannot be cut into slices; use `models`")
    remaining = iter(sources)
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
    for part, options in zip(recipe.slices, recipe.options_of_slices, strict=True):
        weights = [model.weight for model in part.models]
        ranges.append(LayerRange(weights, base_weight, options, list(tuned[: len(weights)]), per_model))
    prefix = layer_stack(template).prefix
    positions = [
        (number, layer / (length - 1) if length > 1 else 1.0)
        for number, length in enumerate(recipe.slice_lengths)
        for layer in range(length)
    ]

    def locate(name: str) -> tuple[int, float]:
        layer = layer_of(name, [prefix])
        if layer is not None:
            return positions[layer]
        return (0 if is_before_layers(name, prefix) else len(ranges) - 1), 0.0

    return LayerSettings(ranges, locate)
