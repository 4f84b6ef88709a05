"""The removals, at several strengths and dampings, and the choice among them on validation turns.

The criterion is one for every method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

import gradmerge as gm

from ..common.states import State, distance, mean_entry
from .evaluation import perplexity
from .settings import Settings

THREADS = 2


class Removals:
    """The removals of one seed, formed in memory.

    ``rest`` is the curvature of the base on the data that stay, ``curvature`` that of the tuned model on the swapped
    turns, ``delta`` that at their difference, which FA1 takes.
    """

    def __init__(
        self,
        settings: Settings,
        base: State,
        tuned: State,
        rest: gm.Curvature,
        curvature: gm.Curvature,
        delta: gm.Curvature,
    ) -> None:
        self._settings, self._base, self._tuned = settings, base, tuned
        self._rest, self._curvature, self._delta = rest, curvature, delta
        mean = mean_entry(curvature)
        self._dampings = {settings.damping: None, **{times * mean: times for times in settings.dampings}}
        self._moved = distance(tuned, base)

    def settings(self) -> list[dict[str, Any]]:
        """Every method at every strength.

        ``times`` is the damping in units of the mean entry of F_t, where it was given so.
        """
        only = {self._settings.damping: None}
        return [
            {"method": method, "damping": damping, "times": times, "strength": strength}
            for method, dampings in (("task-arithmetic", only), ("fa1", only), ("removal", self._dampings))
            for damping, times in dampings.items()
            for strength in self._settings.strengths
        ]

    def state(self, setting: Mapping[str, Any]) -> dict[str, Tensor]:
        """Removal by the rule of that name, or by task arithmetic or FA1 with a negative weight."""
        method, strength = setting["method"], setting["strength"]
        how: dict[str, Any] = {"weights": [strength if method == "removal" else -strength]}
        if method != "task-arithmetic":
            curvature = self._curvature if method == "removal" else self._delta
            how |= {"prior": self._rest, "curvature": [curvature], "damping": setting["damping"]}
        if method == "removal":
            how["options"] = {"cap": "none"}  # the paper's formula
        return gm.merge_state_dicts(self._base, [self._tuned], method, threads=THREADS, **how)

    def step(self, state: State) -> float:
        """‖θ̂ − θ_0‖ / ‖θ_t − θ_0‖."""
        return distance(state, self._base) / self._moved


def choose(entries: Sequence[Mapping[str, Any]], base: Mapping[str, Any], fluency: float | None) -> Mapping[str, Any]:
    """The entry with the lowest perplexity of people's responses to the validation turns.

    Where a removal can only cost perplexity, since the base never saw what is removed, that would choose to do nothing.
    There, with ``fluency``, it is the entry that takes most from the knowledge among those with at most ``fluency``
    times the base's perplexity, if there are any.
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

    At strength 1, ``removal`` has the paper's damping, and ``removal, δ chosen`` the one that the criterion picks. Of
    the chosen ones, the criterion picks the strength, and for removal the damping too.
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
