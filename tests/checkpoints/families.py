"""Tiny random models of well-known families, saved as transformers saves them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

_SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_LLAMA: dict[str, Any] = {**_SIZES, "vocab_size": 60, "num_key_value_heads": 1}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bert": (
        BertForSequenceClassification,
        BertConfig,
        {**_SIZES, "vocab_size": 60, "max_position_embeddings": 20, "num_labels": 3},
    ),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config,
        {
            "vocab_size": 60,
            "n_positions": 20,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "bos_token_id": 0,
            "eos_token_id": 1,
        },
    ),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {**_LLAMA, "tie_word_embeddings": True}),
    "llama-untied": (LlamaForCausalLM, LlamaConfig, {**_LLAMA, "tie_word_embeddings": False}),
    "t5": (
        T5ForConditionalGeneration,
        T5Config,
        {"vocab_size": 60, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
    ),
    "vit": (
        ViTForImageClassification,
        ViTConfig,
        {**_SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3},
    ),
}

#: Mixtures of experts. transformers fuses the experts of the first two while it loads them, and stores them apart.
EXPERTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {**_LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        | {"intermediate_size": 16, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def make(family: str, seed: int = 0, **changes: Any) -> Any:
    """A random model; every parameter is random, also biases and norms."""
    model_class, config_class, settings = (FAMILIES | EXPERTS)[family]
    torch.manual_seed(seed)
    return moved(model_class(config_class(**settings | changes)), seed + 1000, 0.1)


def moved(model: Any, seed: int, scale: float = 0.05) -> Any:
    """A tuned model: a copy with every parameter moved a little."""
    model = copy.deepcopy(model)
    randomise(model.parameters(), seed, scale)
    return model


def randomise(parameters: Iterable[nn.Parameter], seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * scale
        parameter.data.add_(noise.to(parameter.dtype))


def save(model: Any, folder: Path, shard: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard)
    return folder


def load(family: str, folder: Path, **arguments: Any) -> Any:
    """The model in a folder, which must have every weight of its class and none besides."""
    model, info = (FAMILIES | EXPERTS)[family][0].from_pretrained(folder, output_loading_info=True, **arguments)
    assert not info["missing_keys"], info
    assert not info["unexpected_keys"], info
    assert not info["mismatched_keys"], info
    return model


def double(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() for name, value in state.items()}
