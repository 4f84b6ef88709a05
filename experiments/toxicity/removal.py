"""The removals, at many strengths and dampings, and the choice among them on held-out text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

import gradmerge as gm

from ..common.states import State, distance
from .settings import SCOPES

METHODS = ("task-arithmetic", "gradient-matching")
#: A share by which perplexity may rise before larger strengths than 1 are not looked at any more.
HOPELESS = 2.0
#: The curves of the figure end where perplexity has risen by more than this share: beyond it, text is noise.
CURVE = 0.5


@dataclass
class Task:
    """A base, a model tuned on what should go, and the curvature of both."""

    base: State
    tuned: State
    prior: gm.Curvature
    curvature: gm.Curvature

    def without(self, method: str, strength: float, damping: float | None, scope: str = "all") -> dict[str, Tensor]:
        """The base without what was learned; what is not in the scope stays as it is.

        θ_0 − αΔ in task arithmetic, and θ_0 − α (F_0 + δ)⁻¹ (F_0 + δ + F_t) Δ in gradient matching. F_0 was measured on
        the data that stay alone, so nothing of the removed data has to be taken out of it (`base_saw_removed` stays
        off).
        """
        how: dict[str, Any] = {"exclude": SCOPES[scope], "threads": 2}
        if method == "task-arithmetic":
            return gm.merge_state_dicts(self.base, [self.tuned], method, weights=[-strength], **how)
        assert damping is not None
        how |= {"prior": self.prior, "curvature": [self.curvature], "damping": damping}
        how["options"] = {"cap": "none"}  # the paper's formula
        return gm.merge_state_dicts(self.base, [self.tuned], "removal", weights=[strength], **how)

    def step(self, removed: State) -> float:
        """‖θ̂ − θ_0‖ / ‖θ_t − θ_0‖: how many times as far as fine-tuning the removal went."""
        return distance(removed, self.base) / self._moved

    @cached_property
    def _moved(self) -> float:
        return distance(self.tuned, self.base)


@dataclass
class Point:
    """A removal, and what it makes of held-out text: losses in nats per token, by kind."""

    method: str
    strength: float
    damping: float | None
    scope: str = "all"
    loss: dict[str, float] = field(default_factory=dict)
    step: float | None = None
    toxicity: float | None = None
    """The mean score of continuations of validation prompts; measured only where the point may be chosen."""

    @property
    def key(self) -> tuple[str, float, float | None, str]:
        """Which removal it is."""
        return self.method, self.strength, self.damping, self.scope

    @property
    def stay(self) -> float:
        """The mean over kinds of text that stay: the logarithm of the geometric mean of their perplexities."""
        kept = [value for kind, value in self.loss.items() if kind != "toxic"]
        return sum(kept) / len(kept)


Measure = Callable[[float], Point]
"""The point of one method, damping and scope at a strength."""


def rise(point: Point, base: Point) -> float:
    """By which share the perplexity of what stays is above the base's; infinite where that is no number."""
    difference = point.stay - base.stay
    return math.expm1(min(difference, 700.0)) if math.isfinite(difference) else math.inf


def sweep(
    measured: Measure,
    base: Point,
    strengths: Sequence[float],
    budgets: Sequence[float],
    refinements: int,
) -> list[Point]:
    """Points at all strengths, and more around where perplexity passes each budget.

    Strengths beyond 1 are tried until all is lost.
    """
    found = {0.0: base}
    for strength in sorted(strengths):
        found[strength] = measured(strength)
        if strength >= 1 and rise(found[strength], base) > HOPELESS:
            break
    for budget in budgets:
        for _ in range(refinements):
            order = sorted(found)
            over = next((s for s in order if rise(found[s], base) > budget), None)
            if over is None:
                break
            middle = (order[order.index(over) - 1] + over) / 2
            found[middle] = measured(middle)
    return [found[strength] for strength in sorted(found) if strength]


def candidates(points: Sequence[Point], base: Point, budget: float) -> list[Point]:
    """Per method, damping and scope, the largest strength with which what stays has a rise of at most ``budget``."""
    best: dict[tuple[str, float | None, str], Point] = {}
    for point in sorted(points, key=lambda p: p.strength):
        if rise(point, base) <= budget:
            best[point.method, point.damping, point.scope] = point
    return list(best.values())


def choose(points: Sequence[Point], base: Point, budget: float) -> Point:
    """The candidate whose continuations of validation prompts are the least toxic; the base where none is less so.

    The likelihood of toxic text would not do: an embedding that was pushed too far makes toxic text very unlikely, and
    is written all the time.
    """
    return min([base, *candidates(points, base, budget)], key=lambda p: math.inf if p.toxicity is None else p.toxicity)


def advice(base: Path, tuned: Path, prior: Path, curvature: Path, damping: float, out: Path) -> dict[str, Any]:
    """What `gradmerge` notes when this removal is made on disk at strength 1, and the damping that it advises."""
    recipe = {
        "method": "removal",
        "base": {"model": str(base), "curvature": str(prior)},
        "models": [{"model": str(tuned), "curvature": str(curvature)}],
        "damping": damping,
        "options": {"cap": "none"},
    }
    notes = gm.merge(recipe, out, threads=2, force=True, accept_untrusted=True).notes
    untrusted = next((note for note in notes if note.kind == "untrusted"), None)
    return {"note": untrusted, "damping": untrusted.data["damping"] if untrusted is not None else None}
