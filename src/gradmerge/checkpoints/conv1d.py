"""Which way round a weight is stored: (out, in) as of a linear layer, or (in, out) as of GPT-2's Conv1D."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..io.reader import TensorInfo


def stores_inputs_first(
    tensors: Mapping[str, TensorInfo], target: str, sizes: tuple[int, int], embedding: bool, config: Mapping[str, Any]
) -> bool:
    """Whether the target of LoRA's factors stores (in, out), by its shape or, where that is square, its neighbours.

    ``sizes`` are the outputs and inputs of the factors. Where nothing else tells, the adapter's config does.
    """
    outputs, inputs = sizes
    stated = embedding or bool(config.get("fan_in_fan_out"))
    shape = tensors[target].shape
    if len(shape) != 2:
        return stated
    if inputs == outputs:
        neighbours = None if embedding else _neighbours_say(tensors, target)
        return stated if neighbours is None else neighbours
    return shape == (inputs, outputs)


def _neighbours_say(tensors: Mapping[str, TensorInfo], target: str) -> bool | None:
    """Whether weights beside the target, in its module or the next larger one, store (in, out), by their biases.

    PEFT corrects fan_in_fan_out module by module and saves what the last of them had.
    """
    parts = target.split(".")
    for parent in (parts[:-2], parts[:-3]):
        prefix = ".".join(parent) + "."
        for name in tensors if parent else ():
            bias = tensors.get(name.removesuffix("weight") + "bias")
            shape = tensors[name].shape
            if not name.startswith(prefix) or not name.endswith(".weight") or bias is None or len(shape) != 2:
                continue
            if shape[0] != shape[1] and len(bias.shape) == 1 and bias.shape[0] in shape:
                return bias.shape[0] == shape[1]
    return None
