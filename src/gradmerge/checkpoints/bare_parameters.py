"""LoRA on bare parameters (`target_parameters` of PEFT), such as the fused experts of a mixture of experts.

PEFT wraps the module that holds such a parameter, and transformers may store the parameter as one tensor for each
expert. Both depend on the class of the model, which is built here without memory for its weights.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..quiet import quiet_transformers


@dataclass(frozen=True)
class Slice:
    """The part of a parameter (experts × rows × columns) that one stored tensor holds."""

    expert: int | None
    """None: all of them."""
    rows: slice
    flipped: bool
    """The tensor stores (columns, rows)."""


@dataclass(frozen=True)
class BareParameter:
    """A parameter that PEFT adapts by its name, in the model as transformers loads it."""

    name: str
    experts: int
    shape: tuple[int, int]
    """Rows and columns of one expert."""
    inputs_first: bool
    """Rows are inputs and columns outputs, as in gpt-oss."""


def find_bare_parameters(model: nn.Module, targets: Collection[str]) -> dict[str, BareParameter]:
    """Path of the module that gets LoRA's factors → its parameter, for ``target_parameters`` of PEFT.

    PEFT wraps a module once for each of its parameters, in their order: the factors of the last are the module's, those
    of the one before are its `base_layer`'s, and so on.
    """
    result: dict[str, BareParameter] = {}
    for path, module in model.named_modules():
        parameters = [
            (f"{path}.{name}", parameter)
            for name, parameter in module.named_parameters(recurse=False)
            if any(f".{path}.{name}".endswith(f".{target}") for target in targets)
        ]
        for depth, (name, parameter) in enumerate(reversed(parameters)):
            if parameter.dim() not in (2, 3) or parameter.shape[:-2] == (1,):
                continue  # PEFT cannot merge these
            experts = parameter.shape[0] if parameter.dim() == 3 else 1
            inputs_first = parameter.dim() == 3 and bool(getattr(module, "is_transposed", False))
            rows, columns = parameter.shape[-2:]
            result[path + ".base_layer" * depth] = BareParameter(name, experts, (rows, columns), inputs_first)
    return result


def find_slices(model: Any, parameter: BareParameter) -> dict[str, Slice] | None:
    """Name in the checkpoint → the part of the parameter that is stored there; None if it is no such part.

    transformers' own conversion is applied to row numbers, in a parameter of as many rows but very few columns.
    """
    from transformers.core_model_loading import revert_weight_conversion

    experts, rows = parameter.experts, parameter.shape[0]
    columns = 2 if rows != 2 else 3
    shape = (experts, rows, columns) if experts > 1 else (rows, columns)
    numbers = torch.arange(experts * rows).reshape(*shape[:-1], 1).expand(shape)
    owner, _, attribute = parameter.name.rpartition(".")
    module = model.get_submodule(owner)
    original = module._parameters[attribute]
    module._parameters[attribute] = nn.Parameter(torch.empty(shape, device="meta"))  # some conversions read its shape
    try:
        with quiet_transformers():
            stored = revert_weight_conversion(model, {parameter.name: numbers})
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError):
        return None
    finally:
        module._parameters[attribute] = original
    slices = {}
    for name, value in stored.items():
        if (part := _slice_of(value, experts, rows)) is None:
            return None
        slices[name] = part
    return slices


def _slice_of(numbers: Tensor, experts: int, rows: int) -> Slice | None:
    """The part of a parameter whose row numbers a stored tensor holds, if its rows are neighbors."""
    if numbers.dim() not in (2, 3):
        return None
    flipped = bool((numbers[..., :1, :] != numbers[..., :1, :1]).any())
    by_row = (numbers.mT if flipped else numbers)[..., 0]
    by_expert = by_row if by_row.dim() == 2 else by_row[None]
    first = int(by_expert[0, 0])
    start, count = first % rows, by_expert.shape[1]
    wanted = torch.arange(first, first + count) + rows * torch.arange(len(by_expert))[:, None]
    if not by_expert.equal(wanted) or (len(by_expert) > 1 and len(by_expert) != experts) or start + count > rows:
        return None
    whole = len(by_expert) == experts
    return Slice(None if whole else first // rows, slice(start, start + count), flipped)
