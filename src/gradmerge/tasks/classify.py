"""Classification, several labels, or regression of a text or a pair of texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from ..curvature.losses import ExampleLoss, loss_of
from .data.columns import Fields
from .data.labels import read_labels
from .data.read import Rows
from .tokens import Tokens, padded

#: Models that look for their answer at the end of the padded row.
_PADDED_LEFT = {"xlnet"}


class TextExamples(Tokens):
    """Texts, with labels if the fields name a column for them."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        super().__init__(rows, fields, model, tokenizer, max_length)
        config: Any = model.config
        self.labels = None
        if {"label", "labels"} & fields.keys():
            self.labels = read_labels(rows, fields, config)
            self.output: ExampleLoss = loss_of(model, self.labels)
        self.side = "left" if config.model_type in _PADDED_LEFT else "right"
        if config.get_text_config().pad_token_id is None:
            # Decoders read their answer off the last token that is not padding, and must know which that is.
            config.get_text_config().pad_token_id = self.pad

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        encoded = [self._encoded(index) for index in indices]
        pad_type = getattr(self.tokenizer, "pad_token_type_id", 0)
        fill = {"input_ids": self.pad, "token_type_ids": pad_type if isinstance(pad_type, int) else 0}
        inputs = {n: padded([e[n] for e in encoded], fill.get(n, 0), self.side) for n in encoded[0]}
        return inputs if self.labels is None else inputs | {"labels": self.labels[list(indices)]}

    def _encoded(self, index: int) -> dict[str, list[int]]:
        texts = [self.rows.text(index, self.fields[role]) for role in ("text", "text2") if role in self.fields]
        encoded = self.encode(index, *texts, return_attention_mask=True)
        self.check(index, encoded["input_ids"])
        return encoded
