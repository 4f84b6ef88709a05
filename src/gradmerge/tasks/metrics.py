"""Metrics of a model on labeled data, collected batch by batch.

Every metric is the mean of one number per example. For ratios and correlations, which are not means, an example's
number is the metric plus what the example adds to it, to first order (the influence function). So the standard error
of every metric is that of a mean, and two models can be compared example by example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..curvature.losses import MASKED
from ..distributed import Processes
from ..errors import InputError
from .standard_errors import standard_errors

Number = int | float | None
"""None if a metric is not defined, such as the correlation with a constant."""
PerExample = dict[str, Tensor | None]
"""Metric → one float64 per example, whose mean is the metric; None if the metric is not defined."""

#: What each number means.
MEANINGS: Mapping[str, str] = {
    "accuracy": "share of examples whose most likely class is right; of embeddings, whose positive is the nearest",
    "spearman_r": "correlation of the ranks of cosines and scores",
    "mean_reciprocal_rank": "1 / rank of the positive among its candidates, mean over examples",
    "macro_f1": "mean of F1 over the classes that occur in data or predictions",
    "f1": "F1 of class 1",
    "loss_per_example": "loss of an example (the sum over its labels or tokens), mean over examples, nats",
    "exact_match": "share of examples with all labels right; of answers that are the reference, but for case, white "
    "space and punctuation at the ends",
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


class Metrics(ABC):
    """Collects what is needed of every example, and computes metrics from it."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Add a batch."""
        self._batches.append((losses.double().cpu(), *(part.cpu() for part in self.collect(logits, labels))))

    @abstractmethod
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """Return what to keep of a batch besides the losses: tensors with one entry, or one row, per example."""

    @abstractmethod
    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        """Compute all metrics of all examples."""

    def join(self, processes: Processes) -> None:
        """Add the examples of the other processes, by rank."""
        if processes.world_size == 1:
            return
        states = processes.all_gather(vars(self))
        for state in states:  # a process without examples does not know the number of classes
            vars(self).update(state)
        self._batches = [batch for state in states for batch in state["_batches"]]

    def _compute(self) -> PerExample:
        return self.compute(*(torch.cat(parts) for parts in zip(*self._batches, strict=True)))

    @property
    def examples(self) -> int:
        return sum(len(losses) for losses, *_ in self._batches)

    def counts(self) -> dict[str, int]:
        """Return counts besides the number of examples."""
        return {}

    def numbers(self) -> dict[str, Number]:
        """Return the metrics of all examples, and counts."""
        means = {name: None if rows is None else rows.mean().item() for name, rows in self._compute().items()}
        return {**means, **self.counts(), "examples": self.examples}

    def rows(self) -> dict[str, Tensor]:
        """Return metric → one float64 per example, in their order, whose mean is the metric."""
        return {
            name: rows for name, rows in self._compute().items() if rows is not None and bool(rows.isfinite().all())
        }

    def summary(self) -> dict[str, Any]:
        """Return the metrics and counts, and under `standard_errors` the metrics' standard errors."""
        return {**self.numbers(), "standard_errors": standard_errors(self.rows())}


class ClassMetrics(Metrics):
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        self._classes = logits.shape[-1]
        return logits.argmax(-1), labels

    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        predicted, labels = collected
        right = (predicted == labels).double()
        occurrences = torch.bincount(torch.cat([predicted, labels]), minlength=self._classes)
        # NaN for a class that occurs neither in the data nor in the predictions
        f1 = 2 * torch.bincount(labels, right, self._classes) / occurrences
        # An example changes F1 of two classes only: its label and the predicted one.
        scale = len(predicted) / occurrences
        of_label, of_predicted = (((right - f1[classes]) * scale[classes]) for classes in (labels, predicted))
        occurring = occurrences > 0
        macro = f1[occurring].mean() + (of_label + of_predicted) / occurring.sum()
        result: PerExample = {"accuracy": right, "macro_f1": macro}
        if self._classes == 2:
            result["f1"] = f1[1] + of_label * labels + of_predicted * predicted if occurring[1] else None
        return {**result, "loss_per_example": losses}


class LabelMetrics(Metrics):
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return logits > 0, labels > 0.5

    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        predicted, labels = collected
        hits, total = 2.0 * (predicted & labels).double(), predicted.double() + labels.double()
        occurring = total.any(0)
        defined = bool(occurring.any())
        return {
            "micro_f1": ratio_rows(hits.sum(1), total.sum(1)) if defined else None,
            "macro_f1": ratio_rows(hits[:, occurring], total[:, occurring]).mean(1) if defined else None,
            "exact_match": (predicted == labels).all(-1).double(),
            "loss_per_example": losses,
        }


