"""The k-th largest magnitude of numbers that are too many to hold or to sort.

Nonnegative floating-point numbers are ordered like their bit patterns read as integers, their *keys*. A pass counts the
keys of a window in bins. The bin that holds the k-th largest is the window of the next pass, until a bin is one key.
Without a bracket, float32 takes two passes. With a bracket from a sample, one pass is usually enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

#: A window is counted in at most 2**16 bins. The window of a bracket has few values, so that it can have more bins.
BINS, BRACKET_BINS = 16, 20
#: A bracket reaches this many standard errors to either side.
WIDTH = 4.0

Bracket = tuple[float, float]
"""The k-th largest is probably between these two values."""


class Counts:
    """How many values lie above a window, and in each of its bins. ``+=`` adds the counts of other values.

    The first ``+=`` makes a table of all bins. Lists of every block's counts would take more memory than the blocks:
    between small arrays that stay, the memory of large ones that were freed is not used again.
    """

    def __init__(self, above: int, size: int, bins: np.ndarray, counts: np.ndarray) -> None:
        """``bins`` are the numbers of bins that are not empty, of ``size``, and ``counts`` what is in them."""
        self.above, self.size = above, size
        self._bins, self._counts = bins, counts
        self._table: np.ndarray | None = None

    def __iadd__(self, other: Counts) -> Counts:
        if self._table is None:
            self._table = np.zeros(self.size, np.int64)
            self._table[self._bins] = self._counts
        self.above += other.above
        bins, counts = other.in_bins()
        self._table[bins] += counts
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Counts, (self.above, self.size, *self.in_bins())

    def in_bins(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the bins that are not empty, ascending, and their counts."""
        if self._table is None:
            return self._bins, self._counts
        bins = np.flatnonzero(self._table)
        return bins, self._table[bins]


class Quantile:
    """The search for the k-th largest magnitude. For k = 0 it is infinity, and for k = -1 it is 0.

    In each pass, add up ``count(values)`` of all blocks, in any order, and give the sum to :meth:`narrow`. The search
    is over when ``value`` is set. NaN counts as larger than every number.
    """

    def __init__(self, k: int, dtype: torch.dtype, bracket: Bracket | None = None) -> None:
        self.k = k
        self.value: float | None = {0: math.inf, -1: 0.0}.get(k)
        self._float: np.dtype[Any] = np.dtype("f8" if dtype == torch.float64 else "f4")
        self._integer: np.dtype[Any] = np.dtype("i8" if dtype == torch.float64 else "i4")
        # The k-th largest key lies in [low, high).
        self._low, self._high = 0, self._key(math.inf) + 1
        if bracket is None:
            self._look_at(self._low, self._high, BINS)
        else:
            self._look_at(self._key(bracket[0]), self._key(bracket[1]) + 1, BRACKET_BINS)

    def _key(self, value: float) -> int:
        return int(np.array(value, self._float).view(self._integer))

    def _number(self, key: int) -> float:
        return float(np.array(key, self._integer).view(self._float))

    def _look_at(self, start: int, stop: int, bits: int) -> None:
        """Count the keys of [start, stop) in the next pass."""
        self._start, self._stop = start, stop
        self._shift = max(0, (stop - start - 1).bit_length() - bits)
        self._first, self._last = self._number(start), self._number(stop - 1)

    def count(self, magnitudes: np.ndarray) -> Counts:
        """Count some of the values, all of which are nonnegative or NaN."""
        magnitudes = magnitudes.astype(self._float, copy=False)
        at_most = magnitudes <= self._last
        # What is not at most the last value is above it, so that NaN is.
        above = len(magnitudes) - int(np.count_nonzero(at_most))
        if self._start:
            at_most &= magnitudes >= self._first
        if self._stop - self._start == 1:
            equal = int(np.count_nonzero(at_most))
            return Counts(above, 1, np.zeros(min(equal, 1), np.int64), np.full(min(equal, 1), equal))
        # np.compress is twice as fast as an index.
        inside = np.compress(at_most, magnitudes).view(self._integer)
        numbers, size = (inside - self._start) >> self._shift, ((self._stop - self._start - 1) >> self._shift) + 1
        if len(numbers) >> 13:
            dense = np.bincount(numbers)
            bins = np.flatnonzero(dense)
            return Counts(above, size, bins, dense[bins])
        return Counts(above, size, *np.unique(numbers, return_counts=True))

    def narrow(self, counts: Counts) -> None:
        """End a pass: continue below the window, above it or in one of its bins, or set ``value``."""
        bins, inside = counts.in_bins()
        at_least = counts.above + np.cumsum(inside[::-1])
        if self.k <= counts.above and self._last == math.inf:
            self._low = self._stop - 1  # NaN, for which infinity stands
        elif self.k <= counts.above:
            self._low = self._stop
        elif not len(bins) or self.k > at_least[-1]:
            self._high = self._start
        else:
            bin_ = int(bins[::-1][np.searchsorted(at_least, self.k)])
            self._low = self._start + (bin_ << self._shift)
            self._high = min(self._stop, self._low + (1 << self._shift))
        if self._high - self._low == 1:
            self.value = self._number(self._low)
        else:
            self._look_at(self._low, self._high, BINS)


