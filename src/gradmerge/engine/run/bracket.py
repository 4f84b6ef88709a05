"""The k-th largest magnitude of many numbers in one pass, where a sample of them says about what it is."""

from __future__ import annotations

import math

import numpy as np

#: How many standard deviations of a sample's rank the two ends of a bracket are apart from it.
WIDTH = 4.0
#: A bracket that holds more numbers than this is given up.
MOST = 1 << 22


def ends_of(share: float, ordered: np.ndarray) -> tuple[float, float]:
    """The lower and the upper end of a bracket, for a number that so large a share reaches, from a sorted sample."""
    size = len(ordered)
    rank = share * size
    spread = WIDTH * math.sqrt(max(1.0, rank * (1 - rank / size))) + 1
    upper, lower = size - math.floor(rank - spread) - 1, size - math.ceil(rank + spread) - 1
    return float(ordered[lower]) if lower >= 0 else 0.0, float(ordered[upper]) if upper < size else math.inf


class Bracket:
    """Counts the numbers above an upper end, and keeps those from a lower end to it: the k-th largest is among these.

    The ends come from a sample. If it misled, :attr:`value` is None, and the search has to be made in another way.
    """

    def __init__(self, k: int, total: int, ends: tuple[float, float]) -> None:
        self._k, self._left = k, total
        self._lower, self._upper = ends
        self._above = self._at = 0
        self._kept: list[np.ndarray] = []

    def add(self, magnitudes: np.ndarray) -> None:
        """Take some of the numbers into account, in any order."""
        self._left -= len(magnitudes)
        up_to = magnitudes <= self._upper
        # What is not at most the upper end is above it: so is NaN.
        self._above += len(magnitudes) - int(np.count_nonzero(up_to))
        up_to &= magnitudes >= self._lower
        if self._lower == self._upper:
            self._at += int(np.count_nonzero(up_to))
        elif self._at <= MOST:
            kept = np.compress(up_to, magnitudes)  # twice as fast as an index
            self._at += len(kept)
            self._kept.append(kept)

    @property
    def value(self) -> float | None:
        """The k-th largest, once all numbers are added; None if it is not in the bracket."""
        place = self._k - self._above
        if self._left or not 1 <= place <= self._at:
            return None
        if self._lower == self._upper:
            return self._upper
        kept = np.concatenate(self._kept)
        if len(kept) != self._at:
            return None
        return float(np.sort(kept)[len(kept) - place])
