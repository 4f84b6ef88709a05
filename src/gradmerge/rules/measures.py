"""What a rule may ask about whole tensors before it sees their blocks, as functions of those blocks.

A rule names its measures with ``@rule(…, measures={"name": Sums(…)})`` and takes them as inputs of that name. Their
functions take inputs and options of the rule by name, and what was measured before them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over all entries of a tensor: the rule is given a list of them, in float64."""

    of: Callable[..., Iterable[Tensor | float]]
    """The terms of every sum, for a block; or what they add up to there, as a number."""


@dataclass(frozen=True)
class Ranked:
    """The k-th largest of numbers that are not negative, one per entry: the rule is given a list, one for each k."""

    of: Callable[..., Tensor]
    ranks: Callable[..., Sequence[int]]
    """Every k, from the number of ``entries`` and what was measured before: 1 asks for the largest, 0 for infinity, and
    −1 for 0, which every entry reaches."""


Measure = Sums | Ranked


#: Entries whose products are summed in the type of the models; the sums of such runs are then added in float64.
RUN = 1 << 12


def inner_products(vectors: Sequence[Tensor], origin: Tensor | None = None) -> Iterator[float]:
    """The inner products of some vectors, from an origin: the upper triangle of their matrix, row by row."""
    flat = [_array(vector if origin is None else vector - origin) for vector in vectors]
    # One call for many runs: PyTorch's products of so few rows take three times as long.
    whole = len(flat[0]) // RUN * RUN
    parts = [(values[:whole].reshape(-1, RUN), values[whole:].astype(np.float64)) for values in flat]
    for (runs, rest), (other_runs, other_rest) in itertools.combinations_with_replacement(parts, 2):
        yield float(np.vecdot(runs, other_runs).sum(dtype=np.float64) + np.vecdot(rest, other_rest))


def _array(values: Tensor) -> np.ndarray:
    """All values in a row. Blocks of a merge need no operation for it: during each, another thread may step in."""
    if values.dim() == 1 and not values.requires_grad and values.device.type == "cpu":
        return values.numpy()
    return values.reshape(-1).detach().cpu().numpy()


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
    parts = (model if base is None else model - base for model in tuned)
    total = next(parts) * factors[0]
    for part, factor in zip(parts, factors[1:], strict=True):
        total.add_(part, alpha=factor)
    return total if base is None else total.add_(base)
