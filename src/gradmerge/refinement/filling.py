"""Texts of other lengths filled up to one, so that rows of several tasks are one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..curvature.batches import batch_rows, moved, shape_of
from ..curvature.losses import MASKED, logits_of
from .points import evaluated

#: What the rows of a batch are filled up with on the right, beside tokens.
FILLINGS = {"attention_mask": 0, "token_type_ids": 0, "labels": MASKED, "decoder_attention_mask": 0}
#: Texts are filled up to at most so many times their length: beyond, a pass of their own costs less.
REACH = 2.0


class Filling:
    """Fills up batches of tokens with a mask to one length, so that they can be computed together.

    What is added on the right is masked. Batches of anything else stay as they are, and all do where the model names no
    token for padding, or minds; it is asked once.
    """

    def __init__(self) -> None:
        self._minds: bool | None = None

    def __call__(self, model: nn.Module, batches: Sequence[Any], reach: float = REACH) -> list[Any]:
        """The batches in their order, each as long as the longest of those up to ``reach`` times as long as it."""
        filled = list(batches)
        if self._minds or len(batches) < 2 or not all(_is_masked(batch) for batch in batches):
            return filled
        groups: list[list[int]] = []
        for place in sorted(range(len(batches)), key=lambda place: -_length(batches[place])):
            if not groups or _length(batches[groups[-1][0]]) > reach * _length(batches[place]):
                groups.append([])
            groups[-1].append(place)
        for places in groups:
            for place, batch in zip(places, _filled_up(model, [batches[place] for place in places]), strict=True):
                filled[place] = batch
        if self._minds is None:
            pairs = zip(batches, filled, strict=True)
            changed = next(((a, b) for a, b in pairs if shape_of(a) != shape_of(b)), None)
            self._minds = None if changed is None else _minds_filling(model, *changed)
        return list(batches) if self._minds else filled


def _is_masked(batch: Any) -> bool:
    return isinstance(batch, Mapping) and isinstance(batch.get("attention_mask"), Tensor)


def _length(batch: Mapping[str, Tensor]) -> int:
    return batch["attention_mask"].shape[-1]


def _filled_up(model: nn.Module, batches: Sequence[Mapping[str, Any]]) -> Sequence[Any]:
    if any(batch.keys() != batches[0].keys() for batch in batches):
        return batches
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    token = getattr(text, "pad_token_id", None)
    if isinstance(token, int) and not 0 <= token < getattr(text, "vocab_size", 0):
        token = None
    fillings = {**FILLINGS, "input_ids": token, "decoder_input_ids": token}
    filled = [dict(batch) for batch in batches]
    for name in filled[0]:
        values: list[Any] = [batch[name] for batch in batches]
        shapes: list[Any] = [value.shape[1:] if isinstance(value, Tensor) else () for value in values]
        if len(set(shapes)) == 1:
            continue
        # Labels that are no whole numbers may be of classes, which are no more where there are more tokens.
        numbers = name == "labels" and any(isinstance(value, Tensor) and value.is_floating_point() for value in values)
        if numbers or fillings.get(name) is None or any(len(shape) != 1 for shape in shapes):
            return batches
        longest = max(shape[0] for shape in shapes)
        for batch, value in zip(filled, values, strict=True):
            batch[name] = F.pad(value, (0, longest - value.shape[1]), value=fillings[name])
    return filled


def _minds_filling(model: nn.Module, batch: Any, filled: Any) -> bool:
    """Whether what was added to a batch changes the logits of its first row, as where a layer looks past the mask.

    Logits that are all 0 cannot tell, and count as changed.
    """
    place = next(model.parameters()).device
    rows = [moved(batch_rows(each, slice(0, 1)), place) for each in (batch, filled)]
    with evaluated(model), torch.no_grad():
        one, other = (logits_of(model, row) for row in rows)
    if one.dim() == 3:
        other = other[:, : one.shape[1]]
    slack = 1e-3 if one.dtype in (torch.float32, torch.float64) else 5e-2
    return not bool((one - other).abs().max() < slack * one.abs().max())
