"""Metrics of a model on labeled data, collected batch by batch.

Every metric is the mean of one number per example, so its standard error is that of a mean, and two models can be
compared example by example. Ratios and correlations are not means. For them, an example's number is the metric plus
what more weight on the example adds to it (:func:`influence_rows`).

- The error of a share (accuracy, exact match) is binomial, √(p(1 − p)/n). If all examples are right, or all wrong, that
  would be 0. Then two right and two wrong ones are added first (Agresti and Coull), so that two standard errors are
  about 3/n.
- The error of any other metric is that of a mean over examples, √(variance/n).
- Two models are compared on the same examples: the error is that of the mean of the differences. For right and wrong
  answers, one example is added that only the first model has right, and one that only the second has (Bonett and
  Price), because few examples differ.
- Two numbers are tied if they differ by at most two standard errors. There is no correction for the number of
  comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..curvature.losses import MASKED
from ..distributed import Processes
from ..errors import InputError

Rows = dict[str, Tensor]
"""Metric → one float64 per example, whose mean is the metric; NaN if the metric is not defined."""
Collected = tuple[Tensor, ...]

#: Numbers that differ by at most this many standard errors are tied.
TIE = 2.0
#: Metrics that are shares of the examples.
SHARES = frozenset({"accuracy", "exact_match"})
#: What each number means.
MEANINGS: Mapping[str, str] = {
    "accuracy": "share of examples whose most likely class is right",
    "spearman_r": "correlation of the ranks of cosines and scores",
    "mean_reciprocal_rank": "1 / rank of the positive among its candidates, mean over examples",
    "macro_f1": "mean of F1 over the classes that occur in data or predictions",
    "f1": "F1 of class 1",
    "loss_per_example": "loss of an example (the sum over its labels or tokens), mean over examples, nats",
    "exact_match": "share of examples with all labels right",
    "rouge1": "F-measure of words shared with the reference, mean over examples, 0 to 1",
    "rouge2": "the same of pairs of words",
    "rougeL": "the same of the longest common subsequence",
    "bleu": "BLEU of all answers together, 0 to 100",
    "chrf": "chrF of all answers together, 0 to 100",
    "micro_f1": "F1 over all decisions on labels",
    "mse": "mean squared error over examples and outputs",
    "pearson_r": "correlation of outputs and labels",
    "r2": "1 − squared error / variance of the labels",
    "loss_per_token": "mean over tokens that count, nats",
    "perplexity": "exp of the loss per token",
    "token_accuracy": "share of those tokens that the model finds most likely",
    "tokens": "number of tokens that count",
    "examples": "number of examples",
}
_ANSWERS = {
    "exact_match": "share of answers that are the reference, but for case, white space and punctuation at the ends"
}
#: Task → meanings that differ for it.
TASK_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "embedding": {"accuracy": "share of examples whose positive is the nearest candidate"},
    "causal-lm": _ANSWERS,
    "seq2seq": _ANSWERS,
}


class Metrics:
    """Collects what the metrics of a loss need of every example, and computes them."""

    def __init__(self, loss: str) -> None:
        self._collect, self._compute = METRICS[loss]
        self._batches: list[tuple[Tensor, ...]] = []

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Add a batch."""
        parts = (losses.double(), *self._collect(logits, labels))
        self._batches.append(tuple(part.cpu() for part in parts))

    def join(self, processes: Processes) -> None:
        """Add the examples of the other processes, by rank."""
        self._batches = [batch for batches in processes.all_gather(self._batches) for batch in batches]

    @property
    def examples(self) -> int:
        return sum(len(losses) for losses, *_ in self._batches)

    def rows(self) -> Rows:
        """Return metric → one float64 per example, in their order, whose mean is the metric."""
        return {name: rows for name, rows in self._all_rows().items() if bool(rows.isfinite().all())}

    def summary(self) -> dict[str, Any]:
        """Return the metrics and counts, and under `standard_errors` the metrics' standard errors.

        A metric is None if it is not defined, such as the correlation with a constant.
        """
        means = {name: float(rows.mean()) for name, rows in self._all_rows().items()}
        summary: dict[str, Any] = {name: None if math.isnan(mean) else mean for name, mean in means.items()}
        if self._compute is token_metrics:
            summary["tokens"] = int(sum(tokens.sum() for _, tokens, _ in self._batches))
        return summary | {"examples": self.examples, "standard_errors": standard_errors(self.rows())}

    def _all_rows(self) -> Rows:
        return self._compute(*(torch.cat(parts) for parts in zip(*self._batches, strict=True)))


def influence_rows(metric: Callable[[Tensor], Tensor], examples: int) -> Tensor:
    """Write a metric of weighted examples as a mean over examples, to first order (the infinitesimal jackknife).

    Args:
        metric: The metric for a weight per example. It does not change if all weights are multiplied by a number.
        examples: The number of examples.
    """
    weights = torch.ones(examples, dtype=torch.float64, requires_grad=True)
    with torch.enable_grad():
        value = metric(weights)
    if not bool(value.isfinite()):
        return torch.full((examples,), value.item(), dtype=torch.float64)
    (gradient,) = torch.autograd.grad(value, weights)
    return value.detach() + examples * gradient


