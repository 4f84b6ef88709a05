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
    r"(.*[./])?((embed_tokens|wte|word_embeddings?|tok_embeddings|token_embedding|shared|embed_in|lm_head|embed_out|"
    r"decoder|vocab_projector|lm_loss|pred_layer\.proj)\.weight|(decoder|lm_head|vocab_projector|lm_loss|embed_out|"
    r"pred_layer\.proj|predictions)\.bias|final_logits_bias|(transformer|backbone)\.embeddings\.weight)"
)
#: Tables whose rows are not tokens but may have the same number of rows.
OTHER_ROWS = re.compile(r"pos|wpe|type|norm|class|score|patch", re.IGNORECASE)
MISSING, PADDING = -1, -2
"""Instead of a row number: the model lacks the token; the row of the result has no token."""
WHOLE = 1 << 20
"""Tensors of at most so many elements are read whole, whichever rows are needed."""
Index = NDArray[np.int64]


def vocabulary_tensors(checkpoint: Checkpoint) -> tuple[int, frozenset[str]]:
    """Return the number of vocabulary rows of a model, and the tensors that have one row per token.

    Names identify these tensors. A tensor outside the layers with another name counts as well if it has as many rows.
    The exceptions are tables of positions or classes, and a number of rows that is also a width of the model.
    """
    named = [name for name in checkpoint.tensors if VOCABULARY.fullmatch(name) and not in_layer(name)]
    counts = [_row_count(checkpoint.tensors[name]) for name in named]
    if not counts:
        raise InputError(f"{checkpoint.label}: no tensor is known to have one row per token, such as an embedding")
    text = checkpoint.config.get("text_config")
    size = checkpoint.config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    rows = size if size in counts else counts[0]
    widths = {width for info in checkpoint.tensors.values() if len(info.shape) > 1 for width in info.shape[1:]}
    return rows, frozenset(
        name
        for name, info in checkpoint.tensors.items()
        if not in_layer(name) and info.is_float and _row_count(info) == rows
        if name in named or (rows not in widths and not OTHER_ROWS.search(name))
    )


def _row_count(info: TensorInfo) -> int:
    """Return the length of the first axis; of the second for a bias that is stored as one row."""
    shape = info.shape
    return 0 if not shape else shape[1] if len(shape) == 2 and shape[0] == 1 else shape[0]


def read_rows(
    read: Callable[[int, int], Tensor], total: int, columns: int, rows: Index, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return whole rows of a matrix with ``total`` rows, in the order of ``rows``. A negative number is a row of 0.

    ``read`` returns a range of the flattened matrix. Only the rows in question are read, neighbors together.
    """
    out = torch.zeros(len(rows), columns, dtype=dtype)
    here = np.flatnonzero(rows >= 0)
    if total * columns <= WHOLE:
        picked = read(0, total * columns).view(total, columns).index_select(0, torch.from_numpy(rows[here]))
    else:
        distinct, order = np.unique(rows[here], return_inverse=True)
        runs = np.split(distinct, np.flatnonzero(np.diff(distinct) > 1) + 1)
        # `read` may reuse its buffer, so each part is copied.
        parts = [read(int(run[0]) * columns, (int(run[-1]) + 1) * columns).clone() for run in runs if run.size]
        picked = torch.cat(parts or [out[:0].view(-1)]).view(-1, columns).index_select(0, torch.from_numpy(order))
    out[here] = picked.to(dtype)
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
        """Return elements ``start`` to ``stop`` of a reordered tensor in float32, 0 for rows that the model lacks."""
        first, last = start // columns, -(-stop // columns)
        rows = read_rows(read, self.before, columns, self.numbers[first:last])
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
        self._names = {(donor, name): _name_in(donor, name) for donor, _ in donors for name in self.moved}

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
        numbers = self.rows.numbers[wanted]
        out = self._read_from(self.inner, self.inner_names[name], numbers, name, buffers, slot)
        missing = np.flatnonzero(numbers == MISSING)
        total, count = torch.zeros(len(missing), out.shape[1], dtype=out.dtype), np.zeros(len(missing), np.int64)
        for donor, rows in self.donors if missing.size else ():
            donated, stored = rows[wanted[missing]], self._names[donor, name]
            count += donated >= 0
            if stored is not None:
                total += self._read_from(donor, stored, donated, name, buffers, slot)
        out[missing] = total / torch.from_numpy(count.clip(1)).to(total.dtype)[:, None]
        if (padding := np.flatnonzero(numbers == PADDING)).size:
            out[padding] = self._mean_of_tokens(name).to(out.dtype)
        return out

    def _mean_of_tokens(self, name: str) -> Tensor:
        """Return the mean of all rows that have a token, in float64."""
        with self._lock:
            if name not in self._padding:
                columns, buffers = self._columns(name), Buffers()
                tokens = np.flatnonzero(self.rows.numbers != PADDING)
                total = torch.zeros(columns, dtype=torch.float64)
                step = max(1, WHOLE // columns)
                for low in range(0, len(tokens), step):
                    total += self._read(name, tokens[low : low + step], buffers, "mean").double().sum(0)
                self._padding[name] = total / max(1, len(tokens))
            return self._padding[name]

    def _read_from(self, model: Checkpoint, stored: str, rows: Index, name: str, buffers: Buffers, slot: str) -> Tensor:
        """Return rows of a model's tensor for rows of ``name``."""

        def read(start: int, stop: int) -> Tensor:
            return model.read(stored, start, stop, buffers, f"{slot} rows")

        total = _row_count(model.tensors[stored])
        return read_rows(read, total, self._columns(name), rows, self._dtype(name))

    def _columns(self, name: str) -> int:
        return max(1, self.tensors[name].numel // max(1, len(self.rows.numbers)))

    def _dtype(self, name: str) -> torch.dtype:
        """Return float64 if any model stores that, else float32, so that rows taken from the base equal it exactly."""
        pairs = ((donor, self._names[donor, name]) for donor, _ in self.donors)
        types = {donor.tensors[stored].dtype for donor, stored in pairs if stored is not None}
        return torch.float64 if "F64" in types else torch.float32


def _name_in(model: Checkpoint, name: str) -> str | None:
    """Return the name of a tensor in a model: its own, or that of the embedding it is tied to."""
    return name if name in model.tensors else tied_to(name, model)


def unwrap(checkpoint: Checkpoint) -> Checkpoint:
    """Return the model with its own rows."""
    return checkpoint.inner if isinstance(checkpoint, VocabularyCheckpoint) else checkpoint
