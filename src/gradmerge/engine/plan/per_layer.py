"""The weights and options of a merge, as a recipe gives them and as each tensor has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...checkpoints.layers.names import layer_stacks, place_of
from ...recipe import Case, Varying, leaves, spread_over_layers, value_at
from ...text import count


@dataclass(frozen=True)
class Numbers:
    """The weights and options for one tensor."""

    weights: list[float]
    base_weight: float | None
    options: dict[str, Any]

    @property
    def all_weights(self) -> list[float]:
        """The models', and the base's where it has one."""
        return self.weights if self.base_weight is None else [*self.weights, self.base_weight]


@dataclass(frozen=True)
class Stretch:
    """Weights and options as a recipe gives them, for a stretch of layers."""

    weights: Sequence[Varying]
    base_weight: Varying | None
    options: Mapping[str, Any]
    """A list where models differ in an option, with a value for each."""

    @property
    def values(self) -> list[Any]:
        """Everything that may vary over the layers."""
        options = [one for value in self.options.values() for one in (value if isinstance(value, list) else [value])]
        return [*self.weights, *([] if self.base_weight is None else [self.base_weight]), *options]

    def names_of(self, name: str) -> list[str]:
        """What filters are held against for a tensor of the result."""
        return [name]

    def at(self, name: str, position: float) -> Numbers:
        def own(value: Any) -> Any:
            return [own(one) for one in value] if isinstance(value, list) else value_at(value, name, position)

        base_weight = None if self.base_weight is None else own(self.base_weight)
        return Numbers(list(map(own, self.weights)), base_weight, {key: own(v) for key, v in self.options.items()})


class LayerSettings:
    """What the weights and options are for each tensor."""

    def __init__(self, stretches: Sequence[Stretch], place: Callable[[str], tuple[int, float]]) -> None:
        self._stretches = stretches
        self._place = place
        """The stretch that a tensor is in, and its position there from 0 (the first layer) to 1 (the last)."""
        self._varies = any(isinstance(value, tuple) for stretch in stretches for value in stretch.values)
        self._known: dict[tuple[str, float] | int, Numbers] = {}

    @classmethod
    def over(cls, names: Iterable[str], stretch: Stretch) -> LayerSettings:
        """One stretch over all layers of a model with these tensors."""
        stacks = layer_stacks(names)

        def place(name: str) -> tuple[int, float]:
            found = place_of(name, stacks)
            return 0, 0.0 if found is None else found[1] / max(1, stacks[found[0]] - 1)

        return cls([stretch], place)

    def changed(self, weights: Sequence[Varying] | None, options: Mapping[str, Any]) -> LayerSettings:
        """The same layers with other weights (None: these) and options."""
        stretches = [replace(one, weights=weights or one.weights, options=options) for one in self._stretches]
        return LayerSettings(stretches, self._place)

    def of(self, name: str) -> Numbers:
        """The weights and options for a tensor."""
        stretch, position = self._place(name) if self._varies or len(self._stretches) > 1 else (0, 0.0)
        key = (name, position) if self._varies else stretch
        if key not in self._known:
            self._known[key] = self._stretches[stretch].at(name, position)
        return self._known[key]

    def every(self, names: Iterable[str]) -> list[Numbers]:
        """Those that differ, each once."""
        found = {id(numbers): numbers for numbers in map(self.of, names)}.values()
        return list({repr(numbers): numbers for numbers in found}.values())

    def notes(self, names: Sequence[str]) -> list[str]:
        """What a user may not expect of values that vary."""
        notes = []
        values = [value for stretch in self._stretches for value in stretch.values]
        cases = [item for value in values if isinstance(value, tuple) for item in value if isinstance(item, Case)]
        filtered = (
            {one for stretch in self._stretches for name in names for one in stretch.names_of(name)} if cases else ()
        )
        for filter_ in dict.fromkeys(case.filter for case in cases):
            if not any(Case(filter=filter_, value=0.0).fits(name) for name in filtered):
                notes.append(f"filter: {filter_!r} fits no tensor that is merged")
        if any(map(spread_over_layers, values)):
            stacks = layer_stacks(names)
            outside = [name for name in names if place_of(name, stacks) is None]
            if outside:
                some = f"{outside[0]} and {count(len(outside) - 1)} more" if len(outside) > 1 else outside[0]
                notes.append(f"outside the layers, and given the first value of a list over the layers: {some}")
        return notes


def varies(value: Any) -> bool:
    """Whether an option differs between tensors."""
    return any(map(varies, value)) if isinstance(value, list) else isinstance(value, tuple)


def smallest(values: Iterable[Any]) -> float:
    """The smallest number in some that may vary."""
    return float(min(leaf for value in values for leaf in leaves(value)))
