"""Reorder the embedding and output rows of a model to the vocabulary of the result."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InputError
from ..io.reader import TensorInfo
from .checkpoint import Buffers, Checkpoint, View
from .tied_weights import in_layer, tied_to

#: Tensors with one row per token: input embeddings, output heads and their biases.
VOCABULARY = re.compile(
    r"(.*[./])?(embed_tokens|wte|word_embeddings?|tok_embeddings|token_embedding|tokens_embed|shared|embed_in|"
    r"(transformer|backbone)\.embeddings|lm_head|embed_out|output|decoder|proj_out|output_projection|vocab_projector|"
    r"generator_lm_head|lm_loss|pred_layer\.proj|predictions)\.(weight|bias)|(.*[./])?final_logits_bias"
)
MISSING, PADDING = -1, -2
"""Instead of a row number: the model lacks the token; the row of the result has no token."""
STEP = 1 << 20
"""Elements that are read at once for a mean over all rows."""
Index = NDArray[np.int64]


def vocabulary_tensors(checkpoint: Checkpoint) -> tuple[int, frozenset[str]]:
    """Return the number of vocabulary rows of a model, and the tensors that have one row per token."""
    named = [name for name in checkpoint.tensors if VOCABULARY.fullmatch(name) and not in_layer(name)]
    counts = [_row_count(checkpoint.tensors[name]) for name in named]
    if not counts:
        raise InputError(f"{checkpoint.label}: no tensor is known to have one row per token, such as an embedding")
    text = checkpoint.config.get("text_config")
    size = checkpoint.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    rows = size if size in counts else counts[0]
    return rows, frozenset(name for name, count in zip(named, counts, strict=True) if count == rows)


def _row_count(info: TensorInfo) -> int:
    """Return the length of the first axis; of the second for a bias that is stored as one row."""
    shape = info.shape
    return 0 if not shape else shape[1] if len(shape) == 2 and shape[0] == 1 else shape[0]


def read_rows(read: Callable[[int, int], Tensor], columns: int, rows: Index) -> Tensor:
    """Return whole rows of a matrix in float64, in the order of ``rows``. A negative number is a row of 0.

    ``read`` returns a range of the flattened matrix. Only the rows in question are read, neighbors together.
    """
    out = torch.zeros(len(rows), columns, dtype=torch.float64)
    here = np.flatnonzero(rows >= 0)
    if here.size:
        distinct, order = np.unique(rows[here], return_inverse=True)
        runs = np.split(distinct, np.flatnonzero(np.diff(distinct) > 1) + 1)
        ranges = [(int(run[0]) * columns, (int(run[-1]) + 1) * columns) for run in runs]
        # `read` may reuse its buffer, so each part is copied.
        parts = [read(start, stop).to(torch.float64, copy=True) for start, stop in ranges]
        out[here] = torch.cat(parts).view(-1, columns).index_select(0, torch.from_numpy(order))
    return out


@dataclass(eq=False)
class VocabularyRows:
    """The row of a model for each row of the result."""

    numbers: Index
    """The model's row, :data:`MISSING` or :data:`PADDING`."""
    before: int
    """Number of rows of the model."""
    names: frozenset[str]
    """The tensors that have them."""

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this name and shape has one row per token of the model."""
        return name in self.names and _row_count(TensorInfo("F32", shape)) == self.before

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of such a tensor in the result."""
        return (1, len(self.numbers)) if len(shape) == 2 and shape[0] == 1 else (len(self.numbers), *shape[1:])

    def gather(self, read: Callable[[int, int], Tensor], columns: int, start: int, stop: int) -> Tensor:
        """Return elements ``start`` to ``stop`` of a reordered tensor in float64, 0 for rows that the model lacks."""
        first, last = start // columns, -(-stop // columns)
        rows = read_rows(read, columns, self.numbers[first:last])
        return rows.view(-1)[start - first * columns : stop - first * columns]


class VocabularyCheckpoint(View):
    """A model whose vocabulary rows are in the order of the result.

    A token that the model lacks gets the mean of the rows of ``donors``: (model, its row for each row of the result).
    A row without a token gets the mean of all rows with one.

    Args:
        inner: The model.
        rows: Its row for each row of the result.
        donors: Models that give rows, each with their numbers, or a negative number if it gives none.
        heads: Tied head that the model does not store → the embedding it is tied to. Other models store these heads,
            so missing rows come from a head and not from an embedding.
    """

    def __init__(
        self,
        inner: Checkpoint,
        rows: VocabularyRows,
        donors: Sequence[tuple[Checkpoint, Index]],
        heads: Mapping[str, str],
    ) -> None:
        super().__init__(inner)
        self.rows = rows
        self.donors = donors
        self.inner_names |= heads
        self.moved = rows.names | heads.keys()
        self._padding: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        for name in self.moved:
            info = inner.tensors[self.inner_names[name]]
            self.tensors[name] = TensorInfo(info.dtype, rows.shape(info.shape))

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        if name not in self.moved or start >= stop:
            return super().read(name, start, stop, buffers, slot)
        columns = self._columns(name)
        first, last = start // columns, -(-stop // columns)
        numbers = self.rows.numbers[first:last]
        if numbers[0] >= 0 and (np.diff(numbers) == 1).all():  # the rows are neighbors in the model, too
            offset = (int(numbers[0]) - first) * columns
            return self.inner.read(self.inner_names[name], start + offset, stop + offset, buffers, slot)
        rows = self._read(name, np.arange(first, last), buffers, slot)
        return rows.view(-1)[start - first * columns : stop - first * columns]

    def _read(self, name: str, wanted: Index, buffers: Buffers, slot: str) -> Tensor:
        """Return whole rows of the result."""
        columns, numbers = self._columns(name), self.rows.numbers[wanted]

        def rows_of(model: Checkpoint, stored: str, rows: Index) -> Tensor:
            return read_rows(
                lambda start, stop: model.read(stored, start, stop, buffers, f"{slot} rows"), columns, rows
            )

        out = rows_of(self.inner, self.inner_names[name], numbers)
        missing = np.flatnonzero(numbers == MISSING)
        total, count = torch.zeros(len(missing), columns, dtype=torch.float64), np.zeros(len(missing), np.int64)
        for donor, rows in self.donors if missing.size else ():
            donated = rows[wanted[missing]]
            count += donated >= 0
            stored = name if name in donor.tensors else tied_to(name, donor)
            if stored is not None:
                total += rows_of(donor, stored, donated)
        out[missing] = total / torch.from_numpy(count.clip(1))[:, None]
        if (padding := np.flatnonzero(numbers == PADDING)).size:
            out[padding] = self._mean_of_tokens(name)
        return out

    def _mean_of_tokens(self, name: str) -> Tensor:
        """Return the mean of all rows that have a token."""
        with self._lock:
            if name not in self._padding:
                columns, buffers = self._columns(name), Buffers()
                tokens = np.flatnonzero(self.rows.numbers != PADDING)
                total = torch.zeros(columns, dtype=torch.float64)
                step = max(1, STEP // columns)
                for low in range(0, len(tokens), step):
                    total += self._read(name, tokens[low : low + step], buffers, "mean").sum(0)
                self._padding[name] = total / max(1, len(tokens))
            return self._padding[name]

    def _columns(self, name: str) -> int:
        return max(1, self.tensors[name].numel // max(1, len(self.rows.numbers)))


def unwrap(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model with its own rows."""
    return checkpoint.inner if isinstance(checkpoint, VocabularyCheckpoint) else checkpoint
