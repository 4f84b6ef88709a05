"""A tensor's memory as bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared and not copied: reading a file into them fills the tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
