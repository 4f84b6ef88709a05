"""Small tasks with known answers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


def classes(count: int = 120, seed: int = 0, features: int = 4, labels: int = 3, shift: float = 0.0) -> Batch:
    """Inputs, and labels that a linear model tells with some noise; another ``shift`` is another task."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, features, generator=generator, dtype=torch.float64)
    truth = torch.randn(features, labels, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    logits = (x + shift) @ truth * 2
    noise = -torch.log(-torch.log(torch.rand(logits.shape, generator=generator, dtype=torch.float64)))
    return x, (logits + noise).argmax(-1)


def batches(rows: Batch, size: int = 40) -> list[Any]:
    return [(x, y) for x, y in zip(rows[0].split(size), rows[1].split(size), strict=True)]


def perceptron(seed: int = 0, features: int = 4, labels: int = 3, hidden: int = 5) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, labels)).double()
