"""What can go wrong, in two kinds: the request is wrong (exit status 2), or the machine failed (1)."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class GradmergeError(Exception):
    """A failure with a message meant for the user: what is wrong, where, and what to do."""

    status = 1


class InputError(GradmergeError):
    """What was asked for is wrong: a recipe, a checkpoint, an option. Nothing was written."""

    status = 2


class MachineError(GradmergeError):
    """The machine could not do it: no space, a write that failed, a file that vanished half-way."""


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint such as ``; did you mean 'weight'?``, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def listed(items: Iterable[str], limit: int = 8) -> str:
    """At most ``limit`` items, one an indented line, and how many more there are."""
    items = list(items)
    lines = [f"  {item if len(item) <= 300 else item[:299] + '…'}" for item in items[:limit]]
    if len(items) > limit:
        lines.append(f"  … and {len(items) - limit} more")
    return "\n".join(lines)
