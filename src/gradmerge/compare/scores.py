"""How settings are compared: one metric per task, averages where they mean something, ranks where not."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..text import Measured

if TYPE_CHECKING:
    from .preview import Outcome

#: The metric of a task that is shown first: the first of these that its metrics have. A perplexity averages badly over
#: tasks, its logarithm does not.
HEADLINES = (
    *("accuracy", "micro_f1", "spearman_r", "r2", "exact_match", "rougeL", "bleu", "chrf"),
    *("loss_per_token", "mse", "loss_per_example"),
)
_LOWER = (
    *("loss_per_token", "mse", "loss_per_example", "perplexity"),
    *("word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "ter", "wer", "cer"),  # of the harness
)
#: Settings as close to the best as this are as good.
CLOSE = 0.01


def headline(metrics: Mapping[str, Any]) -> str:
    """Accuracy (classes, images, candidates), micro F1 (several labels), loss per token in nats; of a regression R², of
    scored pairs the correlation of ranks, and of both the squared error where all labels are the same. Of generated
    text exact match, ROUGE-L, BLEU or chrF; of a task of the harness the first it gives."""
    optional = ("r2", "spearman_r")
    known = (name for name in HEADLINES if name in metrics and (name not in optional or metrics[name] is not None))
    return next(known, next(iter(metrics)))


def higher_is_better(name: str) -> bool:
    return name not in _LOWER


def loss_name(metrics: Mapping[str, Any]) -> str:
    """Mean loss of an example, nats; of a regression the mean squared error."""
    return "loss_per_example" if "loss_per_example" in metrics else "mse"


def loss_of(metrics: Mapping[str, Any]) -> float:
    """The number of that name. Infinite where there is none."""
    found = metrics.get(loss_name(metrics))
    return math.inf if found is None else float(found)


def measured(metrics: Mapping[str, Any], name: str) -> float | None:
    """A metric with its standard error."""
    value, error = metrics.get(name), metrics.get("standard_errors", {}).get(name)
    return value if value is None or error is None else Measured(value, error)


@dataclass(frozen=True)
class Criterion:
    """What settings are compared by."""

    name: str
    higher: bool
    """Higher is better."""
    by_rank: bool = False
    """The score is a mean of ranks, in which a distance means nothing."""
    shares: bool = False
    """The score is a share, in which 1 % is 0.01."""
    worst: bool = False
    """The score is that of the worst task; else an average or a sum over tasks."""

    def close(self, row: Outcome, best: Outcome) -> bool:
        """Whether a setting is within 1 % of the best: in its score, or, of ranks, in every task's metric."""
        if row.score is None or best.score is None:
            return False
        if self.by_rank:
            return all(_near(row.values[task], value) for task, value in best.values.items())
        return abs(row.score - best.score) <= CLOSE if self.shares else _near(row.score, best.score)


def _near(value: float | None, other: float | None) -> bool:
    if value is None or other is None:
        return value is other
    return abs(value - other) <= CLOSE * abs(other) + 1e-12


def steady(value: float) -> float:
    """A number without the digits that rounding errors decide, so that equal merges are equal."""
    return float(f"{value:.7g}")


class Ranking:
    """Ranks of values among all of their kind; a missing value has none."""

    def __init__(self, values: Sequence[float | None], higher: bool) -> None:
        self._sign = -1.0 if higher else 1.0
        self._sorted = sorted(self._sign * steady(value) for value in values if value is not None)

    def place(self, value: float | None) -> int | None:
        """1 for the best; equal values have the same rank."""
        return None if value is None else 1 + bisect.bisect_left(self._sorted, self._sign * steady(value))

    def middle(self, value: float) -> float:
        """The same, but equal values share the mean of their ranks."""
        place = self._sign * steady(value)
        return (bisect.bisect_left(self._sorted, place) + 1 + bisect.bisect_right(self._sorted, place)) / 2


def mean_ranks(rows: Sequence[Outcome]) -> list[float | None]:
    """The mean over tasks of each row's rank, equal values sharing the mean of theirs; None where one is missing."""
    rankings = {}
    for task in rows[0].values if rows else ():
        known = next((row.metrics[task] for row in rows if row.metrics.get(task)), None)
        higher = known is not None and higher_is_better(headline(known))
        rankings[task] = Ranking([row.values.get(task) for row in rows], higher)
    means: list[float | None] = []
    for row in rows:
        places = [rankings[task].middle(value) for task, value in row.values.items() if value is not None]
        means.append(sum(places) / len(places) if places and len(places) == len(row.values) else None)
    return means
