"""The k-th largest magnitude of numbers that are too many to hold, found exactly and without sorting.

Nonnegative floating-point numbers are ordered like their bit patterns read as integers. One pass counts the patterns
in coarse bins, which tells the bin of the k-th largest; a further pass counts inside that bin, and so on until a bin
is a single pattern. float32 needs two passes and float64 four, less one where a sample has told the right bin.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

BIN_BITS = 16


def magnitude_keys(values: Tensor) -> Tensor:
    """Integers that are ordered like |values|."""
    if values.dtype == torch.float64:
        return values.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
    return values.view(torch.int32) & 0x7FFF_FFFF


def key_value(key: int, dtype: torch.dtype) -> float:
    """The magnitude that a key stands for."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return float(torch.tensor([key], dtype=integer).view(dtype))


@dataclass
class Window:
    """Counts of the keys from ``low`` on, in bins of 2**shift keys."""

    low: int
    shift: int
    bins: int
    whole: bool = False
    """The window holds every key there is."""
    counts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.counts = np.zeros(self.bins, dtype=np.int64)

    def count(self, keys: Tensor) -> np.ndarray:
        """Counts of some keys; threads add them up under a lock."""
        if not self.whole:
            keys = keys[(keys >= self.low) & (keys <= self.low + ((self.bins << self.shift) - 1))]
        return torch.bincount((keys - self.low if self.low else keys) >> self.shift, minlength=self.bins).numpy()

    def locate(self, k: int) -> tuple[int, int]:
        """(bin, rank inside it) of the k-th largest key of this window, k from 1."""
        from_top = np.cumsum(self.counts[::-1])
        place = int(np.searchsorted(from_top, k))
        above = int(from_top[place - 1]) if place else 0
        return self.bins - 1 - place, k - above


class Selection:
    """The search for one k-th largest magnitude: feed every value to ``count`` in each pass, then call ``narrow``."""

    def __init__(self, k: int, dtype: torch.dtype) -> None:
        self.k = k
        self.dtype = dtype
        bits = 63 if dtype == torch.float64 else 31
        self.window = Window(0, bits - BIN_BITS, 1 << BIN_BITS, whole=True)
        self.value: float | None = None

    def count(self, values: Tensor) -> np.ndarray:
        return self.window.count(magnitude_keys(values.to(self.dtype)))

    def add(self, counts: np.ndarray) -> None:
        self.window.counts += counts

    def narrow(self) -> None:
        """End a pass: go into the bin that holds the k-th largest, or finish."""
        place, self.k = self.window.locate(self.k)
        low, shift = self.window.low + (place << self.window.shift), self.window.shift
        if shift == 0:
            self.value = key_value(low, self.dtype)
            return
        bits = min(shift, BIN_BITS)
        self.window = Window(low, shift - bits, 1 << bits)
