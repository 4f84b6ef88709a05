"""Which strength and damping to take, judged on validation turns by one criterion for every method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .evaluation import perplexity


def choose(entries: Sequence[Mapping[str, Any]], base: Mapping[str, Any], fluency: float | None) -> Mapping[str, Any]:
    """The entry with the lowest perplexity of people's responses to the validation turns.

    Where a removal can only cost perplexity, since the base never saw what is removed, that would choose to do nothing. There, with
    ``fluency``, it is the entry that takes most from the knowledge among those with at most ``fluency`` times the base's perplexity,
    if there are any.
    """
    if fluency is not None:
        limit = fluency * perplexity(base["nll"])
        known = [e for e in entries if e["validation"]["grounding"] is not None]
        fluent = [e for e in known if perplexity(e["validation"]["nll"]) <= limit]
        if fluent:
            return max(fluent, key=lambda e: e["validation"]["grounding"])
    return min(entries, key=lambda e: perplexity(e["validation"]["nll"]))


def of(entries: Sequence[Mapping[str, Any]], method: str, **values: Any) -> list[Mapping[str, Any]]:
    """The entries of a method that have these values."""
    return [e for e in entries if e["method"] == method and all(e[name] == value for name, value in values.items())]


def rows(
    entries: Sequence[Mapping[str, Any]], base: Mapping[str, Any], damping: float, fluency: float | None
) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The entries of the tables: at strength 1, and chosen.

    ``removal`` at strength 1 is with the paper's damping, ``removal, δ chosen`` with the best by the criterion. The chosen
    ones have strength, and for removal damping, by the criterion.
    """
    return {
        "strength 1": {
            "task-arithmetic": of(entries, "task-arithmetic", strength=1.0)[0],
            "fa1": of(entries, "fa1", strength=1.0)[0],
            "removal": of(entries, "removal", strength=1.0, damping=damping)[0],
            "removal, δ chosen": choose(of(entries, "removal", strength=1.0), base, fluency),
        },
        "chosen": {
            method: choose(of(entries, method), base, fluency) for method in ("task-arithmetic", "fa1", "removal")
        },
    }
