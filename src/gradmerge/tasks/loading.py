"""A model with data that fits it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..curvature.losses import ExampleLoss
from ..errors import InputError
from ..quiet import quiet_transformers
from .causal_lm import LanguageExamples, without_empty
from .classify import TextExamples
from .columns import Fields, choose_columns
from .data_sources import read_rows
from .image import ImageExamples
from .models import LoadingInfo, device_of, load_image_processor, load_model, load_tokenizer
from .rows import Rows
from .seq2seq import PairExamples


class Examples(Protocol):
    """Rows of a data set as a model takes them."""

    @property
    def output(self) -> ExampleLoss: ...

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Some rows as keyword arguments of the model, with "labels"; padded to the longest of them."""
        ...

    def notes(self) -> list[str]:
        """What a user should know of how the rows were read, so far."""
        ...


@dataclass
class LoadedTask:
    """A model, its data, and the loss of an example."""

    model: nn.Module
    task: str
    output: ExampleLoss
    examples: int
    """Number of rows."""
    device: torch.device
    columns: Fields
    """What was read from which columns of the data."""
    missing_keys: list[str]
    """Tensors of the model that the checkpoint does not hold; none is a parameter."""
    data: Examples
    loading_notes: list[str]

    @property
    def notes(self) -> list[str]:
        """What a user should know; rows that are too long are counted as batches are made."""
        return self.loading_notes + self.data.notes()

    def batches(self, batch_size: int, start: int = 0) -> Iterator[dict[str, Tensor]]:
        """Batches on the CPU in the data's order, from row ``start`` on; rows before it are not even tokenized."""
        if batch_size < 1:
            raise InputError(f"--batch-size {batch_size}: at least one example is needed")
        for first in range(start, self.examples, batch_size):
            with quiet_transformers():
                batch = self.data.batch(range(first, min(first + batch_size, self.examples)))
            yield batch


def load_task(
    model_reference: str,
    source: str,
    *,
    task: str = "auto",
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    split: str | None = None,
    max_length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    attn: str | None = None,
    tokenizer: str | None = None,
) -> LoadedTask:
    """Load a model and data for it.

    ``model_reference`` is a folder, a Hub id (`org/name@revision`) or a PEFT adapter folder; ``source`` a .jsonl, .csv, .parquet
    or .txt file (each also .gz), an .npz, a folder of images by class, or `org/name:split` of the Hub. ``columns`` says which
    column is what (`{"text": "review"}`), ``limit`` how many rows are read at most, ``max_length`` after how many tokens a text is cut.
    """
    rows = read_rows(source, limit=limit, split=split)  # the quicker of the two to fail
    model, info = load_model(model_reference, task, device=device, dtype=dtype, attn=attn)
    fields = choose_columns(info.task, rows, columns)
    notes = list(info.notes)
    if info.task == "causal-lm":
        rows, left_out = without_empty(rows, fields)
        notes += left_out
    examples = _examples(model_reference, model, info, rows, fields, max_length, tokenizer)
    return LoadedTask(
        model=model,
        task=info.task,
        output=examples.output,
        examples=len(rows),
        device=device_of(device),
        columns=fields,
        missing_keys=info.missing_keys,
        data=examples,
        loading_notes=notes,
    )


def _examples(
    reference: str,
    model: nn.Module,
    info: LoadingInfo,
    rows: Rows,
    fields: Fields,
    max_length: int | None,
    tokenizer: str | None,
) -> Examples:
    if info.task == "image":
        return ImageExamples(rows, fields, model, load_image_processor(reference, info))
    kinds: dict[str, Any] = {"classify": TextExamples, "causal-lm": LanguageExamples, "seq2seq": PairExamples}
    examples: Examples = kinds[info.task](rows, fields, model, load_tokenizer(reference, info, tokenizer), max_length)
    return examples
