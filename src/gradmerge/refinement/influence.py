"""Removal without a fine-tuned model: a step along the influence function of the forget set.

With θ the weights, g the gradient of the loss summed over the forget set, and S the Kronecker curvature of the retain
set, scaled to its size, a step is

    θ + s (S + λ)⁻¹ g,    λ = 0.1 · mean eigenvalue of S

s = 1 is the influence function: its estimate of the model that was trained without the forget set. This estimate is
accurate only near θ. s is therefore the largest step length, found by bisection of log s, that keeps the mean loss of
held-out rows of the retain set within a budget and raises the loss on the forget set. If a shorter step that was tried
forgets more, that one is taken.

Several steps repeat this at the new weights. Step k of N may use k/N of the budget. Before each step but the first,
corrections lower the loss on the retain set again, in the same basis. Without them, more steps hardly forget more than
one. The steps end when the loss on the forget set reaches a given level.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..curvature.batches import moved, with_progress
from ..curvature.curvature import Curvature
from ..curvature.estimate import estimate_curvature, estimate_gradient, prepared
from ..curvature.kernels import MAX_KRONECKER_DIM
from ..curvature.losses import ExampleLoss, TokenLoss, labels_of, logits_of, loss_of
from ..display import Displayed, View
from ..errors import InputError
from ..progress import NoProgress, Progress
from ..tasks.metrics import ratio_rows, standard_errors
from ..text import Measured
from .rows import count_rows, sample_rows

#: λ relative to the mean eigenvalue of S.
DAMPING = 0.1
#: Most rows of the retain set for S. The held-out rows measure the loss, so S need not be exact.
SAMPLE_ROWS = 1000
#: Most corrections between two steps, and number of lengths that are tried, each half as long as the one before.
CORRECTIONS, HALVINGS = 6, 12
#: The bisection ends at this ratio of the shortest length that is too long to the longest allowed length.
PRECISION = 2 ** (1 / 16)
#: Limits of the bisection: number of lengths, and the length up to which it doubles.
TRIALS, LONGEST = 24, 64.0


class Dataset(NamedTuple):
    """Rows as batches that can be read several times, and their loss (None: the model's own)."""

    batches: Sequence[Any]
    loss: ExampleLoss | None = None


@dataclass
class StepTrial:
    """A step length, and the mean losses of an example after a step of this length."""

    s: float
    retain: float
    """On the held-out rows of the retain set."""
    forget: float | None
    """On the forget set; None if the step is not within the budget."""
    allowed: bool = False
    """Whether more is forgotten after this step, within the budget and up to the stopping level."""


@dataclass
class InfluenceStep:
    """One influence step."""

    s: float
    """The length that was taken; 0 if none is within the budget."""
    damping: float
    """λ."""
    trials: list[StepTrial]
    """All lengths that were tried, in ascending order."""


@dataclass
class MeanLosses:
    """Mean losses of an example."""

    retain: float
    """On the held-out rows of the retain set."""
    forget: float
    """On the forget set."""


@dataclass(repr=False)
class RemovalResult(Displayed):
    """What a removal by influence steps did."""

    model: nn.Module
    """The model that was passed in, changed."""
    before: MeanLosses
    after: MeanLosses
    """For a model on disk: with the weights rounded to the dtypes of its files."""
    budget: float
    """Allowed relative increase of ``retain``."""
    until: float | None
    """The stopping level of ``forget``."""
    steps: list[InfluenceStep] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    """Number of examples: ``forget_rows``, ``retain_rows`` (without the held-out ones), ``held_out_rows``, and
    ``retain_size``, the number that the retain set stands for."""
    seconds: float = 0.0
    output: Path | None = None
    """On disk: the folder that was written."""
    notes: list[str] = field(default_factory=list)
    standard_errors: dict[str, dict[str, float | None]] = field(default_factory=dict)
    """`before`, `after`, `rise` (on the same rows) and `used` → of `retain` and `forget`; None if nothing varies."""

    @property
    def s(self) -> float:
        """The sum of the step lengths."""
        return sum(step.s for step in self.steps)

    @property
    def used(self) -> float:
        """The relative increase of the mean loss on the held-out rows of the retain set."""
        return self.after.retain / self.before.retain - 1 if self.before.retain > 0 else 0.0

    @property
    def used_text(self) -> str:
        """`used` in percent with its standard error, as in `+1.8 ± 0.4 %`."""
        error = self.standard_errors.get("used", {}).get("retain")
        return f"{100 * self.used:+.3g}{'' if error is None else f' ± {100 * error:.2g}'} %"

    def facts(self) -> dict[str, Any]:
        """All numbers, as in the record."""
        return {
            "method": "influence",
            **self.rows,
            "budget": self.budget,
            "used": self.used,
            "until": self.until,
            "s": self.s,
            "before": asdict(self.before),
            "after": asdict(self.after),
            "standard_errors": self.standard_errors,
            "steps": [asdict(step) for step in self.steps],
        }

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        output = None if self.output is None else str(self.output)
        return {"output": output, **self.facts(), "seconds": round(self.seconds, 3), "notes": self.notes}

    def losses(self) -> list[tuple[str, Measured, Measured, Measured]]:
        """The forget set and the retain set: mean loss of an example before and after, and its increase."""
        rows = []
        for title, name in (("forget set", "forget"), ("retain set, held out", "retain")):
            errors = {when: self.standard_errors.get(when, {}).get(name) for when in ("before", "after", "rise")}
            before = Measured(getattr(self.before, name), errors["before"])
            after = Measured(getattr(self.after, name), errors["after"])
            rows.append((title, before, after, Measured(after - before, errors["rise"])))
        return rows

    def _line(self) -> list[str]:
        sets = [f"{title} {float(a):.4g} → {float(b):.4g}" for title, a, b, _ in self.losses()]
        return [*sets, f"s {self.s:.3g}", f"{self.seconds:.1f} s"]

    def _view(self) -> View:
        return ["mean loss", "before", "after", "increase"], [list(row) for row in self.losses()], self.notes


def remove_influence(
    model: nn.Module,
    forget: Dataset,
    retain: Dataset,
    held_out: Dataset,
    *,
    retain_size: int,
    budget: float,
    steps: int = 1,
    until: float | None = None,
    unseen: Dataset | None = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    round_weights: Callable[[], None] = lambda: None,
    progress: Progress | None = None,
) -> RemovalResult:
    """Remove what a model has learned from the forget set, in place, and return what was done.

    Args:
        model: The model; parameters with ``requires_grad=False`` are not changed.
        forget: All rows to forget.
        retain: Rows to keep, for the curvature.
        held_out: Other rows to keep, for the budget.
        retain_size: How many examples ``retain`` stands for.
        budget: Allowed relative increase of the mean loss on ``held_out``.
        steps: Most steps.
        until: Stopping level: no step raises the mean loss on ``forget`` above it.
        unseen: Rows whose mean loss, before the first step, is the stopping level.
        max_kronecker_dim: Layers with more inputs or outputs have a diagonal in S.
        round_weights: Rounds the model's weights to the dtypes in which they are stored.
        progress: Reports batches.
    """
    run = _Run(model, forget, retain, held_out, round_weights, progress or NoProgress())
    rows_before = run.row_losses()
    before = _means(rows_before)
    if not (math.isfinite(before.retain) and math.isfinite(before.forget)):
        raise InputError("the model's loss is not finite on these rows")
    if unseen is not None:
        until = run.loss(unseen)
    if until is not None and before.forget >= until:
        raise InputError(
            f"the loss on the forget set is {before.forget:.4g} already, which is not below the stopping level of "
            f"{until:.4g}: there is nothing to forget"
        )
    result = RemovalResult(model, before, before, budget, until)
    sample = Dataset(sample_rows(retain.batches, SAMPLE_ROWS), retain.loss)
    forgotten, reached, level = before.forget, False, math.inf if until is None else until
    try:
        for number in range(1, steps + 1):
            curvature = run.curvature(sample, max_kronecker_dim)
            basis = KroneckerBasis(curvature, retain_size / curvature.examples)
            damping = DAMPING * basis.mean()
            if number > 1:
                run.correct(basis, damping, retain_size / count_rows(retain.batches), level)
                forgotten = run.loss(forget)
            direction = basis.solve(run.gradient(forget), damping)
            del curvature, basis
            limit = before.retain * (1 + budget * number / steps)
            trials = run.try_lengths(direction, limit, forgotten, level)
            lengths = {trial.forget: trial.s for trial in trials if trial.allowed and trial.forget is not None}
            forgotten, s = max(lengths.items(), default=(forgotten, 0.0))
            run.take(direction, s)
            result.steps.append(InfluenceStep(s, damping, trials))
            reached = until is not None and any(trial.forget is not None and trial.forget > until for trial in trials)
            if reached or s == 0:
                break
    except BaseException:
        run.move({}, 0.0)
        raise
    rows_after = run.row_losses()
    result.after = _means(rows_after)
    result.standard_errors = _errors(rows_before, rows_after)
    if result.after.forget <= before.forget:
        result.notes.append("The loss on the forget set did not rise: no step within the budget raises it.")
    elif until is not None and not reached:
        result.notes.append(
            f"The stopping level of {until:.4g} was not reached within the budget. The loss on the forget set is "
            f"{result.after.forget:.4g}."
        )
    return result


class _Run:
    """What the steps of a removal compute on the model and its rows."""

    def __init__(
        self,
        model: nn.Module,
        forget: Dataset,
        retain: Dataset,
        held_out: Dataset,
        round_weights: Callable[[], None],
        progress: Progress,
    ) -> None:
        self.model, self.forget, self.retain, self.held_out = model, forget, retain, held_out
        self._round, self._progress = round_weights, progress
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
        if not self._parameters:
            raise InputError("the model has no parameter with requires_grad=True: there is nothing to change")
        # In float32 or wider, so that small steps add up.
        self._values = {
            name: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def move(self, direction: Mapping[str, Tensor], s: float) -> None:
        """Set the model's weights to a point on the line from the weights that were taken last; 0 restores these."""
        for name, parameter in self._parameters.items():
            parameter.copy_(self._values[name] + s * direction[name] if s else self._values[name])
        self._round()

    def take(self, direction: Mapping[str, Tensor], s: float) -> None:
        """Take a step."""
        for name, value in self._values.items():
            value += s * direction[name]
        self.move(direction, 0.0)

    def losses(self, rows: Dataset) -> Tensor:
        """The loss of every example, in float64 on the CPU."""
        device, losses = next(self.model.parameters()).device, []
        with prepared(self.model), torch.no_grad():
            for batch in with_progress(rows.batches, self._progress, "loss"):
                batch = moved(batch, device)
                logits, labels = logits_of(self.model, batch), labels_of(batch)
                loss = rows.loss or loss_of(self.model, labels)
                loss.check(logits.shape, labels)
                losses.append(loss.losses(logits, labels).double().cpu())
        return torch.cat(losses)

    def loss(self, rows: Dataset) -> float:
        """The mean loss of an example."""
        return float(self.losses(rows).mean())

    def row_losses(self) -> dict[str, Tensor]:
        """The losses of all examples of the held-out rows and of the forget set."""
        return {"retain": self.losses(self.held_out), "forget": self.losses(self.forget)}

    def gradient(self, rows: Dataset) -> Mapping[str, Tensor]:
        """The gradient of the summed loss."""
        return estimate_gradient(self.model, with_progress(rows.batches, self._progress, "gradient"), output=rows.loss)

    def curvature(self, rows: Dataset, max_kronecker_dim: int) -> Curvature:
        """Kronecker curvature with labels sampled from the model; with two classes, the exact expectation over both."""
        batch = moved(rows.batches[0], next(self.model.parameters()).device)
        with prepared(self.model), torch.no_grad():
            logits = logits_of(self.model, batch)
        by_token = isinstance(rows.loss or loss_of(self.model, labels_of(batch)), TokenLoss)
        return estimate_curvature(
            self.model,
            with_progress(rows.batches, self._progress, "curvature"),
            "exact" if logits[0].numel() <= 2 and not by_token else "sampled",
            kind="kronecker",
            output=rows.loss,
            max_kronecker_dim=max_kronecker_dim,
        )

    def correct(self, basis: KroneckerBasis, damping: float, scale: float, until: float) -> None:
        """Lower the loss on the held-out rows by steps along the gradient of the retain set.

        None raises the loss on the forget set above ``until``.
        """
        kept = self.loss(self.held_out)
        for _ in range(CORRECTIONS):
            gradient = {name: -scale * value for name, value in self.gradient(self.retain).items()}
            direction, best = basis.solve(gradient, damping), 0.0
            for s in (2.0**-halvings for halvings in range(HALVINGS)):
                self.move(direction, s)
                loss = self.loss(self.held_out)
                if loss < kept and self.loss(self.forget) <= until:
                    kept, best = loss, s
                elif best:
                    break
            self.take(direction, best)
            if not best:
                return

    def try_lengths(
        self, direction: Mapping[str, Tensor], limit: float, forgotten: float, until: float
    ) -> list[StepTrial]:
        """Try step lengths, from 1 on, until the longest allowed one is known up to ``PRECISION``.

        A length is allowed if the loss on the held-out rows is at most ``limit``, and the loss on the forget set rises
        above ``forgotten``, but not above ``until``.
        """
        trials: list[StepTrial] = []
        low, high, s = 0.0, math.inf, 1.0
        while len(trials) < TRIALS and low < LONGEST and not (low > 0 and high / low <= PRECISION):
            self.move(direction, s)
            trial = StepTrial(s, self.loss(self.held_out), None)
            if trial.retain <= limit:
                trial.forget = self.loss(self.forget)
                trial.allowed = math.isfinite(trial.forget) and forgotten < trial.forget <= until
            low, high = (s, high) if trial.allowed else (low, s)
            trials.append(trial)
            s = 2 * low if high == math.inf else high / 2 if low == 0 else math.sqrt(low * high)
        return sorted(trials, key=lambda trial: trial.s)


def _means(rows: Mapping[str, Tensor]) -> MeanLosses:
    return MeanLosses(**{name: float(losses.mean()) for name, losses in rows.items()})


def _errors(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, dict[str, float | None]]:
    """The standard errors of a result, from the losses of every row."""
    rise = {name: after[name] - before[name] for name in before}
    used = {"retain": ratio_rows(rise["retain"], before["retain"])}
    groups: dict[str, Mapping[str, Tensor]] = {"before": before, "after": after, "rise": rise, "used": used}
    return {name: standard_errors(rows) for name, rows in groups.items()}


class KroneckerBasis:
    """The eigenvalues of a curvature, multiplied by ``scale``, and the eigenvectors of its layers.

    S is the curvature of a layer, G ⊗ A / T. In the eigenvectors of G and A it is diagonal, so that adding λ and
    dividing are exact. Parameters without factors have a diagonal.
    """

    def __init__(self, curvature: Curvature, scale: float = 1.0) -> None:
        self._transposed = curvature.transposed
        self._vectors: dict[str, tuple[Tensor, Tensor]] = {}
        self._values = {name: scale * value for name, value in curvature.diagonal.items()}
        for name, layer in curvature.layers.items():
            out_values, out_vectors = torch.linalg.eigh(layer.outputs.double())
            in_values, in_vectors = torch.linalg.eigh(layer.inputs.double())
            values = torch.outer(out_values.clamp(min=0), in_values.clamp(min=0)) * (scale / max(layer.tokens, 1))
            self._vectors[name] = out_vectors.to(layer.outputs), in_vectors.to(layer.inputs)
            self._values[name] = values.to(layer.outputs)

    def mean(self) -> float:
        """The mean eigenvalue."""
        total = sum(float(values.double().sum()) for values in self._values.values())
        return total / sum(values.numel() for values in self._values.values())

    def solve(self, gradient: Mapping[str, Tensor], damping: float) -> dict[str, Tensor]:
        """Return (S + λ)⁻¹ g by parameter name."""
        solution: dict[str, Tensor] = {}
        for name, values in self._values.items():
            if name not in self._vectors:
                solution[name] = gradient[name] / (values + damping)
                continue
            out_vectors, in_vectors = self._vectors[name]
            bias = name.removesuffix("weight") + "bias"
            transposed, shape = name in self._transposed, gradient[name].shape
            matrix = gradient[name].T if transposed else gradient[name].flatten(1)
            with_bias = len(in_vectors) > matrix.shape[1]
            if with_bias:
                matrix = torch.cat([matrix, gradient[bias][:, None]], 1)
            matrix = out_vectors @ ((out_vectors.T @ matrix @ in_vectors) / (values + damping)) @ in_vectors.T
            if with_bias:
                matrix, solution[bias] = matrix[:, :-1], matrix[:, -1].contiguous()
            solution[name] = (matrix.T if transposed else matrix).reshape(shape)
        return solution
