"""What a model was tuned under, written beside it: P of ½‖θ − θ_base‖²_P, which the **sum** of the losses goes with.

Training minimises the mean of M terms, L = (1/M) Σ_i ℓ_i, plus ½ strength · ‖θ − θ_base‖²_{H_0}. Where it comes to rest
depends on the coupling, with D = √v̂ + ε of Adam:

    adam        ∇L + strength · H_0 ⊙ Δ = 0          P = M · strength · H_0
    decoupled   ∇L / D + strength · H_0 ⊙ Δ = 0      P = M · strength · D ⊙ H_0, with D as it is at the end

Either way ∇ Σ_i ℓ_i + P ⊙ Δ = 0, which is what gradient matching asks of a model.
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
from .prior_options import CURVATURE

RECORD = "gradmerge_penalty.json"
FORMAT = "gradmerge-penalty/1"
#: The folder inside the model's that holds P, where it is no multiple of the identity.
FOLDER = "penalty"

Kept = Mapping[Tensor, Mapping[str, Any]]
"""What an optimizer keeps of each parameter."""


def write_penalty(folder: Path, groups: list[dict[str, Any]], kept: Kept, model: nn.Module, mean_over: float) -> None:
    """Write the record of the groups of a PriorAdamW beside a model whose loss was a mean over so many terms."""
    if is_adapted(model):
        raise InputError(
            "the penalty of an adapter is on its factors A and B, and a merge of the weights W + s·BA that they stand "
            "for needs one on W: it is not recorded"
        )
    if not isinstance(mean_over, int | float) or not 0 < mean_over < math.inf:
        raise InputError(f"mean_over={mean_over}: how many terms the training loss is a mean of; 1 if it is a sum")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Save the model first, then record its penalty beside it.")
    value: Any = FOLDER
    numbers = {_number(group) for group in groups}
    if numbers == {0.0}:
        value = "none"
    elif len(numbers) == 1 and None not in numbers:
        value = {"identity": mean_over * numbers.pop()}  # type: ignore[operator]
    else:
        _matrix(groups, kept, model, mean_over).save(folder / FOLDER, force=True)
    temporary = folder / f".{RECORD}"
    temporary.write_text(json.dumps({"format": FORMAT, "penalty": value}, indent=2) + "\n", "utf-8")
    os.replace(temporary, folder / RECORD)  # noqa: PTH105


def _number(group: Mapping[str, Any]) -> float | None:
    """c where the penalty of a group's mean loss is c · I."""
    if group["strength"] == 0:
        return 0.0
    is_number = group["coupling"] == "adam" and isinstance(group["prior"], float)
    return float(group["strength"]) * group["prior"] if is_number else None


def _matrix(groups: list[dict[str, Any]], kept: Kept, model: nn.Module, mean_over: float) -> Curvature:
    """P by names in memory, to be saved by those of files; 0 for what is not trained, since it does not move."""
    sums = {n: torch.zeros(()).expand(p.shape) for n, p in model.named_parameters() if p.is_floating_point()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    trained = [p for group in groups for p in group["params"]]
    if foreign := [tuple(p.shape) for p in trained if p not in names]:
        raise InputError(
            f"{type(model).__name__}: the optimizer trains {len(foreign)} parameters that it does not have, of shapes "
            f"{listed(map(str, foreign), 4)}"
        )
    for group in groups:
        for parameter in group["params"]:
            prior = kept.get(parameter, {}).get("prior") if group["prior"] == CURVATURE else group["prior"] or 1.0
            # Without a prior the optimizer pulls as with I; without a step there is nothing to balance yet.
            metric = _metric(group, kept.get(parameter, {})) if group["coupling"] == "decoupled" else 1.0
            if group["strength"] != 0 and prior is not None and metric is not None:
                whole = torch.as_tensor(prior, device="cpu").double() * metric * float(group["strength"]) * mean_over
                sums[names[parameter]] = whole.float().expand(parameter.shape)
    own = {name: value.clone(memory_format=torch.contiguous_format) for name, value in sums.items()}
    return Curvature(own, 1, PENALTY, stored=for_files(model))


def _metric(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
    """D = √v̂ + ε, if the parameter has been stepped."""
    squares = state.get("max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq")
    if squares is None:
        return None
    correction = 1 - float(group["betas"][1]) ** float(state["step"])
    metric: Tensor = (squares.detach().cpu().double() / correction).sqrt() + group["eps"]
    return metric
