"""Names that a model of transformers has in memory, where its files have others."""

from __future__ import annotations

from typing import Any

import torch

from ..quiet import quiet_transformers
from .checkpoint import Checkpoint
from .compat.config_diff import MOST_LAYERS, parts


def stored_by_class(checkpoint: Checkpoint) -> dict[str, str]:
    """Name in memory → name in files, as transformers renames them for the class that the config names; or nothing."""
    from transformers.core_model_loading import revert_weight_conversion

    model = empty_model_of(checkpoint)
    if model is None:
        return {}
    try:
        names = [name for name, _ in model.named_parameters()]
        shapes = [p.shape if p.dim() != 3 else (*p.shape[:2], 2) for p in model.parameters()]  # copies of experts fit
        numbers = {name: torch.tensor(float(k)).expand(shapes[k]) for k, name in enumerate(names)}
        stored = revert_weight_conversion(model, numbers)
    except Exception:  # then names are what they are
        return {}
    return {names[int(v.min())]: n for n, v in stored.items() if v.numel() and bool(v.min() == v.max())}


def empty_model_of(checkpoint: Checkpoint) -> Any:
    """The model that a checkpoint's config describes, without memory for its weights; None if there is no such model.

    No code but that of transformers is run.
    """
    config = checkpoint.config
    named = config.get("architectures")
    counts = (v for _, part in parts(config) for k, v in part.items() if "layer" in k or "expert" in k)
    if not isinstance(named, list) or not named or any(isinstance(n, int) and n > MOST_LAYERS for n in counts):
        return None  # such layers would take all memory, and no model has so many
    import transformers

    try:
        kind = getattr(transformers, str(named[0]))
        with quiet_transformers(), torch.device("meta"):
            model = kind(kind.config_class.from_dict(dict(config)))
    except Exception:  # a class that there is not, a config that does not fit it
        return None
    # More parameters than that are of the config of another model.
    return None if sum(p.numel() for p in model.parameters()) > 16 * checkpoint.parameters else model
