"""The sum of squares of one parameter, its terms in the current backward pass, and gradients by plain autograd."""

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
from .totals import Keeping, Total


class Distrusted(Exception):
    """Sums may be wrong: a formula that does not fit was used on earlier batches, or on a part of this one."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.parameters = set(parameters)


class ParameterSum:
    """Σ_i g_i² of one parameter, over the examples so far; or the Kronecker factors of its layer in their place."""

    def __init__(
        self, parameter: nn.Parameter, factors: KroneckerSums | None = None, keeping: Keeping | None = None
    ) -> None:
        self.parameter = parameter
        self.factors = factors
        self.keeping = keeping or Keeping()
        self.dtype = kernels.sum_type(parameter)
        self.weight: ParameterSum | None = None
        """Of a bias: the weight whose factors, if it has some, stand for the bias too."""
        self.slow = False
        """No formula fits: autograd takes the gradients, one example at a time."""
        self.kinds: list[type] = []
        """The terms that one backward pass gives, as seen in the trial."""
        self.terms: list[Term] = []
        """Terms of this backward pass that wait: all uses of a parameter add up before they are squared."""
        self.ids: list[Tensor] = []
        """Rows of a table that this batch's examples use, noted in the forward pass."""
        self._head: tuple[Tensor, Tensor] | None = None

    @functools.cached_property
    def kept(self) -> Total:
        """Σ_i g_i², wherever it is; made when it is first needed."""
        return self.keeping.total(self.parameter.shape, self.dtype, self.parameter.device)

    @property
    def total(self) -> Tensor:
        """Σ_i g_i² as a tensor."""
        return self.kept.whole()

    def add(self, put: Callable[[Tensor], Any]) -> None:
        """``put`` adds to Σ_i g_i²."""
        self.kept.add(put)

    @property
    def has_factors(self) -> bool:
        """Whether factors stand for it: one product with a matrix, by a formula that fits."""
        if self.factors is None or self.slow:
            return False
        return self.kinds == [OuterGradient] or (self.factors.begun and not self.kinds)  # gone on from, and not used

    @property
    def used(self) -> bool:
        """Whether a gradient has reached it, as far as is known."""
        return self.slow or bool(self.kinds) or (self.factors is not None and self.factors.begun)

    @property
    def is_tied_table(self) -> bool:
        """A table of rows that is a linear layer's matrix as well."""
        return self.kinds.count(OuterGradient) == 1 and self.kinds.count(RowGradient) == len(self.kinds) - 1 > 0

    def keep_head(self, term: OuterGradient) -> None:
        """Keep what the embedding of a tied table will need of its head, whose own squares have been added.

        With A the gradient of the head and S that of the embedding, (A + S)² = A² + S (2A + S). S has few rows, and
        only those of A are kept: all of A is as large as the logits.
        """
        if self._head is not None:
            raise Distrusted([self.parameter])
        rows = kernels.unique_rows(torch.cat(self.ids, 1))
        self._head = rows, kernels.outer_at_rows(term, rows, self.dtype)

    def add_terms(self) -> None:
        """Add the squares of all that this backward pass has given."""
        if self._head is None:
            self.add(lambda total: kernels.add_squares(total, self.terms))
            return
        if len(self.terms) != len(self.kinds) - 1:
            raise Distrusted([self.parameter])
        rows, head = self._head
        table = kernels.merge_rows([term for term in self.terms if isinstance(term, RowGradient)], self.dtype).y
        # Where activations are computed again, rows are asked for twice: the same rows, with more places left over.
        count = min(rows.shape[1], table.shape[1])
        rows, head, table = rows[:, :count], head[:, :count], table[:, :count]
        self.add(lambda total: kernels.add_rows(total, rows, table * (2 * head + table)))

    def forget(self) -> None:
        """Drop what the backward pass has given."""
        if self.terms:
            self.terms = []
        self._head = None

    @functools.cached_property
    def end(self) -> Any:
        """The node where autograd leaves the parameter's gradient; the parameter must require one when it is asked."""
        return torch.autograd.graph.get_gradient_edge(self.parameter).node


Sums = Mapping[nn.Parameter, ParameterSum]


def for_each_example(
    batch: Any,
    objectives: Callable[[Any, int], Sequence[Callable[[], Tensor]]],
    sums: Iterable[ParameterSum],
    use: Callable[[ParameterSum, Tensor], None],
) -> None:
    """Plain autograd: call ``use`` with the gradient of each example, backward pass and parameter that is used.

    That is right for every model, and takes a forward and backward pass per example.
    ``objectives(example, row)`` gives a function for each backward pass over one example, which is a batch of its own.
    """
    examples = examples_in(batch)
    with handing_over({one.parameter: functools.partial(use, one) for one in sums}):
        for row in range(examples):
            passes = objectives(batch_rows(batch, slice(row, row + 1)), row)
            for number, objective in enumerate(passes):
                value = objective()
                if value.requires_grad:
                    value.backward(retain_graph=number + 1 < len(passes))


@contextlib.contextmanager
def handing_over(handlers: Mapping[nn.Parameter, Callable[[Tensor], Any]]) -> Iterator[None]:
    """Inside, a backward pass hands each parameter's gradient over as soon as it is whole; none is kept."""
    parameters = list(handlers)
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_gradients(parameters))
        stack.enter_context(differentiable(parameters))
        for one, handler in handlers.items():

            def accumulated(parameter: Tensor, handler: Callable[[Tensor], Any] = handler) -> None:
                gradient, parameter.grad = parameter.grad, None
                if gradient is not None:  # an embedding may give only the rows it used
                    handler(gradient if gradient.layout == torch.strided else gradient.to_dense())

            stack.callback(one.register_post_accumulate_grad_hook(accumulated).remove)
        yield


@contextlib.contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Parameters have no ``grad`` inside, and afterwards the one they had."""
    kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = None
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def differentiable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Parameters require a gradient inside, and none afterwards."""
    parameters = list(parameters)
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)
