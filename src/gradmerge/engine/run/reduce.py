"""What a rule measures on whole tensors before it merges them: sums over all entries, and entries of certain ranks."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers
from ...rules.measures import Ranked, Sums
from ..plan.plan import Job, Plan, rule_arguments, step_of
from .reading import read_block, shaped
from .selection import Selection

#: Elements that are reduced at once. Fixed, so that sums do not depend on how the merge cuts its blocks.
CHUNK = 1 << 19

Advance = Callable[[int], None]
Blocks = Callable[[], Iterator[dict[str, Any]]]
"""A pass over the blocks of a tensor, each as what its rule would be given but for what is measured."""


def measure(
    plan: Plan, job: Job, known: Mapping[str, Any], advance: Advance = lambda nbytes: None
) -> dict[str, list[float]]:
    """The measures of one tensor; ``known`` are its thresholds."""
    assert job.rule is not None
    rule, buffers, settings = job.rule, Buffers(), plan.inputs.settings.of(job.name)

    def blocks() -> Iterator[dict[str, Any]]:
        step = step_of(job, CHUNK)
        for start in range(0, max(job.info.numel, 1), step):
            stop = min(start + step, job.info.numel)
            tensors = read_block(plan, job, start, stop, buffers)
            yield rule_arguments(rule, plan, shaped(job, start, stop, {**tensors, **known}), settings)

    numbers, measures = rule_arguments(rule, plan, known, settings), rule.measures_of(settings.options)
    found = measured(measures, blocks, numbers, job.info.numel, job.compute)
    advance(len(measures) * plan.bytes_read(job))
    return found


def measured(
    measures: Mapping[str, Sums | Ranked],
    blocks: Blocks,
    numbers: Mapping[str, Any],
    entries: int,
    dtype: torch.dtype,
) -> dict[str, list[float]]:
    """Every measure in turn; ``numbers`` are the arguments of the rule that belong to no block."""
    found: dict[str, list[float]] = {}
    for name, one in measures.items():
        if isinstance(one, Sums):
            parts = [[_total(terms) for terms in _call(one.of, block | found)] for block in blocks()]
            found[name] = [exact_sum(column) for column in zip(*parts, strict=True)]
        else:
            ranks = _call(one.ranks, {**numbers, **found, "entries": entries})
            found[name] = _ranked(one, ranks, lambda: (block | found for block in blocks()), dtype)
    return found


def _ranked(one: Ranked, ranks: Iterable[int], blocks: Blocks, dtype: torch.dtype) -> list[float]:
    searches = [Selection(k, dtype) for k in ranks]
    while left := [search for search in searches if search.value is None]:
        counts: list[Any] = [0] * len(left)
        for block in blocks():
            values = _call(one.of, block).reshape(-1)
            counts = [count + search.count(values.clone()) for count, search in zip(counts, left, strict=True)]
        for search, count in zip(left, counts, strict=True):
            search.narrow(count)
    return [search.value for search in searches if search.value is not None]


def _total(terms: Tensor | float) -> float:
    return float(terms.sum(dtype=torch.float64)) if isinstance(terms, Tensor) else terms


def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    return function(**{name: arguments[name] for name in _names(function)})


@functools.cache
def _names(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def exact_sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except (ValueError, OverflowError):  # infinities of both signs, or a sum that is larger than any number
        return math.nan
