"""Layers of models: find them by the names of tensors, and stack the layers of several models.

A *stack* is a sequence of layers with a common prefix: `model.layers.` in Llama, `transformer.h.` in GPT-2, and both
`encoder.block.` and `decoder.block.` in T5. Other numbers are not layers: experts and parts of a T5 block (deeper in
the name), `0.auto_model.` of sentence-transformers, and the parts of an `nn.Sequential`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..notes import Kind, Note
from ..text import some
from .checkpoint import Checkpoint, View
from .comparison import Comparison, compare
from .config_diff import completed, parts
from .tied_weights import same_values, tied_to

#: The prefix of a stack: modules with layers are called `layers`, `h`, `transformer_blocks` and the like.
_PREFIX = re.compile(r"(.*?[./])?(\w*(layers?|blocks?)|h)\.(?=\d{1,5}\.)")
_NUMBER = re.compile(r"(\d{1,5})\.")
#: Tensors before the first layer: embeddings and what is applied to them. All others outside the layers come after.
_BEFORE = re.compile(
    r"emb(?!ed_out)|\bwte\b|\bwpe\b|^shared\.|relative_pe|patch_conv|\bln_pre|layernorm_pre|\bpre_layr|\bpre_layernorm"
    r"|\.conv[12]\.|feature_"
)
#: Parts of a model that turn images or audio into inputs of the language model.
TOWER = re.compile("vision|visual|multi_modal|audio|image")


def layer_stacks(names: Iterable[str]) -> dict[str, int]:
    """Return prefix → number of layers for every stack, in the order of the names.

    >>> layer_stacks(["model.embed.weight", "model.layers.0.mlp.fc.weight", "model.layers.1.mlp.fc.weight"])
    {'model.layers.': 2}
    """
    stacks: dict[str, int] = {}
    for name in names:
        if prefix := _PREFIX.match(name):
            number = int(name[prefix.end() :].partition(".")[0])
            stacks[prefix[0]] = max(stacks.get(prefix[0], 0), number + 1)
    return stacks


def find_layer(name: str, stacks: Iterable[str]) -> tuple[str, int] | None:
    """Return (stack, number) of the layer of a tensor, or None if it is outside the layers.

    >>> find_layer("model.layers.3.mlp.experts.7.w1.weight", ["model.layers."])
    ('model.layers.', 3)
    """
    for prefix in stacks:
        if name.startswith(prefix) and (match := _NUMBER.match(name, len(prefix))):
            return prefix, int(match[1])
    return None


def layer_of(name: str, stacks: Iterable[str]) -> int | None:
    """Return the number of the layer of a tensor, or None if it is outside the layers."""
    layer = find_layer(name, stacks)
    return None if layer is None else layer[1]


def is_before_layers(name: str, stack: str = "") -> bool:
    """Return whether a tensor outside the layers comes before them, as embeddings do, or after them, as heads do."""
    in_other_tower = TOWER.search(name) is not None and TOWER.search(stack) is None
    return in_other_tower or _BEFORE.search(name) is not None


# Stacking layers of several models

#: Config keys with the number of layers.
COUNTS = {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers"}
COUNTS |= {"encoder_layers", "depth"}
#: Names of lists with one entry per layer, if they have that length.
PER_LAYER = re.compile(
    "layer|block|attn|attention|window|head|pattern|multiplier|intermediate|ffn|spars|rope|expert|kv"
)
Layer = tuple[Checkpoint, int]
"""A model, and the number of one of its layers."""


@dataclass(frozen=True)
class LayerStack:
    """The layers of a model, and its tensors outside of them."""

    prefix: str
    layers: list[list[str]]
    """For each layer the names of its tensors, without the prefix and the number."""
    before: list[str]
    """Tensors before the first layer, such as embeddings."""
    after: list[str]
    """Tensors after the last layer, such as heads."""


def layer_stack(checkpoint: Checkpoint) -> LayerStack:
    """Return the layers of a model, or raise an error if it has none or several stacks that could be meant."""
    prefix, count = _find_stack(checkpoint)
    stack = LayerStack(prefix, [[] for _ in range(count)], [], [])
    for name in checkpoint.tensors:
        number = layer_of(name, [prefix])
        if number is not None:
            stack.layers[number].append(name.removeprefix(f"{prefix}{number}."))
        else:
            (stack.before if is_before_layers(name, prefix) else stack.after).append(name)
    return stack


def _find_stack(checkpoint: Checkpoint) -> tuple[str, int]:
    """Return the prefix and the number of layers, which must be a number of layers in the config, if it has one."""
    stacks = layer_stacks(checkpoint.tensors)
    sections = [section for _, section in _sections(checkpoint.config)]
    counts = [section[key] for section in sections for key in COUNTS & section.keys() if isinstance(section[key], int)]
    fitting = [prefix for prefix, number in stacks.items() if not counts or number in counts]
    if len(fitting) > 1:
        fitting = [prefix for prefix in fitting if not TOWER.search(prefix)]
    if len(fitting) == 1:
        return fitting[0], stacks[fitting[0]]
    found = some([f"{prefix}* ({number})" for prefix, number in stacks.items()]) or "no numbered layers"
    raise InputError(
        f"{checkpoint.label}: `slices` needs a model with one stack of layers, of the number in its config "
        f"({some(list(map(str, counts))) or 'none'}). The file has {found}"
    )


def _sections(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path, section) for the parts of a config that describe the language model, or the only model."""
    return ((path, section) for path, section in parts(config) if not TOWER.search(path))


