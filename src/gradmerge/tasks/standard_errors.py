"""Standard errors of metrics, and whether the difference of two is significant.

- The error of a share (accuracy, exact match) is binomial, √(p(1 − p)/n). If all examples are right, or all wrong, that
  would be 0. Then two right and two wrong ones are added first (Agresti and Coull), so that two standard errors are
  about 3/n.
- The error of any other metric is that of a mean over examples, √(variance/n), see :mod:`.metrics`.
- Two models are compared on the same examples: the error is that of the mean of the differences. For right and wrong
  answers, one example is added that only the first model has right, and one that only the second has (Bonett and
  Price), because few examples differ.
- Two numbers are tied if they differ by at most two standard errors. There is no correction for the number of
  comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

#: Numbers that differ by at most this many standard errors are tied.
TIE = 2.0
#: Metrics that are shares of the examples.
SHARES = frozenset({"accuracy", "exact_match"})


@dataclass(frozen=True)
class Difference:
    """How much larger one number is than another, on the same examples."""

    value: float
    error: float
    """Standard error of ``value``; NaN for a single example."""

    @property
    def tied(self) -> bool:
        """Whether the difference is not significant."""
        return not abs(self.value) > TIE * self.error


def standard_error(rows: Tensor, share: bool = False) -> float:
    """Return the standard error of the mean of one number per example; NaN if all numbers are equal.

    Args:
        rows: One number per example.
        share: The numbers are 0 and 1, and their mean a share of the examples, whose error is binomial.
    """
    count = len(rows)
    if share:
        right = float(rows.sum())
        if right in (0, count):
            right, count = right + 2, count + 4
        return math.sqrt(right * (count - right) / count**3)
    spread = float(rows.double().std()) if count > 1 else 0.0
    return spread / math.sqrt(count) if spread > 1e-12 * float(rows.abs().max()) else math.nan


def standard_errors(rows: Mapping[str, Tensor]) -> dict[str, float | None]:
    """Return the standard error of every metric; None if all of its numbers are equal."""
    errors = {name: standard_error(values, name in SHARES) for name, values in rows.items()}
    return {name: error if math.isfinite(error) else None for name, error in errors.items()}


def are_shares(rows: Tensor) -> bool:
    """Whether every number is 0 or 1, so that their mean is a share of the examples."""
    return bool(((rows == 0) | (rows == 1)).all())


def difference(rows: Tensor, others: Tensor) -> Difference:
    """Return how much larger the mean of ``rows`` is than that of ``others``: the same examples in the same order."""
    differences, count = rows.double() - others.double(), len(rows)
    value = float(differences.mean())
    if not (are_shares(rows) and are_shares(others)):
        return Difference(value, float(differences.std()) / math.sqrt(count) if count > 1 else math.nan)
    total = count + 2
    variance = float(differences.square().sum()) + 2 - float(differences.sum()) ** 2 / total
    return Difference(value, math.sqrt(variance) / total)


def averaged(differences: Sequence[Difference]) -> Difference:
    """Return the mean of differences on independent examples, such as those of several tasks."""
    value = sum(difference.value for difference in differences) / len(differences)
    return Difference(value, math.hypot(*(difference.error for difference in differences)) / len(differences))