class QuantileCounts(list[Counts]):
    """The counts of several quantiles. ``+=`` adds those of other blocks."""

    def __iadd__(self, other: Iterable[Counts]) -> QuantileCounts:  # type: ignore[override,misc]
        for counts, more in zip(self, other, strict=True):
            counts += more
        return self


class QuantileSearch:
    """The search for some quantiles of every model at once, pass by pass."""

    def __init__(self, quantiles: Iterable[list[Quantile]]) -> None:
        self.quantiles = list(quantiles)

    @property
    def unknown(self) -> list[tuple[int, Quantile]]:
        """The quantiles that are not known yet, with the numbers of their models."""
        return [(model, q) for model, some in enumerate(self.quantiles) for q in some if q.value is None]

    def count(self, magnitudes: Sequence[np.ndarray]) -> QuantileCounts:
        """Count a block, given the magnitudes of every model."""
        return QuantileCounts(quantile.count(magnitudes[model]) for model, quantile in self.unknown)

    def narrow(self, counts: Sequence[Counts]) -> None:
        """End a pass over all blocks."""
        for (_, quantile), some in zip(self.unknown, counts, strict=True):
            quantile.narrow(some)

    @property
    def values(self) -> list[list[float]]:
        """The values of every model's quantiles, once all are known."""
        return [[quantile.value for quantile in some if quantile.value is not None] for some in self.quantiles]


def bracket_of(share: float, runs: Sequence[np.ndarray]) -> Bracket:
    """Return a bracket of the value that a ``share`` of all magnitudes reaches, from runs of a sample.

    Neighboring entries have similar magnitudes. The standard error is therefore that of a mean over runs, but at least
    that of a mean over entries.
    """
    ordered = np.sort(np.concatenate(runs))  # NaN comes last, as the largest
    size, rank = len(ordered), share * len(ordered)
    value = ordered[min(size - 1, max(0, size - math.ceil(rank)))]
    above = np.array([np.count_nonzero(run >= value) / len(run) for run in runs])
    error = max(
        math.sqrt(max(1.0, rank * (1 - share))),
        size * float(above.std()) / math.sqrt(len(runs) - 1) if len(runs) > 1 else 0.0,
    )
    spread = WIDTH * error + 1
    upper, lower = size - math.floor(rank - spread) - 1, size - math.ceil(rank + spread) - 1
    first = float(ordered[lower]) if lower >= 0 else 0.0
    last = float(ordered[upper]) if upper < size else math.inf
    return (0.0 if math.isnan(first) else first), (math.inf if math.isnan(last) else last)
