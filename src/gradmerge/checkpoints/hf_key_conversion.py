"""Map the parameter names of a transformers model in memory to the names in its files."""

from __future__ import annotations

from typing import Any

import torch

from ..quiet import quiet_transformers
from .checkpoint import Checkpoint
from .compat.config_diff import MOST_LAYERS, parts


def stored_by_class(checkpoint: Checkpoint) -> dict[str, str]:
    """Return name in memory → name in files, as the model's transformers class converts them; empty on failure."""
    from transformers.core_model_loading import revert_weight_conversion

    model = empty_model_of(checkpoint)
    if model is None:
        return {}
    try:
        # Convert a state dict in which every tensor is filled with its own number.
        names = [name for name, _ in model.named_parameters()]
        shapes = [p.shape if p.dim() != 3 else (*p.shape[:2], 2) for p in model.parameters()]  # copies of experts fit
        numbers = {name: torch.tensor(float(k)).expand(shapes[k]) for k, name in enumerate(names)}
        stored = revert_weight_conversion(model, numbers)
    except Exception:  # transformers cannot convert it, so both names are the same
        return {}
    return {names[int(v.min())]: n for n, v in stored.items() if v.numel() and bool(v.min() == v.max())}


def empty_model_of(checkpoint: Checkpoint) -> Any:
    """Return the model that the config describes, without memory for its weights; None if there is no such model.

    Runs only code of transformers itself.
    """
    config = checkpoint.config
    architectures = config.get("architectures")
    counts = (v for _, part in parts(config) for k, v in part.items() if "layer" in k or "expert" in k)
    if not isinstance(architectures, list) or not architectures:
        return None
    if any(isinstance(n, int) and n > MOST_LAYERS for n in counts):
        return None  # so many layers would fill the memory, and no real model has them
    import transformers

    try:
        model_class = getattr(transformers, str(architectures[0]))
        with quiet_transformers(), torch.device("meta"):
            model = model_class(model_class.config_class.from_dict(dict(config)))
    except Exception:  # no such class, or the config does not fit it
        return None
    # With many more parameters than the file, the config belongs to another model.
    return None if sum(p.numel() for p in model.parameters()) > 16 * checkpoint.parameters else model
