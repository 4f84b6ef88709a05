"""Differences between two configs that change what a model computes from the same weights."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from ..quiet import quiet_transformers

#: Keys that do not change what a model computes from its weights, or that other checks cover.
IRRELEVANT = re.compile(
    r"""
    # where the model comes from and how it runs
    _(?!class_name).*|architectures|auto_map|.*version|.*dtype|.*attn_implementation.*|pretraining_tp|prefix|.*cache.*
    |use_mamba.*|disable_custom_kernels|deterministic_flash_attn|residual_in_fp32|reorder_and_upcast_attn|force_upcast
    |tokenizer_class|pretrained_cfg|backbone|backbone_kwargs|return_dict.*|chunk_size_feed_forward|torchscript
    |output_(attentions|hidden_states|router_logits|past|scores)|num_logits_to_keep
    |quantization_config|compression_config|generation_config
    # tied weights and labels have checks of their own
    |tie_.*|id2label|label2id|num_labels|num_classes|label_names|problem_type|finetuning_task|task_specific_params
    # tokens and generation
    |.*token_(id|ids|index)|.*suppress_tokens|(max|min)_length|num_beams|do_sample|temperature|top_p|length_penalty
    |no_repeat_ngram_size|early_stopping|repetition_penalty|num_return_sequences|is_encoder_decoder
    # training
    |.*drop.*|.*(loss|cost|coef|noise|jitter|smoothing).*|.*init.*|mask_(time|feature)_.*|apply_spec_augment
    |gradient_.*|freeze_.*|label_.*|time_step_(min|max|floor|limit)
    # sizes: names and shapes of the tensors are compared
    |(.*_)?(hidden|intermediate|inner|vocab|embedding|projection)_sizes?|(num|n)_(hidden_)?layers?|n_embd|n_inner|d_model
    |d_ff|(encoder|decoder)_(layers|ffn_dim)|num_(encoder|decoder)_layers|sample_size
    # positions that a longer or shorter table does not change; windows, which `layer_types` describes
    |max_(\w+_)?position_embeddings|max_\w+_positions|n_positions|n_ctx|max_seq\w*|seq_length|model_max_length
    |max_window_layers
    """,
    re.VERBOSE,
)
#: Of a model that transformers has no class for, only keys with these words count.
WITHOUT_CLASS = re.compile(
    "rope|rotary|position|head|eps|act|norm|window|attention|attn|scal|softcap|expert|pool|image_size|patch_size"
    "|model_type|architecture|_class_name|is_decoder"
)
#: Kinds of rope whose angles depend on the number of positions.
ROPE_BY_LENGTH = {"dynamic", "yarn", "longrope", "su"}
#: Names of the same activation, up to rounding.
ACTIVATIONS = {"swish": "silu", "gelu_python": "gelu", "gelu_pytorch_tanh": "gelu_new", "gelu_fast": "gelu_new"}
#: Flags of older versions of sentence-transformers, in the order in which it concatenates the poolings.
POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
#: Nested dicts that are not configs of models.
NO_MODEL = {"quantization_config", "compression_config", "generation_config"}
#: Nested dicts that are configs, beside those that end in `_config`.
NESTED = {"encoder", "decoder", "question_encoder", "generator", "model_args"}
DEPTH = 8
MOST_LAYERS = 10_000


def parts(config: dict[str, Any], path: str = "", depth: int = 0) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a config and the configs nested in it, such as `text_config`, each with its path (`text_config.`)."""
    yield path, config
    for key, value in config.items():
        nested = (key.endswith("_config") or key in NESTED) and key not in NO_MODEL
        if isinstance(value, dict) and nested and depth < DEPTH:
            yield from parts(value, f"{path}{key}.", depth + 1)


