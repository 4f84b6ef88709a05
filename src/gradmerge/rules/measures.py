"""Statistics of whole tensors that the engine computes before a rule gets their blocks.

A rule declares them with ``@rule(…, measures={"name": Sums(…)})`` and takes them as inputs of the same names. Their
functions take inputs and options of the rule by name, and the measures before them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .spec import Numbers, Tensors


@dataclass(frozen=True)
class Sums:
    """Sums over all entries of a tensor; the rule gets a list of them, in float64."""

    of: Callable[..., Iterable[Tensor | float]]
    """The terms of every sum for a block, or their sum over the block as a number."""


@dataclass(frozen=True)
class Ranked:
    """The k-th largest of nonnegative numbers, one per entry; the rule gets a list with one number per k."""

    of: Callable[..., Tensor]
    ranks: Callable[..., Sequence[int]]
    """Every k, from the number of ``entries`` and the measures before: 1 for the largest number, 0 for infinity, −1 for
    the number 0."""


Measure = Sums | Ranked


#: Entries whose products are summed in the type of the models; the sums of these runs are added in float64.
RUN = 1 << 12


def inner_products(vectors: Tensors, origin: Tensor | None = None) -> Iterator[float]:
    """The inner products of vectors, minus an origin: the upper triangle of their matrix, row by row."""
    flat = [_array(vector if origin is None else vector - origin) for vector in vectors]
    # NumPy handles many runs in one call, three times faster than PyTorch with so few rows.
    whole = len(flat[0]) // RUN * RUN
    parts = [(values[:whole].reshape(-1, RUN), values[whole:].astype(np.float64)) for values in flat]
    for (runs, rest), (other_runs, other_rest) in itertools.combinations_with_replacement(parts, 2):
        yield float(np.vecdot(runs, other_runs).sum(dtype=np.float64) + np.vecdot(rest, other_rest))


def _array(values: Tensor) -> np.ndarray:
    """The values as a flat array. Blocks of a merge need no PyTorch call, which would release the GIL."""
    if values.dim() == 1 and not values.requires_grad and values.device.type == "cpu":
        return values.numpy()
    return values.reshape(-1).detach().cpu().numpy()


#: The inner products of the base and the models, for :func:`square`.
PRODUCTS = Sums(lambda base, tuned: inner_products([base, *tuned]))
#: The inner products of the Δ_t, or of the models if there is no base.
DELTA_PRODUCTS = Sums(lambda base, tuned: inner_products(tuned, base))


def square(products: Numbers) -> Tensor:
    """The symmetric matrix with this upper triangle, given row by row."""
    size = int((8 * len(products) + 1) ** 0.5) // 2
    matrix = torch.zeros(size, size, dtype=torch.float64)
    rows, columns = torch.triu_indices(size, size)
    matrix[rows, columns] = matrix[columns, rows] = torch.tensor(products, dtype=torch.float64)
    return matrix


def normalized(weights: Numbers) -> list[float]:
    """w_t / Σ w."""
    whole = math.fsum(weights)
    if abs(whole) <= 1e-12 * math.fsum(map(abs, weights)):  # such as 0.1 + 0.2 − 0.3, which is 0 up to rounding
        raise ValueError("the weights sum to 0; change them, or set options.normalize: false")
    return [weight / whole for weight in weights]


def spanned(base: Tensor | None, tuned: Tensors, factors: Numbers) -> Tensor:
    """θ_0 + Σ c_t Δ_t, or Σ c_t θ_t if there is no base."""
    parts = (model if base is None else model - base for model in tuned)
    total = next(parts) * factors[0]
    for part, factor in zip(parts, factors[1:], strict=True):
        total.add_(part, alpha=factor)
    return total if base is None else total.add_(base)
