"""Sums of squared gradients, against gradients of single examples that are written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from gradmerge.curvature import kernels
from gradmerge.curvature.kernels import (
    DirectGradient,
    ExpertGradient,
    OuterGradient,
    RowGradient,
    Term,
    add_outer,
    add_rows,
    add_squares,
    merge_rows,
    outer_at_rows,
    unique_rows,
)

SIZES = st.integers(1, 5)
few = settings(max_examples=60, deadline=None)


def numbers(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def make(kind: str, examples: int, tokens: int, out: int, width: int, generator: torch.Generator) -> Term:
    if kind == "direct":
        return DirectGradient(numbers(generator, examples, out, width))
    if kind == "outer":
        return OuterGradient(numbers(generator, examples, tokens, out), numbers(generator, examples, tokens, width))
    # Few different rows, so that some come twice.
    ids = torch.randint(0, out, (examples, tokens), generator=generator)
    return RowGradient(ids, numbers(generator, examples, tokens, width))


def dense(term: Term, example: int, out: int, width: int) -> Tensor:
    """The gradient of one example, one token at a time."""
    if isinstance(term, DirectGradient):
        return term.gradient[example].clone().view(out, width)
    gradient = torch.zeros(out, width, dtype=torch.float64)
    for token in range(term.y.shape[1]):
        y = term.y[example, token]
        if isinstance(term, OuterGradient):
            for row in range(out):
                gradient[row] += y[row] * term.x[example, token]
        else:
            gradient[int(term.ids[example, token])] += y
    return gradient


def squares(terms: Sequence[Term], examples: int, out: int, width: int) -> Tensor:
    total = torch.zeros(out, width, dtype=torch.float64)
    for example in range(examples):
        gradient = torch.zeros_like(total)
        for term in terms:
            gradient += dense(term, example, out, width)
        total += gradient**2
    return total


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Term], tuple[int, int, int], int]:
    """Uses of one parameter, (examples, rows, columns), and how many entries are held at once."""
    examples, out, width = draw(SIZES), draw(SIZES), draw(SIZES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    kinds = draw(st.lists(st.sampled_from(["direct", "outer", "rows"]), min_size=1, max_size=4))
    terms = [make(kind, examples, draw(SIZES), out, width, generator) for kind in kinds]
    return terms, (examples, out, width), draw(st.sampled_from([1, 3, 7, 20, 1 << 20]))


@few
@given(cases())
def test_uses_of_a_parameter_add_up_before_they_are_squared(
    case: tuple[list[Term], tuple[int, int, int], int],
) -> None:
    terms, (examples, out, width), held = case
    before = torch.rand(out, width, dtype=torch.float64)
    total = before.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "HELD_CPU", held)
        add_squares(total, terms, examples)
    assert torch.allclose(total - before, squares(terms, examples, out, width), atol=1e-12)


@few
@given(SIZES, SIZES, st.integers(1, 6), st.integers(1, 6), SIZES, st.integers(0, 1000))
def test_a_tied_heads_squares_are_its_own_and_those_of_the_rows_it_shares(
    examples: int, places: int, tokens: int, vocabulary: int, width: int, seed: int
) -> None:
    """(A + S)² = A² + S (2A + S), with rows of S only where the example has that token."""
    generator = torch.Generator().manual_seed(seed)
    head = make("outer", examples, places, vocabulary, width, generator)
    table = [make("rows", examples, tokens, vocabulary, width, generator) for _ in range(2)]
    total = torch.zeros(vocabulary, width, dtype=torch.float64)
    assert isinstance(head, OuterGradient)
    add_outer(total, head)
    uses = [term for term in table if isinstance(term, RowGradient)]
    rows = unique_rows(torch.cat([term.ids for term in uses], 1))
    a, s = outer_at_rows(head, rows, total.dtype), merge_rows(uses, total.dtype).y
    add_rows(total, rows, s * (2 * a + s))
    assert torch.allclose(total, squares([head, *table], examples, vocabulary, width), atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 60])
def test_experts_add_up_their_tokens_of_each_example(rows: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    experts, examples = (torch.randint(0, n, (rows,), generator=generator) for n in (4, 3))
    y, x = numbers(generator, rows, 5), None if bias else numbers(generator, rows, 6)
    shape = (4, 5) if x is None else (4, 5, 6)
    direct = numbers(generator, 3, *shape)
    for more in ([], [DirectGradient(direct)]):
        gradient = torch.zeros(3, *shape, dtype=torch.float64) + sum(term.gradient for term in more)
        for row in range(rows):
            gradient[examples[row], experts[row]] += y[row] if x is None else y[row].outer(x[row])
        total = torch.zeros(shape, dtype=torch.float64)
        add_squares(total, [ExpertGradient(experts, examples, y, x), *more], 3)
        torch.testing.assert_close(total, gradient.square().sum(0))
