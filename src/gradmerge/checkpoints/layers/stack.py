"""Layers of several models stacked into one: a checkpoint that reads each layer where it comes from."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...errors import InputError
from ...notes import Kind, Note
from ..checkpoint import Buffers, Checkpoint, View
from ..compat.compare import Comparison, compare, is_buffer
from ..compat.tied_weights import same_values, tied_to
from .config import config_of_layers, main_stack, per_layer
from .names import is_before_layers, layer_of

Signature = Mapping[str, tuple[int, ...]]
"""The tensors of a layer: what follows its number in their names → shape."""


@dataclass(frozen=True)
class LayerRange:
    """Layers ``first`` to ``stop`` (one past the last) of a model, and where the recipe says so."""

    checkpoint: Checkpoint
    first: int
    stop: int
    where: str

    def __post_init__(self) -> None:
        wanted = f"{self.where}: layers [{self.first}, {self.stop}]"
        if not 0 <= self.first < self.stop:
            raise InputError(f"{wanted} are none: give the first, counted from 0, and one past the last")
        if self.stop > (count := main_stack(self.checkpoint)[1]):
            raise InputError(
                f"{wanted} are more than {self.checkpoint.label} has: {count}, from 0 to {count - 1}, so that the "
                f"second number is at most {count}"
            )

    def __len__(self) -> int:
        return self.stop - self.first


class StackedCheckpoint(View):
    """The layers of some ranges one after the other, numbered anew.

    What comes before the layers, as embeddings do, is that of the first range's model, and what comes after, as heads
    do, that of the last. Config, tokenizer and folder are those of ``front``, but for what the config says of layers.
    """

    kind = "stacked layers"

    def __init__(self, ranges: Sequence[LayerRange], front: Checkpoint, left_out: Container[int] = ()) -> None:
        """``left_out`` are places of ranges that only hold a place: their tensors are merged without this model."""
        super().__init__(front)
        self.kind = StackedCheckpoint.kind
        self.front = front
        self.ranges = list(ranges)
        self.parts = list(dict.fromkeys(p.checkpoint for i, p in enumerate(ranges) if i not in left_out))
        self.label = ", ".join(dict.fromkeys(part.label for part in self.parts))
        self.hub_id = self.parts[0].hub_id if len(self.parts) == 1 else None
        self.notes = []
        self.layers = [(part.checkpoint, number) for part in ranges for number in range(part.first, part.stop)]
        """The model of each layer, and its number there."""
        self.config, notes = config_of_layers(front, self.layers)
        self.places: dict[str, tuple[Checkpoint, str]] = dict(self._places_of(self.layers))
        """Tensor → the model that it is read from, and its name there."""
        range_of = self._range_of if left_out else lambda name: -1
        self.absent = frozenset(name for name in self.places if range_of(name) in left_out)
        self.places = {name: place for name, place in self.places.items() if name not in self.absent}
        self.tensors = {name: checkpoint.tensors[stored] for name, (checkpoint, stored) in self.places.items()}
        self.notes += [note for part in dict.fromkeys((front, *self.parts)) for note in part.notes] + notes

    def _places_of(self, layers: Sequence[tuple[Checkpoint, int]]) -> Iterator[tuple[str, tuple[Checkpoint, str]]]:
        first, last = layers[0][0], layers[-1][0]
        for name in _outside(first):
            if is_before_layers(name, main_stack(first)[0]):
                yield name, (first, name)
        names = {checkpoint: _by_layer(checkpoint) for checkpoint in dict.fromkeys(part for part, _ in layers)}
        for number, (checkpoint, own) in enumerate(layers):
            prefix = main_stack(checkpoint)[0]
            for rest in names[checkpoint].get(own, ()):
                yield f"{prefix}{number}.{rest}", (checkpoint, f"{prefix}{own}.{rest}")
        for name in _outside(last):
            if not is_before_layers(name, main_stack(last)[0]) and not self._is_tied_copy(name, first, last):
                yield name, (last, name)

    def _range_of(self, name: str) -> int:
        """Which range a tensor comes from."""
        stack = main_stack(self.front)[0]
        layer = layer_of(name, [stack])
        if layer is None:
            return 0 if is_before_layers(name, stack) else len(self.ranges) - 1
        return [i for i, part in enumerate(self.ranges) for _ in range(len(part))][layer]

    def _is_tied_copy(self, name: str, first: Checkpoint, last: Checkpoint) -> bool:
        """Whether a head is a copy of the last model's embedding; the result has that of the first as its head."""
        tied = tied_to(name, last) if self.front.config else None
        if tied is None or not same_values(last, name, tied):
            return False
        if first is not last:
            head = f"{name} of {last.label} is its embedding"
            self.notes.append(f"{head}; the result's, which is tied as well, is that of {first.label}")
        return True

    def misplaced(self) -> list[str]:
        """Layers that are not what models of this kind have in their place.

        Some kinds have tensors, or widths, in some layers alone. Either the config says in which, and follows them, or
        the number of a layer decides.
        """
        own = _signatures(self.front)
        lists = per_layer(self.front.config, len(own)) if any(one != own[0] for one in own) else {}
        kinds: dict[str, Signature] = {}
        said = [repr([values[number] for values in lists.values()]) for number in range(len(own))]
        follow = all(kinds.setdefault(kind, one) == one for kind, one in zip(said, own, strict=True))
        changes = sum(one != other for one, other in itertools.pairwise(own))
        signatures = {part: _signatures(part) for part, _ in self.layers}
        found = []
        for number, (part, place) in enumerate(self.layers):
            expected = own if follow else own[number : number + 1] or (own[-1:] if changes == 1 else [])
            if signatures[part][place] not in expected:
                found.append(f"layer {number} of the result would be layer {place} of {part.label}")
        return found

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        checkpoint, stored = self.places[name]
        return checkpoint.read(stored, start, stop, buffers, slot)

    def will_need(self, name: str) -> None:
        if name in self.places:
            checkpoint, stored = self.places[name]
            checkpoint.will_need(stored)

    def files(self) -> list[Path]:
        return list(dict.fromkeys(path for part in self.parts for path in part.files()))

    def close(self) -> None:
        for part in (self.front, *self.parts):
            part.close()


