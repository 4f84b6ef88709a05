"""Weights in memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

State = Mapping[str, Tensor]


def read_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, under the names of its files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def norm(state: State) -> float:
    """‖a‖ over all tensors."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in state.values()))


def distance(one: State, other: State) -> float:
    """‖a − b‖ over all tensors."""
    return math.sqrt(sum(float((value.double() - other[n].double()).square().sum()) for n, value in one.items()))


def mean_entry(state: State) -> float:
    """The mean over all entries of all tensors."""
    total = sum(float(value.sum(dtype=torch.float64)) for value in state.values())
    return total / sum(value.numel() for value in state.values())
