"""Layers: found by the names of tensors, and stacked from several models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from gradmerge.checkpoints.checkpoint import Checkpoint
from gradmerge.checkpoints.layers import (
    StackedCheckpoint,
    compare_parts,
    config_of_layers,
    find_layer,
    is_before_layers,
    layer_of,
    layer_stack,
    layer_stacks,
)

#: Tensors outside the layers, as mergekit 0.1.5 divides them in its architectures. Tensors after the layers of a vision
#: tower are left out, because they come before the layers of the language model.
BEFORE = """
model.embed_tokens.weight bert.embeddings.LayerNorm.bias transformer.rotary_pos_emb.inv_freq transformer.wte.weight
wpe.weight gpt_neox.embed_in.weight multi_modal_projector.linear_1.weight shared.weight vision_model.layernorm_pre.bias
model.tok_embeddings.weight transformer.relative_pe.slopes vision_tower.patch_conv.weight backbone.embeddings.weight
visual.merger.ln_q.weight model.visual.pos_embed.weight model.decoder.embed_positions.weight model.encoder.conv1.bias
"""
AFTER = """
model.norm.weight lm_head.weight bert.pooler.dense.weight cls.predictions.decoder.weight classifier.bias
vocab_projector.weight pre_classifier.bias transformer.ln_f.weight language_model.lm_head.weight embed_out.weight
gpt_neox.final_layer_norm.bias score.weight backbone.norm_f.weight classifier.out_proj.bias output.weight
model.decoder.layer_norm.bias model.encoder.layer_norm.weight
"""


def test_tensors_outside_the_layers_are_divided_as_in_mergekit() -> None:
    assert [name for name in BEFORE.split() if not is_before_layers(name, "model.layers.")] == []
    assert [name for name in AFTER.split() if is_before_layers(name, "model.layers.")] == []
    own = ["vision_model.embeddings.class_embedding", "vision_model.post_layernorm.weight"]
    assert [is_before_layers(name, "vision_model.encoder.layers.") for name in own] == [True, False]


def numbered(template: str, count: int) -> list[str]:
    return [template.format(number) for number in range(count)]


STACKS = {
    "llama": (
        ["model.embed_tokens.weight", *numbered("model.layers.{}.self_attn.q_proj.weight", 12)],
        {"model.layers.": 12},
    ),
    "experts": (
        [f"model.layers.{n}.mlp.experts.{e}.w1.weight" for n in range(2) for e in range(8)],
        {"model.layers.": 2},
    ),
    "t5": (
        [
            f"{side}.block.{n}.layer.{p}.layer_norm.weight"
            for side in ("encoder", "decoder")
            for n in (0, 1)
            for p in (0, 1)
        ],
        {"encoder.block.": 2, "decoder.block.": 2},
    ),
    "sentence-transformers": (
        [*numbered("0.auto_model.encoder.layer.{}.output.dense.weight", 2), "1_Dense/linear.weight"],
        {"0.auto_model.encoder.layer.": 2},
    ),
    "sequential": (["net.0.weight", "net.2.weight", "net.4.weight"], {}),
    "hybrid": (
        ["m.layers.0.norm.weight", "m.layers.0.mamba.A", "m.layers.1.norm.weight", "m.layers.1.attn.q.weight"],
        {"m.layers.": 2},
    ),
    "vision and language": (
        [
            *numbered("model.visual.blocks.{}.mlp.fc1.weight", 3),
            *numbered("model.language_model.layers.{}.mlp.up.weight", 2),
        ],
        {"model.visual.blocks.": 3, "model.language_model.layers.": 2},
    ),
}


@pytest.mark.parametrize(("names", "expected"), STACKS.values(), ids=STACKS)
def test_stacks_of_layers_are_found_by_name(names: list[str], expected: dict[str, int]) -> None:
    assert layer_stacks(names) == expected
    assert layer_stacks(reversed(names)) == expected


def test_a_tensor_belongs_to_the_layer_of_the_first_number_of_its_stack() -> None:
    stacks = {"model.layers.": 4, "vision.blocks.": 2}
    assert layer_of("model.layers.3.mlp.experts.7.w1.weight", stacks) == 3
    assert find_layer("vision.blocks.1.fc.0.weight", stacks) == ("vision.blocks.", 1)
    assert layer_of("model.layersnorm.weight", stacks) is None
    assert layer_of("model.norm.weight", stacks) is None
    assert layer_of("x.model.layers.3.w", stacks) is None


# Stacks of layers of several models


def model(
    label: str, layers: int, seed: int, config: Mapping[str, Any] | None = None, width: int = 4, **more: Tensor
) -> Checkpoint:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"model.embed.weight": (9, width), "model.norm.weight": (width,), "lm_head.weight": (9, width)}
    for number in range(layers):
        shapes[f"model.layers.{number}.mlp.experts.1.weight"] = (width, width)
        shapes[f"model.layers.{number}.norm.weight"] = (width,)
    memory = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()} | more
    return Checkpoint(label, memory=memory, config={"num_hidden_layers": layers, **(config or {})})


def stack(*ranges: tuple[Checkpoint, int, int]) -> StackedCheckpoint:
    layers = [(part, number) for part, first, stop in ranges for number in range(first, stop)]
    return StackedCheckpoint(layers, ranges[0][0])


def tied(label: str, seed: int) -> Checkpoint:
    table = torch.randn(9, 4, generator=torch.Generator().manual_seed(seed))
    more = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    return model(label, 2, seed, {"tie_word_embeddings": True}, **more)


def test_a_tied_head_comes_from_the_model_of_the_embedding() -> None:
    a, b = tied("A", 1), tied("B", 2)
    stacked = stack((a, 0, 2), (b, 0, 2))
    assert "lm_head.weight" not in stacked.tensors
    assert stacked.sources["model.embed_tokens.weight"][0] is a


KINDS: dict[str, tuple[dict[str, Any], Sequence[int], dict[str, Any]]] = {
    "gpt2": ({"n_layer": 4}, [0, 1, 2, 3, 3], {"n_layer": 5}),
    "gemma2": (  # its layers alternate by default
        {"num_hidden_layers": 4},
        [0, 2, 3],
        {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),
    "qwen2": (
        {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},
        [0, 2, 1],
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    ),
    "of no class": (
        {"num_layers": 4, "window_sizes": [1, 2, 3, 4], "image_mean": [0, 0, 0, 0]},
        [3, 0],
        {"num_layers": 2, "window_sizes": [4, 1], "image_mean": [0, 0, 0, 0]},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_config_values_per_layer_follow_the_layers(kind: str) -> None:
    stated, numbers, expected = KINDS[kind]
    checkpoint = model("A", 4, 1, {"model_type": kind, **stated})
    checkpoint.config = {"model_type": kind, **stated}
    config = config_of_layers(checkpoint, [(checkpoint, number) for number in numbers])
    assert config == {**checkpoint.config, **expected}


def test_slices_cut_the_language_model() -> None:
    config = {"text_config": {"num_hidden_layers": 2}, "vision_config": {"num_hidden_layers": 2}}
    names = [f"model.{side}.{n}.fc.weight" for side in ("visual.blocks", "language_model.layers") for n in (0, 1)]
    checkpoint = Checkpoint("V", memory={name: torch.ones(2) for name in names}, config=config)
    stack = layer_stack(checkpoint)
    assert (stack.prefix, stack.layers) == ("model.language_model.layers.", [["fc.weight"]] * 2)
    made = config_of_layers(checkpoint, [(checkpoint, 0)] * 3)
    assert made == {"text_config": {"num_hidden_layers": 3}, "vision_config": {"num_hidden_layers": 2}}


def problems(*ranges: tuple[Checkpoint, int, int]) -> str:
    return "\n".join(compare_parts([stack(*ranges)], (), ()).problems)


def test_models_can_differ_in_depth_and_not_in_width() -> None:
    a = model("A", 2, 1)
    assert problems((a, 0, 2), (model("B", 5, 2), 4, 5)) == ""
    found = problems((a, 0, 2), (model("B", 2, 2, width=6), 0, 1))
    assert "model.layers.0.norm.weight" in found
