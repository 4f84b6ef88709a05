"""Whether two configs make the same function of the weights, once defaults are filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...quiet import quiet_transformers

#: Keys that change what a model computes from the same weights. Others (dropout, token ids, caches, initial values) do
#: not, or change names and shapes, which are compared as such.
FUNCTION = re.compile(
    r"""
    model_type|is_decoder|is_encoder_decoder|add_cross_attention
    # heads
    |.*heads?|n_head_kv|.*head_dim|d_kv|d_head|kv_channels|attention_head_size|multi_query.*|new_decoder_architecture
    # norms and where they stand
    |.*eps|.*epsilon|do_layer_norm_before|normalize_before|.*_post_layernorm|use_parallel_residual|parallel_attn
    # activations
    |(.*_)?act|(.*_)?activation|(.*_)?act_fn|(.*_)?activation_f(unctio)?n|afn|feed_forward_proj|is_gated_act
    # positions; rope has a reading of its own
    |position_embedding_type|.*rotary_pct|rotary_dim|rotary_emb_base|rope_local_base_freq|rope_interleave.*
    |(local|global)_rope_theta|alibi|use_alibi|relative_attention.*|max_relative_positions|no_rope_layer.*
    |position_biased_input|pos_att_type
    # which positions are attended to
    |layer_types|sliding_window.*|max_window_layers|attention_window|local_attention|window_size
    |attention_chunk_size|global_attn_every_n_layers|attention_types|attention_layers
    # factors
    |.*_multipliers?|.*softcap(ping)?|query_pre_attn_scalar|logit_scale|logits_scaling|scale_attn_.*
    |scale_embeddings?|scale_emb|scale_depth|dim_model_base|attention_scale|routed_scaling_factor
    # experts
    |num_experts_per_tok(en)?|num_selected_experts|moe_top_?k|norm_topk_prob|n_group|topk_group|topk_method|scoring_func
    # images and sound
    |image_size|patch_size|num_channels|tubelet_size|temporal_patch_size|spatial_merge_size|conv_stride
    |vision_feature_.*
    # pooling
    |classifier_pooling|pool(er|ing)_?(type|mode)|use_mean_pooling|summary_type|global_pool
    # classes of timm and diffusers
    |architecture|_class_name
    """,
    re.VERBOSE,
)
NOT_THESE = {"pruned_heads"}
#: Keys whose default follows from the number of heads.
FOLLOWS = {"head_dim", "num_key_value_heads"}
#: Defaults that are the same in every model that has the key.
ABSENT = {"position_embedding_type": "absolute", "partial_rotary_factor": 1.0, "rope_type": "default"}
#: Words for the same activation, up to rounding.
ACTIVATIONS = {"swish": "silu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
#: Kinds of rope that depend on how many positions the config allows.
BY_LENGTH = {"dynamic", "yarn", "longrope", "su"}
#: Parts of a config that describe no model.
NO_MODEL = {"quantization_config", "compression_config", "generation_config"}
#: Marks the config of a language model that is part of a larger one, and keys in which it may differ from one alone.
TOWER = "_tower"
OF_TOWERS = {"model_type", "rope_scaling.mrope_section", "rope_scaling.mrope_interleaved"}
#: The keys of sentence-transformers' older versions for how tokens are pooled, in the order in which several count.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
DEPTH = 8
MOST_LAYERS = 10_000
MISSING = object()
#: A flag or size with one of these values is off.
UNSET = (None, False, MISSING)


def parts(config: Mapping[str, Any], place: str = "", depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """A config and the configs in it, such as `text_config`, each with the path that leads to it."""
    yield place, config
    for key, value in config.items():
        inner = key.endswith("_config") or key in ("encoder", "decoder", "question_encoder", "generator", "model_args")
        if isinstance(value, dict) and inner and key not in NO_MODEL and depth < DEPTH:
            yield from parts(value, f"{place}{key}.", depth + 1)


def comparable(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Both configs; of a model for text and images that meets a language model, the part that describes its tower."""
    if first and other and all(key.endswith("_config") for key in other):  # parts in folders of their own
        return {key: first.get(key, {}) for key in other}, other
    towers = [_tower(config) for config in (first, other)]
    if (towers[0] is None) == (towers[1] is None) or not first or not other:
        return first, other
    ours, theirs = (config if tower is None else tower for config, tower in zip((first, other), towers, strict=True))
    return ours, theirs


