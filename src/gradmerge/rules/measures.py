"""What a rule may ask about whole tensors before it sees their blocks, as functions of those blocks.

A rule names its measures with ``@rule(…, measures={"name": Sums(…)})`` and takes them as inputs of that name. Their
functions take inputs and options of the rule by name, and what was measured before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over all entries of a tensor: the rule is given a list of them, in float64."""

    of: Callable[..., Iterable[Tensor]]
    """The terms of every sum, for a block; or what they add up to there."""


@dataclass(frozen=True)
class Ranked:
    """The k-th largest of numbers that are not negative, one per entry: the rule is given a list, one for each k."""

    of: Callable[..., Tensor]
    ranks: Callable[..., Sequence[int]]
    """Every k, from the number of ``entries`` and what was measured before: 1 asks for the largest, 0 for infinity, and
    −1 for 0, which every entry reaches."""


Measure = Sums | Ranked


#: Entries whose products are summed in the type of the models, and how many such runs are summed at once: the sums of
#: runs are then added in float64.
RUN, RUNS = 1 << 12, 1 << 4


def inner_products(vectors: Sequence[Tensor], origin: Tensor | None = None) -> Iterator[Tensor]:
    """The inner products of some vectors, from an origin: the upper triangle of their matrix, row by row."""
    flat = [vector.reshape(-1) for vector in vectors]
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat[0].device)
    for start in range(0, len(flat[0]), RUN * RUNS):
        rows = torch.stack([vector[start : start + RUN * RUNS] for vector in flat])
        if origin is not None:
            rows -= origin.reshape(-1)[start : start + RUN * RUNS]
        whole = rows.shape[1] // RUN * RUN
        runs = rows[:, :whole].reshape(len(flat), -1, RUN).transpose(0, 1)
        total += torch.bmm(runs, runs.transpose(1, 2)).sum(0, dtype=torch.float64)
        rest = rows[:, whole:].double()
        total.addmm_(rest, rest.T)
    return (total[place, other] for place in range(len(flat)) for other in range(place, len(flat)))


#: The inner products of base and models, the base first if it is there; as :func:`square` takes them.
PRODUCTS = Sums(lambda base, tuned: inner_products([*([] if base is None else [base]), *tuned]))
#: The inner products of the Δ_t, or of the models themselves where there is no base.
DELTA_PRODUCTS = Sums(lambda base, tuned: inner_products(tuned, base))


def square(products: Sequence[float]) -> Tensor:
    """The matrix of inner products from its upper triangle, row by row."""
    size = int((8 * len(products) + 1) ** 0.5) // 2
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows, columns = torch.triu_indices(size, size)
    matrix[rows, columns] = matrix[columns, rows] = torch.tensor(products, dtype=torch.float64)
    return matrix


def spanned(base: Tensor | None, tuned: Sequence[Tensor], factors: Sequence[float]) -> Tensor:
    """θ_0 + Σ c_t Δ_t, or Σ c_t θ_t where there is no base."""
    total = torch.zeros_like(tuned[0])
    for model, factor in zip(tuned, factors, strict=True):
        total += (model if base is None else model - base) * factor
    return total if base is None else total.add_(base)
