"""The encoder of a model, and its head for a task."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..curvature.losses import unwrapped
from ..errors import InputError


def representation_modules(module: nn.Module) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the language-model head whose input is the representation, or else the encoder whose output it is."""
    model: Any = unwrapped(module)
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    if isinstance(head, nn.Module):
        return head, None
    encoder = getattr(model, "base_model", None)
    return None, encoder if isinstance(encoder, nn.Module) and encoder is not model else None


def encoder_prefix(module: nn.Module) -> str:
    """Return the path of the encoder in a model with a head for a task, with a dot; empty if there is none."""
    _, encoder = representation_modules(module)
    if encoder is None:
        return ""
    return next(f"{name}." for name, child in unwrapped(module).named_modules() if child is encoder)


@torch.no_grad()
def with_encoder_of(model: nn.Module, head: nn.Module, reference: str, head_reference: str) -> nn.Module:
    """Copy the encoder's weights of ``model`` into ``head``, a model with the wanted head, and return it."""
    prefix = encoder_prefix(head)
    if not prefix:
        raise InputError(f"head {head_reference}: has no head apart from its encoder")
    weights = model.state_dict()
    for name, value in head.state_dict().items():
        if name.startswith(prefix):
            if name not in weights or weights[name].shape != value.shape:
                shape = list(weights[name].shape) if name in weights else "missing"
                raise InputError(
                    f"head {head_reference}: does not fit {reference}: {name} is {list(value.shape)} there, and "
                    f"{shape} in {reference}"
                )
            value.copy_(weights[name])
    return head
