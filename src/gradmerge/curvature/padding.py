"""Which of a batch's tokens are padding, as the layers of a model see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .losses import MASKED


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
