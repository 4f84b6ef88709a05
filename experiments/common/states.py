"""Weights in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

State = Mapping[str, Tensor]


def read_state(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint folder, under the names of its files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


@torch.no_grad()
def put(model: Any, state: State) -> Any:
    """Copy weights into a model and return it; tied weights may be missing from ``state``."""
    unknown = model.load_state_dict(dict(state), strict=False).unexpected_keys
    if unknown:
        raise ValueError(f"the model has no {unknown[0]}")
    return model


def norm(state: State) -> float:
    """Return ‖a‖ over all tensors."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in state.values()))


def distance(one: State, other: State) -> float:
    """Return ‖a − b‖ over all tensors."""
    return math.sqrt(sum(float((value.double() - other[n].double()).square().sum()) for n, value in one.items()))


def mean_entry(state: State) -> float:
    """Return the mean over all entries of all tensors."""
    total = sum(float(value.sum(dtype=torch.float64)) for value in state.values())
    return total / sum(value.numel() for value in state.values())
