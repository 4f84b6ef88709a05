"""Gauss-Newton in a Kronecker basis: a few steps towards the minimum of all tasks' losses, each of measured length.

A round takes up to ``STEPS`` steps. One step at θ, with N_t/n_t how many examples a row of task t stands for:

1. Every task tells its gradient and its Kronecker curvature; g = Σ_t (N_t/n_t) Σ_i ∇ℓ_i + P(θ − θ_0).
2. Directions d_λ = −(S + λ)⁻¹ g, for a few dampings λ from the median of S on, and the last step: V, each of length 1.
3. Steps are the minima of the quadratic model in the span of V, c = −(Vᵀ (GGN + P) V + ρ)⁻¹ Vᵀ g for a few ridges ρ,
   and parts of them. A step of fixed length would ruin the model: the Kronecker basis knows directions better than
   lengths, so the curvature along V is measured on a sample of the rows.
4. The one with the lowest loss on the rows held back is taken, if that is lower than before, and the summed loss on
   the others is too. If there is none, refinement ends, and θ stays.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from ..processes import ALONE, Processes
from ..progress import NoProgress, Progress
from .basis import Basis
from .owners import ALONG_ROWS, CURVATURE_ROWS, Owner
from .points import Point, dot, moving, norm, trained, unit, weighted
from .rounds import Refinement, RefinementStep, Round

STEPS = 3
#: Dampings, as multiples of the median of S.
DAMPINGS = (1.0, 10.0, 100.0, 1000.0)
#: Ridges, as shares of the mean curvature along the directions.
RIDGES = (1e-3, 1e-2, 1e-1)
#: Parts of a step that are tried.
PARTS = (1.0, 0.5, 0.25)
#: So many of the steps that are best on the rows held back are tried on the others.
TRIED = 4


@dataclass(frozen=True)
class Penalty:
    """½‖θ − θ_0‖²_P with a diagonal P."""

    matrix: Point
    base: Point

    def gradient(self, here: Point) -> dict[str, Tensor]:
        return {name: p * (here[name].detach() - self.base[name]) for name, p in self.matrix.items()}

    def value(self, here: Point) -> float:
        return 0.5 * sum(
            float((p.double() * (here[name].detach() - self.base[name]).double().square()).sum())
            for name, p in self.matrix.items()
        )

    def along(self, directions: Sequence[Point]) -> Tensor:
        scaled = [{name: p * direction[name] for name, p in self.matrix.items()} for direction in directions]
        return torch.tensor([[dot(a, b) for b in directions] for a in scaled], dtype=torch.float64)


@dataclass
class Progressed:
    """Where a refinement stands between two rounds: all that the next one needs beside the model's weights."""

    done: Refinement
    last: dict[str, Tensor] = field(default_factory=dict)
    """For newton the last step, for adamw its moments."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """To go on from another process's work: the weights as they were then."""


def begin(model: nn.Module, owners: Sequence[Owner], method: str, penalty: Penalty | None) -> Progressed:
    """The start of a refinement, measured."""
    done = Refinement(model, method)
    done.rounds.append(losses_at(model, owners, penalty, done))
    return Progressed(done)


def losses_at(model: nn.Module, owners: Sequence[Owner], penalty: Penalty | None, done: Refinement) -> Round:
    """The losses of all owners at the model as it is."""
    rows = penalty.value(trained(model)) if penalty is not None else 0.0
    held, errors = {}, {}
    for owner in owners:
        rows += owner.examples / owner.rows * owner.losses(model, held=False)[0]
        held[owner.name] = owner.losses(model, held=True)[0]
        if owner.held_error is not None:
            errors[owner.name] = owner.held_error
    done.passes.update(rows=1, held=1)
    return Round(held, rows, errors=errors)


def newton(
    model: nn.Module,
    owners: Sequence[Owner],
    *,
    rounds: int = 2,
    penalty: Penalty | None = None,
    so_far: Progressed | None = None,
    told: Callable[[Progressed], None] = lambda progressed: None,
    progress: Progress | None = None,
    processes: Processes = ALONE,
) -> Refinement:
    """Refine a model in place; it is never left with a higher loss on the rows held back than it came with.

    Args:
        model: What is refined; parameters with ``requires_grad=False`` stay as they are.
        owners: The tasks.
        rounds: How many rounds at most, with those that are done already.
        penalty: A quadratic penalty beside the losses, if there is one.
        so_far: To go on from, with the model as it was then.
        told: Called after every round that lowered the loss.
        progress: Told of every round; its unit is rows, and the owners advance it.
        processes: Those that refine it together, and ask owners that answer all of them alike.
    """
    state = so_far or begin(model, owners, "newton", penalty)
    done = state.done
    search = _Search(model, owners, penalty, done, processes)
    while len(done.rounds) <= rounds and not done.stopped:
        begun, now = time.perf_counter(), done.rounds[-1]
        # Of every step the gradient and the loss of all rows, and of some the curvature and that along the directions.
        rows = [owner.rows for owner in owners]
        curved, along = (sum(min(count, most) for count in rows) for most in (CURVATURE_ROWS, ALONG_ROWS))
        work = STEPS * (2 * sum(rows) + curved + (1 + len(DAMPINGS)) * along)
        (progress or NoProgress()).begin(f"round {len(done.rounds)} of {rounds}", work)
        steps: list[RefinementStep] = []
        while len(steps) < STEPS:
            found = search.step(now, state.last)
            if found is None:
                done.stopped = "no step lowers the loss on the rows held back"
                break
            now, step, state.last = found
            steps.append(step)
        if steps:
            done.rounds.append(replace(now, steps=steps, seconds=time.perf_counter() - begun))
            told(state)
    return done


