"""Numbers in the type that they are stored in, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a type, each the nearest number of it, the even one of two that are equally near.

    PyTorch takes float64 to 16 bits by way of float32, which rounds twice: the first time a number may come to lie
    half-way, and the second on the wrong side. So the first step cuts off here, and sets the last bit where anything
    was cut: float32 has enough bits more for the second to see on which side of half-way the number was.
    """
    if values.dtype != torch.float64 or dtype.itemsize >= 4 or not dtype.is_floating_point:
        return values.to(dtype)
    near = values.float()
    wide = near.double()
    # The bits of a float are ordered as its magnitude is: one less is the next number towards 0, from infinity too.
    bits = near.view(torch.int32) - (wide.abs() > values.abs()).int()
    bits |= (wide != values).int()
    return bits.view(torch.float32).to(dtype)
