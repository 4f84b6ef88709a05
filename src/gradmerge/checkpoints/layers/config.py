"""Find the layers of a model, and write the config of a model with other layers."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError
from ...text import some
from ..checkpoint import Checkpoint
from ..compat.config_diff import abbreviate, completed, parts
from .names import TOWER, is_before_layers, layer_of, layer_stacks

#: Keys with the number of layers.
COUNTS = {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers"}
COUNTS |= {"encoder_layers", "depth"}
#: Names of lists with one entry per layer, if they have that length.
PER_LAYER = re.compile(
    "layer|block|attn|attention|window|head|pattern|multiplier|intermediate|ffn|spars|rope|expert|kv"
)
#: Lists of layer numbers.
NUMBERS = {"mlp_only_layers", "full_attn_idxs", "cross_attention_layers", "attn_layer_indices"}
#: Keys that make the function of a layer depend on its number. `layer_types` replaces the first group.
WINDOWS = {"sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers", "full_attention_interval"}
BY_NUMBER = {"no_rope_layer_interval", "scale_attn_by_inverse_layer_idx", "num_kv_shared_layers"}

_STACKS: weakref.WeakKeyDictionary[Checkpoint, LayerStack] = weakref.WeakKeyDictionary()


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
    if checkpoint not in _STACKS:
        prefix, count = _find_stack(checkpoint)
        stack = LayerStack(prefix, [[] for _ in range(count)], [], [])
        for name in checkpoint.tensors:
            number = layer_of(name, [prefix])
            if number is not None:
                stack.layers[number].append(name.removeprefix(f"{prefix}{number}."))
            else:
                (stack.before if is_before_layers(name, prefix) else stack.after).append(name)
        _STACKS[checkpoint] = stack
    return _STACKS[checkpoint]


def _find_stack(checkpoint: Checkpoint) -> tuple[str, int]:
    stacks = layer_stacks(checkpoint.tensors)
    if not stacks:
        raise InputError(f"{checkpoint.label}: no numbered layers such as model.layers.0, so `slices` cannot cut it")
    counts = {
        path + key: section[key]
        for path, section in _sections(checkpoint.config)
        for key in section
        if key in COUNTS and isinstance(section[key], int)
    }
    fitting = {prefix: number for prefix, number in stacks.items() if not counts or number in counts.values()}
    outside_towers = {prefix: number for prefix, number in fitting.items() if not TOWER.search(prefix)}
    if len(fitting) == 1 or len(outside_towers) == 1:
        return next(iter((outside_towers or fitting).items()))
    listed = some([f"{prefix}* ({number})" for prefix, number in stacks.items()])
    if fitting:
        raise InputError(
            f"{checkpoint.label}: several stacks of layers: {listed}. `slices` can only cut models with one stack"
        )
    expected = some([f"{key}: {number}" for key, number in counts.items()])
    raise InputError(
        f"{checkpoint.label}: config.json has {expected}, but the file has the layers {listed}. Save the model again"
    )


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (path, section) for the parts of a config that describe the language model, or the only model."""
    return ((path, section) for path, section in parts(config) if not TOWER.search(path))


def per_layer(config: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Return key → its value for each layer, with the defaults of the model's class filled in."""
    return _lists(completed(config) or {}, count) | _lists(config, count)


def _lists(config: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    lists: dict[str, list[Any]] = {}
    for path, section in _sections(config):
        for key, value in section.items():
            if isinstance(value, list) and key in NUMBERS:
                lists[path + key] = [number in value for number in range(count)]
            elif isinstance(value, list) and len(value) == count and PER_LAYER.search(key) and "token" not in key:
                lists[path + key] = value
    return lists


def config_of_layers(front: Checkpoint, layers: Sequence[tuple[Checkpoint, int]]) -> tuple[dict[str, Any], list[str]]:
    """Return the config of a model with these layers and otherwise the config of ``front``, and notes.

    Args:
        front: The model whose config is used.
        layers: (model, number of its layer) for each layer of the result.
    """
    if not front.config:
        return {}, []
    models = dict.fromkeys(model for model, _ in layers)
    lists = {model: per_layer(model.config, len(layer_stack(model).layers)) for model in models}
    values: dict[str, list[Any]] = {}
    for path in dict.fromkeys(path for model in models for path in lists[model]):
        without = [model.label for model in models if path not in lists[model]]
        if without:
            having = next(model.label for model in models if path in lists[model])
            raise InputError(f"{without[0]}: its config has no {path}, which describes each layer in {having}")
        values[path] = [lists[model][path][number] for model, number in layers]

    config, count = copy.deepcopy(front.config), len(layer_stack(front).layers)
    for path, section in list(_sections(config)):
        for key in section:
            if key in COUNTS and section[key] == count and not isinstance(section[key], bool):
                _section(config, path)[key] = len(layers)
            elif path + key in values:
                _section(config, path)[key] = _as_written(key, values[path + key])
    # A list that follows from the defaults of the class is not written.
    defaults = per_layer(config, len(layers))
    for path, expected in values.items():
        if defaults.get(path) != expected:
            section_path, _, key = path.rpartition(".")
            _section(config, section_path)[key] = _as_written(key, expected)
    if completed(front.config) is not None:
        full = completed(config)
        found = _lists(full or {}, len(layers))
        lost = [path for path, expected in values.items() if found.get(path) != expected]
        if full is None or lost:
            raise InputError(
                f"{front.label}: {lost[0] if lost else 'the function'} of its layers follows from more of its config "
                "than `slices` can change"
            )
    return config, list(_notes(config, layers, values))


def _section(config: dict[str, Any], path: str) -> dict[str, Any]:
    for key in filter(None, path.split(".")):
        config = config[key]
    return config


def _as_written(key: str, values: list[Any]) -> list[Any]:
    return [number for number, value in enumerate(values) if value] if key in NUMBERS else values


def _notes(
    config: Mapping[str, Any], layers: Sequence[tuple[Checkpoint, int]], values: Mapping[str, object]
) -> Iterator[str]:
    if all(number == new for new, (_, number) in enumerate(layers)):
        return
    for path, section in _sections(config):
        typed = any(key.endswith("layer_types") for key in values) or section.get("use_sliding_window") is False
        for key in section:
            if section[key] and key in (BY_NUMBER if typed else BY_NUMBER | WINDOWS):
                yield (
                    f"config.json: {path}{key} ({abbreviate(section[key])}) depends on the number of a layer, and some "
                    "layers have another number in the result"
                )