class _Search:
    """Finds a step and takes it."""

    def __init__(
        self,
        model: nn.Module,
        owners: Sequence[Owner],
        penalty: Penalty | None,
        done: Refinement,
        processes: Processes = ALONE,
    ) -> None:
        self._model, self._owners, self._penalty, self._done = model, owners, penalty, done
        self._processes = processes
        self._scales = [owner.examples / owner.rows for owner in owners]

    def step(self, now: Round, last: Point) -> tuple[Round, RefinementStep, dict[str, Tensor]] | None:
        """The losses after a step that lowers both, what it was, and the step itself; None if there is none."""
        gradient = self._gradient()
        directions, dampings = self._directions(gradient, last)
        # Machines of several kinds may round differently: where to go is said by one of them.
        self._processes.from_first(value for direction in directions for value in direction.values())
        points = self._points(directions, gradient)
        ranked = self._held(directions, [point for _, _, point in points])
        order = sorted((held, place) for place, held in enumerate(ranked) if held < now.judged)
        for _, place in order[:TRIED]:
            ridge, part, point = points[place]
            with moving(self._model, directions) as move:
                move(point)
                after = losses_at(self._model, self._owners, self._penalty, self._done)
            if after.rows < now.rows and after.judged < now.judged:
                taken = weighted(point.tolist(), directions)
                with torch.no_grad():
                    for name, parameter in trained(self._model).items():
                        parameter.add_(taken[name].to(parameter))
                self._processes.from_first(trained(self._model).values())
                heaviest = int(point[: len(dampings)].abs().argmax())
                return after, RefinementStep(norm(taken), part, dampings[heaviest], ridge), taken
        return None

    def _gradient(self) -> dict[str, Tensor]:
        parameters = trained(self._model)
        total = {name: torch.zeros_like(p, requires_grad=False) for name, p in parameters.items()}
        for scale, owner in zip(self._scales, self._owners, strict=True):
            for name, value in owner.gradient(self._model).items():
                total[name].add_(value.to(total[name]), alpha=scale)
        self._done.passes.update(gradient=1)
        if self._penalty is not None:
            for name, value in self._penalty.gradient(parameters).items():
                total[name] += value
        return total

    def _directions(self, gradient: Mapping[str, Tensor], last: Point) -> tuple[list[Point], list[float]]:
        shapes = {name: value.shape for name, value in gradient.items()}
        measured = [owner.curvature(self._model) for owner in self._owners]
        scales = [owner.examples / one.examples for owner, one in zip(self._owners, measured, strict=True)]
        basis = Basis(measured, scales, shapes)
        self._done.passes.update(curvature=1)
        middle = basis.summary(torch.median) or basis.summary(torch.mean)
        dampings = [damping * middle for damping in DAMPINGS]
        found: list[Point] = [unit({n: -value for n, value in basis.solve(gradient, d).items()}) for d in dampings]
        return [*found, *([unit(last)] if last else [])], dampings

    def _points(self, directions: Sequence[Point], gradient: Mapping[str, Tensor]) -> list[tuple[float, float, Tensor]]:
        """(ridge, part, coefficients) of every step that is tried."""
        matrix = torch.zeros(len(directions), len(directions), dtype=torch.float64)
        for scale, owner in zip(self._scales, self._owners, strict=True):
            matrix += scale * owner.along(self._model, directions)
        self._done.passes.update(along=len(directions))
        if self._penalty is not None:
            matrix += self._penalty.along(directions)
        slopes = torch.tensor([dot(direction, gradient) for direction in directions], dtype=torch.float64)
        size = matrix.diagonal().mean().clamp(min=torch.finfo(torch.float64).tiny)
        eye = torch.eye(len(directions), dtype=torch.float64)
        solved = [(-torch.linalg.solve(matrix + ridge * size * eye, slopes)).tolist() for ridge in RIDGES]
        agreed = [torch.tensor(one, dtype=torch.float64) for one in self._processes.gather(solved)[0]]
        whole = list(zip(RIDGES, agreed, strict=True))
        return [(r, part, part * c) for r, c in whole for part in PARTS if bool(c.isfinite().all())]

    def _held(self, directions: Sequence[Point], points: Sequence[Tensor]) -> list[float]:
        """Of each point what decides: the sum over tasks of the mean loss of a row held back."""
        if not points:
            return []
        stacked = torch.stack(list(points))
        answers = [owner.losses(self._model, directions, stacked, held=True) for owner in self._owners]
        self._done.passes.update(held=len(points))
        return [sum(losses) for losses in zip(*answers, strict=True)]
