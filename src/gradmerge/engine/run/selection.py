"""The k-th largest magnitude of numbers that are too many to hold, found exactly and without sorting.

Nonnegative floating-point numbers are ordered like their bit patterns read as integers, their *keys*. A pass counts
the keys in bins, which tells the bin of the k-th largest; a further pass counts inside that bin, and so on until a bin
is a single key. float32 takes two passes and float64 four. If a guess is given, the first pass counts the keys around
it one by one, and the rest as below or above: a good guess makes it the only pass. Where many values are equal, as
differences of bfloat16 numbers are, the guess can be the very value; then it is enough to compare with that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

BIN_BITS = 16
#: How many keys around a guess are counted one by one: values within about 1.5 % of it.
GUESS_BITS = 18


@dataclass(frozen=True)
class Guess:
    """What a sample says about the value that is looked for."""

    value: float
    exact: bool
    """Parts of the sample agree on it, so that it is probably the very one."""
    ends: tuple[float, float] = (0.0, math.inf)
    """Between these two it almost surely is."""


def magnitude_keys(values: Tensor) -> Tensor:
    """Integers that are ordered like |values|."""
    if values.dtype == torch.float64:
        return values.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
    return values.view(torch.int32) & 0x7FFF_FFFF


def key_value(key: int, dtype: torch.dtype) -> float:
    """The magnitude that a key stands for."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return float(torch.tensor([key], dtype=integer).view(dtype))


class Selection:
    """The search for one k-th largest magnitude, k from 1; for 0 it is infinity, and for −1 it is 0.

    In each pass, the counts of every block of values are added up (in any order), and :meth:`narrow` takes the sum.
    When ``value`` is set the search is over.
    """

    def __init__(self, k: int, dtype: torch.dtype, guess: Guess | None = None) -> None:
        self.k = k
        self.dtype = dtype
        self.value: float | None = {0: math.inf, -1: 0.0}.get(k)
        # The k-th largest key is in [low, high), and is the k-th largest of all keys below high.
        self._keys = 1 << (63 if dtype == torch.float64 else 31)
        self._low, self._high = 0, self._keys
        self._beyond = 0  # how many keys are known to be at or above high
        if guess is None or dtype != torch.float32:
            self._look_at(self._low, self._high)
        else:
            key = int(magnitude_keys(torch.tensor([guess.value], dtype=dtype)))
            half = 0 if guess.exact else 1 << (GUESS_BITS - 1)
            self._look_at(max(0, key - half), key + max(1, half), shift=0)

    def _look_at(self, start: int, stop: int, shift: int | None = None) -> None:
        """Count the keys of [start, stop) in bins of 2**shift keys, in the next pass."""
        self._start, self._stop = start, stop
        self._shift = max(0, (stop - start - 1).bit_length() - BIN_BITS) if shift is None else shift
        self._bins = -(-(stop - start) >> self._shift) or 1
        self._first = key_value(start, self.dtype)

    def count(self, values: Tensor) -> np.ndarray:
        """How many values are below the window, in each of its bins, and above it. May overwrite the values."""
        if self._stop - self._start == 1:
            return self._compare(values)
        places = magnitude_keys(values.to(self.dtype))
        if self._start:
            places = places - self._start
        if self._shift:
            places = places >> self._shift
        if self._stop - self._start < self._keys:
            places = places.clamp(-1, self._bins)
        return torch.bincount(places.add_(1), minlength=self._bins + 2).numpy()

    def _compare(self, values: Tensor) -> np.ndarray:
        """The same for a window of one key, by comparing with it."""
        # numpy's comparisons are several times as fast as PyTorch's.
        magnitudes = values.to(self.dtype).abs_().numpy()
        value = self._first
        # What is not at most the value is above it: so is NaN, as among the keys.
        below, at_most = np.count_nonzero(magnitudes < value), np.count_nonzero(magnitudes <= value)
        return np.array([below, at_most - below, len(magnitudes) - at_most])

    def narrow(self, counts: np.ndarray) -> None:
        """End a pass: go on below the window, above it or in the bin that holds the k-th largest, or finish."""
        # Keys from high on are above every window and were taken off k when high was lowered.
        above = int(counts[-1]) - self._beyond
        inside = np.cumsum(counts[-2:0:-1])
        if self.k <= above:
            self._low = self._stop
        elif self.k > above + int(inside[-1]):
            self.k -= above + int(inside[-1])
            self._beyond += above + int(inside[-1])
            self._high = self._start
        else:
            place = int(np.searchsorted(inside, self.k - above))
            larger = above + (int(inside[place - 1]) if place else 0)
            self.k -= larger
            self._beyond += larger
            self._low = self._start + ((self._bins - 1 - place) << self._shift)
            self._high = min(self._high, self._low + (1 << self._shift))
        if self._high - self._low == 1:
            self.value = key_value(self._low, self.dtype)
        else:
            self._look_at(self._low, self._high)
