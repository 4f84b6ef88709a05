"""Work for a process of its own, which imports nothing but this to do it."""

from __future__ import annotations


def tenfold(seed: int, plus: int) -> int:
    return 10 * seed + plus
