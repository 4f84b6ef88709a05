"""How sure a number is that was measured on examples, and whether two numbers can be told apart.

- The error of a share (accuracy, exact match) is binomial, √(p(1 − p)/n). Where all examples are right, or all wrong,
  that would be 0; there two right and two wrong ones are added first (Agresti and Coull), so that two standard errors
  reach to about 3/n.
- The error of any other metric is that of a mean over examples, √(variance/n): every metric is written as the mean of
  one number per example (``Metrics.rows``), to first order.
- Two models are compared on the same examples: the error is that of the mean of the differences. Of right and wrong
  answers, one example is added that only the one has right, and one that only the other has (Bonett and Price), as
  few examples differ.
- Two numbers are tied where they differ by no more than two standard errors. Nothing is corrected for the number of
  comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

#: Numbers that differ by no more than so many standard errors are tied.
TIE = 2.0
#: Metrics that are shares of the examples.
SHARES = frozenset({"accuracy", "exact_match"})


@dataclass(frozen=True)
class Difference:
    """How much larger one number is than another, on the same examples."""

    value: float
    error: float
    """Standard error of ``value``; NaN where a single example says nothing of it."""

    @property
    def tied(self) -> bool:
        """Whether the examples cannot tell the two apart."""
        return not abs(self.value) > TIE * self.error


def standard_error(rows: Tensor, share: bool = False) -> float:
    """Standard error of the mean of one number per example; NaN where they are all the same, as a single one is.

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
    """The standard error of every metric; None where it is not known, as nothing varies."""
    found = {name: standard_error(values, name in SHARES) for name, values in rows.items()}
    return {name: error if math.isfinite(error) else None for name, error in found.items()}


def are_shares(rows: Tensor) -> bool:
    """Whether the mean of one number per example is a share of the examples."""
    return bool(((rows == 0) | (rows == 1)).all())


def difference(rows: Tensor, others: Tensor) -> Difference:
    """How much larger the mean of ``rows`` is than that of ``others``: the same examples in the same order."""
    apart, count = rows.double() - others.double(), len(rows)
    value = float(apart.mean())
    if not (are_shares(rows) and are_shares(others)):
        return Difference(value, float(apart.std()) / math.sqrt(count) if count > 1 else math.nan)
    more = count + 2
    return Difference(value, math.sqrt(float(apart.square().sum()) + 2 - float(apart.sum()) ** 2 / more) / more)


def averaged(differences: Sequence[Difference]) -> Difference:
    """The mean of differences on examples that have nothing to do with each other, such as those of several tasks."""
    value = sum(one.value for one in differences) / len(differences)
    return Difference(value, math.hypot(*(one.error for one in differences)) / len(differences))
