"""How a transformers model stores its parameters: their names in files, and the parts of those that are stored apart.

The model is built from its config, without memory for weights, and only with classes of transformers itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..io.small_files import refuse_hub_code
from ..quiet import quiet_transformers
from .checkpoint import Checkpoint
from .config_diff import claims_too_many


def empty_model(checkpoint: Checkpoint) -> Any:
    """Return the model that the config describes, on the meta device; None if transformers cannot build it.

    Code from the Hub is not run, also not that of an attention implementation.
    """
    config = checkpoint.config
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or claims_too_many(config):
        return None
    import transformers

    try:
        refuse_hub_code(dict(config), checkpoint.label)
        model_class = getattr(transformers, str(architectures[0]))
        with quiet_transformers(), torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(dict(config)))
    except Exception:  # no such class, the config does not fit it, or it names code from the Hub
        return None
    # With many more parameters than the file, the config belongs to another model.
    return None if sum(p.numel() for p in model.parameters()) > 16 * checkpoint.parameters else model


def revert_names(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as transformers stores them in files: renamed, and cut into parts. Empty if it cannot."""
    from transformers.core_model_loading import revert_weight_conversion

    try:
        with quiet_transformers():
            return dict(revert_weight_conversion(model, dict(tensors)))
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return {}


@dataclass(frozen=True)
class Slice:
    """The part of a parameter (experts × rows × columns) that one stored tensor holds."""

    expert: int | None
    """None: all of them."""
    rows: slice
    flipped: bool
    """The tensor stores (columns, rows)."""


def find_slices(model: nn.Module, name: str) -> dict[str, Slice] | None:
    """Return name in files → the part of a parameter that is stored there; None if it is not a slice of rows.

    transformers' own conversion is applied to row numbers, in a parameter of as many rows but very few columns.
    """
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    original = module._parameters[attribute]
    assert original is not None
    *leading, rows, _ = original.shape
    experts = leading[0] if leading else 1
    shape = (*leading, rows, 2 if rows != 2 else 3)
    numbers = torch.arange(experts * rows).reshape(*leading, rows, 1).expand(shape)
    module._parameters[attribute] = nn.Parameter(torch.empty(shape, device="meta"))  # some conversions read its shape
    try:
        stored = revert_names(model, {name: numbers})
    finally:
        module._parameters[attribute] = original
    slices = {name: part for name, value in stored.items() if (part := _slice_of(value, experts, rows))}
    return slices if slices and len(slices) == len(stored) else None


def _slice_of(numbers: Tensor, experts: int, rows: int) -> Slice | None:
    """Return the part of a parameter whose row numbers a stored tensor holds, if its rows are consecutive."""
    if numbers.dim() not in (2, 3):
        return None
    flipped = bool((numbers[..., :1, :] != numbers[..., :1, :1]).any())
    by_row = (numbers.mT if flipped else numbers)[..., 0]
    by_expert = by_row if by_row.dim() == 2 else by_row[None]
    first = int(by_expert[0, 0])
    start, count = first % rows, by_expert.shape[1]
    expected = torch.arange(first, first + count) + rows * torch.arange(len(by_expert))[:, None]
    if not by_expert.equal(expected) or len(by_expert) not in (1, experts) or start + count > rows:
        return None
    whole = len(by_expert) == experts
    return Slice(None if whole else first // rows, slice(start, start + count), flipped)
