"""Tell weights stored as (out, in), as in linear layers, from (in, out), as in GPT-2's Conv1D."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..io.reader import TensorInfo


def stores_inputs_first(
    tensors: Mapping[str, TensorInfo], target: str, sizes: tuple[int, int], embedding: bool, config: Mapping[str, Any]
) -> bool:
    """Return whether the target of LoRA factors is stored as (in, out).

    The shape decides; for a square weight the neighboring layers, and otherwise the adapter's config. ``sizes`` are the
    numbers of outputs and inputs of the factors.
    """
    outputs, inputs = sizes
    configured = embedding or bool(config.get("fan_in_fan_out"))
    shape = tensors[target].shape
    if len(shape) != 2:
        return configured
    if inputs != outputs:
        return shape == (inputs, outputs)
    neighbors = None if embedding else _neighbors_store_inputs_first(tensors, target)
    return configured if neighbors is None else neighbors


def _neighbors_store_inputs_first(tensors: Mapping[str, TensorInfo], target: str) -> bool | None:
    """Compare weights in the module of the target, or in the enclosing one, with the sizes of their biases.

    The config alone is not reliable: PEFT corrects fan_in_fan_out module by module and saves the last value.
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
