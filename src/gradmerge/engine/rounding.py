"""Correct rounding to the type of the result."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values rounded once to the nearest number of a type, ties to even.

    PyTorch converts float64 to 16 bits through float32 and rounds twice, which can give the wrong neighbor. Here the
    first step truncates and sets the last bit if anything was cut off (round to odd), so that the second is correct.
    """
    if values.dtype != torch.float64 or dtype.itemsize >= 4 or not dtype.is_floating_point:
        return values.to(dtype)
    near = values.float()
    wide = near.double()
    # The bits of floats are ordered like their magnitudes: one less is the next number towards 0, also from infinity.
    bits = near.view(torch.int32) - (wide.abs() > values.abs()).int()
    bits |= (wide != values).int()
    return bits.view(torch.float32).to(dtype)
