"""Words for people: hints, lists, sizes and numbers in messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'weight'?``, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def natural(name: str) -> list[tuple[int, int, str]]:
    """A sort key for dotted names that puts layer 2 before layer 10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split(".")]


def listed(items: Iterable[str], limit: int = 8) -> str:
    """At most ``limit`` items, one an indented line, and how many more there are."""
    items = list(items)
    lines = [f"  {item if len(item) <= 300 else item[:299] + '…'}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"  … and {len(items) - limit} more")
    return "\n".join(lines)


def size(nbytes: float) -> str:
    """Bytes in decimal units, as disks and the Hub count them."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def count(number: int) -> str:
    """A number of parameters: 1.10 B, 22.7 M, 768."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g} {unit}"
    return str(number)
