"""Eight-bit logarithmic codes for curvature.

Code 0 is zero; codes 1 … 255 are equally spaced in ln(value) between the smallest and the largest nonzero value of
the tensor, which are stored beside it as two float32 numbers.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SUFFIX = ".log8"


def encode(values: Tensor) -> tuple[Tensor, Tensor]:
    """(codes as uint8, [smallest, largest] nonzero value as float32). A value moves by at most half a step in ln."""
    values = values.float().double()  # what float32 cannot hold is 0
    positive = values[values > 0]
    if positive.numel() == 0:
        return torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(2)
    ends = torch.stack([positive.min(), positive.max()]).float()
    low, high = (math.log(end) for end in ends.tolist())
    step = (high - low) / 254
    exact = (values.clamp(min=math.exp(low)).log() - low) / step if step > 0 else torch.zeros_like(values)
    codes = exact.round().clamp(0, 254) + 1
    return torch.where(values > 0, codes, 0.0).to(torch.uint8), ends


def table(ends: Tensor) -> Tensor:
    """The 256 values that the codes of a tensor stand for, as float32."""
    low, high = ends.double().tolist()
    if high <= 0:
        return torch.zeros(256)
    values = torch.linspace(math.log(low), math.log(high), 255, dtype=torch.float64).exp()
    return torch.cat([torch.zeros(1, dtype=torch.float64), values]).float()


def decode(codes: Tensor, values: Tensor) -> Tensor:
    """Values of some codes, from the tensor's table."""
    return values.index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
