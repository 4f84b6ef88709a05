"""Numbers that say how good a model is, gathered batch by batch."""

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
"""None where a number is not defined, such as the correlation with a constant."""

#: What each number is.
MEANINGS: Mapping[str, str] = {
    "accuracy": "share of examples whose most likely class is right; of embeddings, whose positive is the nearest",
    "spearman_r": "correlation of the ranks of cosines and scores",
    "mean_reciprocal_rank": "1 / place of the positive among its candidates, mean over examples",
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
    """What is kept of every example, and the numbers made of it."""

    def __init__(self) -> None:
        self._kept: list[tuple[Tensor, ...]] = []

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Take in a batch: what the model says, what is right, and the loss of each example."""
        self._kept.append((losses.double().cpu(), *(one.cpu() for one in self.facts(logits, labels))))

    @abstractmethod
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        """What is kept of a batch beside the losses: tensors with one entry, or one row, per example."""

    @abstractmethod
    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        """Metric → one number per example, as :meth:`rows` has them; None where a metric is not defined."""

    def join(self, processes: Processes) -> None:
        """Add the rows of the other processes, by rank."""
        if processes.world_size == 1:
            return
        every = processes.all_gather(vars(self))
        for other in every:  # a process without examples does not know everything, such as the number of classes
            vars(self).update(other)
        self._kept = [part for other in every for part in other["_kept"]]

    def _measured(self) -> dict[str, Tensor | None]:
        return self.measure(*(torch.cat(parts) for parts in zip(*self._kept, strict=True)))

    @property
    def examples(self) -> int:
        return sum(len(losses) for losses, *_ in self._kept)

    def numbers(self) -> dict[str, Number]:
        """The numbers of everything that was taken in."""
        means = {name: None if rows is None else rows.mean().item() for name, rows in self._measured().items()}
        return {**means, **self.counts(), "examples": self.examples}

    def counts(self) -> dict[str, int]:
        """What is counted beside the examples."""
        return {}

    def rows(self) -> dict[str, Tensor]:
        """Metric → one float64 per example, in their order, whose mean is the metric.

        Their standard deviation / √n is the metric's standard error: a ratio, a correlation and what else is no mean
        over examples is written as itself plus what each example adds to it, to first order (its influence function).
        """
        return {
            name: rows for name, rows in self._measured().items() if rows is not None and bool(rows.isfinite().all())
        }

    def summary(self) -> dict[str, Any]:
        """The numbers, and their standard errors under `standard_errors`."""
        return {**self.numbers(), "standard_errors": standard_errors(self.rows())}


class ClassMetrics(Metrics):
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        self._classes = logits.shape[-1]
        return logits.argmax(-1), labels

    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        told, true = facts
        right = (told == true).double()
        seen = torch.bincount(torch.cat([told, true]), minlength=self._classes)
        f1 = (
            2 * torch.bincount(true, right, self._classes) / seen
        )  # NaN for a class that occurs neither in the data nor in the predictions
        # Of the classes, an example has to do with the true one and the one that the model says only.
        adds = len(told) / seen
        of_true, of_told = (((right - f1[one]) * adds[one]) for one in (true, told))
        occurring = seen > 0
        macro = f1[occurring].mean() + (of_true + of_told) / occurring.sum()
        found: dict[str, Tensor | None] = {"accuracy": right, "macro_f1": macro}
        if self._classes == 2:
            found["f1"] = f1[1] + of_true * true + of_told * told if occurring[1] else None
        return {**found, "loss_per_example": losses}


class LabelMetrics(Metrics):
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return logits > 0, labels > 0.5

    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        told, true = facts
        hits, seen = 2.0 * (told & true).double(), told.double() + true.double()
        occurring = seen.any(0)
        return {
            "micro_f1": ratio_rows(hits.sum(1), seen.sum(1)) if bool(occurring.any()) else None,
            "macro_f1": ratio_rows(hits[:, occurring], seen[:, occurring]).mean(1) if bool(occurring.any()) else None,
            "exact_match": (told == true).all(-1).double(),
            "loss_per_example": losses,
        }


class SquaredMetrics(Metrics):
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return logits.double().flatten(1), labels.double().reshape(len(labels), -1)

    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        told, true = facts
        error, spread = (told - true).square(), (true - true.mean(0)).square()
        return {
            "mse": error.mean(1),
            "pearson_r": _pearson(told, true),
            # The mean of the labels adds nothing of first order: it is where their squared distance is smallest.
            "r2": 1 - ratio_rows(error, spread).mean(1) if bool((spread.sum(0) > 0).all()) else None,
        }


class CosineMetrics(SquaredMetrics):
    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        found = super().measure(losses, *facts)
        told, true = facts
        return {"spearman_r": _spearman(told[:, 0], true[:, 0]), "pearson_r": found["pearson_r"], "mse": found["mse"]}


class RankingMetrics(Metrics):
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        positive = logits.gather(1, labels[:, None])
        # Candidates that are as near as the positive count as nearer: a model that embeds all alike finds nothing.
        return ((logits >= positive).sum(1).double(),)

    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        (places,) = facts
        return {"accuracy": (places == 1).double(), "mean_reciprocal_rank": 1 / places, "loss_per_example": losses}


class TokenMetrics(Metrics):
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        counts = labels != MASKED
        right = (logits.argmax(-1) == labels) & counts
        return counts.sum(1).double(), right.sum(1).double()

    def counts(self) -> dict[str, int]:
        return {"tokens": int(sum(tokens.sum() for _, tokens, _ in self._kept))}

    def measure(self, losses: Tensor, *facts: Tensor) -> dict[str, Tensor | None]:
        tokens, right = facts
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
    def facts(self, logits: Tensor, labels: Tensor) -> Sequence[Tensor]:
        return super().facts(logits[:, :-1], labels[:, 1:])


#: The metrics that go with a loss, by its name.
METRICS: Mapping[str, type[Metrics]] = {
    "classes": ClassMetrics,
    "labels": LabelMetrics,
    "squared": SquaredMetrics,
    "tokens": TokenMetrics,
    "next-token": NextTokenMetrics,
    "cosine": CosineMetrics,
    "ranking": RankingMetrics,
}


def ratio_rows(tops: Tensor, bottoms: Tensor) -> Tensor:
    """A ratio of two means over examples, as a mean over examples: r + (top − r · bottom) / mean bottom."""
    whole = bottoms.mean(0)
    ratio = tops.mean(0) / whole
    rows: Tensor = ratio + (tops - ratio * bottoms) / whole
    return rows


def perplexity_rows(losses: Tensor) -> Tensor:
    """exp of a mean over examples, likewise. Beyond 700 it is no float64; rows that are not finite have no error."""
    mean = losses.mean()
    return mean.exp() * (1 + losses - mean) if mean < 700 else torch.full_like(losses, math.inf)


def _pearson(told: Tensor, true: Tensor) -> Tensor | None:
    """The correlation of each column with its own; their mean."""
    told, true = told - told.mean(0), true - true.mean(0)
    return _correlation(told * true, told.square(), true.square())


def _correlation(covariance: Tensor, one: Tensor, other: Tensor) -> Tensor | None:
    """c / √(v w) of three means over examples, as a mean over examples; None where v or w is 0."""
    scales = one.mean(0), other.mean(0)
    if not all(bool((scale > 1e-300).all()) for scale in scales):
        return None
    whole = (scales[0] * scales[1]).sqrt()
    r = covariance.mean(0) / whole
    rows = r + covariance / whole - r * (one / scales[0] + other / scales[1]) / 2
    return rows.flatten(1).mean(1) if rows.ndim > 1 else rows


def _spearman(told: Tensor, true: Tensor) -> Tensor | None:
    """The correlation of ranks, equal values sharing the mean of theirs."""

    def above(values: Tensor, weights: Tensor) -> Tensor:
        """For every example, the mean over all of the weights of those with a larger value, and half of equal ones."""
        _, own = values.unique(return_inverse=True)
        sums = weights.new_zeros(int(own.max()) + 1).index_add(0, own, weights)
        return (sums.flip(0).cumsum(0).flip(0) - sums / 2)[own] / len(values)

    def covariance(x: Tensor, y: Tensor) -> Tensor:
        """Of ranks as shares f and g, whose means are ½: an example has its own f·g, and moves all ranks above it."""
        f, g = (1 - above(values, torch.ones_like(values)) for values in (x, y))
        rows: Tensor = f * g + above(x, g) + above(y, f) - 2 * (f * g).mean() - 0.25
        return rows

    varying = all(bool((values != values[0]).any()) for values in (told, true))
    pairs = ((told, true), (told, told), (true, true))
    return _correlation(*(covariance(*pair) for pair in pairs)) if varying else None
