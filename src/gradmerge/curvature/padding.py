"""Which of a batch's tokens are padding, as the layers of a model see them; and more of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .batches import batch_rows
from .losses import MASKED, logits_of

#: What the rows of a batch are filled up with on the right, beside tokens.
FILLINGS = {"attention_mask": 0, "token_type_ids": 0, "labels": MASKED, "decoder_attention_mask": 0}


def masks_of(model: nn.Module, batch: Any) -> dict[bool, Tensor | None]:
    """The mask (examples, tokens) of tokens that are no padding: of the encoder, and under True of the decoder."""
    if not isinstance(batch, Mapping):
        return {}
    return {False: batch.get("attention_mask"), True: _decoder_mask(model, batch)}


def sees_decoder(name: str) -> bool:
    """Whether a layer takes the decoder's tokens: in a decoder all do but keys and values of cross-attention."""
    crossing = any(word in name for word in ("EncDecAttention", "encoder_attn", "crossattention"))
    keys = name.removesuffix(".weight").rpartition(".")[2] in ("k", "v", "k_proj", "v_proj", "key", "value")
    return ("decoder." in name or name.startswith("lm_head")) and not (crossing and keys)


def _decoder_mask(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | None:
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return batch.get("attention_mask")
    if "decoder_attention_mask" in batch:
        return batch["decoder_attention_mask"]
    labels = batch.get("labels")
    return labels != MASKED if isinstance(labels, Tensor) and labels.dim() == 2 else None


def filled_up(model: nn.Module, batches: Sequence[Any]) -> Sequence[Any]:
    """Batches of tokens with a mask, all as long as the longest: what is added on the right is masked.

    Batches of anything else, and of a model that names no token for padding, stay as they are.
    """
    if len(batches) < 2 or not all(isinstance(batch, Mapping) and "attention_mask" in batch for batch in batches):
        return batches
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    token = getattr(text, "pad_token_id", None)
    if isinstance(token, int) and not 0 <= token < getattr(text, "vocab_size", 0):
        token = None
    fillings = {**FILLINGS, "input_ids": token, "decoder_input_ids": token}
    filled = [dict(batch) for batch in batches]
    for name in filled[0]:
        values = [batch.get(name) for batch in batches]
        shapes: list[Any] = [value.shape[1:] if isinstance(value, Tensor) else () for value in values]
        if len(set(shapes)) == 1:
            continue
        if fillings.get(name) is None or any(len(shape) != 1 for shape in shapes):
            return batches
        longest = max(shape[0] for shape in shapes)
        for batch, value in zip(filled, values, strict=True):
            batch[name] = F.pad(value, (0, longest - value.shape[1]), value=fillings[name])
    return filled


def minds_filling(model: nn.Module, batch: Any, filled: Any) -> bool:
    """Whether what was added to a batch changes the logits of its first row, as where a layer looks past the mask."""
    with torch.no_grad():
        one, other = (logits_of(model, batch_rows(each, slice(0, 1))) for each in (batch, filled))
    if one.dim() == 3:
        other = other[:, : one.shape[1]]
    slack = 1e-3 if one.dtype in (torch.float32, torch.float64) else 5e-2
    return not bool((one - other).abs().max() <= slack * one.abs().max())