def ratio_rows(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Write a ratio of two means over examples as a mean over examples."""
    return influence_rows(lambda weights: weights @ numerators / (weights @ denominators), len(numerators))


# For each loss: what to keep of a batch besides the losses (tensors with one entry, or one row, per example), and the
# metrics of all examples.


def collect_classes(logits: Tensor, labels: Tensor) -> Collected:
    return logits.argmax(-1), labels, torch.full_like(labels, logits.shape[-1])


def class_metrics(losses: Tensor, predicted: Tensor, labels: Tensor, classes: Tensor) -> Rows:
    right, count = (predicted == labels).double(), int(classes[0])
    occurs = torch.bincount(torch.cat([predicted, labels]), minlength=count) > 0

    def f1(weights: Tensor) -> Tensor:
        """F1 of every class, which is NaN for one that does not occur."""
        none = weights.new_zeros(count)
        occurrences = none.index_add(0, predicted, weights) + none.index_add(0, labels, weights)
        return 2 * none.index_add(0, labels, weights * right) / occurrences

    result = {"accuracy": right, "macro_f1": influence_rows(lambda w: f1(w)[occurs].mean(), len(right))}
    if count == 2:
        result["f1"] = influence_rows(lambda w: f1(w)[1], len(right))
    return {**result, "loss_per_example": losses}


def collect_labels(logits: Tensor, labels: Tensor) -> Collected:
    return logits > 0, labels > 0.5


def label_metrics(losses: Tensor, predicted: Tensor, labels: Tensor) -> Rows:
    hits, total = 2.0 * (predicted & labels).double(), predicted.double() + labels.double()
    occurs = total.any(0)
    of_label, of_total = hits[:, occurs], total[:, occurs]
    return {
        "micro_f1": ratio_rows(hits.sum(1), total.sum(1)),
        "macro_f1": influence_rows(lambda w: (w @ of_label / (w @ of_total)).mean(), len(hits)),
        "exact_match": (predicted == labels).all(-1).double(),
        "loss_per_example": losses,
    }


def collect_numbers(logits: Tensor, labels: Tensor) -> Collected:
    return logits.double().flatten(1), labels.double().reshape(len(labels), -1)


def regression_metrics(losses: Tensor, outputs: Tensor, labels: Tensor) -> Rows:
    error = (outputs - labels).square()

    def r2(weights: Tensor) -> Tensor:
        spread = weights @ (labels - weights @ labels / weights.sum()).square()
        return 1 - (weights @ error / spread.where(spread > 0, torch.nan)).mean()

    return {
        "mse": error.mean(1),
        "pearson_r": influence_rows(lambda w: correlation(w, outputs, labels), len(labels)),
        "r2": influence_rows(r2, len(labels)),
    }


def cosine_metrics(losses: Tensor, outputs: Tensor, labels: Tensor) -> Rows:
    result = regression_metrics(losses, outputs, labels)
    spearman = influence_rows(lambda w: correlation(w, ranks(w, outputs), ranks(w, labels)), len(labels))
    return {"spearman_r": spearman, "pearson_r": result["pearson_r"], "mse": result["mse"]}


def collect_positions(logits: Tensor, labels: Tensor) -> Collected:
    # Candidates as near as the positive count as nearer: equal embeddings get the worst rank.
    return ((logits >= logits.gather(1, labels[:, None])).sum(1).double(),)


def ranking_metrics(losses: Tensor, positions: Tensor) -> Rows:
    accuracy = (positions == 1).double()
    return {"accuracy": accuracy, "mean_reciprocal_rank": 1 / positions, "loss_per_example": losses}


def collect_tokens(logits: Tensor, labels: Tensor) -> Collected:
    counts = labels != MASKED
    right = (logits.argmax(-1) == labels) & counts
    return counts.sum(1).double(), right.sum(1).double()


def collect_next_tokens(logits: Tensor, labels: Tensor) -> Collected:
    return collect_tokens(logits[:, :-1], labels[:, 1:])


def token_metrics(losses: Tensor, tokens: Tensor, right: Tensor) -> Rows:
    if not bool(tokens.any()):
        raise InputError("the data has no token to predict: its texts are too short, or cut before what counts")
    return {
        "loss_per_token": ratio_rows(losses, tokens),
        "perplexity": influence_rows(lambda w: (w @ losses / (w @ tokens)).exp(), len(losses)),
        "loss_per_example": losses,
        "token_accuracy": ratio_rows(right, tokens),
    }


#: The name of a loss → what to keep of a batch, and the metrics.
METRICS: Mapping[str, tuple[Callable[[Tensor, Tensor], Collected], Callable[..., Rows]]] = {
    "classes": (collect_classes, class_metrics),
    "labels": (collect_labels, label_metrics),
    "squared": (collect_numbers, regression_metrics),
    "tokens": (collect_tokens, token_metrics),
    "next-token": (collect_next_tokens, token_metrics),
    "cosine": (collect_numbers, cosine_metrics),
    "ranking": (collect_positions, ranking_metrics),
}


def correlation(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the mean over columns of the correlation of x and y; NaN if a column is constant."""
    x, y = (values - weights @ values / weights.sum() for values in (x, y))
    columns: Tensor = weights @ (x * y) / ((weights @ x.square()) * (weights @ y.square())).sqrt()
    return columns.mean()


def ranks(weights: Tensor, values: Tensor) -> Tensor:
    """Return each value's rank, as the share of the weight below it. Equal values share the mean of their ranks."""
    _, groups = values[:, 0].unique(return_inverse=True)
    sums = weights.new_zeros(int(groups.max()) + 1).index_add(0, groups, weights)
    return ((sums.cumsum(0) - sums / 2)[groups] / weights.sum())[:, None]


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
