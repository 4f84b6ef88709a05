"""Numbers of several seeds, in tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from gradmerge.demo.tables import markdown

__all__ = ["markdown", "shown"]


def shown(values: Sequence[float], digits: int = 1) -> str:
    """`86.5 ± 0.2`: mean, and standard deviation over seeds where there are several."""
    text = f"{statistics.fmean(values):.{digits}f}"
    return text if len(values) == 1 else f"{text} ± {statistics.stdev(values):.{digits}f}"
