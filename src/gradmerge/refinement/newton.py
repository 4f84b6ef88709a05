"""Gauss-Newton in a Kronecker basis: a few steps towards the minimum of all tasks' losses, each of measured length.

One round at θ, with N_t/n_t how many examples a row of task t stands for:

1. Every task tells its Kronecker curvature and its gradient; g = Σ_t (N_t/n_t) Σ_i ∇ℓ_i + P(θ − θ_0).
2. Directions d = −(S + λ)⁻¹ g, for a few dampings λ around ten times the median of S.
3. The step is the minimum of the quadratic model in the plane of d and the last step, c = −(Vᵀ GGN V)⁻¹ Vᵀ g. A step
   of fixed length would ruin the model: the Kronecker basis knows directions better than lengths.
4. Of all these steps, and shorter ones, that lower the summed loss, the one with the lowest loss on rows held back is
   taken. If none is lower than before, refinement ends, and θ stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .basis import Basis
from .owners import Owner, placed, trained

#: Dampings that are tried, as multiples of the median of S.
DAMPINGS = (1.0, 10.0, 100.0, 1000.0)
#: Parts of a step that are tried, the whole first.
PARTS = (1.0, 0.5, 0.25)


@dataclass
class Round:
    """One step of a refinement."""

    held: dict[str, float]
    """Task → mean loss of a row held back, after the step."""
    rows: float
    """The sum of all tasks' losses on their rows, each scaled to its number of examples, after the step."""
    damping: float = 0.0
    part: float = 0.0
    length: float = 0.0
    """‖step‖ over all parameters."""

    @property
    def judged(self) -> float:
        """What decides: the sum over tasks of the mean loss of a row held back."""
        return sum(self.held.values())


@dataclass
class Refinement:
    """What a refinement did: the start, and every round that was better than the one before."""

    rounds: list[Round] = field(default_factory=list)
    stopped: str = ""
    """Why it ended before all rounds were done, if it did."""


def newton(
    model: nn.Module,
    owners: Sequence[Owner],
    *,
    rounds: int = 2,
    base: Mapping[str, Tensor] | None = None,
    penalty: Mapping[str, Tensor] | None = None,
    told: Callable[[Round], None] = lambda done: None,
) -> Refinement:
    """Refine a model in place; it is never left with a higher loss on the rows held back than it came with.

    Args:
        model: What is refined; parameters with ``requires_grad=False`` stay as they are.
        owners: The tasks.
        rounds: How many steps at most.
        base: θ_0 of the penalty.
        penalty: P, the diagonal of a quadratic penalty ½‖θ − θ_0‖²_P, if there is one.
        told: Called after every round.
    """
    parameters = trained(model)
    shapes = {name: p.shape for name, p in parameters.items()}
    scales = [owner.examples / owner.rows for owner in owners]
    done = Refinement()
    here = {name: p.detach().clone() for name, p in parameters.items()}
    now = _judge(model, owners, scales, [here])[0]
    done.rounds.append(now)
    last: dict[str, Tensor] | None = None
    for _ in range(rounds):
        answers = [owner.gradient(model) for owner in owners]
        gradient = {
            name: sum(scale * answer[name] for scale, answer in zip(scales, answers, strict=True))
            for name in parameters
        }
        if penalty is not None and base is not None:
            gradient = {name: g + penalty[name] * (here[name] - base[name]) for name, g in gradient.items()}
        basis = Basis([owner.curvature(model) for owner in owners], scales, shapes)
        middle = basis.summary(torch.median)
        steps: list[tuple[float, dict[str, Tensor]]] = []
        for damping in DAMPINGS:
            towards = {name: -value for name, value in basis.solve(gradient, damping * middle).items()}
            directions = [_unit(towards), *([_unit(last)] if last is not None else [])]
            steps += [(damping, step) for step in _lengths(model, owners, scales, directions, gradient, penalty)]
        tried = [(damping, part, step) for damping, step in steps for part in PARTS]
        points = ({n: here[n] + part * step[n] for n in here} for _, part, step in tried)
        judged = [_judge(model, owners, scales, [point])[0] for point in points]
        better = [place for place, one in enumerate(judged) if one.rows < now.rows and one.judged < now.judged]
        if not better:
            done.stopped = "no step lowers the loss on the rows held back"
            break
        place = min(better, key=lambda place: judged[place].judged)
        damping, part, step = tried[place]
        last = {name: part * value for name, value in step.items()}
        now = judged[place]
        now.damping, now.part, now.length = damping * middle, part, _norm(last)
        with torch.no_grad():
            for name, p in parameters.items():
                p += last[name]
                here[name] = p.detach().clone()
        done.rounds.append(now)
        told(now)
    return done


def _lengths(
    model: nn.Module,
    owners: Sequence[Owner],
    scales: Sequence[float],
    directions: Sequence[Mapping[str, Tensor]],
    gradient: Mapping[str, Tensor],
    penalty: Mapping[str, Tensor] | None,
) -> list[dict[str, Tensor]]:
    """The step to the minimum of the quadratic model along the directions; none where it has no minimum."""
    matrix = torch.zeros(len(directions), len(directions), dtype=torch.float64)
    for scale, owner in zip(scales, owners, strict=True):
        matrix += scale * owner.along(model, directions)
    if penalty is not None:
        weighted = [{n: penalty[n] * v for n, v in direction.items()} for direction in directions]
        matrix += torch.tensor([[_dot(a, b) for b in directions] for a in weighted], dtype=torch.float64)
    slopes = torch.tensor([_dot(direction, gradient) for direction in directions], dtype=torch.float64)
    floor = 1e-12 * matrix.diagonal().max().clamp(min=1e-30)
    c = -torch.linalg.solve(matrix + floor * torch.eye(len(matrix), dtype=torch.float64), slopes)
    if not bool(c.isfinite().all()):
        return []
    return [{name: sum(float(k) * v[name] for k, v in zip(c, directions, strict=True)) for name in directions[0]}]


def _judge(
    model: nn.Module, owners: Sequence[Owner], scales: Sequence[float], points: Sequence[Mapping[str, Tensor]]
) -> list[Round]:
    answers = [owner.losses(model, points) for owner in owners]
    return [
        Round(
            held={owner.name: answer[place][1] for owner, answer in zip(owners, answers, strict=True)},
            rows=sum(scale * answer[place][0] for scale, answer in zip(scales, answers, strict=True)),
        )
        for place in range(len(points))
    ]


def _dot(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float(torch.dot(a[n].flatten().double(), b[n].flatten().double())) for n in a)


def _norm(a: Mapping[str, Tensor]) -> float:
    return math.sqrt(_dot(a, a))


def _unit(a: Mapping[str, Tensor]) -> dict[str, Tensor]:
    length = _norm(a) or 1.0
    return {name: value / length for name, value in a.items()}


__all__ = ["Refinement", "Round", "newton", "placed"]
