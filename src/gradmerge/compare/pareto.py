"""The settings that no other is better than in every respect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from .preview import Outcome
from .scores import headline, higher_is_better

Item = TypeVar("Item")


def unbeaten(items: Sequence[tuple[Item, Sequence[float]]]) -> list[Item]:
    """Of items with their gains, those that no other has as much of each as, and more of one."""

    def beats(one: Sequence[float], other: Sequence[float]) -> bool:
        return all(a >= b for a, b in zip(one, other, strict=True)) and list(one) != list(other)

    kept: list[int] = []
    # What beats another has a larger sum, and what is beaten is so by one of those that are not.
    for place in sorted(range(len(items)), key=lambda place: -sum(items[place][1])):
        if not any(beats(items[other][1], items[place][1]) for other in kept):
            kept.append(place)
    return [items[place][0] for place in sorted(kept)]


def front(rows: Sequence[Outcome], tasks: Sequence[str], forgotten: Sequence[str] = ()) -> list[Outcome]:
    """The settings that none is better than on every task; on what is to be forgotten, worse is better."""

    def gain(row: Outcome, task: str) -> float:
        better = higher_is_better(headline(row.metrics[task])) != (task in forgotten)
        return (row.values[task] or 0.0) * (1 if better else -1)

    return unbeaten([(row, [gain(row, task) for task in tasks]) for row in rows])
