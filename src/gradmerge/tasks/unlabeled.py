"""Unlabeled rows of a task as batches of a model's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..quiet import quiet_transformers
from .causal_lm import LanguageExamples, without_empty
from .classify import TextExamples
from .data.columns import choose_columns
from .data.read import Rows, read_rows
from .image import ImageExamples
from .models import LoadingInfo
from .processors import load_image_processor, load_tokenizer
from .sentence_model import SentenceSetup, read_setup
from .seq2seq import PairExamples


@dataclass
class UnlabeledRows:
    """Rows as keyword arguments of a model, on the CPU."""

    batches: list[dict[str, Tensor]]
    count: int
    notes: list[str]


def read_unlabeled(
    source: str,
    module: nn.Module,
    reference: str,
    info: LoadingInfo,
    *,
    columns: Mapping[str, str] | None = None,
    limit: int | None = None,
    batch_size: int = 8,
    max_length: int | None = None,
    tokenizer: str | None = None,
) -> UnlabeledRows:
    """Read the inputs of a model from a data source; columns with labels are not read.

    Language models read texts, prompts with completions, or conversations. Encoder-decoders read their targets too,
    as inputs of the decoder: labels in the batches say which positions count.
    """
    rows = read_rows(source, limit=limit)
    if not len(rows):
        raise InputError(f"{source}: there are no rows")
    fields = choose_columns(info.task, rows, columns, labeled=False)
    if info.task == "causal-lm":
        rows, _ = without_empty(rows, fields)
    examples: Any
    if info.task == "image":
        examples = ImageExamples(rows, fields, module, load_image_processor(reference, info))
    else:
        known = load_tokenizer(reference, info, tokenizer)
        if info.task == "embedding":
            setup = read_setup(reference, info.folder)
            rows, max_length = _as_embedded(rows, fields["text"], setup), _shorter(max_length, setup.max_length)
            fields = {"text": ("text",)}
        kinds: dict[str, Any] = {"causal-lm": LanguageExamples, "seq2seq": PairExamples}
        examples = kinds.get(info.task, TextExamples)(rows, fields, module, known, max_length)
    batches = []
    with quiet_transformers():
        for first in range(0, len(rows), batch_size):
            batches.append(examples.batch(range(first, min(first + batch_size, len(rows)))))
    return UnlabeledRows(batches, len(rows), list(getattr(examples, "notes", lambda: rows.notes)()))


def _as_embedded(rows: Rows, columns: tuple[str, ...], setup: SentenceSetup) -> Rows:
    """Texts as a sentence-transformers model reads them: with its prompt, in lower case if it says so."""
    texts = [setup.prompt + rows.text(index, columns).strip() for index in range(len(rows))]
    return Rows(
        rows.label, [{"text": t.lower() if setup.lower_case else t} for t in texts], ("text",), notes=rows.notes
    )


def _shorter(one: int | None, other: int | None) -> int | None:
    return one if other is None or one is not None else other
