"""Layers in the names of tensors, among other numbers."""

from __future__ import annotations

import pytest

from gradmerge.checkpoints.layers import layer_of, layer_stacks, place_of


def numbered(template: str, count: int) -> list[str]:
    return [template.format(number) for number in range(count)]


STACKS = {
    "llama": (
        ["model.embed_tokens.weight", *numbered("model.layers.{}.self_attn.q_proj.weight", 12)],
        {"model.layers.": 12},
    ),
    "one layer": (["model.layers.0.mlp.up_proj.weight", "lm_head.weight"], {"model.layers.": 1}),
    "gpt-2, bare": ([*numbered("h.{}.attn.c_attn.weight", 3), "wte.weight"], {"h.": 3}),
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
    "one block of t5": (numbered("encoder.block.0.layer.{}.layer_norm.weight", 2), {"encoder.block.": 1}),
    "sentence-transformers": (
        [*numbered("0.auto_model.encoder.layer.{}.output.dense.weight", 2), "1_Dense/linear.weight"],
        {"0.auto_model.encoder.layer.": 2},
    ),
    "its modules in one": (
        [*numbered("0.auto_model.layers.{}.fc.weight", 2), "1.linear.weight", "1.linear.bias"],
        {"0.auto_model.layers.": 2},
    ),
    "sequential": (["net.0.weight", "net.2.weight", "net.4.weight"], {}),
    "sequential with a norm": (["merger.mlp.0.weight", "merger.mlp.0.bias", "head.0.weight"], {}),
    "list of linear layers": (numbered("layers.{}.weight", 3), {"layers.": 3}),
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
    "stages": (
        [f"layer{stage}.{n}.conv1.weight" for stage in (1, 2) for n in range(stage)],
        {"layer1.": 1, "layer2.": 2},
    ),
}


@pytest.mark.parametrize(("names", "expected"), STACKS.values(), ids=STACKS)
def test_stacks_of_layers_are_found_by_name(names: list[str], expected: dict[str, int]) -> None:
    assert layer_stacks(names) == expected
    assert layer_stacks(reversed(names)) == expected


def test_a_tensor_belongs_to_the_layer_of_the_first_number_of_its_stack() -> None:
    stacks = {"model.layers.": 4, "vision.blocks.": 2}
    assert layer_of("model.layers.3.mlp.experts.7.w1.weight", stacks) == 3
    assert place_of("vision.blocks.1.fc.0.weight", stacks) == ("vision.blocks.", 1)
    assert layer_of("model.layersnorm.weight", stacks) is None
    assert layer_of("model.norm.weight", stacks) is None
    assert layer_of("x.model.layers.3.w", stacks) is None
