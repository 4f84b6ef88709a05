"""What may be given to PriorAdamW and PriorTrainer as options of the penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..curvature import Curvature
from ..errors import InputError

Prior = None | float | Curvature | Mapping[str, Tensor] | str | Path
Coupling = Literal["decoupled", "adam"]

#: What a group's `prior` says when H_0 is in the state of its parameters.
CURVATURE = "curvature"


class Gone:
    """Stands for a mapping that was used when the optimizer was made, and let go of."""


def check_options(options: Mapping[str, Any]) -> float | str | None:
    """Raise if an option is wrong; what a group says of its prior otherwise: None, a number, or `CURVATURE`."""
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
    if isinstance(anchor, Gone):
        raise InputError(
            'a further group needs an "anchor" of its own (a mapping or a path, or None for the parameters as they are '
            "now): the mapping that the optimizer was made with is not kept"
        )
    if not isinstance(anchor, None | Mapping | str | Path):
        raise InputError(
            f"anchor: None, a mapping from names to tensors or the path of a checkpoint, not {type(anchor).__name__}"
        )
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
    if isinstance(prior, Gone):
        raise InputError(
            'a further group needs a "prior" of its own (a mapping, a Curvature, a path or a number): the mapping that '
            "the optimizer was made with is not kept"
        )
    if not isinstance(prior, (Mapping, str, Path)):
        raise InputError(
            'prior: None, "identity", a number, a Curvature, a mapping from names to tensors or a path, not '
            f"{type(prior).__name__}"
        )
    return CURVATURE
