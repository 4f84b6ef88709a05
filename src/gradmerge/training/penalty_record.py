"""The penalty that a model was trained with, saved beside it: P of ½‖θ − θ_base‖²_P for the **sum** of the losses.

Training minimizes the mean of M terms, L = (1/M) Σ_i ℓ_i, plus ½ strength · ‖θ − θ_base‖²_{H_0}. It converges where,
with D = √v̂ + ε of Adam:

    adam        ∇L + strength · H_0 ⊙ Δ = 0          P = M · strength · H_0
    decoupled   ∇L / D + strength · H_0 ⊙ Δ = 0      P = M · strength · D ⊙ H_0, with the final D

In both cases ∇ Σ_i ℓ_i + P ⊙ Δ = 0, which is what gradient matching assumes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature import Curvature
from ..curvature.checkpoint_names import for_files, is_adapted
from ..curvature.format import PENALTY
from ..errors import InputError
from ..text import listed

RECORD = "gradmerge_penalty.json"
FORMAT = "gradmerge-penalty/1"
#: The folder inside the model's folder that holds P, unless P is a multiple of the identity.
FOLDER = "penalty"

State = Mapping[Tensor, Mapping[str, Any]]
"""The optimizer's state of each parameter, with its anchor and prior."""


def write_penalty(folder: Path, groups: list[dict[str, Any]], state: State, model: nn.Module, mean_over: float) -> None:
    """Write the record of a PriorAdamW beside a model whose training loss was a mean over ``mean_over`` terms."""
    if is_adapted(model):
        raise InputError(
            "record_penalty: the penalty of an adapter is on its factors A and B, but a merge needs one on the full "
            "weights W + s·BA"
        )
    if not isinstance(mean_over, int | float) or not 0 < mean_over < math.inf:
        raise InputError(f"mean_over={mean_over}: must be the number of terms that the loss is a mean of; 1 for a sum")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Save the model first, then record its penalty.")
    multiples = {_multiple_of_identity(group) for group in groups}
    value: Any = FOLDER
    if multiples == {0.0}:
        value = "none"
    elif len(multiples) == 1 and (multiple := multiples.pop()) is not None:
        value = {"identity": mean_over * multiple}
    else:
        _diagonal(groups, state, model, mean_over).save(folder / FOLDER, force=True)
    temporary = folder / f".{RECORD}"
    temporary.write_text(json.dumps({"format": FORMAT, "penalty": value}, indent=2) + "\n", "utf-8")
    os.replace(temporary, folder / RECORD)  # noqa: PTH105


def _multiple_of_identity(group: Mapping[str, Any]) -> float | None:
    """Return c if the penalty on the mean loss is c · I."""
    if group["strength"] == 0:
        return 0.0
    is_multiple = group["coupling"] == "adam" and isinstance(group["prior"], float)
    return float(group["strength"]) * group["prior"] if is_multiple else None


def _diagonal(groups: list[dict[str, Any]], state: State, model: nn.Module, mean_over: float) -> Curvature:
    """Return P by names in memory; it is saved with the names of files. Weights that are not trained have P = 0."""
    sums = {n: torch.zeros(()).expand(p.shape) for n, p in model.named_parameters() if p.is_floating_point()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    unknown = [str(tuple(p.shape)) for group in groups for p in group["params"] if p not in names]
    if unknown:
        raise InputError(
            f"{type(model).__name__}: {len(unknown)} parameters of the optimizer are not in this model, with shapes "
            f"{listed(unknown, 4)}"
        )
    for group in groups:
        for parameter in group["params"]:
            values = state.get(parameter, {})
            prior = group["prior"] if isinstance(group["prior"], float) else values.get("prior")
            metric = _adam_metric(group, values) if group["coupling"] == "decoupled" else 1.0
            # Without a step, there is nothing that the penalty balances.
            if group["strength"] != 0 and prior is not None and metric is not None:
                diagonal = torch.as_tensor(prior, device="cpu").double() * metric * float(group["strength"]) * mean_over
                sums[names[parameter]] = diagonal.float().expand(parameter.shape)
    copies = {name: value.clone(memory_format=torch.contiguous_format) for name, value in sums.items()}
    return Curvature(copies, 1, PENALTY, stored=for_files(model))


def _adam_metric(group: Mapping[str, Any], values: Mapping[str, Any]) -> Tensor | None:
    """Return D = √v̂ + ε, or None before the first step."""
    squares = values.get("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
    if squares is None:
        return None
    correction = 1 - float(group["betas"][1]) ** float(values["step"])
    metric: Tensor = (squares.detach().cpu().double() / correction).sqrt() + group["eps"]
    return metric
