"""Add up what layers give: squares of examples' gradients, and Kronecker factors.

In a term of the gradient, x is what went into a layer and y the gradient of its output; axis 0 is examples and axis 1
tokens throughout. Sums are float32 (or float64).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .batches import sees_decoder
from .curvature import KroneckerFactors
from .offload import StoredSum

#: Entries of examples' gradients that are held at once, on a processor (so that they stay in its cache) and on a GPU.
HELD_CPU = 1 << 20
HELD_CUDA = 1 << 26

#: A product of a matrix with itself is computed in stripes that end at the diagonal: (most stripes, least width).
STRIPES_CPU, STRIPES_CUDA = (8, 48), (4, 256)

#: Layers with more inputs or outputs get a diagonal: their factors would be of a gigabyte or more each.
MAX_KRONECKER_DIM = 16384


@dataclass(frozen=True)
class DirectGradient:
    """g_i itself, for every example: (examples, *shape)."""

    gradient: Tensor

    def of_examples(self, first: int, end: int) -> DirectGradient:
        """Return the term of some examples."""
        return DirectGradient(self.gradient[first:end])

    def add_to(self, gradient: Tensor) -> None:
        """Add the term to the examples' whole gradients, (examples, *shape)."""
        gradient += self.gradient.to(gradient.dtype).view_as(gradient)


@dataclass(frozen=True)
class OuterGradient:
    """g_i = Σ_t y_it x_itᵀ, as of a linear layer: y (examples, tokens, out), x (examples, tokens, in)."""

    y: Tensor
    x: Tensor

    def of_examples(self, first: int, end: int) -> OuterGradient:
        return OuterGradient(self.y[first:end], self.x[first:end])

    def add_to(self, gradient: Tensor) -> None:
        y, x = self.y.to(gradient.dtype), self.x.to(gradient.dtype)
        gradient += torch.bmm(y.transpose(1, 2), x).view_as(gradient)


@dataclass(frozen=True)
class RowGradient:
    """g_i has y_it added to row ids_it, as of an embedding: ids (examples, tokens), y (examples, tokens, width)."""

    ids: Tensor
    y: Tensor

    def of_examples(self, first: int, end: int) -> RowGradient:
        return RowGradient(self.ids[first:end], self.y[first:end])

    def add_to(self, gradient: Tensor) -> None:
        offset = torch.arange(len(gradient), device=gradient.device)[:, None] * gradient.shape[1]
        y = self.y.flatten(0, 1).to(gradient.dtype)
        gradient.flatten(0, 1).index_add_(0, (self.ids + offset).flatten(), y)


@dataclass(frozen=True)
class ExpertGradient:
    """g_i has Σ y xᵀ in the slice of each expert, over the tokens of example i that are routed to it.

    Every token has a row for each of its experts: y (rows, out), and x (rows, in) or None for a bias.
    """

    experts: Tensor
    """The expert of each row."""
    examples: Tensor
    """The example of each row."""
    y: Tensor
    x: Tensor | None

    def of_examples(self, first: int, end: int) -> ExpertGradient:
        rows = (self.examples >= first) & (self.examples < end)
        x = None if self.x is None else self.x[rows]
        return ExpertGradient(self.experts[rows], self.examples[rows] - first, self.y[rows], x)

    def add_to(self, gradient: Tensor) -> None:
        for row, (example, expert) in enumerate(zip(self.examples.tolist(), self.experts.tolist(), strict=True)):
            y = self.y[row].to(gradient.dtype)
            gradient[example, expert] += y if self.x is None else y.outer(self.x[row].to(gradient.dtype))


Term = DirectGradient | OuterGradient | RowGradient | ExpertGradient


