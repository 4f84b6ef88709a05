"""Text to text: every token of a target from its source and the target's tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..curvature.losses import LOSSES, ExampleLoss
from .columns import Fields
from .rows import Rows
from .tokens import Tokens, padded, padded_labels


class PairExamples:
    """Sources and targets. Both are cut to the same length."""

    output: ExampleLoss = LOSSES["tokens"]

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        self.rows, self.fields = rows, fields
        self.tokens = Tokens(rows, tokenizer, model, max_length)

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        sources, targets = [], []
        for index in indices:
            sources.append(self.tokens.encode(index, self.rows.text(index, self.fields["source"]))["input_ids"])
            target = self.rows.text(index, self.fields["target"])
            targets.append(self.tokens.encode(index, text_target=target)["input_ids"])
            self.tokens.check(index, [*sources[-1], *targets[-1]])
        return {
            "input_ids": padded(sources, self.tokens.pad),
            "attention_mask": padded([[1] * len(ids) for ids in sources], 0),
            "labels": padded_labels(targets),
        }

    def notes(self) -> list[str]:
        return self.tokens.notes()