def _lists(config: dict[str, Any], count: int) -> dict[str, list[Any]]:
    """Return key → its value for each layer, with the defaults of the model's class filled in."""
    return {
        path + key: value
        for path, section in (*_sections(completed(config) or {}), *_sections(config))
        for key, value in section.items()
        if isinstance(value, list) and len(value) == count and PER_LAYER.search(key) and "token" not in key
    }


def config_of_layers(front: Checkpoint, layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the config of a model with these layers, and otherwise the config of ``front``."""
    if not front.config:
        return {}
    models = dict.fromkeys(model for model, _ in layers)
    lists = {model: _lists(model.config, len(layer_stack(model).layers)) for model in models}
    config, count = copy.deepcopy(front.config), len(layer_stack(front).layers)
    sections = dict(_sections(config))
    for section in sections.values():
        section |= {key: len(layers) for key in COUNTS & section.keys() if section[key] == count}
    for path in dict.fromkeys(path for of_model in lists.values() for path in of_model):
        without = [model.label for model in models if path not in lists[model]]
        if without:
            raise InputError(f"{without[0]}: its config has no {path}, which describes each layer in the other models")
        name, dot, key = path.rpartition(".")
        if name + dot in sections:
            sections[name + dot][key] = [lists[model][path][number] for model, number in layers]
    return config


class StackedCheckpoint(View):
    """Layers of several models one after the other, with new numbers.

    Tensors before the layers, such as embeddings, come from the model of the first layer. Tensors after the layers,
    such as heads, come from the model of the last layer. Config, tokenizer and folder are those of ``front``.

    Args:
        layers: The model and layer for each layer of the result.
        front: The model that gives config and tokenizer.
        left_out: Layers of the result that are merged without this model.
    """

    def __init__(self, layers: Sequence[Layer], front: Checkpoint, left_out: Collection[int] = ()) -> None:
        super().__init__(front)
        self.kind = "stacked layers"
        self.front = front
        self.layers = list(layers)
        self.parts = list(dict.fromkeys(model for new, (model, _) in enumerate(layers) if new not in left_out))
        self.label = ", ".join(dict.fromkeys(part.label for part in self.parts))
        self.hub_id = self.parts[0].hub_id if len(self.parts) == 1 else None
        self.notes = [note for part in dict.fromkeys((front, *self.parts)) for note in part.notes]
        self.config = config_of_layers(front, layers)
        names = list(self._new_names())
        self.absent = frozenset(name for new, name, _, _ in names if new in left_out)
        self.sources = {name: (model, stored) for new, name, model, stored in names if new not in left_out}
        """Tensor → (the model that it is read from, its name there)."""
        self.tensors = {name: model.tensors[stored] for name, (model, stored) in self.sources.items()}

    def _new_names(self) -> Iterator[tuple[int, str, Checkpoint, str]]:
        """Yield (the layer of the result that it belongs to, tensor, its model, its name there)."""
        stacks = {model: layer_stack(model) for model in dict.fromkeys(model for model, _ in self.layers)}
        (first, _), (last, _) = self.layers[0], self.layers[-1]
        for name in stacks[first].before:
            yield 0, name, first, name
        for new, (model, number) in enumerate(self.layers):
            prefix = stacks[model].prefix
            for rest in stacks[model].layers[number]:
                yield new, f"{prefix}{new}.{rest}", model, f"{prefix}{number}.{rest}"
        for name in stacks[last].after:
            embedding = tied_to(name, last) if self.front.config else None
            # A head that is a copy of the embedding of another model is left out: the result ties its own.
            if embedding is None or not same_values(last, name, embedding):
                yield len(self.layers) - 1, name, last, name

    def source(self, name: str) -> tuple[Checkpoint, str]:
        return self.sources[name]

    def files(self) -> list[Path]:
        return list(dict.fromkeys(path for part in self.parts for path in part.files()))

    def close(self) -> None:
        for part in (self.front, *self.parts):
            part.close()


def compare_parts(
    checkpoints: Sequence[Checkpoint], exclude: Sequence[str], allow_config: Sequence[str], one_tokenizer: bool = False
) -> Comparison:
    """Compare the models whose layers are stacked in what all layers share: config, tokenizer and outer tensors."""
    stacks = [checkpoint for checkpoint in checkpoints if isinstance(checkpoint, StackedCheckpoint)]
    if not stacks:
        return Comparison()
    front = stacks[0].front
    others = [part for part in dict.fromkeys(part for stack in stacks for part in stack.parts) if part is not front]
    outlines = [_outline(model) for model in (front, *others)]
    options: dict[str, Any] = {"allow_config": allow_config, "one_tokenizer": one_tokenizer}
    result = compare(outlines[0], outlines[1:], exclude=exclude, **options)
    # The comparison of the stacks themselves reports unused patterns and unrelated models.
    result.notes = [
        note
        for note in result.notes
        if not note.startswith("exclude:") and not (isinstance(note, Note) and note.kind is Kind.STRANGERS)
    ]
    return result


def _outline(model: Checkpoint) -> View:
    """Return a model with its first layer only, so that models with other numbers of layers can be compared."""
    stack = layer_stack(model)
    first = [f"{stack.prefix}0.{rest}" for rest in stack.layers[0]]
    outline = View(model, {name: name for name in (*stack.before, *first, *stack.after)})
    outline.config = config_of_layers(model, [(model, 0)])
    return outline