def sum_type(value: Tensor) -> torch.dtype:
    """The type that squares of such numbers are added up in."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def add_squares(total: Tensor, terms: Sequence[Term], examples: int) -> None:
    """total += Σ_i (Σ_terms g_i)²: several uses of one parameter add up before they are squared."""
    direct = [term for term in terms if isinstance(term, DirectGradient)]
    outer = [term for term in terms if isinstance(term, OuterGradient)]
    rows = [term for term in terms if isinstance(term, RowGradient)]
    experts = [term for term in terms if isinstance(term, ExpertGradient)]
    if len(outer) == 1 == len(terms):
        add_outer(total, outer[0])
    elif len(outer) == len(terms):
        add_outer(total, OuterGradient(torch.cat([t.y for t in outer], 1), torch.cat([t.x for t in outer], 1)))
    elif len(direct) == len(terms):
        total += _sum_of(direct, total.dtype).square().sum(0).view_as(total)
    elif len(rows) == len(terms):
        summed = merge_rows(rows, total.dtype)
        add_rows(total, summed.ids, summed.y.square_())
    elif len(experts) == len(terms):
        add_experts(total, experts)
    else:
        _add_mixed(total, terms, examples)


def add_many_direct(totals: Sequence[Tensor], terms: Sequence[Sequence[DirectGradient]]) -> None:
    """totals += Σ_i (Σ_terms g_i)² of many small parameters: on a GPU, starting a kernel takes longer than its work."""
    together = torch.cat([_sum_of(some, totals[0].dtype).flatten(1) for some in terms], 1)
    sums = together.square_().sum(0).split([total.numel() for total in totals])
    torch._foreach_add_(list(totals), [part.view_as(total) for part, total in zip(sums, totals, strict=True)])


def _sum_of(terms: Sequence[DirectGradient], dtype: torch.dtype) -> Tensor:
    gradient = terms[0].gradient.to(dtype)
    for term in terms[1:]:
        gradient = gradient + term.gradient.to(dtype)
    return gradient


def add_outer(total: Tensor, term: OuterGradient) -> None:
    """total (out, in) += Σ_i (Σ_t y_it x_itᵀ)², without holding more than a few examples' gradients."""
    y, x = term.y, term.x
    total = total.view(len(total), -1)
    if y.shape[1] == 1:  # one token: the square of a product is the product of squares
        total.addmm_(y[:, 0].to(total.dtype).square().T, x[:, 0].to(total.dtype).square())
        return
    fused = _fused(y, x, total)
    if fused is not None:
        fused(y, x, total)
        return
    y, x = y.to(total.dtype), x.to(total.dtype)
    held = HELD_CUDA if total.is_cuda else HELD_CPU
    (examples, _, width), inputs = y.shape, x.shape[2]
    rows = max(1, min(width, held // inputs))
    group = max(1, min(examples, held // (rows * inputs)))
    buffer = total.new_empty(group, rows, inputs)
    for top in range(0, width, rows):
        part = total[top : top + rows]
        for first in range(0, examples, group):
            left = y[first : first + group, :, top : top + rows].transpose(1, 2)
            gradient = buffer[: left.shape[0], : left.shape[1]]
            torch.bmm(left, x[first : first + group], out=gradient)
            for example in gradient:
                part.addcmul_(example, example)


def add_experts(total: Tensor, terms: Sequence[ExpertGradient]) -> None:
    """total (experts, …) += Σ_i g_i², from the rows of each pair of an expert and an example.

    A pair's rows are padded with zeros, so that pairs with about as many rows are multiplied together.
    """
    experts, example_of_row = torch.cat([t.experts for t in terms]), torch.cat([t.examples for t in terms])
    y, inputs = torch.cat([t.y for t in terms]), [t.x for t in terms if t.x is not None]
    if not len(y):
        return
    examples = int(example_of_row.max()) + 1
    pair = experts * examples + example_of_row
    if not inputs:
        gradient = total.new_zeros(len(total) * examples, total[0].numel())
        gradient.index_add_(0, pair, y.to(total.dtype))
        total += gradient.square_().view(len(total), examples, -1).sum(1).view_as(total)
        return
    order = pair.argsort()
    y, x = y[order], torch.cat(inputs)[order]
    counts = torch.bincount(pair, minlength=len(total) * examples).view(len(total), examples).tolist()
    first = 0
    for expert, row_counts in enumerate(counts):
        groups: dict[int, list[tuple[int, int]]] = {}
        for count in row_counts:
            if count:
                groups.setdefault(count.bit_length(), []).append((first, count))
                first += count
        for group in groups.values():
            starts, lengths = torch.tensor(group, device=y.device)[:, :, None].unbind(1)
            step = torch.arange(max(count for _, count in group), device=y.device)
            rows = (starts + step).clamp(max=len(y) - 1)
            add_outer(total[expert], OuterGradient(y[rows] * (step < lengths)[..., None], x[rows]))


def merge_rows(terms: Sequence[RowGradient], dtype: torch.dtype) -> RowGradient:
    """Return one gradient for each distinct id of an example. Unused positions have id 0 and gradient 0."""
    ids, y = torch.cat([t.ids for t in terms], 1), torch.cat([t.y for t in terms], 1)
    ordered, order = ids.sort(1)
    positions = _positions_of(ordered)
    y = y.gather(1, order[..., None].expand_as(y)).flatten(0, 1).to(dtype)
    summed = torch.zeros_like(y).index_add_(0, positions, y)
    return RowGradient(_at_positions(ordered, positions), summed.view(*ids.shape, -1))


def unique_rows(ids: Tensor) -> Tensor:
    """Return the distinct ids of each example in ascending order. Unused positions hold 0."""
    ordered = ids.sort(1).values
    return _at_positions(ordered, _positions_of(ordered))


def _positions_of(ordered: Tensor) -> Tensor:
    """Return the flat position of each sorted id in a result of the same shape. Equal ids of an example share one."""
    position = torch.zeros_like(ordered)
    position[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
    return (position + torch.arange(len(ordered), device=ordered.device)[:, None] * ordered.shape[1]).flatten()


def _at_positions(ordered: Tensor, positions: Tensor) -> Tensor:
    return torch.zeros_like(ordered).flatten().scatter_(0, positions, ordered.flatten()).view_as(ordered)


def add_rows(total: Tensor, ids: Tensor, values: Tensor) -> None:
    total.index_add_(0, ids.flatten(), values.flatten(0, 1).to(total.dtype))


def outer_at_rows(term: OuterGradient, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows ids_it of example i's Σ_t y_it x_itᵀ: (examples, rows, in)."""
    index = ids[:, None, :].expand(-1, term.y.shape[1], -1)
    return torch.bmm(term.y.gather(2, index).transpose(1, 2), term.x.to(term.y.dtype)).to(dtype)


def _add_mixed(total: Tensor, terms: Sequence[Term], examples: int) -> None:
    """Any mixture, by holding the gradient of a few examples."""
    some = max(1, (HELD_CUDA if total.is_cuda else HELD_CPU) // total.numel())
    for first in range(0, examples, some):
        end = min(first + some, examples)
        gradient = total.new_zeros(end - first, *total.shape)
        for term in terms:
            term.of_examples(first, end).add_to(gradient)
        total += gradient.square_().sum(0)


def _fused(y: Tensor, x: Tensor, total: Tensor) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """The fused kernel, where it applies: 16-bit numbers on a GPU with Triton."""
    suits = y.is_cuda and y.dtype == x.dtype and y.dtype in (torch.bfloat16, torch.float16)
    return _triton_kernel() if suits and total.dtype == torch.float32 and total.is_contiguous() else None


@functools.cache
def _triton_kernel() -> Callable[[Tensor, Tensor, Tensor], None] | None:
    try:
        from .triton_kernels import add_outer_fused
    except ImportError:
        return None
    return add_outer_fused


class KroneckerSums:
    """A = Σ x̃x̃ᵀ, G = Σ yyᵀ and T of one layer, over all tokens of all examples.

    x̃ = [x; 1] is the layer's input, with a 1 for its bias. G ⊗ A / T represents the curvature of [W b]. Padding does
    not count. Only the lower triangles are computed; they are mirrored at the end.
    """

    def __init__(
        self, name: str, weight: Tensor, bias: nn.Parameter | None, transposed: bool, accumulate_on: str = "device"
    ) -> None:
        self.transposed = transposed
        """The weight's first axis is the input's, as in GPT-2's Conv1D."""
        self.bias = bias
        """The parameter that the last row and column of A represent."""
        self.decoder = sees_decoder(name)
        outputs, inputs = weight.shape[0], weight.shape[1:].numel()
        if transposed:
            outputs, inputs = inputs, outputs
        width, dtype = inputs + (bias is not None), sum_type(weight)
        self._inputs = StoredSum((width, width), dtype, weight.device, accumulate_on)
        self._outputs = StoredSum((outputs, outputs), dtype, weight.device, accumulate_on)
        self._tokens: int | Tensor = 0

    def add(self, term: OuterGradient, batch: BatchInputs, inputs: bool) -> None:
        """Add a batch; ``inputs``: also add its inputs, which only the first of several backward passes does."""
        x, y = (term.y, term.x) if self.transposed else (term.x, term.y)
        rows = batch.rows(y, self.decoder, self._outputs.value.dtype)
        if inputs:
            self._inputs.add(lambda total: batch.add_inputs(self, total, x))
            self._tokens = self._tokens + batch.tokens(x, self.decoder)
        self._outputs.add(lambda total: _add_square(total, rows))

    def result(self) -> KroneckerFactors:
        """Return A, G and T."""
        inputs, outputs, tokens = self._inputs.value, self._outputs.value, int(self._tokens)
        _mirror(inputs)
        _mirror(outputs)
        if self.bias is not None:
            inputs[-1, -1] = tokens
        return KroneckerFactors(inputs, outputs, tokens, self.transposed)


class BatchInputs:
    """What the layers of one batch share: the padding mask, and x̃x̃ᵀ of layers with the same input.

    On a GPU nothing here reads a value, because that would wait for the device.
    """

    def __init__(self, masks: Mapping[bool, Tensor | None]) -> None:
        self._masks: dict[bool, Tensor] = {}
        """(examples, tokens): the tokens that count, unless all do."""
        self._counts: dict[bool, int | Tensor] = {}
        for side, mask in masks.items():
            on_cpu = mask is not None and mask.device.type == "cpu"
            if mask is not None and not (on_cpu and bool(mask.all())):
                self._masks[side] = mask != 0
                self._counts[side] = int(self._masks[side].sum()) if on_cpu else self._masks[side].sum()
        self._last: tuple[bool, Tensor, Tensor] | None = None

    def tokens(self, value: Tensor, side: bool) -> int | Tensor:
        """Return how many tokens of (examples, tokens, width) are not padding."""
        return value.shape[0] * value.shape[1] if self._mask(value, side) is None else self._counts[side]

    def rows(self, value: Tensor, side: bool, dtype: torch.dtype) -> Tensor:
        """Return (tokens, width) without padding, in a type that can be multiplied into a sum of ``dtype``.

        On a GPU, padding becomes 0 instead.
        """
        mask, flat = self._mask(value, side), value.flatten(0, 1)
        if mask is not None:
            flat = flat[mask.flatten()] if mask.device.type == "cpu" else flat * mask.reshape(-1, 1)
        return flat if dtype == torch.float32 and _adds_wide(flat.device, flat.dtype) else flat.to(dtype)

    def _mask(self, value: Tensor, side: bool) -> Tensor | None:
        mask = self._masks.get(side)
        return mask.to(value.device) if mask is not None and mask.shape == value.shape[:2] else None

    def add_inputs(self, sums: KroneckerSums, total: Tensor, x: Tensor) -> None:
        """Add Σ x̃x̃ᵀ except its last entry, T. Queries, keys and values share an input, which is multiplied once."""
        if self._last is not None:
            decoder, seen, product = self._last
            # The input is kept alive here, so no other tensor can have its address.
            alike = seen.data_ptr() == x.data_ptr() and seen.shape == x.shape and seen.stride() == x.stride()
            if alike and product.shape == total.shape and decoder == sums.decoder:
                total += product
                return
        product = torch.zeros_like(total)
        rows = self.rows(x, sums.decoder, total.dtype)
        width = rows.shape[1]
        _add_square(product[:width, :width], rows)
        if len(product) > width:
            product[width, :width] += rows.sum(0, dtype=product.dtype)
        total += product
        self._last = sums.decoder, x, product


def _add_square(total: Tensor, rows: Tensor) -> None:
    """total += rowsᵀ rows, on and left of the diagonal; what is right of it may be anything."""
    width = rows.shape[1]
    most, thinnest = STRIPES_CUDA if rows.is_cuda else STRIPES_CPU
    step = max(thinnest, -(-width // most))
    for top in range(0, width, step):
        bottom = min(top + step, width)
        part, left, right = total[top:bottom, :bottom], rows[:, top:bottom].T, rows[:, :bottom]
        if rows.dtype == total.dtype:
            part.addmm_(left, right)
        else:
            torch.addmm(part, left, right, out_dtype=torch.float32, out=part)


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies 16-bit matrices into a float32 sum, as tensor cores can."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones, total = torch.ones(32, 32, dtype=dtype, device=device), torch.ones(32, 64, device=device)[:, :32]
    try:
        torch.addmm(total, ones.T, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # an older PyTorch
        return False
    return bool((total == 33).all())


def _mirror(lower: Tensor, step: int = 1024) -> None:
    """Copy what is left of the diagonal to the right of it, in place: the device may have no room for a copy."""
    for top in range(0, len(lower), step):
        bottom = top + step
        square = lower[top:bottom, top:bottom]
        square.copy_(square.tril() + square.tril(-1).T)
        lower[top:bottom, bottom:] = lower[bottom:, top:bottom].T
