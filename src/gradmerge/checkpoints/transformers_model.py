"""How a transformers model stores its parameters: their names in files, and the parts of those that are stored apart.

The model is built from its config, without memory for weights, and only with classes of transformers itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..io.remote_code_guard import refuse_hub_code
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


def stored_names(model: Any) -> dict[str, str]:
    """Return name in memory → name in files, as the model's class converts them; empty on failure."""
    if model is None:
        return {}
    from transformers.core_model_loading import revert_weight_conversion

    # Convert a state dict in which every tensor is filled with its own number.
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape if p.dim() != 3 else (*p.shape[:2], 2) for p in model.parameters()]  # copies of experts fit
    numbers = {name: torch.tensor(float(k)).expand(shapes[k]) for k, name in enumerate(names)}
    try:
        stored = revert_weight_conversion(model, numbers)
    except Exception:  # transformers cannot convert it, so both names are the same
        return {}
    return {names[int(v.min())]: n for n, v in stored.items() if v.numel() and bool(v.min() == v.max())}


@dataclass(frozen=True)
class BareParameter:
    """A parameter that PEFT adapts by its name (`target_parameters`), such as the fused experts of a layer."""

    name: str
    experts: int
    shape: tuple[int, int]
    """Rows and columns of one expert."""
    inputs_first: bool
    """Rows are inputs and columns outputs, as in gpt-oss."""


def find_bare_parameters(model: nn.Module, targets: Collection[str]) -> dict[str, BareParameter]:
    """Return path of the module that gets LoRA's factors → its parameter, for ``target_parameters`` of PEFT.

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


@dataclass(frozen=True)
class Slice:
    """The part of a parameter (experts × rows × columns) that one stored tensor holds."""

    expert: int | None
    """None: all of them."""
    rows: slice
    flipped: bool
    """The tensor stores (columns, rows)."""


def find_slices(model: Any, parameter: BareParameter) -> dict[str, Slice] | None:
    """Return name in files → the part of the parameter that is stored there; None if it is not a slice of rows.

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
    slices = {name: _slice_of(value, experts, rows) for name, value in stored.items()}
    return None if None in slices.values() else slices  # type: ignore[return-value]


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
