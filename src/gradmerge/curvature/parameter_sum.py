"""The sum of squares of one parameter, its gradient terms in the current backward pass, and gradients by autograd."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import kernels
from .batches import batch_rows, examples_in
from .kernels import OuterGradient, RowGradient, Term
from .kfac import KroneckerSums
from .offload import StoredSum


class ParameterSum:
    """Σ_i g_i² of one parameter over examples, or instead the Kronecker factors of its layer."""

    def __init__(self, parameter: nn.Parameter, accumulate_on: str = "device") -> None:
        self.parameter = parameter
        self.dtype = kernels.sum_type(parameter)
        self.factors: KroneckerSums | None = None
        self.weight: ParameterSum | None = None
        """For a bias: its layer's weight, if the factors of that include the bias."""
        self.slow = False
        """No formula fits: autograd computes the gradients, one example at a time."""
        self.uses: list[type[Term]] = []
        """For each use in this forward pass, the kind of term that the backward pass gives."""
        self.ids: list[Tensor] = []
        """For each use as a table in this forward pass, the rows that the examples use."""
        self.terms: list[Term] = []
        """Terms of this backward pass. All uses of a parameter add up before they are squared."""
        self._accumulate_on = accumulate_on
        self._head: tuple[Tensor, Tensor] | None = None

    @functools.cached_property
    def stored(self) -> StoredSum:
        """Σ_i g_i², made when it is first used."""
        return StoredSum(self.parameter.shape, self.dtype, self.parameter.device, self._accumulate_on)

    @property
    def is_tied_table(self) -> bool:
        """Whether it is an embedding that is also the matrix of a linear layer."""
        return self.uses.count(OuterGradient) == 1 and self.uses.count(RowGradient) == len(self.uses) - 1 > 0

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the square of one example's gradient."""
        wide = gradient.to(self.dtype)
        self.stored.add(lambda total: total.addcmul_(wide, wide))

    def add_head(self, term: OuterGradient) -> None:
        """Add the squares of a tied table's head, and keep what the embedding needs of it.

        With the head's gradient A and the embedding's S, (A + S)² = A² + S (2A + S). S has few rows, and only those of
        A are kept: all of A is as large as the logits.
        """
        rows = kernels.unique_rows(torch.cat(self.ids, 1))
        self._head = rows, kernels.outer_at_rows(term, rows, self.dtype)
        self.stored.add(lambda total: kernels.add_outer(total, term))

    def add_terms(self) -> None:
        """Add the squares of all terms of this backward pass."""
        if self._head is None:
            self.stored.add(lambda total: kernels.add_squares(total, self.terms))
            return
        rows, head = self._head
        table = [term for term in self.terms if isinstance(term, RowGradient)]
        if len(table) < len(self.ids):  # a use without a gradient
            table += [RowGradient(ids, table[0].y.new_zeros(*ids.shape, head.shape[2])) for ids in self.ids]
        sums = kernels.merge_rows(table, self.dtype).y[:, : rows.shape[1]]
        self.stored.add(lambda total: kernels.add_rows(total, rows, sums * (2 * head + sums)))

    def end_pass(self) -> None:
        """Drop the terms of the backward pass."""
        self.terms = []
        self._head = None

    def forget(self) -> None:
        """Drop everything of this batch."""
        self.end_pass()
        self.uses, self.ids = [], []


Sums = Mapping[nn.Parameter, ParameterSum]


def for_each_example(
    batch: Any,
    objectives: Callable[[Any, int], Sequence[Callable[[], Tensor]]],
    sums: Iterable[ParameterSum],
    use: Callable[[ParameterSum, Tensor], None],
) -> None:
    """Call ``use`` with each example's gradient of each parameter that is used, by plain autograd.

    This is right for every model, and takes a forward and backward pass per example. ``objectives(example, row)``
    returns a function for each backward pass over one example, as a batch of one.
    """
    with gradient_handlers({entry.parameter: functools.partial(use, entry) for entry in sums}):
        for row in range(examples_in(batch)):
            passes = objectives(batch_rows(batch, slice(row, row + 1)), row)
            for number, objective in enumerate(passes):
                value = objective()
                if value.requires_grad:
                    value.backward(retain_graph=number + 1 < len(passes))


@contextlib.contextmanager
def gradient_handlers(handlers: Mapping[nn.Parameter, Callable[[Tensor], Any]]) -> Iterator[None]:
    """Pass each parameter's gradient to its handler as soon as it is complete, and do not keep it."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(differentiable(list(handlers)))
        for parameter, handler in handlers.items():

            def accumulated(parameter: Tensor, handler: Callable[[Tensor], Any] = handler) -> None:
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:  # the gradient of an embedding may be sparse
                    handler(gradient if gradient.layout == torch.strided else gradient.to_dense())

            stack.callback(parameter.register_post_accumulate_grad_hook(accumulated).remove)
        yield


@contextlib.contextmanager
def differentiable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the parameters require a gradient inside, with ``grad`` None. Restore their ``grad`` at the end."""
    saved = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, saved, strict=True):
            parameter.requires_grad_(False)
            parameter.grad = gradient
