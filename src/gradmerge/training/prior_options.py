"""What a user gives PriorAdamW as prior and anchor: checked, found by name, and put where the optimizer keeps it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..curvature import Curvature
from ..errors import InputError
from .named_tensors import find, open_anchor, open_prior

Prior = None | float | Curvature | Mapping[str, Tensor] | str | Path
Coupling = Literal["decoupled", "adam"]

#: What a group's `prior` says when H_0 is in the state of its parameters.
CURVATURE = "curvature"
#: What a parameter's state holds beside Adam's moments.
KEPT = ("anchor", "prior")
#: What a group that is added later must say, if the optimizer was made with a mapping.
_OF_ITS_OWN = {
    "anchor": 'an "anchor" of its own (a mapping or a path, or None for the parameters as they are now)',
    "prior": 'a "prior" of its own (a mapping, a Curvature, a path or a number)',
}


class Gone:
    """Stands for a mapping that was used when the optimizer was made, and is not kept."""


def check_options(options: Mapping[str, Any]) -> float | str | None:
    """Raise if an option is wrong; returns what the group keeps as its prior: None, a number, or `CURVATURE`."""
    prior, anchor, keep_on = options["prior"], options["anchor"], options["keep_on"]
    for name in ("strength", "damping"):
        if not isinstance(options[name], (int, float)) or not 0 <= options[name] < math.inf:
            raise InputError(f"{name}={options[name]}: a number, at least 0 and finite")
    for name, words in (("coupling", ("decoupled", "adam")), ("reduction", ("mean", "sum"))):
        if options[name] not in words:
            raise InputError(f'{name}={options[name]!r}: "{words[0]}" or "{words[1]}"')
    if options["keep_dtype"] not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(
            f"keep_dtype={options['keep_dtype']}: torch.bfloat16, torch.float32 or torch.float64 (others lack the "
            "range of curvature)"
        )
    if keep_on is not None:
        try:
            torch.device(keep_on)
        except (RuntimeError, TypeError) as error:
            raise InputError(f"keep_on={keep_on!r}: not a device of PyTorch") from error
    for name, own in _OF_ITS_OWN.items():
        if isinstance(options[name], Gone):
            raise InputError(f"a further group needs {own}: the mapping that the optimizer was made with is not kept")
    if not isinstance(anchor, None | Mapping | str | Path):
        kinds = "None, a mapping from names to tensors or the path of a checkpoint"
        raise InputError(f"anchor: {kinds}, not {type(anchor).__name__}")
    damping = float(options["damping"])
    if prior is None:
        if options["coupling"] == "adam":
            raise InputError('coupling="adam" solves a penalty with an H_0, but prior=None. Use prior="identity".')
        if damping:
            raise InputError(f"damping={damping:g} is added to the prior, but prior=None. Leave one of them out.")
        return None
    if isinstance(prior, str) and prior == "identity":
        return 1.0 + damping
    if isinstance(prior, (int, float)):
        if not 0 <= prior < math.inf:
            raise InputError(f"prior={prior}: as a number, it is at least 0 and finite")
        return float(prior) + damping
    if not isinstance(prior, (Mapping, str, Path)):
        kinds = 'None, "identity", a number, a Curvature, a mapping from names to tensors or a path'
        raise InputError(f"prior: {kinds}, not {type(prior).__name__}")
    return CURVATURE


def kept_tensors(
    group: Mapping[str, Any], given: Mapping[str, Any], model: nn.Module | None
) -> dict[Tensor, dict[str, Tensor]]:
    """Anchor and prior of a new group's parameters, from what the user gave; with strength 0, some may be missing."""
    params: list[Tensor] = group["params"]
    if any(p.is_complex() for p in params):
        raise InputError(
            "PriorAdamW: complex parameters are not supported. Train their real and imaginary parts apart."
        )
    optional = group["strength"] == 0
    kept: dict[Tensor, dict[str, Tensor]] = {p: {} for p in params}
    opened = []
    if given["anchor"] is not None:
        opened.append(("anchor", "an anchor", open_anchor(given["anchor"])))
    else:
        for i, p in enumerate(params):
            kept[p]["anchor"] = placed("anchor", p.detach().clone(), p, group)
            if not optional:
                refuse_unusable("anchor", kept[p]["anchor"], parameter_name(group, i), "the parameters as they are")
    if group["prior"] == CURVATURE:
        opened.append(("prior", "a prior", open_prior(given["prior"], given["reduction"])))
    for key, what, opening in opened:
        if group.get("param_names") is None:
            raise InputError(
                f"PriorAdamW: {len(params)} parameters without names, but {what} that goes by names. Give the model, "
                "or model.named_parameters()."
            )
        named = dict(zip(group["param_names"], params, strict=True))
        with opening as tensors:
            for name, value in find(tensors, list(named.items()), model, optional=optional):
                if key == "prior":
                    # Looked at twice: damping hides negative values, and a narrow type may overflow.
                    refuse_unusable(key, value, name, tensors.label)
                    value = value.to(torch.promote_types(value.dtype, torch.float32)) + float(given["damping"])
                else:
                    value = value.clone()
                kept[named[name]][key] = placed(key, value, named[name], group)
                refuse_unusable(key, kept[named[name]][key], name, tensors.label)
    return {p: values for p, values in kept.items() if values}


def parameter_name(group: Mapping[str, Any], i: int) -> str:
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i} of its group"


def refuse_unusable(key: str, value: Tensor, name: str, label: str) -> None:
    """Anchors are finite, and curvature is also not negative: else the first step would spoil every weight."""
    if value.numel() == 0 or value.is_meta:
        return
    low, high = (float(limit) for limit in torch.aminmax(value.detach()))
    if not (math.isfinite(low) and math.isfinite(high)) or (key == "prior" and low < 0):
        what = "negative or not finite" if key == "prior" else "not finite"
        raise InputError(f"{label}: {name} has values that are {what}; PriorAdamW cannot take it as {key}")


def placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """The value on the device and in the type that the group asks for, laid out in memory as the parameter is."""
    usual = parameter.dtype if key == "anchor" or parameter.dtype == torch.float64 else torch.float32
    dtype = group["keep_dtype"] or usual
    device = parameter.device if group["keep_on"] is None else torch.device(group["keep_on"])
    kept = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if (value.dtype, value.device, value.stride()) == (dtype, kept.device, kept.stride()):
        kept = value
    else:
        kept.copy_(value)
    return kept.pin_memory() if kept.device.type == "cpu" and parameter.device.type == "cuda" else kept
