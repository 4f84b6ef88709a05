"""Which points of many a figure shows, and where names have room."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def thinned(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """A curve's points, of a long one the lowest and the highest of every stretch: the same picture."""
    if len(rows) <= most:
        return rows
    per = math.ceil(2 * len(rows) / most)
    kept: list[dict[str, Any]] = []
    for start in range(0, len(rows), per):
        part = [row for row in rows[start : start + per] if row["y"] is not None]
        ends = {id(f(part, key=lambda row: row["y"])) for f in (min, max)} if part else set()
        kept += [row for row in part if id(row) in ends]
    return kept


def spaced(rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """A cloud's points, of a dense one the first of every small square."""
    known = [row for row in rows if row["x"] is not None and row["y"] is not None]
    if len(known) <= most:
        return known
    (left, wide), (low, tall) = (
        (min(values), max(values) - min(values) or 1.0) for values in ([row[k] for row in known] for k in ("x", "y"))
    )
    side = math.sqrt(most) - 1
    squares: dict[tuple[int, int], dict[str, Any]] = {}
    for row in known:
        squares.setdefault((int((row["x"] - left) / wide * side), int((row["y"] - low) / tall * side)), row)
    return list(squares.values())


def label_places(values: Sequence[float], points: Sequence[tuple[float | None, float | None]]) -> list[tuple[str, str]]:
    """Where the name of each reference line is furthest from points, other lines and names: `right` or `left` at its
    end, `above` or `below` it."""
    known = [(x, y) for x, y in points if x is not None and y is not None]
    heights = [*values, *(y for _, y in known)]
    letter = 0.03 * (max(heights, default=0.0) - min(heights, default=0.0))
    first, last = (min(x for x, _ in known), max(x for x, _ in known)) if known else (0.0, 0.0)
    reach = 0.2 * (last - first)
    taken = {
        "right": [y for x, y in known if x >= last - reach],
        "left": [y for x, y in known if x <= first + reach],
    }
    found = []
    for i, value in enumerate(values):
        others = [*values[:i], *values[i + 1 :]]

        def room(place: tuple[str, str], value: float = value, others: Sequence[float] = others) -> float:
            middle = value + (letter if place[1] == "above" else -letter)
            return min((abs(middle - other) for other in (*taken[place[0]], *others)), default=math.inf)

        best = max((("right", "above"), ("left", "above"), ("right", "below"), ("left", "below")), key=room)
        taken[best[0]].append(value + (letter if best[1] == "above" else -letter))
        found.append(best)
    return found
