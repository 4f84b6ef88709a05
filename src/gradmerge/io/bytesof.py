"""A tensor's memory as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared and not copied: reading a file into them fills the tensor."""
    # Every operation of PyTorch lets go of the interpreter, and threads then wait for it: only what is needed.
    flat = tensor if tensor.dim() == 1 else tensor.reshape(-1)
    return memoryview((flat.detach() if flat.requires_grad else flat).view(torch.uint8).numpy())  # type: ignore[arg-type]
