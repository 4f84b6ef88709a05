"""Merges of one linear layer in float64, with full Hessians: the theory is exact or nearly exact here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradmerge as gm

from ..common.states import State
from .data import Rows, concatenate

CLASSES = 10
STEPS = 50


def _squared(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits - F.one_hot(labels, CLASSES)).square().sum()


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="sum")


#: Name → the loss as a sum over rows, and what `gm.estimate_curvature` calls it.
LOSSES: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "linear regression": (_squared, "squared"),
    "logistic regression": (_cross_entropy, "classes"),
}


def flatten(state: State) -> Tensor:
    """[W b], row by row."""
    return torch.cat([state["weight"], state["bias"][:, None]], 1).flatten()


def as_state(values: Tensor) -> dict[str, Tensor]:
    rows = values.view(CLASSES, -1)
    return {"weight": rows[:, :-1], "bias": rows[:, -1]}


class Linear:
    """One layer under one loss; weights are flat vectors."""

    def __init__(self, name: str) -> None:
        self.loss, self.output = LOSSES[name]

    def total(self, values: Tensor, rows: Rows) -> Tensor:
        """The sum of the losses."""
        return self.loss(F.linear(rows.pixels, **as_state(values)), rows.labels)

    def hessian(self, values: Tensor, rows: Rows) -> Tensor:
        """Σ_i S_i ⊗ x̃x̃ᵀ with S the Hessian of the loss in the logits: 2 I, or diag p − ppᵀ."""
        inputs = F.pad(rows.pixels, (0, 1), value=1.0)
        p = F.linear(rows.pixels, **as_state(values)).softmax(-1)
        blocks = p.diag_embed() - p[:, :, None] * p[:, None]
        if self.output == "squared":
            blocks = 2 * torch.eye(CLASSES, dtype=p.dtype).expand_as(blocks)
        found = blocks.flatten(1).T @ (inputs[:, :, None] * inputs[:, None]).flatten(1)
        size = (CLASSES, CLASSES, inputs.shape[1], inputs.shape[1])
        return found.view(size).transpose(1, 2).reshape(len(values), len(values))

    def fit(self, start: Tensor, rows: Rows, prior: Tensor, begin: Tensor | None = None) -> Tensor:
        """Minimize the sum of the losses and ½ ‖θ − start‖² in the norm of ``prior``, by Newton's method."""

        def objective(values: Tensor) -> Tensor:
            return self.total(values, rows) + 0.5 * (values - start) @ prior @ (values - start)

        values = start if begin is None else begin
        for _ in range(STEPS):
            gradient = torch.func.grad(objective)(values)
            step = torch.linalg.solve(self.hessian(values, rows) + prior, gradient)
            if float(step.norm()) <= 1e-12 * float(values.norm()):
                break
            while float(objective(values - step)) > float(objective(values)) * (1 + 1e-12):
                step = step / 2
            values = values - step
        return values

    def estimate(self, values: Tensor, rows: Rows, kind: str) -> Any:
        layer = nn.Linear(rows.pixels.shape[1], CLASSES).double()
        layer.load_state_dict(as_state(values))
        labels = F.one_hot(rows.labels, CLASSES).double() if self.output == "squared" else rows.labels
        batch = (rows.pixels, labels)
        return gm.estimate_curvature(layer, [batch], "exact", output=self.output, kind=kind, progress=False)


def compare(name: str, ridge: float, base_rows: Rows, tasks: Sequence[Rows], tests: Sequence[Rows]) -> dict[str, Any]:
    """Method → accuracy and loss, means over the test sets, and ‖θ − θ_joint‖ / ‖θ_0 − θ_joint‖.

    The base minimizes its losses and ½ · ridge · ‖θ‖², whose Hessian there is H_0; tasks and the joint model are fitted
    under it. ``all data`` is fitted to everything at once, with the same ridge: for linear regression the joint model.
    """
    model = Linear(name)
    zero = torch.zeros((base_rows.pixels.shape[1] + 1) * CLASSES, dtype=torch.float64)
    eye = ridge * torch.eye(len(zero), dtype=torch.float64)
    base = model.fit(zero, base_rows, eye)
    prior = model.hessian(base, base_rows) + eye
    tuned = [model.fit(base, rows, prior) for rows in tasks]
    hessians = [model.hessian(one, rows) for one, rows in zip(tuned, tasks, strict=True)]
    pulls = [(prior + hessian) @ (one - base) for hessian, one in zip(hessians, tuned, strict=True)]
    rows_of_tasks = concatenate(*tasks)
    joint = model.fit(base, rows_of_tasks, prior)
    states: dict[str, Tensor] = {
        "base": base,
        "joint": joint,
        "joint, from elsewhere": model.fit(base, rows_of_tasks, prior, begin=zero),
        "all data": model.fit(zero, concatenate(base_rows, rows_of_tasks), eye),
        "full": base + torch.linalg.solve(prior + torch.stack(hessians).sum(0), torch.stack(pulls).sum(0)),
    }
    start, ends = as_state(base), [as_state(one) for one in tuned]
    for method in ("average", "task-arithmetic"):
        states[method] = flatten(gm.merge_state_dicts(start, ends, method))
    for kind in ("diagonal", "kronecker"):
        curvature = [model.estimate(one, rows, kind) for one, rows in zip(tuned, tasks, strict=True)]
        if kind == "diagonal":
            states["fisher-averaging"] = flatten(
                gm.merge_state_dicts(start, ends, "fisher-averaging", curvature=curvature)
            )
        prior_curvature = model.estimate(base, base_rows, kind)
        states[kind] = flatten(
            gm.merge_state_dicts(start, ends, prior=prior_curvature, curvature=curvature, damping=ridge)
        )
    return {name: _evaluate(model, one, joint, base, tests) for name, one in states.items()}


def _evaluate(model: Linear, values: Tensor, joint: Tensor, base: Tensor, tests: Sequence[Rows]) -> dict[str, float]:
    logits = [F.linear(rows.pixels, **as_state(values)) for rows in tests]
    right = [float((z.argmax(-1) == rows.labels).double().mean()) for z, rows in zip(logits, tests, strict=True)]
    losses = [float(model.total(values, rows)) / len(rows.labels) for rows in tests]
    return {
        "accuracy": fmean(right),
        "loss": fmean(losses),
        "distance": float((values - joint).norm() / (base - joint).norm()),
    }
