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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature import Curvature
from ..curvature.checkpoint_names import for_files, is_adapted
from ..curvature.format import PENALTY
from ..errors import InputError

RECORD = "gradmerge_penalty.json"
FORMAT = "gradmerge-penalty/1"
#: The folder inside the model's folder that holds P, unless P is a multiple of the identity.
FOLDER = "penalty"


def write_penalty(
    folder: Path, penalties: Iterable[tuple[Tensor, float | Tensor]], model: nn.Module, mean_over: float
) -> None:
    """Write the record of a penalty beside a model whose training loss was a mean over ``mean_over`` terms.

    ``penalties`` has P / ``mean_over`` of each parameter: its diagonal, or a number for a multiple of the identity.
    """
    if is_adapted(model):
        raise InputError(
            "record_penalty: the penalty of an adapter is on its factors A and B, but a merge needs one on the full "
            "weights W + s·BA"
        )
    if not isinstance(mean_over, int | float) or not 0 < mean_over < math.inf:
        raise InputError(f"mean_over={mean_over}: must be the number of terms that the loss is a mean of; 1 for a sum")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Save the model first, then record its penalty.")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, float | Tensor] = {}
    for parameter, penalty in penalties:
        if parameter not in names:
            shape = tuple(parameter.shape)
            raise InputError(f"{type(model).__name__}: does not have a parameter of the optimizer, of shape {shape}")
        found[names[parameter]] = penalty * mean_over
    multiples = {penalty if isinstance(penalty, float) else None for penalty in found.values()}
    value: Any = FOLDER
    if len(multiples) == 1 and (multiple := multiples.pop()) is not None:
        value = {"identity": multiple} if multiple else "none"
    else:
        # Weights that are not trained have P = 0.
        sums = {
            name: torch.as_tensor(found.get(name, 0.0), dtype=torch.float32).expand(parameter.shape).contiguous()
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        Curvature(sums, 1, PENALTY, stored=for_files(model)).save(folder / FOLDER, force=True)
    temporary = folder / f".{RECORD}"
    temporary.write_text(json.dumps({"format": FORMAT, "penalty": value}, indent=2) + "\n", "utf-8")
    os.replace(temporary, folder / RECORD)  # noqa: PTH105
