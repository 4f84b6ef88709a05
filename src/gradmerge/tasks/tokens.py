"""What the tasks on text share: lengths, truncation and padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..curvature.losses import MASKED
from ..errors import InputError
from ..text import first_line
from .data.columns import Fields
from .data.read import Rows

#: Tokens of an example when the user gives no --max-length and the model allows more.
DEFAULT_LENGTH = 1024


@dataclass(frozen=True)
class Prompt:
    """What a model is asked, and what it should answer."""

    text: str
    ids: list[int]
    reference: str | None
    """None where the data says nothing of an answer, as for plain text that goes on."""


class Tokens:
    """Rows of text as tokens: with a tokenizer, up to the longest sequence that goes into the model."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        self.rows, self.fields = rows, fields
        self.tokenizer = tokenizer
        self.max_length = length_of(model, tokenizer, max_length)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary = int(embedding.weight.shape[0])
        self.truncated: set[int] = set()
        """Rows seen so far that were longer than ``max_length``."""
        config: Any = model.config
        # Padding never counts, but some models look for it: to count positions, or to find the last token.
        stated = (config.get_text_config().pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        pads = [n for n in stated if isinstance(n, int) and 0 <= n < self.vocabulary]
        if not pads:
            raise InputError("the model has no tokens: its embedding is empty")
        self.pad: int = pads[0]

    def encode(self, index: int, *texts: str, **options: Any) -> dict[str, list[int]]:
        """The tokens of a row's text or pair of texts, cut to ``max_length`` as the tokenizer cuts."""
        full = self.all_of(index, *texts, **options)
        if len(full["input_ids"]) > self.max_length:
            self.truncated.add(index)
            full = self.all_of(index, *texts, truncation=True, max_length=self.max_length, **options)
        return full

    def all_of(self, index: int, *texts: str, **options: Any) -> dict[str, list[int]]:
        """The tokens of a row's text or pair of texts, however many."""
        try:
            return {name: list(values) for name, values in self.tokenizer(*texts, **options).items()}
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # what panics in Rust is no Exception
            raise self.rows.error(index, f"the tokenizer cannot take its text: {first_line(error)}") from error

    def check(self, index: int, ids: Sequence[int]) -> None:
        if ids and max(ids) >= self.vocabulary:
            found = f"the tokenizer gives token {max(ids)}, but the model knows {self.vocabulary} tokens"
            other = "the tokenizer is of another model. Give the right one: model_args tokenizer=PATH"
            raise self.rows.error(index, f"{found}: {other}")

    def batch_of(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Examples side by side. Padding is on the right and never counts."""
        return {
            "input_ids": padded(ids, self.pad),
            "attention_mask": padded([[1] * len(sequence) for sequence in ids], 0),
            "labels": padded(labels, MASKED),
        }

    def notes(self) -> list[str]:
        if not self.truncated:
            return self.rows.notes
        long = f"{len(self.truncated)} of {len(self.rows)} rows are longer than {self.max_length} tokens"
        return [*self.rows.notes, f"{long} and were cut (--max-length)"]


def padded(sequences: Sequence[Sequence[int]], value: int, side: str = "right") -> Tensor:
    """Sequences as the rows of a tensor, filled up to the longest, and to one entry if all are empty."""
    tensors = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    table = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
    return table if table.numel() else table.new_full((len(tensors), 1), value)


def length_of(model: nn.Module, tokenizer: Any, wanted: int | None) -> int:
    """The longest sequence in tokens: as wanted, else what model and tokenizer allow, at most ``DEFAULT_LENGTH``."""
    positions = positions_of(model)
    if wanted is not None:
        if wanted < 2:
            raise InputError(f"--max-length {wanted}: at least 2 tokens are needed")
        if positions is not None and wanted > positions:
            raise InputError(f"--max-length {wanted}: the model has positions for {positions} tokens only")
        return wanted
    stated = getattr(tokenizer, "model_max_length", None)
    if not isinstance(stated, int | float) or not stated >= 2:
        stated = DEFAULT_LENGTH
    return int(min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH, stated))


def positions_of(model: nn.Module) -> int | None:
    """How many tokens the model has positions for; None where positions are relative."""
    for name, module in model.named_modules():
        # RoBERTa and its kin count positions from behind the one of padding.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "relative_attention_num_buckets", None):
        return None
    stated = getattr(config, "max_position_embeddings", None)
    return stated if isinstance(stated, int) and stated > 0 else None
