"""The sum of one parameter: what it holds, and what the backward pass at hand has given for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .kernels import (
    OuterGradient,
    RowGradient,
    Term,
    add_rows,
    add_squares,
    merge_rows,
    outer_at_rows,
    unique_rows,
)


class Distrusted(Exception):
    """A formula was used on batches, or on a part of this one, that it may have been wrong for."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.parameters = set(parameters)


class ParameterSum:
    """Σ_i g_i² of one parameter, over the examples so far."""

    def __init__(self, parameter: nn.Parameter, total: Tensor) -> None:
        self.parameter = parameter
        self.total = total
        self.slow = False
        """No formula fits: autograd takes the gradients, one example at a time."""
        self.kinds: list[type] = []
        """The terms that one backward pass gives, as seen in the trial."""
        self.terms: list[Term] = []
        """Terms of this backward pass that are not added yet: all uses of a parameter add up before they are squared."""
        self.ids: list[Tensor] = []
        """Rows of a table that this batch's examples use, told in the forward pass."""
        self._head: tuple[Tensor, Tensor] | None = None
        self._end: Any = None

    @property
    def is_tied_table(self) -> bool:
        """A table of rows that is a linear layer's matrix as well."""
        return self.kinds.count(OuterGradient) == 1 and self.kinds.count(RowGradient) == len(self.kinds) - 1 > 0

    def keep_head(self, term: OuterGradient) -> None:
        """Keep of the head of a tied table what its embedding will need; the squares of the head itself are added.

        With A the gradient of the head and S that of the embedding, (A + S)² = A² + S (2A + S). S has few rows, and only
        those of A are kept: all of A is as large as the logits.
        """
        if self._head is not None:
            raise Distrusted([self.parameter])
        rows = unique_rows(torch.cat(self.ids, 1))
        self._head = rows, outer_at_rows(term, rows, self.total.dtype)

    def add_terms(self) -> None:
        """Add the squares of all that this backward pass has given."""
        if self._head is None:
            add_squares(self.total, self.terms)
            return
        if len(self.terms) != len(self.kinds) - 1:
            raise Distrusted([self.parameter])
        rows, head = self._head
        table = merge_rows([term for term in self.terms if isinstance(term, RowGradient)], self.total.dtype).y
        # Where activations are computed again, rows are asked for twice: the same rows, with more places left over.
        count = min(rows.shape[1], table.shape[1])
        rows, head, table = rows[:, :count], head[:, :count], table[:, :count]
        add_rows(self.total, rows, table * (2 * head + table))

    def forget(self) -> None:
        """Drop what the backward pass has given."""
        if self.terms:
            self.terms = []
        self._head = None

    @property
    def end(self) -> Any:
        """The node where autograd leaves the parameter's gradient; first asked for while the parameter requires one."""
        if self._end is None:
            self._end = torch.autograd.graph.get_gradient_edge(self.parameter).node
        return self._end

    @property
    def reached(self) -> bool:
        """Whether the backward pass that runs now will give the parameter itself a gradient."""
        return bool(torch._C._will_engine_execute_node(self.end))