def _outside(checkpoint: Checkpoint) -> list[str]:
    """The tensors outside the layers."""
    stack = [main_stack(checkpoint)[0]]
    return [name for name in checkpoint.tensors if layer_of(name, stack) is None]


def _by_layer(checkpoint: Checkpoint) -> dict[int, list[str]]:
    """Layer → what follows its number in the names of its tensors, in the order of the file."""
    prefix = main_stack(checkpoint)[0]
    found: dict[int, list[str]] = {}
    for name in checkpoint.tensors:
        number = layer_of(name, [prefix])
        if number is not None:
            found.setdefault(number, []).append(name[len(f"{prefix}{number}.") :])
    return found


def _signatures(checkpoint: Checkpoint) -> list[Signature]:
    prefix, count = main_stack(checkpoint)
    names, tensors = _by_layer(checkpoint), checkpoint.tensors
    return [
        {
            rest: tensors[name].shape
            for rest in sorted(names.get(number, ()))
            if not is_buffer(name := f"{prefix}{number}.{rest}", tensors[name])
        }
        for number in range(count)
    ]


class _Outline(View):
    """A model with one layer of each kind: what models of different numbers of layers have in common."""

    def __init__(self, inner: Checkpoint, layers: Mapping[int, int], config: Mapping[str, object]) -> None:
        prefix = main_stack(inner)[0]
        names = _by_layer(inner)
        stored = {name: name for name in _outside(inner)}
        for number, own in layers.items():
            stored |= {f"{prefix}{number}.{rest}": f"{prefix}{own}.{rest}" for rest in names[own]}
        super().__init__(inner, stored)
        self.config = dict(config)


def compare_parts(
    stacked: Sequence[StackedCheckpoint],
    exclude: Sequence[str],
    allow_config: Sequence[str],
    resolved_keys: Sequence[str] = (),
) -> Comparison:
    """Whether the models that layers are taken from fit together, all but the number of their layers."""
    front = stacked[0].front
    parts = [part for part in dict.fromkeys(p for one in stacked for p in one.parts) if part is not front]
    outlines = [_outline(part) for part in parts]
    compared = compare(
        _outline(front), outlines, exclude=exclude, allow_config=allow_config, resolved_keys=resolved_keys
    )
    # What merges the layers, and how far they are from one another, is seen when the stacks are compared.
    strange = [n for n in compared.notes if isinstance(n, Note) and n.kind is Kind.STRANGERS]
    compared.notes = [n for n in compared.notes if not n.startswith("exclude:") and n not in strange]
    if not compared.problems:
        for one in stacked:
            what = f"layers of {front.label} differ in their tensors, and these are not what it has in their place"
            compared.refuse(one.misplaced(), what)
    return compared


def _outline(checkpoint: Checkpoint) -> _Outline:
    kinds: dict[str, int] = {}
    for number, signature in enumerate(_signatures(checkpoint)):
        kinds.setdefault(repr(list(signature)), number)
    layers = dict(enumerate(kinds.values()))
    config, _ = config_of_layers(checkpoint, [(checkpoint, number) for number in layers.values()])
    return _Outline(checkpoint, layers, config)
