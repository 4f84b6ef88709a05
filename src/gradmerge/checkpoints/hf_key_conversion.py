"""Names that a model of transformers has in memory, where its files have others."""

from __future__ import annotations

import torch

from ..quiet import quiet_transformers
from .checkpoint import Checkpoint
from .compat.config_diff import MOST_LAYERS, parts


def stored_by_class(checkpoint: Checkpoint) -> dict[str, str]:
    """Name in memory → name in files, as transformers renames them for the class that the config names; or nothing.

    The model is built without memory for its weights, and from no code but transformers' own.
    """
    config = checkpoint.config
    named = config.get("architectures")
    counts = (v for _, part in parts(config) for k, v in part.items() if "layer" in k or "expert" in k)
    if not isinstance(named, list) or not named or any(isinstance(n, int) and n > MOST_LAYERS for n in counts):
        return {}  # such layers would take all memory, and no model has so many
    import transformers
    from transformers.core_model_loading import revert_weight_conversion

    try:
        kind = getattr(transformers, str(named[0]))
        with quiet_transformers(), torch.device("meta"):
            model = kind(kind.config_class.from_dict(dict(config)))
        names = [name for name, _ in model.named_parameters()]
        if sum(p.numel() for p in model.parameters()) > 16 * checkpoint.parameters:  # the config of another model
            return {}
        numbers = {n: torch.tensor(float(k)).expand(p.shape) for k, (n, p) in enumerate(model.named_parameters())}
        stored = revert_weight_conversion(model, numbers)
    except Exception:  # a class that there is not, a config that does not fit it: then names are what they are
        return {}
    return {names[int(v.min())]: n for n, v in stored.items() if v.numel() and bool(v.min() == v.max())}
