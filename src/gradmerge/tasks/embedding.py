"""Embeddings: two texts and how alike they are, or a text, what belongs to it, and what does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..curvature.losses import ClassLoss, ExampleLoss, SquaredLoss
from ..errors import InputError
from .data.columns import Fields
from .data.read import Rows, shorten
from .sentence_model import EmbeddingModel
from .tokens import Tokens, padded


class CosineLoss(SquaredLoss):
    """(cos − score)²: the squared error of the cosine between two texts."""

    name = "cosine"


class RankingLoss(ClassLoss):
    """−log softmax(cos / temperature) of the positive among an example's own candidates.

    Other examples of the batch are no negatives: then an example's loss would depend on its batch, and have no gradient
    of its own.
    """

    name = "ranking"


class EmbeddingExamples(Tokens):
    """An anchor with a positive and its score, or with a positive and negatives."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: object, max_length: int | None) -> None:
        super().__init__(rows, fields, model, tokenizer, max_length)
        assert isinstance(model, EmbeddingModel)
        self.setup = model.setup
        if max_length is None and self.setup.max_length is not None:
            self.max_length = min(self.max_length, self.setup.max_length)
        self.texts = [fields["anchor"], fields["positive"], *((name,) for name in fields.get("negative", ()))]
        self.output: ExampleLoss = RankingLoss() if "negative" in fields else CosineLoss()
        if "score" in fields:
            self.labels = _scores(rows, fields["score"][0])
        elif "negative" in fields:
            self.labels = torch.zeros(len(rows), dtype=torch.long)
        else:
            self.labels = torch.ones(len(rows))
            rows.notes.append("the pairs have neither scores nor negatives: each cosine is compared with 1")

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for place, columns in enumerate(self.texts):
            encoded = [self._encoded(index, columns) for index in indices]
            for name in encoded[0]:
                fill = self.pad if name == "input_ids" else 0
                found[f"{name}_{place}"] = padded([one[name] for one in encoded], fill)
        return found | {"labels": self.labels[list(indices)]}

    def _encoded(self, index: int, columns: Sequence[str]) -> dict[str, list[int]]:
        text = self.setup.prompt + self.rows.text(index, columns).strip()
        encoded = self.encode(index, text.lower() if self.setup.lower_case else text, return_attention_mask=True)
        if not encoded["input_ids"]:
            raise self.rows.error(index, f"{columns[0]!r} has no tokens")
        self.check(index, encoded["input_ids"])
        return encoded


def _scores(rows: Rows, column: str) -> Tensor:
    values: list[float] = []
    for index, cell in enumerate(rows.column(column)):
        try:
            value = float(cell)
        except (TypeError, ValueError, OverflowError):
            value = math.nan
        if not math.isfinite(value):
            raise rows.error(index, f"{column!r} is {shorten(cell)}; a score is a number")
        if abs(value) > 1:
            raise InputError(
                f"{rows.label}: {column!r} has {value:g}; scores are compared with cosines, from -1 to 1. Divide "
                "them by the largest score there can be."
            )
        values.append(value)
    return torch.tensor(values)
