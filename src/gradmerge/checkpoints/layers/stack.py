"""Stack layers of several models: a checkpoint that reads each layer from its model."""

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
from .config import config_of_layers, layer_stack, per_layer

Signature = Mapping[str, tuple[int, ...]]
"""The tensors of a layer: name after the layer's number → shape."""


@dataclass(frozen=True)
class LayerRange:
    """Layers ``first`` to ``stop`` (exclusive) of a model; ``where`` is their key in the recipe."""

    checkpoint: Checkpoint
    first: int
    stop: int
    where: str

    def __post_init__(self) -> None:
        count = len(layer_stack(self.checkpoint).layers)
        if not 0 <= self.first < self.stop <= count:
            raise InputError(
                f"{self.where}: layers [{self.first}, {self.stop}] do not exist in {self.checkpoint.label}, which has "
                f"{count}. Give the first, counted from 0, and one past the last (at most {count})"
            )


class StackedCheckpoint(View):
    """The layers of several ranges one after the other, with new numbers.

    Embeddings and other tensors before the layers come from the model of the first range, heads and other tensors after
    the layers from that of the last. Config, tokenizer and folder are those of ``front``.

    Args:
        ranges: The layers.
        front: The model that gives config and tokenizer.
        left_out: Numbers of ranges whose tensors are merged without this model.
    """

    kind = "stacked layers"

    def __init__(self, ranges: Sequence[LayerRange], front: Checkpoint, left_out: Container[int] = ()) -> None:
        super().__init__(front)
        self.kind = StackedCheckpoint.kind
        self.front = front
        self.parts = list(dict.fromkeys(part.checkpoint for i, part in enumerate(ranges) if i not in left_out))
        self.label = ", ".join(dict.fromkeys(part.label for part in self.parts))
        self.hub_id = self.parts[0].hub_id if len(self.parts) == 1 else None
        self.notes = [note for part in dict.fromkeys((front, *self.parts)) for note in part.notes]
        self.layers = [(part.checkpoint, number) for part in ranges for number in range(part.first, part.stop)]
        """(model, number of its layer) for each layer."""
        self.config, notes = config_of_layers(front, self.layers)
        sources = dict(self._sources(ranges))
        self.absent = frozenset(name for name, (number, _, _) in sources.items() if number in left_out)
        self.places = {name: source[1:] for name, source in sources.items() if name not in self.absent}
        """Tensor → (the model that it is read from, its name there)."""
        self.tensors = {name: model.tensors[stored] for name, (model, stored) in self.places.items()}
        self.notes += notes

    def _sources(self, ranges: Sequence[LayerRange]) -> Iterator[tuple[str, tuple[int, Checkpoint, str]]]:
        """Yield tensor → (number of its range, model, name in the model)."""
        first, last = ranges[0].checkpoint, ranges[-1].checkpoint
        for name in layer_stack(first).before:
            yield name, (0, first, name)
        new = itertools.count()
        for i, part in enumerate(ranges):
            stack = layer_stack(part.checkpoint)
            for number in range(part.first, part.stop):
                prefix = f"{stack.prefix}{next(new)}."
                for rest in stack.layers[number]:
                    yield prefix + rest, (i, part.checkpoint, f"{stack.prefix}{number}.{rest}")
        for name in layer_stack(last).after:
            if not self._is_embedding(name, first, last):
                yield name, (len(ranges) - 1, last, name)

    def _is_embedding(self, name: str, first: Checkpoint, last: Checkpoint) -> bool:
        """Return whether a stored head is a copy of the embedding; the result then ties it to its own embedding."""
        embedding = tied_to(name, last) if self.front.config else None
        if embedding is None or not same_values(last, name, embedding):
            return False
        if first is not last:
            self.notes.append(
                f"{name} of {last.label} is its embedding; the result ties its head to the embedding of {first.label}"
            )
        return True

    def misplaced(self) -> list[str]:
        """Return the layers whose tensors are not those of a layer at that number in ``front``.

        In some models only some layers have certain tensors or widths. If the config describes which ones, the layers
        can be anywhere; otherwise each must keep a number that has the same tensors.
        """
        front = _signatures(self.front)
        lists = per_layer(self.front.config, len(front)) if any(other != front[0] for other in front) else {}
        by_config: dict[str, Signature] = {}
        keys = [repr([values[number] for values in lists.values()]) for number in range(len(front))]
        described = all(by_config.setdefault(key, own) == own for key, own in zip(keys, front, strict=True))
        changes = sum(one != other for one, other in itertools.pairwise(front))
        signatures = {model: _signatures(model) for model, _ in self.layers}
        lines = []
        for new, (model, number) in enumerate(self.layers):
            # Beyond the last layer of `front`, layers may go on as its last ones if they changed only once.
            expected = front if described else front[new : new + 1] or (front[-1:] if changes == 1 else [])
            if signatures[model][number] not in expected:
                lines.append(f"layer {new} of the result would be layer {number} of {model.label}")
        return lines

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        model, stored = self.places[name]
        return model.read(stored, start, stop, buffers, slot)

    def will_need(self, name: str) -> None:
        if name in self.places:
            model, stored = self.places[name]
            model.will_need(stored)

    def files(self) -> list[Path]:
        return list(dict.fromkeys(path for part in self.parts for path in part.files()))

    def close(self) -> None:
        for part in (self.front, *self.parts):
            part.close()


def _signatures(model: Checkpoint) -> list[Signature]:
    stack = layer_stack(model)
    signatures: list[Signature] = []
    for number, rests in enumerate(stack.layers):
        names = {rest: f"{stack.prefix}{number}.{rest}" for rest in sorted(rests)}
        infos = {rest: model.tensors[name] for rest, name in names.items()}
        signatures.append({rest: info.shape for rest, info in infos.items() if not is_buffer(names[rest], info)})
    return signatures


def compare_parts(
    stacks: Sequence[StackedCheckpoint],
    exclude: Sequence[str],
    allow_config: Sequence[str],
    resolved_keys: Sequence[str] = (),
) -> Comparison:
    """Compare the models of stacked layers in everything but the number of their layers."""
    front = stacks[0].front
    models = dict.fromkeys(model for stack in stacks for model in stack.parts)
    outlines = [_outline(model) for model in models if model is not front]
    result = compare(_outline(front), outlines, exclude=exclude, allow_config=allow_config, resolved_keys=resolved_keys)
    # The comparison of the stacks themselves reports unused patterns and unrelated models.
    result.notes = [
        note
        for note in result.notes
        if not note.startswith("exclude:") and not (isinstance(note, Note) and note.kind is Kind.STRANGERS)
    ]
    if not result.problems:
        for stack in stacks:
            result.refuse(
                stack.misplaced(),
                f"the layers of {front.label} have different tensors, and these layers do not fit at their new numbers",
            )
    return result


def _outline(model: Checkpoint) -> View:
    """Return a model with one layer of each kind, which models with different numbers of layers have in common."""
    kinds: dict[str, int] = {}
    for number, signature in enumerate(_signatures(model)):
        kinds.setdefault(repr(list(signature)), number)
    stack = layer_stack(model)
    stored = {name: name for name in (*stack.before, *stack.after)}
    for new, number in enumerate(kinds.values()):
        stored |= {f"{stack.prefix}{new}.{rest}": f"{stack.prefix}{number}.{rest}" for rest in stack.layers[number]}
    outline = View(model, stored)
    outline.config, _ = config_of_layers(model, [(model, number) for number in kinds.values()])
    return outline
