"""The k-th largest magnitude of numbers that are too many to hold or to sort.

Nonnegative floating-point numbers are ordered like their bit patterns read as integers, their *keys*. A pass counts the
keys of a window in bins. The bin that holds the k-th largest is the window of the next pass, until a bin is one key.
Without a bracket, float32 takes two passes. With a bracket from a sample, one pass is usually enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
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
    """How many values lie above some windows, and in each of their bins. ``+=`` adds the counts of other values.

    The first ``+=`` makes a table of all bins. The counts of a block are short lists of the bins that are not empty.
    """

    def __init__(self, above: np.ndarray, size: int, bins: np.ndarray, counts: np.ndarray) -> None:
        """``above`` has a number for each window. ``bins`` number those that are not empty, of ``size``."""
        self.above, self.size = above, size
        self._bins, self._counts = bins, counts
        self._table: np.ndarray | None = None

    def __iadd__(self, other: Counts) -> Counts:
        if self._table is None:
            self._table = np.zeros(self.size, np.int64)
            self._table[self._bins] = self._counts
        bins, counts = other.in_bins()
        self._table[bins] += counts
        self.above = self.above + other.above
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the bins that are not empty; the table of an unpickled array may be read-only."""
        return Counts, (self.above, self.size, *self.in_bins())

    def in_bins(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the bins that are not empty, ascending, and their counts."""
        if self._table is None:
            return self._bins, self._counts
        bins = np.flatnonzero(self._table)
        return bins, self._table[bins]


class Quantile:
    """The k-th largest magnitude. For k = 0 it is infinity, and for k = -1 it is 0. NaN is larger than every number.

    The search is over when ``value`` is set.
    """

    def __init__(self, k: int, dtype: torch.dtype, bracket: Bracket | None = None) -> None:
        self.k = k
        self.value: float | None = {0: math.inf, -1: 0.0}.get(k)
        wide = dtype == torch.float64
        self._float: np.dtype[Any] = np.dtype("f8" if wide else "f4")
        self._integer: np.dtype[Any] = np.dtype("i8" if wide else "i4")
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
        self.size = ((stop - start - 1) >> self._shift) + 1
        """Number of bins."""

    def count(self, magnitudes: np.ndarray) -> tuple[int, np.ndarray, np.ndarray]:
        """Return how many values are above the window, the bins that are not empty, and their counts."""
        magnitudes = magnitudes.astype(self._float, copy=False)
        inside = magnitudes <= self._last
        # What is not at most the last value is above it, so that NaN is.
        above = len(magnitudes) - int(np.count_nonzero(inside))
        if self._start:
            inside &= magnitudes >= self._first
        # np.compress is twice as fast as an index.
        bins = (np.compress(inside, magnitudes).view(self._integer) - self._start) >> self._shift
        if len(bins) >> 13:
            dense = np.bincount(bins)
            bins = np.flatnonzero(dense)
            return above, bins, dense[bins]
        return above, *np.unique(bins, return_counts=True)

    def narrow(self, above: int, bins: np.ndarray, counts: np.ndarray) -> None:
        """End a pass: continue below the window, above it or in one of its bins, or set ``value``."""
        at_least = above + np.cumsum(counts[::-1])
        if self.k <= above and self._last == math.inf:
            self._low = self._stop - 1  # NaN, for which infinity stands
        elif self.k <= above:
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


class QuantileSearch:
    """The search for some quantiles of every model at once.

    In each pass, add up :meth:`count` of all blocks, in any order, and pass the sum to :meth:`narrow`, until nothing is
    ``unknown``.
    """

    def __init__(self, quantiles: Iterable[list[Quantile]]) -> None:
        self.quantiles = list(quantiles)

    @property
    def unknown(self) -> list[tuple[int, Quantile]]:
        """The quantiles that are not known yet, with the numbers of their models."""
        return [(model, q) for model, some in enumerate(self.quantiles) for q in some if q.value is None]

    def _bins(self) -> Iterator[tuple[int, Quantile, int]]:
        """Yield model, quantile and number of its first bin: each quantile has its own range of bins."""
        first = 0
        for model, quantile in self.unknown:
            yield model, quantile, first
            first += quantile.size

    def count(self, magnitudes: Sequence[np.ndarray]) -> Counts:
        """Count a block, given the magnitudes of every model."""
        counted = [(first, quantile.count(magnitudes[model])) for model, quantile, first in self._bins()]
        above = np.array([above for _, (above, _, _) in counted])
        bins = np.concatenate([first + bins for first, (_, bins, _) in counted])
        counts = np.concatenate([counts for _, (_, _, counts) in counted])
        return Counts(above, sum(quantile.size for _, quantile in self.unknown), bins, counts)

    def narrow(self, total: Counts) -> None:
        """End a pass over all blocks."""
        bins, counts = total.in_bins()
        for (_, quantile, first), above in zip(list(self._bins()), total.above.tolist(), strict=True):
            own = slice(*np.searchsorted(bins, [first, first + quantile.size]))
            quantile.narrow(above, bins[own] - first, counts[own])

    @property
    def values(self) -> list[list[float]]:
        """The values of every model's quantiles, once all are known."""
        return [[quantile.value for quantile in some if quantile.value is not None] for some in self.quantiles]


def bracket_of(share: float, runs: Sequence[np.ndarray]) -> Bracket:
    """Return a bracket of the value that a ``share`` of all magnitudes reaches, from runs of a sample.

    Neighboring entries have similar magnitudes. The standard error is therefore that of a mean over runs, but at least
    that of a mean over entries.
    """
    ordered = np.nan_to_num(np.sort(np.concatenate(runs)), nan=math.inf, posinf=math.inf)
    size, rank = len(ordered), share * len(ordered)
    value = ordered[min(size - 1, max(0, size - math.ceil(rank)))]
    above = np.array([np.count_nonzero(run >= value) / len(run) for run in runs])
    spread = WIDTH * max(math.sqrt(max(1.0, rank * (1 - share))), size * above.std() / math.sqrt(len(runs))) + 1
    lower, upper = size - math.ceil(rank + spread) - 1, size - math.floor(rank - spread) - 1
    return float(ordered[lower]) if lower >= 0 else 0.0, float(ordered[upper]) if upper < size else math.inf