class SquaredMetrics(Metrics):
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return logits.double().flatten(1), labels.double().reshape(len(labels), -1)

    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        outputs, labels = collected
        error, spread = (outputs - labels).square(), (labels - labels.mean(0)).square()
        return {
            "mse": error.mean(1),
            "pearson_r": _pearson(outputs, labels),
            # The mean of the labels adds nothing to first order: it minimizes their squared distance.
            "r2": 1 - ratio_rows(error, spread).mean(1) if bool((spread.sum(0) > 0).all()) else None,
        }


class CosineMetrics(SquaredMetrics):
    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        result = super().compute(losses, *collected)
        outputs, labels = collected
        spearman = _spearman(outputs[:, 0], labels[:, 0])
        return {"spearman_r": spearman, "pearson_r": result["pearson_r"], "mse": result["mse"]}


class RankingMetrics(Metrics):
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        positive = logits.gather(1, labels[:, None])
        # Candidates as near as the positive count as nearer: equal embeddings get the worst rank.
        return ((logits >= positive).sum(1).double(),)

    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        (ranks,) = collected
        return {"accuracy": (ranks == 1).double(), "mean_reciprocal_rank": 1 / ranks, "loss_per_example": losses}


class TokenMetrics(Metrics):
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        counts = labels != MASKED
        right = (logits.argmax(-1) == labels) & counts
        return counts.sum(1).double(), right.sum(1).double()

    def counts(self) -> dict[str, int]:
        return {"tokens": int(sum(tokens.sum() for _, tokens, _ in self._batches))}

    def compute(self, losses: Tensor, *collected: Tensor) -> PerExample:
        tokens, right = collected
        if not bool(tokens.any()):
            raise InputError("the data has no token to predict: its texts are too short, or cut before what counts")
        per_token = ratio_rows(losses, tokens)
        return {
            "loss_per_token": per_token,
            "perplexity": perplexity_rows(per_token),
            "loss_per_example": losses,
            "token_accuracy": ratio_rows(right, tokens),
        }


class NextTokenMetrics(TokenMetrics):
    def collect(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return super().collect(logits[:, :-1], labels[:, 1:])


#: The name of a loss → its metrics.
METRICS: Mapping[str, type[Metrics]] = {
    "classes": ClassMetrics,
    "labels": LabelMetrics,
    "squared": SquaredMetrics,
    "tokens": TokenMetrics,
    "next-token": NextTokenMetrics,
    "cosine": CosineMetrics,
    "ranking": RankingMetrics,
}


def ratio_rows(numerators: Tensor, denominators: Tensor) -> Tensor:
    """Write a ratio of two means over examples as a mean over examples: r + (n − r · d) / mean d."""
    mean = denominators.mean(0)
    ratio = numerators.mean(0) / mean
    rows: Tensor = ratio + (numerators - ratio * denominators) / mean
    return rows


def perplexity_rows(losses: Tensor) -> Tensor:
    """Write exp of a mean over examples as a mean over examples. A mean above 700 gives infinity."""
    mean = losses.mean()
    return mean.exp() * (1 + losses - mean) if mean < 700 else torch.full_like(losses, math.inf)


def _pearson(outputs: Tensor, labels: Tensor) -> Tensor | None:
    """The correlation of each column of the outputs with that of the labels; their mean."""
    outputs, labels = outputs - outputs.mean(0), labels - labels.mean(0)
    return _correlation(outputs * labels, outputs.square(), labels.square())


def _correlation(covariance: Tensor, variance_x: Tensor, variance_y: Tensor) -> Tensor | None:
    """Write c / √(v w) of three means over examples as a mean over examples; None if v or w is 0."""
    means = variance_x.mean(0), variance_y.mean(0)
    if not all(bool((mean > 1e-300).all()) for mean in means):
        return None
    scale = (means[0] * means[1]).sqrt()
    r = covariance.mean(0) / scale
    rows = r + covariance / scale - r * (variance_x / means[0] + variance_y / means[1]) / 2
    return rows.flatten(1).mean(1) if rows.ndim > 1 else rows


def _spearman(outputs: Tensor, labels: Tensor) -> Tensor | None:
    """The correlation of ranks. Equal values share the mean of their ranks."""

    def above(values: Tensor, weights: Tensor) -> Tensor:
        """For every example, the mean over all of the weights of those with a larger value, and half of equal ones."""
        _, groups = values.unique(return_inverse=True)
        sums = weights.new_zeros(int(groups.max()) + 1).index_add(0, groups, weights)
        return (sums.flip(0).cumsum(0).flip(0) - sums / 2)[groups] / len(values)

    def covariance(x: Tensor, y: Tensor) -> Tensor:
        """Of ranks as shares f and g, whose means are ½. An example adds f·g, and changes all ranks above its own."""
        f, g = (1 - above(values, torch.ones_like(values)) for values in (x, y))
        rows: Tensor = f * g + above(x, g) + above(y, f) - 2 * (f * g).mean() - 0.25
        return rows

    if not all(bool((values != values[0]).any()) for values in (outputs, labels)):
        return None
    return _correlation(covariance(outputs, labels), covariance(outputs, outputs), covariance(labels, labels))
