"""What a refinement did, round by round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from ..display import Displayed, View
from ..tasks.uncertainty import Difference


@dataclass
class RefinementStep:
    """One step of a round, which was taken."""

    length: float
    """‖step‖ over all parameters. For adamw, where a step is a pass: how far from the start it ended."""
    part: float
    """Of the step to the minimum of the quadratic model. For adamw: of the planned passes, with this one."""
    damping: float = 0.0
    """For newton: the λ that weighs most in the step. For adamw: the learning rate."""
    ridge: float = 0.0
    """For newton: what was added to the curvature along the directions, as a share of its mean."""


@dataclass
class Round:
    """Losses after a round; the first of a refinement is the start, before any step."""

    held: dict[str, float]
    """Task → mean loss of a row held back, in nats."""
    rows: float
    """The sum of all tasks' losses on their rows, each scaled to its number of examples, and the penalty."""
    steps: list[RefinementStep] = field(default_factory=list)
    seconds: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    """Task → the standard error of ``held``, where its rows are known here."""

    @property
    def judged(self) -> float:
        """What decides: the sum over tasks of the mean loss of a row held back."""
        return sum(self.held.values())


@dataclass(repr=False)
class Refinement(Displayed):
    """What a refinement did: the start, and every round that was better than the one before."""

    model: nn.Module
    """The model that was given, refined."""
    method: str
    rounds: list[Round] = field(default_factory=list)
    """The start, then a round each."""
    stopped: str = ""
    """Why it ended before all rounds were done, if it did."""
    passes: Counter[str] = field(default_factory=Counter)
    """How often the rows were gone through, for what: ``gradient`` and ``rows`` (the loss), all of them;
    ``curvature`` and ``along`` (a direction each), at most ``CURVATURE_ROWS`` and ``ALONG_ROWS`` of each task;
    ``held``, those held back."""
    doubted: list[str] = field(default_factory=list)
    """Tasks whose labels fit the start no better than chance."""
    teaching: float = 0.0
    """How much of a row's loss, in the rounds, is that to the answer of its task's teacher; 0 where there are none."""
    before: dict[str, dict[str, Any]] = field(default_factory=dict)
    """On disk: task → metrics on its rows held back, of the start."""
    after: dict[str, dict[str, Any]] = field(default_factory=dict)
    """On disk: the same of the result, as it was written."""
    gains: dict[str, dict[str, Difference]] = field(default_factory=dict)
    """On disk: task → metric → how much more it is after than before, on the same rows."""
    seconds: float = 0.0
    output: Path | None = None
    """On disk: the folder that was written."""
    notes: list[str] = field(default_factory=list)

    @property
    def improved(self) -> bool:
        """Whether any step was taken; else the model is as it was given."""
        return len(self.rounds) > 1

    def _line(self) -> list[str]:
        first, last = self.rounds[0].judged, self.rounds[-1].judged
        counted = len(self.rounds) - 1
        told = [self.method, f"{counted} round{'s' if counted != 1 else ''}"]
        return [*told, f"held-back loss {first:.4g} → {last:.4g}", f"{self.seconds:.1f} s"]

    def _view(self) -> View:
        tasks = list(self.rounds[0].held)
        rows = [[number, *(one.held[task] for task in tasks)] for number, one in enumerate(self.rounds)]
        return ["round", *(f"{task}, held-back loss" for task in tasks)], rows, self.notes
