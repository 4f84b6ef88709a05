"""Numbers that say how good a model is, gathered batch by batch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ..curvature.losses import MASKED
from ..errors import InputError

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
    "exact_match": "share of examples with all labels right",
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
    """What is summed up over batches, and the numbers made of it."""

    loss = 0.0
    examples = 0

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        """Take in a batch: what the model says, what is right, and the loss of each example."""
        self.loss += losses.double().sum().item()
        self.examples += len(labels)

    @abstractmethod
    def numbers(self) -> dict[str, Number]:
        """The numbers of everything that was taken in."""


class ClassMetrics(Metrics):
    confusion: Tensor | int = 0  # one row per class that is right, one column per class that the model says

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        super().add(logits, labels, losses)
        classes = logits.shape[-1]
        cells = labels * classes + logits.argmax(-1)
        counts = torch.bincount(cells.cpu(), minlength=classes * classes)
        self.confusion = self.confusion + counts.view(classes, classes)

    def numbers(self) -> dict[str, Number]:
        confusion = torch.as_tensor(self.confusion)
        right, told, true = confusion.diagonal(), confusion.sum(0), confusion.sum(1)
        f1 = _f1(right, told - right, true - right)
        numbers: dict[str, Number] = {"accuracy": int(right.sum()) / self.examples, "macro_f1": _mean(f1)}
        if len(f1) == 2:
            numbers["f1"] = f1[1]
        return numbers | {"loss_per_example": self.loss / self.examples, "examples": self.examples}


class LabelMetrics(Metrics):
    exact = 0
    counts: Tensor | int = 0  # rows: hits, false alarms, misses; one column per label

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        super().add(logits, labels, losses)
        told, true = logits > 0, labels > 0.5
        self.counts = self.counts + torch.stack([(told & true).sum(0), (told & ~true).sum(0), (~told & true).sum(0)])
        self.exact += int((told == true).all(-1).sum())

    def numbers(self) -> dict[str, Number]:
        counts = torch.as_tensor(self.counts).cpu()
        return {
            "micro_f1": _f1(*counts.sum(-1, keepdim=True))[0],
            "macro_f1": _mean(_f1(*counts)),
            "exact_match": self.exact / self.examples,
            "loss_per_example": self.loss / self.examples,
            "examples": self.examples,
        }


class SquaredMetrics(Metrics):
    def __init__(self) -> None:
        self.told: list[Tensor] = []
        self.true: list[Tensor] = []

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        super().add(logits, labels, losses)
        self.told.append(logits.double().flatten(1).cpu())
        self.true.append(labels.double().reshape(len(labels), -1).cpu())

    def numbers(self) -> dict[str, Number]:
        told, true = torch.cat(self.told), torch.cat(self.true)
        error = (told - true).square()
        centred, spread = told - told.mean(0), true - true.mean(0)
        variances = spread.square().sum(0)
        norms = (centred.square().sum(0) * variances).sqrt()
        r = (centred * spread).sum(0) / norms
        r2 = 1 - error.sum(0) / variances
        return {
            "mse": error.mean().item(),
            "pearson_r": r.mean().item() if bool((norms > 0).all()) else None,
            "r2": r2.mean().item() if bool((variances > 0).all()) else None,
            "examples": self.examples,
        }


class CosineMetrics(SquaredMetrics):
    def numbers(self) -> dict[str, Number]:
        numbers = super().numbers()
        told, true = (_ranks(torch.cat(values)[:, 0]) for values in (self.told, self.true))
        told, true = told - told.mean(), true - true.mean()
        norms = (told.square().sum() * true.square().sum()).sqrt().item()
        spearman = (told * true).sum().item() / norms if norms else None
        return {"spearman_r": spearman, **{name: numbers[name] for name in ("pearson_r", "mse", "examples")}}


class RankingMetrics(Metrics):
    first = reciprocal = 0.0

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        super().add(logits, labels, losses)
        positive = logits.gather(1, labels[:, None])
        # Candidates that are as near as the positive count as nearer: a model that embeds all alike finds nothing.
        places = (logits >= positive).sum(1).double()
        self.first += (places == 1).sum().item()
        self.reciprocal += (1 / places).sum().item()

    def numbers(self) -> dict[str, Number]:
        return {
            "accuracy": self.first / self.examples,
            "mean_reciprocal_rank": self.reciprocal / self.examples,
            "loss_per_example": self.loss / self.examples,
            "examples": self.examples,
        }


class TokenMetrics(Metrics):
    tokens = right = 0

    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        super().add(logits, labels, losses)
        counts = labels != MASKED
        self.tokens += int(counts.sum())
        self.right += int(((logits.argmax(-1) == labels) & counts).sum())

    def numbers(self) -> dict[str, Number]:
        if not self.tokens:
            raise InputError("the data has no token to predict: its texts are too short, or cut before what counts")
        per_token = self.loss / self.tokens
        return {
            "loss_per_token": per_token,
            "perplexity": math.exp(per_token) if per_token < 700 else math.inf,
            "loss_per_example": self.loss / self.examples,
            "token_accuracy": self.right / self.tokens,
            "tokens": self.tokens,
            "examples": self.examples,
        }


class NextTokenMetrics(TokenMetrics):
    def add(self, logits: Tensor, labels: Tensor, losses: Tensor) -> None:
        super().add(logits[:, :-1], labels[:, 1:], losses)


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


def _ranks(values: Tensor) -> Tensor:
    """Place of each value from the smallest on; equal values share the mean of theirs."""
    _, own, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    places: Tensor = ends - (counts.double() - 1) / 2
    return places[own]


def _f1(hits: Tensor, false_alarms: Tensor, misses: Tensor) -> list[float | None]:
    """2·hits / (2·hits + false alarms + misses); None for what occurs neither in the data nor in the predictions."""
    whole = (2 * hits + false_alarms + misses).tolist()
    return [2 * hit / total if total else None for hit, total in zip(hits.tolist(), whole, strict=True)]


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