def _tower(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The config of the language model inside a larger one, or None if this is a language model's own."""
    if isinstance(config.get("text_config"), dict):
        return {**config["text_config"], TOWER: True}
    if any(isinstance(config.get(key), dict) for key in ("vision_config", "audio_config")):  # as older versions wrote
        full = completed(config) or {}
        inner = full.get("text_config")
        plain = {key: value for key, value in config.items() if not isinstance(value, dict) or "rope" in key}
        return {**(inner if isinstance(inner, dict) else plain), TOWER: True}
    return None


def differences(first: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Key → both values where the functions differ; and keys that only one config has, without a known default."""
    ours, theirs = effective(first), effective(other)
    if not first or not other or ours == theirs:
        return {}, []
    stated = ours.keys() | theirs.keys()
    as_tower = first.get(TOWER) or other.get(TOWER)
    alike = as_tower or first.get("model_type") == other.get("model_type")
    known = [completed(first), completed(other)] if alike else [None]
    if None not in known:
        ours, theirs = (effective(config or {}) for config in known)
    found = _differing(ours, theirs)
    if as_tower:  # named after the larger model; its positions in time and space are one and the same for text
        found = {key: pair for key, pair in found.items() if key not in OF_TOWERS}
    certain = {key: pair for key, pair in found.items() if pair[0] is not MISSING and pair[1] is not MISSING}
    certain = {k: pair for k, pair in certain.items() if k in stated or k.rpartition(".")[2] not in FOLLOWS} or certain
    # A key that the model's own class does not have changes nothing.
    return certain, [] if None not in known else sorted(found.keys() - certain.keys())


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    found = {}
    for key in dict.fromkeys([*ours, *theirs]):
        here, there = (_in_effect(key, side.get(key, MISSING)) for side in (ours, theirs))
        unset = all(any(value is nothing for nothing in UNSET) for value in (here, there))
        if here != there and not unset:
            found[key] = (here, there)
    return found


def _in_effect(key: str, value: Any) -> Any:
    last = key.rpartition(".")[2]
    absent = ABSENT.get(last, 1.0 if last.endswith(("_multiplier", "logit_scale")) else value)
    return absent if value is None or value is MISSING else value


def effective(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that change the function, by path, each in one spelling."""
    found: dict[str, Any] = {}
    for place, section in parts(config):
        stated = {key: section[key] for key in section if FUNCTION.fullmatch(key) and key not in NOT_THESE}
        _forget_unused_windows(stated, section)
        stated |= _rope(section)
        if modes := poolings(section):
            stated = {key: value for key, value in stated.items() if key not in POOLINGS} | {
                "pooling_mode": "+".join(modes)
            }
        found |= {place + key: _spelt(value) for key, value in stated.items()}
    return found


def poolings(section: Mapping[str, Any]) -> tuple[str, ...]:
    """How a module of sentence-transformers pools tokens, as any of its versions writes it; empty if it does not."""
    stated = section.get("pooling_mode", [mode for key, mode in POOLINGS.items() if section.get(key) is True])
    return tuple(map(str, stated)) if isinstance(stated, list | tuple) else (str(stated),)


def _spelt(value: Any) -> Any:
    if isinstance(value, str):
        return ACTIVATIONS.get(value.lower(), value)
    if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
        return value[0]  # an image's height and width
    return value


def _forget_unused_windows(stated: dict[str, Any], section: Mapping[str, Any]) -> None:
    layers = stated.get("layer_types")
    if isinstance(layers, list) and all(layer == "full_attention" for layer in layers):
        stated["layer_types"] = None
    elif section.get("use_sliding_window") is not False:
        return
    stated |= {"sliding_window": None, "max_window_layers": None}


def _rope(section: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions, from `rope_theta` and `rope_scaling` or from `rope_parameters`, which holds both."""
    stated = [section.get(key) for key in ("rope_scaling", "rope_parameters")]
    given = {key: value for part in stated if isinstance(part, dict) for key, value in part.items()}
    by_layer = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    ropes = {f"{kind}.": _one_rope(part, section) for kind, part in by_layer.items()} or {"": _one_rope(given, section)}
    return {place + key: value for place, rope in ropes.items() for key, value in rope.items()}


def _one_rope(given: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(given.get("rope_type", given.get("type", "default")))
    plain = ("rope_theta", "partial_rotary_factor")
    found = {key: part[key] for part in (section, given) for key in plain if key in part}
    scaling = {key: value for key, value in given.items() if key not in (*plain, "type")} | {"rope_type": kind}
    if kind in ("default", "mrope"):
        scaling = {key: value for key, value in scaling.items() if key == "mrope_section"}
    if kind in BY_LENGTH and "max_position_embeddings" in section:
        found["max_position_embeddings"] = section["max_position_embeddings"]
    return found | {f"rope_scaling.{key}": value for key, value in scaling.items()}


def completed(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The config with the defaults of transformers' own class, or None if it has no such class or that fails."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _of_modest_depth(config):
        return None
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    try:
        with quiet_transformers():
            full = CONFIG_MAPPING[model_type].from_dict(_of_the_function(config)).to_dict()
    except Exception:  # whatever a class makes of values that it does not expect
        return None
    return full if isinstance(full, dict) else None


def _of_modest_depth(config: Mapping[str, Any]) -> bool:
    """Whether the model has few enough layers: config classes make lists with an entry per layer."""
    return not any(
        isinstance(value, int) and value > MOST_LAYERS and re.search("(layer|block|depth|stage)s?$", key)
        for _, section in parts(config)
        for key, value in section.items()
    )


def _of_the_function(config: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Without keys that a class acts on but the function does not depend on: labels, code, dtypes, Hub models."""
    left_out = {"id2label", "label2id", "num_labels", "auto_map", "dtype", "torch_dtype", "transformers_version"}
    left_out |= {"backbone", "backbone_kwargs", *NO_MODEL}
    left_out |= {"time_step_limit"}  # which is written with an infinity that cannot be read again
    return {
        key: _of_the_function(value, depth + 1) if isinstance(value, dict) and depth < DEPTH else value
        for key, value in config.items()
        if key not in left_out and not key.startswith("_") and "attn_implementation" not in key
    }


def allows(allowed: Sequence[str], key: str) -> str | None:
    """Which of some keys allows a difference: the key itself, or a leading or trailing part of its path.

    `rope_scaling` and `rope_parameters` are names for all of rope.
    """
    pieces = key.split(".")
    names = {".".join(pieces[:end]) for end in range(1, len(pieces) + 1)}
    names |= {".".join(pieces[start:]) for start in range(len(pieces))}
    if re.search("rope|rotary|max_position", key):
        names |= {"rope_scaling", "rope_parameters", f"rope_parameters.{pieces[-1]}"}
    return next((name for name in allowed if name in names), None)


def labels(config: Mapping[str, Any]) -> dict[str, str]:
    """Name of a class → its place, from `id2label`; nothing where the names are the generic ones or cannot be read."""
    stated = config.get("id2label")
    if not isinstance(stated, dict):
        stated = config.get("label2id")
        stated = {str(place): name for name, place in stated.items()} if isinstance(stated, dict) else {}
    names = {str(name).strip().casefold(): str(place) for place, name in stated.items()}
    return {} if all(re.fullmatch(r"label_\d+", name) for name in names) else names


def shown(value: Any) -> str:
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
