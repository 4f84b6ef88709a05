"""Terms of single examples' gradients, and functions that add their squares to a sum.

Every function adds Σ_i g_i² to a float32 (or float64) sum, where g_i is example i's gradient of one parameter. In a
term, x is what went into a layer and y the gradient of its output; axis 0 is examples and axis 1 tokens throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

#: Entries of examples' gradients that are held at once, on a processor (so that they stay in its cache) and on a GPU.
HELD_CPU = 1 << 20
HELD_CUDA = 1 << 26


@dataclass(frozen=True)
class DirectGradient:
    """g_i itself, for every example: (examples, *shape)."""

    gradient: Tensor


@dataclass(frozen=True)
class OuterGradient:
    """g_i = Σ_t y_it x_itᵀ, as of a linear layer: y (examples, tokens, out), x (examples, tokens, in)."""

    y: Tensor
    x: Tensor


@dataclass(frozen=True)
class RowGradient:
    """g_i has y_it added to row ids_it, as of an embedding: ids (examples, tokens), y (examples, tokens, width)."""

    ids: Tensor
    y: Tensor


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


Term = DirectGradient | OuterGradient | RowGradient | ExpertGradient


def sum_type(value: Tensor) -> torch.dtype:
    """The type that squares of such numbers are added up in."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def add_squares(total: Tensor, terms: Sequence[Term]) -> None:
    """total += Σ_i (Σ_terms g_i)²: several uses of one parameter add up before they are squared."""
    direct = [term for term in terms if isinstance(term, DirectGradient)]
    outer = [term for term in terms if isinstance(term, OuterGradient)]
    rows = [term for term in terms if isinstance(term, RowGradient)]
    experts = [term for term in terms if isinstance(term, ExpertGradient)]
    if len(outer) == len(terms):
        joined = outer[0]
        if len(outer) > 1:
            joined = OuterGradient(torch.cat([t.y for t in outer], 1), torch.cat([t.x for t in outer], 1))
        add_outer(total, joined)
    elif len(direct) == len(terms):
        total += _sum_of(direct, total.dtype).square().sum(0).view_as(total)
    elif len(rows) == len(terms):
        summed = merge_rows(rows, total.dtype)
        add_rows(total, summed.ids, summed.y.square_())
    elif len(experts) == len(terms):
        add_experts(total, join_experts(experts))
    else:
        _add_mixed(total, terms)


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


def join_experts(terms: Sequence[ExpertGradient]) -> ExpertGradient:
    """Return the rows of several terms as one term."""
    if len(terms) == 1:
        return terms[0]
    inputs = [term.x for term in terms if term.x is not None]
    return ExpertGradient(
        torch.cat([term.experts for term in terms]),
        torch.cat([term.examples for term in terms]),
        torch.cat([term.y for term in terms]),
        torch.cat(inputs) if inputs else None,
    )


def add_experts(total: Tensor, term: ExpertGradient) -> None:
    """total (experts, …) += Σ_i g_i², from the rows of each pair of an expert and an example.

    A pair's rows are padded with zeros, so that pairs with about as many rows are multiplied together.
    """
    if not len(term.y):
        return
    examples = int(term.examples.max()) + 1
    pair = term.experts * examples + term.examples
    if term.x is None:
        gradient = total.new_zeros(len(total) * examples, total[0].numel())
        gradient.index_add_(0, pair, term.y.to(total.dtype))
        total += gradient.square_().view(len(total), examples, -1).sum(1).view_as(total)
        return
    order = pair.argsort()
    y, x = term.y[order], term.x[order]
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


def _add_mixed(total: Tensor, terms: Sequence[Term]) -> None:
    """Any mixture, by holding the gradient of a few examples."""
    examples = max(map(_examples_in, terms))
    some = max(1, (HELD_CUDA if total.is_cuda else HELD_CPU) // total.numel())
    squares = torch.zeros_like(total)  # all or nothing is added, also where memory runs out half-way
    for first in range(0, examples, some):
        part = slice(first, min(first + some, examples))
        gradient = total.new_zeros(part.stop - part.start, *total.shape)
        for term in terms:
            if isinstance(term, DirectGradient):
                gradient += term.gradient[part].to(total.dtype).view_as(gradient)
            elif isinstance(term, OuterGradient):
                y, x = term.y[part].to(total.dtype), term.x[part].to(total.dtype)
                gradient += torch.bmm(y.transpose(1, 2), x).view_as(gradient)
            elif isinstance(term, ExpertGradient):
                for row in ((term.examples >= part.start) & (term.examples < part.stop)).nonzero()[:, 0].tolist():
                    part_of_expert = gradient[int(term.examples[row]) - part.start, int(term.experts[row])]
                    y_row = term.y[row].to(total.dtype)
                    part_of_expert += y_row if term.x is None else y_row.outer(term.x[row].to(total.dtype))
            else:
                offset = torch.arange(len(gradient), device=total.device)[:, None] * total.shape[0]
                ids = (term.ids[part] + offset).flatten()
                gradient.flatten(0, 1).index_add_(0, ids, term.y[part].flatten(0, 1).to(total.dtype))
        squares += gradient.square_().sum(0)
    total += squares


def _examples_in(term: Term) -> int:
    if isinstance(term, ExpertGradient):
        return int(term.examples.max()) + 1
    return len(term.gradient if isinstance(term, DirectGradient) else term.y)


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
