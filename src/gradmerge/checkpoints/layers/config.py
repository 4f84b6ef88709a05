"""What a config says of a model's layers: how many there are, and what each of them is."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...errors import InputError
from ...text import some
from ..checkpoint import Checkpoint
from ..compat.config_diff import completed, parts, shown
from .names import TOWER, layer_stacks

#: Keys that hold the number of layers.
COUNTS = {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "decoder_layers"}
COUNTS |= {"encoder_layers", "depth"}
#: Names of lists with an entry for every layer, if they are as long.
PER_LAYER = re.compile(
    "layer|block|attn|attention|window|head|pattern|multiplier|intermediate|ffn|spars|rope|expert|kv"
)
#: Lists of the numbers of some layers.
NUMBERS = {"mlp_only_layers", "full_attn_idxs", "cross_attention_layers", "attn_layer_indices"}
#: Keys by which a layer's own number decides what it does; with `layer_types`, that says it for the first of them.
WINDOWS = {"sliding_window_pattern", "max_window_layers", "global_attn_every_n_layers", "full_attention_interval"}
BY_NUMBER = {"no_rope_layer_interval", "scale_attn_by_inverse_layer_idx", "num_kv_shared_layers"}


_KNOWN: weakref.WeakKeyDictionary[Checkpoint, tuple[str, int]] = weakref.WeakKeyDictionary()


def main_stack(checkpoint: Checkpoint) -> tuple[str, int]:
    """The prefix of a model's layers, and how many there are; refused where that cannot be told."""
    if checkpoint not in _KNOWN:
        _KNOWN[checkpoint] = _find_stack(checkpoint)
    return _KNOWN[checkpoint]


def _find_stack(checkpoint: Checkpoint) -> tuple[str, int]:
    stacks = layer_stacks(checkpoint.tensors)
    if not stacks:
        raise InputError(f"{checkpoint.label}: has no numbered layers, as model.layers.0 would be; slices cut those")
    stated = _counts(checkpoint.config)
    fitting = {prefix: number for prefix, number in stacks.items() if not stated or number in stated.values()}
    towers = {prefix for prefix in fitting if TOWER.search(prefix)}
    if len(fitting) > 1 and len(towers) == len(fitting) - 1:
        fitting = {prefix: number for prefix, number in fitting.items() if prefix not in towers}
    if len(fitting) == 1:
        return next(iter(fitting.items()))
    found = some([f"{prefix}* ({number})" for prefix, number in stacks.items()])
    if fitting:
        raise InputError(f"{checkpoint.label}: has several stacks of layers: {found}. Slices cut models that have one.")
    said = some([f"{key}: {number}" for key, number in stated.items()])
    raise InputError(f"{checkpoint.label}: its config.json says {said}, but its layers are {found}; save it again")


def _counts(config: Mapping[str, Any]) -> dict[str, int]:
    """What a config says about the number of layers, by key."""
    return {
        place + key: section[key]
        for place, section in _sections(config)
        for key in section
        if key in COUNTS and isinstance(section[key], int)
    }


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The parts of a config that describe the language model, or the only one."""
    return ((place, section) for place, section in parts(config) if not TOWER.search(place))


def per_layer(config: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Key → what it says of every layer, stated or by the defaults of the model's class."""
    return _lists(completed(config) or {}, count) | _lists(config, count)


def _lists(config: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for place, section in _sections(config):
        for key, value in section.items():
            if not isinstance(value, list):
                continue
            if key in NUMBERS:
                found[place + key] = [number in value for number in range(count)]
            elif len(value) == count and PER_LAYER.search(key) and "token" not in key:
                found[place + key] = value
    return found


def config_of_layers(front: Checkpoint, layers: Sequence[tuple[Checkpoint, int]]) -> tuple[dict[str, Any], list[str]]:
    """The config of a model of these layers, each a model and a number, that is otherwise like ``front``; and notes."""
    if not front.config:
        return {}, []
    count, config = main_stack(front)[1], copy.deepcopy(front.config)
    models = dict.fromkeys(checkpoint for checkpoint, _ in layers)
    said = {checkpoint: per_layer(checkpoint.config, main_stack(checkpoint)[1]) for checkpoint in models}
    wanted: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for lists in said.values() for key in lists):
        lacking = [checkpoint.label for checkpoint, lists in said.items() if key not in lists]
        if lacking:
            has = next(checkpoint.label for checkpoint, lists in said.items() if key in lists)
            raise InputError(f"{lacking[0]}: its config has no {key}, by which {has} says what each layer is")
        wanted[key] = [said[checkpoint][key][number] for checkpoint, number in layers]
    for place, key in ((place, key) for place, section in _sections(config) for key in section):
        section = _section(config, place)
        if key in COUNTS and section[key] == count and not isinstance(section[key], bool):
            section[key] = len(layers)
        elif place + key in wanted:
            section[key] = _written(key, wanted[place + key])
    by_default = per_layer(config, len(layers))
    for path, values in wanted.items():
        place, _, key = path.rpartition(".")
        if by_default.get(path) != values:
            _section(config, place)[key] = _written(key, values)
    if completed(front.config) is not None:
        made = _lists(completed(config) or {}, len(layers))
        lost = [key for key, values in wanted.items() if made.get(key) != values]
        if lost or completed(config) is None:
            what = f"{lost[0]} of its layers follows" if lost else "what its layers are follows"
            raise InputError(f"{front.label}: {what} from more of its config than slices can cut; no model can be made")
    return config, list(_notes(config, layers, wanted))


def _section(config: dict[str, Any], place: str) -> dict[str, Any]:
    for key in filter(None, place.split(".")):
        config = config[key]
    return config


def _written(key: str, values: list[Any]) -> list[Any]:
    return [number for number, value in enumerate(values) if value] if key in NUMBERS else values


def _notes(
    config: Mapping[str, Any], layers: Sequence[tuple[Checkpoint, int]], said: Mapping[str, object]
) -> Iterator[str]:
    if all(place == number for place, (_, number) in enumerate(layers)):
        return
    for place, section in _sections(config):
        types = any(key.endswith("layer_types") for key in said) or section.get("use_sliding_window") is False
        keys = [key for key in section if section[key] and key in (BY_NUMBER if types else BY_NUMBER | WINDOWS)]
        for key in keys:
            yield (
                f"config.json: {place}{key} ({shown(section[key])}) goes by the number of a layer, and layers have "
                "other numbers in the result than in their models"
            )
