"""The weights and options of a merge, for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.layers import StackedCheckpoint, find_layer, layer_stacks
from ..recipe import Case, Varying, leaves, value_at


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
