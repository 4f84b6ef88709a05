"""A model whose embedding and output rows stand in the order of another vocabulary."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import InputError
from ...io.reader import TensorInfo
from ..checkpoint import TORCH_TYPES, Buffers, Checkpoint
from ..compat.tied_weights import in_layer, tied_to
from ..views import View

#: Tensors with a row for every token: input embeddings, output heads and their biases.
VOCABULARY = re.compile(
    r"(.*[./])?((embed_tokens|wte|word_embeddings?|tok_embeddings|token_embedding|shared|embed_in|lm_head|embed_out|"
    r"decoder|vocab_projector|lm_loss|pred_layer\.proj)\.weight|(decoder|lm_head|vocab_projector|lm_loss|embed_out|"
    r"pred_layer\.proj|predictions)\.bias|final_logits_bias|(transformer|backbone)\.embeddings\.weight)"
)
#: Names of tables with rows of another kind, of which there may be as many.
OTHER_ROWS = re.compile(r"pos|wpe|type|norm|class|score|patch", re.IGNORECASE)
#: Rows that lie no further apart than this many elements are read at once, in pieces of at most so many elements.
GAP, PIECE = 1 << 12, 1 << 20
#: What a row of the result is to a model: not its own, but that of others; or no token's at all.
ELSEWHERE, PADDING = -1, -2
Index = NDArray[np.int64]


def vocabulary_tensors(checkpoint: Checkpoint) -> tuple[int, list[str]]:
    """The number of rows of a model's embeddings, and the tensors that have that many, one for each token.

    Names tell these. A tensor outside the layers with so many rows and another name is one of them too, unless the
    number is also an inner width of the model, or the name that of positions or classes.
    """
    named = [n for n in checkpoint.tensors if VOCABULARY.fullmatch(n) and not in_layer(n)]
    text = checkpoint.config.get("text_config")
    inner = text.get("vocab_size") if isinstance(text, dict) else None
    stated = checkpoint.config.get("vocab_size", inner)
    counts = [_rows(checkpoint.tensors[name]) for name in named]
    if not counts:
        raise InputError(
            f"{checkpoint.label}: none of its tensors is known to have a row for each token, such as an embedding"
        )
    rows = stated if stated in counts else counts[0]
    widths = {width for info in checkpoint.tensors.values() if len(info.shape) > 1 for width in info.shape[1:]}
    names = [
        name
        for name, info in checkpoint.tensors.items()
        if not in_layer(name) and info.is_float and _rows(info) == rows
        if name in named or (rows not in widths and not OTHER_ROWS.search(name))
    ]
    return rows, names


def _rows(info: TensorInfo) -> int:
    """The length of the first axis; of the second for a bias that is stored as one row."""
    shape = info.shape
    return 0 if not shape else shape[1] if len(shape) == 2 and shape[0] == 1 else shape[0]


def resized(info: TensorInfo, rows: int) -> TensorInfo:
    """The same tensor with another number of rows."""
    one_row = len(info.shape) == 2 and info.shape[0] == 1
    return TensorInfo(info.dtype, (1, rows) if one_row else (rows, *info.shape[1:]))


def gather(read: Callable[[int, int], Tensor], columns: int, rows: Index, start: int, stop: int, out: Tensor) -> None:
    """Put elements ``start`` to ``stop`` of the given rows, one after another, into ``out``; rows below 0 stay as is.

    ``read`` gives a range of elements of the flattened source. Rows that lie side by side there are read at once.
    """
    first = start // columns
    wanted = rows[first : -(-stop // columns)]
    places = np.flatnonzero(wanted >= 0)
    if not places.size:
        return
    order = places[np.argsort(wanted[places], kind="stable")]
    source = wanted[order]
    offset = start - first * columns
    longest = max(1, PIECE // columns)
    # A new piece begins where the gap is wide, and where the piece would be too long.
    breaks = np.flatnonzero(np.diff(source) * columns > GAP + columns) + 1
    for begin, end in itertools.pairwise([0, *breaks.tolist(), source.size]):
        while begin < end:
            stop_at = begin + 1
            if end > stop_at:
                stop_at = begin + int(np.searchsorted(source[begin:end], source[begin] + longest))
            _place(read, columns, order[begin:stop_at], source[begin:stop_at], offset, out)
            begin = stop_at


def _place(
    read: Callable[[int, int], Tensor],
    columns: int,
    places: Index,
    source: Index,
    offset: int,
    out: Tensor,
) -> None:
    """Read a span of source rows, and put them in their places; the first and last row of ``out`` may be cut."""
    low, high = int(source[0]), int(source[-1]) + 1
    values = read(low * columns, high * columns).view(-1, columns)
    single = np.full(places.shape, True)
    if high > low + 1:  # else scattered, as they often are: no indexing
        values = values.to(out.dtype)
        # The first place whose row lies in ``out`` as a whole, and the one after the last.
        begin, end = -(-offset // columns), (out.numel() + offset) // columns
        single = (places < begin) | (places >= end)
        if not single.all():
            inner = out[begin * columns - offset : end * columns - offset].view(-1, columns)
            inner[torch.from_numpy(places[~single] - begin)] = values[torch.from_numpy(source[~single] - low)]
    for place, row in zip(places[single].tolist(), (source[single] - low).tolist(), strict=True):
        at = place * columns - offset
        cut, until = max(0, -at), min(columns, out.numel() - at)
        out[at + cut : at + until] = values[row, cut:until]


@dataclass(eq=False)
class VocabularyRows:
    """Where the rows of one model come from, for every row of the result."""

    own: Index
    """The model's own row, :data:`ELSEWHERE` or :data:`PADDING`."""
    before: int
    """Rows that the model has."""
    names: frozenset[str]
    """Its tensors that have them."""

    @property
    def count(self) -> int:
        return len(self.own)

    def covers(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this name and shape has a row for each of the model's tokens."""
        return name in self.names and _rows(TensorInfo("F32", shape)) == self.before

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return resized(TensorInfo("F32", shape), self.count).shape


@dataclass(eq=False)
class Defaults:
    """Rows of the result for models that have none of their own: the mean of some models' rows, or 0 where of none."""

    models: Sequence[Checkpoint]
    rows: list[Index]
    """For each model, the row that it gives, or -1."""
    counts: Index
    """How many models give one."""
    names: dict[tuple[int, str], str] = field(default_factory=dict)

    def name(self, place: int, name: str) -> str | None:
        """The tensor of a model that stands for ``name``: its own, or the one that a tied head is."""
        key = place, name
        if key not in self.names:
            model = self.models[place]
            self.names[key] = name if name in model.tensors else tied_to(name, model) or ""
        return self.names[key] or None


class VocabularyCheckpoint(View):
    """A model, its rows permuted and extended to the vocabulary of the result.

    ``heads`` are tied heads that the model does not store, each with the embedding that it is, where the template
    stores both: rows that the model lacks then come from the head of another, and not from its embedding.
    """

    def __init__(self, inner: Checkpoint, rows: VocabularyRows, defaults: Defaults, heads: dict[str, str]) -> None:
        super().__init__(inner)
        self.rows = rows
        self._defaults = defaults
        self.stored |= heads
        self.moved = rows.names | heads.keys()
        """Tensors whose rows are put in another order."""
        self._means: dict[str, Tensor] = {}
        self._lock = threading.Lock()
        for name in self.moved:
            self.tensors[name] = resized(inner.tensors[self.stored[name]], rows.count)

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        if name not in self.moved:
            return super().read(name, start, stop, buffers, slot)
        columns = self._columns(name)
        wanted = self.rows.own[start // columns : -(-stop // columns)]
        stored = TORCH_TYPES[self.tensors[name].dtype]
        if (wanted >= 0).all():
            if (np.diff(wanted) == 1).all():  # as they lie in the file
                moved = (int(wanted[0]) - start // columns) * columns if wanted.size else 0
                return self.inner.read(self.stored[name], start + moved, stop + moved, buffers, slot)
            out = buffers.take(slot, (stop - start) * stored.itemsize).view(stored)
            self._gather(self.inner, self.stored[name], self.rows.own, start, stop, buffers, slot, out)
            return out
        # Wide enough for the rows of every model, so that a row taken from the base differs from it by exactly 0.
        wide = self._wide(name)
        out = torch.zeros(stop - start, dtype=wide)
        self._gather(self.inner, self.stored[name], self.rows.own, start, stop, buffers, slot, out)
        self._fill(name, start, stop, buffers, slot, out)
        if (wanted == PADDING).any():
            mean = self._mean(name)
            inside = torch.arange(start, stop)
            padding = torch.from_numpy(wanted == PADDING)[inside // columns - start // columns]
            out[padding] = mean[inside[padding] % columns].to(wide)
        return out

    def _columns(self, name: str) -> int:
        return max(1, self.tensors[name].numel // max(1, self.rows.count))

    def _wide(self, name: str) -> torch.dtype:
        """float32, or float64 where a model has that."""
        donors = ((model, self._defaults.name(place, name)) for place, model in enumerate(self._defaults.models))
        types = {model.tensors[stored].dtype for model, stored in donors if stored is not None}
        return torch.float64 if "F64" in types else torch.float32

    def _gather(
        self,
        model: Checkpoint,
        stored: str,
        rows: Index,
        start: int,
        stop: int,
        buffers: Buffers,
        slot: str,
        out: Tensor,
    ) -> None:
        numel = model.tensors[stored].numel
        columns = max(1, numel // max(1, _rows(model.tensors[stored])))

        def read(low: int, high: int) -> Tensor:
            return model.read(stored, low, min(high, numel), buffers, f"{slot} rows")

        gather(read, columns, rows, start, stop, out)

    def _fill(self, name: str, start: int, stop: int, buffers: Buffers, slot: str, out: Tensor) -> None:
        """Add the rows that are not the model's own: means over the models that have them."""
        columns, defaults = self._columns(name), self._defaults
        first, last = start // columns, -(-stop // columns)
        lacking = self.rows.own[first:last] == ELSEWHERE
        if not lacking.any():
            return
        for place, model in enumerate(defaults.models):
            rows = np.where(lacking, defaults.rows[place][first:last], -1)
            stored = defaults.name(place, name)
            if stored is None or not (rows >= 0).any():
                continue
            given = torch.zeros_like(out)
            self._gather(model, stored, rows, start - first * columns, stop - first * columns, buffers, slot, given)
            out += given
        counts = np.where(lacking, np.maximum(defaults.counts[first:last], 1), 1)
        inside = torch.arange(start, stop) // columns - first
        out /= torch.from_numpy(counts).to(out.dtype)[inside]

    def _mean(self, name: str) -> Tensor:
        """The mean of all rows that mean a token, in float64: what rows that mean none are filled with."""
        with self._lock:
            if name not in self._means:
                columns, tokens = self._columns(name), int((self.rows.own != PADDING).sum())
                total, buffers = torch.zeros(columns, dtype=torch.float64), Buffers()
                step = max(1, PIECE // columns)
                for low in range(0, self.rows.count, step):
                    kept = self.rows.own[low : low + step]
                    places = np.flatnonzero(kept != PADDING)
                    # Runs without padding, so that reading them does not ask for this mean again.
                    for run in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1) if places.size else ():
                        begin, end = low + int(run[0]), low + int(run[-1]) + 1
                        block = self.read(name, begin * columns, end * columns, buffers, "mean")
                        total += block.view(-1, columns).double().sum(0)
                self._means[name] = total / max(1, tokens)
            return self._means[name]


def stored(checkpoint: Checkpoint) -> Checkpoint:
    """A model with its own rows."""
    return checkpoint.inner if isinstance(checkpoint, VocabularyCheckpoint) else checkpoint
