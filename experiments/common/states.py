"""Weights in memory: read from a folder, put into a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)


def read_state(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint folder, under the names of its files."""
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def model_with(model: Model, state: Mapping[str, Tensor]) -> Model:
    """A model like this one, on its device, with weights that go by the names of checkpoint files.

    transformers renames some weights between files and memory, so it is the one to load them.
    """
    made, report = type(model).from_pretrained(
        None, config=model.config, state_dict=dict(state), dtype=torch.float32, output_loading_info=True
    )
    lacking = sorted({*report["missing_keys"]} & {name for name, _ in made.named_parameters()})
    if lacking:
        raise ValueError(f"{type(model).__name__}: the weights lack {lacking[0]}")
    placed: Model = made.to(model.device).eval()
    return placed