def differences(first: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return key → both values where two configs differ in a key that both have after defaults are filled in.

    Keys are paths such as `text_config.num_attention_heads`. Defaults come from the config classes of transformers,
    which are imported only if the configs differ as they are.
    """
    if not first or not other or _values(first) == _values(other):
        return {}
    pair, texts = [first, other], [config.get("text_config") for config in (first, other)]
    is_inside = isinstance(texts[0], dict) != isinstance(texts[1], dict)
    if is_inside:  # a language model is compared with the one inside of a vision-language model
        pair = [text if isinstance(text, dict) else config for text, config in zip(texts, pair, strict=True)]
    complete = [full for config in pair if (full := completed(config)) is not None]
    has_classes = len(complete) == 2
    ours, theirs = map(_values, complete if has_classes else pair)
    return {
        key: (ours[key], theirs[key])
        for key in sorted(ours.keys() & theirs.keys())
        if ours[key] != theirs[key]
        and not (ours[key] in (None, False) and theirs[key] in (None, False))
        and (has_classes or WITHOUT_CLASS.search(key))
        and not (is_inside and key == "model_type")
    }


def _values(config: dict[str, Any], path: str = "", depth: int = 0) -> dict[str, Any]:
    """Return path → value of every relevant key of a config and of the dicts in it."""
    values: dict[str, Any] = {}
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and str(rope.get("rope_type", rope.get("type"))) in ROPE_BY_LENGTH:
        values[f"{path}max_position_embeddings"] = config.get("max_position_embeddings")
    if modes := poolings(config):
        config = {key: value for key, value in config.items() if key not in POOLINGS} | {"pooling_mode": modes}
    for key, value in config.items():
        if IRRELEVANT.fullmatch(str(key)):  # transformers has dicts by layer number
            continue
        if isinstance(value, dict) and value and depth < DEPTH:
            values |= _values(value, f"{path}{key}.", depth + 1)
        else:
            values[f"{path}{key}"] = _normalized(value)
    return values


def _normalized(value: Any) -> Any:
    if isinstance(value, str):
        return ACTIVATIONS.get(value.lower(), value)
    if isinstance(value, list | tuple):
        # Equal entries are one value: the height and width of an image, or the types of all layers.
        return value[0] if value and all(entry == value[0] for entry in value) else list(value)
    return value


def poolings(section: dict[str, Any]) -> tuple[str, ...]:
    """Return how a module of sentence-transformers pools tokens, from any version's keys; empty if it does not."""
    modes = section.get("pooling_mode", [mode for key, mode in POOLINGS.items() if section.get(key) is True])
    return tuple(map(str, modes)) if isinstance(modes, list | tuple) else (str(modes),)


def completed(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the config as transformers' class for it reads it, defaults filled in; None if there is no such class."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or claims_too_many(config):
        return None
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return None
    try:
        with quiet_transformers():
            full = CONFIG_MAPPING[model_type].from_dict(_safe_to_complete(config)).to_dict()
    except Exception:  # values that the class does not expect
        return None
    return full if isinstance(full, dict) else None


def claims_too_many(config: dict[str, Any]) -> bool:
    """Return whether a config claims more layers or experts than any model has, which would fill the memory."""
    return any(
        isinstance(value, int) and value > MOST_LAYERS and re.search("(layer|block|depth|stage|expert)s?$", key)
        for _, section in parts(config)
        for key, value in section.items()
    )


def _safe_to_complete(config: dict[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return the config without keys that make its class load code, ask the Hub or list many labels."""
    left_out = {"id2label", "label2id", "num_labels", "auto_map", "dtype", "torch_dtype", "transformers_version"}
    left_out |= {"backbone", "backbone_kwargs", *NO_MODEL}
    left_out |= {"time_step_limit"}  # holds an infinity, which its class writes and cannot read
    return {
        key: _safe_to_complete(value, depth + 1) if isinstance(value, dict) and depth < DEPTH else value
        for key, value in config.items()
        if key not in left_out and not key.startswith("_") and "attn_implementation" not in key
    }


def allows(allowed: Sequence[str], key: str) -> bool:
    """Return whether ``allowed`` has a key, or a part of its path. `rope_scaling` covers everything about rope."""
    names = {key, *key.split(".")}
    if re.search("rope|rotary|max_position", key):
        names |= {"rope_scaling", "rope_parameters"}
    return not names.isdisjoint(allowed)


def labels(config: dict[str, Any]) -> dict[str, str]:
    """Return class name → index from `id2label`; empty if the names are generic (`LABEL_0`) or unreadable."""
    by_index = config.get("id2label")
    if not isinstance(by_index, dict):
        by_name = config.get("label2id")
        by_index = {str(index): name for name, index in by_name.items()} if isinstance(by_name, dict) else {}
    names = {str(name).strip().casefold(): str(index) for index, name in by_index.items()}
    return {} if all(re.fullmatch(r"label_\d+", name) for name in names) else names


def abbreviate(value: Any) -> str:
    """Return a value as text for a message, at most 80 characters long."""
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
