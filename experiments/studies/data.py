"""scikit-learn's digits as they are and turned, and how they are dealt out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor


class Rows(NamedTuple):
    pixels: Tensor
    """rows × 64, from −1 to 1."""
    labels: Tensor

    def take(self, places: Tensor) -> Rows:
        return Rows(self.pixels[places], self.labels[places])


def joined(*parts: Rows) -> Rows:
    return Rows(torch.cat([part.pixels for part in parts]), torch.cat([part.labels for part in parts]))


@cache
def digits() -> Rows:
    """All 1,797 of them, upright."""
    found = datasets.load_digits()
    return Rows(torch.from_numpy(found.data).float() / 8 - 1, torch.from_numpy(found.target).long())


def turned(rows: Rows, degrees: float) -> Rows:
    """Every image turned clockwise about its middle; what comes in from outside is empty."""
    angle = math.radians(degrees)
    there = torch.tensor([[math.cos(angle), math.sin(angle), 0.0], [-math.sin(angle), math.cos(angle), 0.0]])
    images = rows.pixels.view(-1, 1, 8, 8) + 1
    grid = F.affine_grid(there.expand(len(images), 2, 3), list(images.shape), align_corners=False)
    return Rows(F.grid_sample(images, grid, align_corners=False).flatten(1) - 1, rows.labels)


def relabelled(rows: Rows, digits: int) -> Rows:
    """The first so many digits go by the name of the next of them, and the last of them by that of the first."""
    labels = torch.where(rows.labels < digits, (rows.labels + 1) % max(digits, 1), rows.labels)
    return Rows(rows.pixels, labels)


def dealt(parts: Sequence[Rows], own: float, seed: int) -> list[Rows]:
    """A share of every part stays what it is; the rest is shuffled together and dealt out again."""
    draw = torch.Generator().manual_seed(seed)
    kept, rest = [], []
    for part in parts:
        stay, go = torch.randperm(len(part.labels), generator=draw).tensor_split([round(own * len(part.labels))])
        kept.append(part.take(stay))
        rest.append(part.take(go))
    together = joined(*rest)
    order = torch.randperm(len(together.labels), generator=draw).split([len(part.labels) for part in rest])
    return [joined(part, together.take(places)) for part, places in zip(kept, order, strict=True)]
