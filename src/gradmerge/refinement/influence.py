"""Removal without a tuned model: influence steps, from the gradient of what is to go and the curvature of what stays.

At θ, with S the Kronecker curvature of rows that stay, scaled to all examples that stay, and λ = 0.1 · mean S:

1. d = (S + λ)⁻¹ g, where g = Σ ∇ℓ_i(θ) over the rows that are to be forgotten. θ + d is the influence function's guess
   of the model that never saw them.
2. Far from θ that guess is not to be trusted, so that the step is s · d with the largest s, found by bisecting log s,
   that keeps the mean loss of a kept row within the budget: on rows that are held back from S. (Where a shorter step
   that was tried forgets more, it is that one.) Without such rows s is the Newton length gᵀd / dᵀ GGN d.

Several rounds follow the curve along which kept loss is least: each may use its part of the budget, and between two of
them Gauss-Newton steps on the kept rows, in the same basis, repair what the last one broke. S, λ and g are taken anew.
The result is the end of the round with the highest loss on what is to be forgotten, which is the last but for bad luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..display import Displayed, View
from ..errors import InputError
from ..tasks.metrics import ratio_rows
from ..tasks.uncertainty import standard_errors
from ..text import Measured
from .basis import Basis
from .owners import DataOwner
from .points import Point, copied, dot, set_weights, trained, unit, weighted

#: λ, as a multiple of the mean of S.
DAMPING = 0.1
#: Steps on the kept rows between two rounds.
REPAIRS = 3
#: Parts of such a step that are tried.
PARTS = (1.0, 0.5, 0.25)
#: How often log s is halved once it is known between which two lengths the budget ends, and the most that are tried.
HALVINGS, TRIES = 4, 24
#: No step is longer than so many Newton lengths, also where kept rows do not object.
LONGEST = 64


@dataclass
class StepTrial:
    """One length of a step, and the mean losses of an example that the model has after it."""

    s: float
    kept: float
    forget: float


@dataclass
class InfluenceRound:
    """One influence step."""

    newton: float
    """The Newton length, in the units of s."""
    damping: float
    """λ."""
    chosen: StepTrial
    curve: list[StepTrial]
    """Every length that was tried, shortest first; 0 is the model as this round found it, repaired."""


@dataclass(repr=False)
class InfluenceRemoval(Displayed):
    """What a removal did; losses are means over examples, of kept ones on the rows that were held back."""

    model: nn.Module
    """The model that was given, changed."""
    before: StepTrial
    after: StepTrial
    """Of a model on disk as it was written; ``s`` is the sum over the rounds."""
    budget: float | None
    """By how much the mean loss of a kept row might rise, relative to before; None where no row was held back."""
    rounds: list[InfluenceRound] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """How many rows were to be forgotten, kept and held back, and how many examples stay in all."""
    seconds: float = 0.0
    output: Path | None = None
    """On disk: the folder that was written."""
    notes: list[str] = field(default_factory=list)
    standard_errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """`before`, `after`, `rise` (on the same rows) and `used` → of `kept` and `forget`; None where nothing varies."""

    def tell_errors(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> None:
        """How sure the losses are, from those of every row of `kept` and `forget`."""
        rise = {name: after[name] - before[name] for name in before}
        used = {"kept": ratio_rows(rise["kept"], before["kept"])}
        every = {"before": before, "after": after, "rise": rise, "used": used}
        self.standard_errors = {name: standard_errors(rows) for name, rows in every.items()}

    @property
    def used_words(self) -> str:
        """`+1.8 ± 0.4 %`."""
        error = self.standard_errors.get("used", {}).get("kept")
        return f"{100 * self.used:+.3g}{'' if error is None else f' ± {100 * error:.2g}'} %"

    def measure(self, forget: DataOwner, keep: DataOwner) -> None:
        """Take the losses after the removal anew, as the model is now."""
        walk = _Walk(self.model, forget, keep, held=self.budget is not None)
        self.after = replace(walk.trials(None, [0.0])[0], s=self.after.s)

    @property
    def used(self) -> float:
        """By how much the mean loss of a kept row rose, relative to before."""
        return self.after.kept / self.before.kept - 1 if self.before.kept > 0 else 0.0

    def facts(self) -> dict[str, Any]:
        """All numbers, as a record holds them."""
        return {
            "method": "influence",
            **self.rows,
            "budget": self.budget,
            "used": self.used,
            "s": self.after.s,
            "before": {"kept": self.before.kept, "forget": self.before.forget},
            "after": {"kept": self.after.kept, "forget": self.after.forget},
            "standard_errors": self.standard_errors,
            "rounds": [asdict(one) for one in self.rounds],
        }

    def _line(self) -> list[str]:
        forget, kept = (f"{name} {float(a):.4g} → {float(b):.4g}" for name, a, b, _ in self.losses())
        return [f"{forget}", f"{kept}", f"s {self.after.s:.3g}", f"{self.seconds:.1f} s"]

    def _view(self) -> View:
        return ["mean loss", "before", "after", "rose by"], [list(row) for row in self.losses()], self.notes

    def losses(self) -> list[tuple[str, Measured, Measured, Measured]]:
        """What is to go and what is kept: the mean loss of an example before, after, and what it rose by."""

        def told(when: str, name: str, value: float) -> Measured:
            return Measured(value, self.standard_errors.get(when, {}).get(name))

        found = []
        for words, name in (("to be forgotten", "forget"), ("kept", "kept")):
            a, b = getattr(self.before, name), getattr(self.after, name)
            found.append((words, told("before", name, a), told("after", name, b), told("rise", name, b - a)))
        return found


def remove_influence(
    model: nn.Module,
    forget: DataOwner,
    keep: DataOwner,
    *,
    budget: float | None,
    rounds: int = 1,
    told: Callable[[InfluenceRound], None] = lambda done: None,
) -> InfluenceRemoval:
    """Take what a model has learned from some rows out of it, in place.

    Args:
        model: What is changed; parameters with ``requires_grad=False`` stay as they are.
        forget: The rows that are to go.
        keep: Rows that stay, those that are held back, and how many examples they stand for.
        budget: By how much the mean loss of a row that is held back may rise, relative to before; None where there is
            no such row: then steps have the Newton length, and losses are those of the rows themselves.
        rounds: How many steps.
        told: Called after every step.
    """
    walk = _Walk(model, forget, keep, held=budget is not None)
    shapes = {name: p.shape for name, p in trained(model).items()}
    before = walk.trials(None, [0.0])[0]
    if not math.isfinite(before.kept + before.forget):
        raise InputError("the model's loss is not finite on these rows")
    done = InfluenceRemoval(model, before, before, budget)
    best, weights = before, copied(trained(model))
    for place in range(rounds):
        curvature = keep.curvature(model)
        basis = Basis([curvature], [keep.examples / curvature.examples], shapes)
        damping = DAMPING * basis.summary(torch.mean)
        if place:
            walk.repair(basis, damping)
        gradient = forget.gradient(model)
        direction = basis.solve(gradient, damping)
        newton = walk.newton_length(direction, gradient)
        now = walk.trials(None, [0.0])[0]
        if budget is None:
            curve = [now, *walk.trials(direction, [newton])]
            chosen = curve[-1]
        else:
            limit = (1 + budget * (place + 1) / rounds) * before.kept
            curve, chosen = walk.bisect(direction, newton, limit, now)
        walk.move(direction, chosen.s)
        done.after = replace(chosen, s=done.after.s + chosen.s)
        done.rounds.append(InfluenceRound(newton, damping, chosen, curve))
        if done.after.forget > best.forget:
            best = done.after
            set_weights(weights, trained(model))
        told(done.rounds[-1])
    if rounds > 1 and done.after is not best:  # repairs on the kept rows may teach those that are to go again
        done.after = best
        set_weights(trained(model), weights)
    return done


class _Walk:
    """A model that moves, and what is lost on the way."""

    def __init__(self, model: nn.Module, forget: DataOwner, keep: DataOwner, *, held: bool) -> None:
        self.model, self.forget, self.keep, self.held = model, forget, keep, held

    def kept(self, step: Point | None = None, lengths: Sequence[float] = (0.0,)) -> list[float]:
        """The mean loss of a kept row, after some part of a step."""
        found = self.keep.losses(self.model, *_points(step, lengths), held=self.held)
        return found if self.held else [loss / self.keep.rows for loss in found]

    def trials(self, step: Point | None, lengths: Sequence[float]) -> list[StepTrial]:
        forgotten = self.forget.losses(self.model, *_points(step, lengths), held=False)
        both = zip(lengths, self.kept(step, lengths), forgotten, strict=True)
        return [StepTrial(s, kept, forget / self.forget.rows) for s, kept, forget in both]

    def newton_length(self, direction: Point, gradient: Point) -> float:
        """gᵀd / dᵀ GGN d: the minimum of the kept rows' quadratic loss less what the step gains to first order."""
        curved = self.keep.examples / self.keep.rows * float(self.keep.along(self.model, [direction])[0, 0])
        slope = dot(gradient, direction)
        if not (math.isfinite(slope) and math.isfinite(curved)):
            raise InputError("the gradient of what is to be forgotten, or the curvature of what stays, is not finite")
        if slope <= 0:
            raise InputError("the gradient of what is to be forgotten is 0: the model has learned nothing from it")
        return slope / curved if curved > 0 else 1.0

    def bisect(self, direction: Point, first: float, limit: float, now: StepTrial) -> tuple[list[StepTrial], StepTrial]:
        """The longest step that keeps the kept rows' loss within a limit; every one tried, and the one chosen."""
        tried, low, high, halved = [now], 0.0, math.inf, 0
        s = first
        while len(tried) < TRIES and halved < HALVINGS and low < LONGEST * first:
            tried += self.trials(direction, [s])
            if tried[-1].kept <= limit:
                low = s
            else:  # also where it is no number
                high = s
            halved += 0 < low < high < math.inf
            s = 2 * low if high == math.inf else high / 2 if low == 0 else math.sqrt(low * high)
        tried.sort(key=lambda one: one.s)
        # The longest, but where more is forgotten on the way to it.
        return tried, max((one for one in tried if one.s <= low), key=lambda one: (one.forget, one.s))

    def repair(self, basis: Basis, damping: float) -> None:
        """Gauss-Newton steps on the kept rows, as long as they lower the loss that judges."""
        kept, last = self.kept()[0], None
        for _ in range(REPAIRS):
            gradient = self.keep.gradient(self.model)
            plane = [unit(basis.solve(gradient, damping)), *([unit(last)] if last is not None else [])]
            slopes = torch.tensor([dot(gradient, one) for one in plane], dtype=torch.float64)
            curved = self.keep.along(self.model, plane)
            c = -torch.linalg.lstsq(curved, slopes[:, None]).solution[:, 0]
            step = weighted(c.tolist(), plane)
            judged = dict(zip(PARTS, self.kept(step, PARTS), strict=True))
            part = min(judged, key=judged.__getitem__)
            if not judged[part] < kept:
                return
            kept, last = judged[part], weighted([part], [step])
            self.move(last, 1.0)

    def move(self, step: Point, s: float) -> None:
        with torch.no_grad():
            for name, parameter in trained(self.model).items():
                parameter.add_(step[name].to(parameter), alpha=s)


def _points(step: Point | None, lengths: Sequence[float]) -> tuple[list[Point], Tensor | None]:
    """Parts of a step as owners are asked for them; no step is θ itself."""
    return ([], None) if step is None else ([step], torch.tensor(lengths, dtype=torch.float64)[:, None])
