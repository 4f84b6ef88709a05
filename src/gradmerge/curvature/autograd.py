"""Gradients of single examples by plain autograd: right for every model, at a forward and backward pass per example."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batches import batch_rows, examples_in
from .sums import ParameterSum


def for_each_example(
    batch: Any,
    objectives: Callable[[Any, int], Sequence[Callable[[], Tensor]]],
    sums: Iterable[ParameterSum],
    use: Callable[[ParameterSum, Tensor], None],
) -> None:
    """Call ``use`` with the gradient of each example, backward pass and parameter; not where a parameter is not used.

    ``objectives(example, row)`` gives a function for each backward pass over one example, which is a batch of its own.
    """
    sums = list(sums)
    parameters = [one.parameter for one in sums]
    with differentiable(parameters):
        for row in range(examples_in(batch)):
            passes = objectives(batch_rows(batch, slice(row, row + 1)), row)
            for number, objective in enumerate(passes):
                value, again = objective(), number + 1 < len(passes)
                if not value.requires_grad:
                    continue
                found = torch.autograd.grad(value, parameters, retain_graph=again, allow_unused=True)
                for one, gradient in zip(sums, found, strict=True):
                    if gradient is not None:  # an embedding may give only the rows it used
                        use(one, gradient if gradient.layout == torch.strided else gradient.to_dense())


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
