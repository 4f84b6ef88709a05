"""What a recipe's merge costs: predicted from curvature, evaluated on data, and compared with a target model."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.open import open_checkpoint
from ..curvature.summary import group_of
from ..display import Displayed, View
from ..engine.jobs import LayerJob
from ..engine.plan import Plan
from ..errors import InputError
from ..progress import NoProgress, Progress
from ..recipe import Recipe, mapped
from ..rules import METHODS
from ..rules.kronecker_matching import applied, diagonal_of, solve, sound
from ..tasks import LoadOptions
from .candidates import Block, Candidate, look_at, notes_on
from .grid import Setting
from .in_memory import Rows, State, TaskData, load_data, match_data, materialise, state_of
from .measured_merges import compare_merges, measure_without_penalty
from .penalty_check import Gauge, find_gauges, gradient_scale
from .plans import Candidates
from .predict import BASE, Prediction, open_to_look, predict, task_names
from .preview import Preview
from .sweeps import changes_files

#: What a merge is compared with, besides itself.
OTHERS = ("task-arithmetic", "average", "fisher-averaging", "gradient-matching")
#: The method that predictions are shown relative to.
REFERENCES = ("task-arithmetic", "task-arithmetic (negated)")
#: Values of keys that are looked at beside the recipe's, all in memory at once where there is data.
MOST_SETTINGS = 12


@dataclass
class Residual:
    """How far a merge is from the model trained on everything, seen from the data's gradients."""

    residual: float
    """‖H_0(θ̂ − θ_0) + Σ α_t ∇ℓ_t(θ̂)‖: zero at the jointly trained model."""
    gradient: float
    """‖Σ α_t ∇ℓ_t(θ̂)‖, to compare it with."""
    distance: float
    """‖H̄⁻¹ r‖: the predicted distance to the jointly trained model."""
    moved: float
    """‖θ̂ − θ_0‖, to compare that with."""
    by_group: dict[str, float] = field(default_factory=dict)
    """‖H̄⁻¹ r‖ of each layer group."""


@dataclass(repr=False)
class Diagnosis(Displayed):
    """Everything that was found out about a recipe's merge."""

    recipe: Recipe
    own: str
    """Name of the candidate that is diagnosed: the recipe's merge, or the merged model given."""
    prediction: Prediction
    metrics: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)
    """model → task → metrics; models are the candidates, `base` and `tuned`."""
    rows: dict[str, dict[str, Rows]] = field(default_factory=dict)
    """The same of every row of the data: model → task → metric → one number per row, whose mean is the metric."""
    without_penalty: str = ""
    """Name of the recipe's merge with `base.penalty: none` in these, measured where the gauge suggests it."""
    measured: Preview | None = None
    """The merges compared on the data, as a preview does; its reference is the merge that is diagnosed."""
    residuals: dict[str, Residual] = field(default_factory=dict)
    """By candidate, where every task has data."""
    gauges: dict[str, Gauge] = field(default_factory=dict)
    """By task with data: whether its model was tuned under the penalty that the recipe takes for granted."""
    mismatch: dict[tuple[str, str], float] = field(default_factory=dict)
    """(candidate, task) → ‖∇ℓ_t(θ) − ∇ℓ_t(target)‖, of the mean loss over the data."""
    examples: dict[str, int] = field(default_factory=dict)
    """Examples of each task's data that were looked at."""
    notes: list[str] = field(default_factory=list)
    calibrate_command: str = ""
    """The command that calibrates the merge; empty if it cannot be calibrated."""
    verdict: list[str] = field(default_factory=list)
    """What a user should know, in sentences."""

    @property
    def candidates(self) -> list[str]:
        return self.prediction.candidates

    @property
    def reference(self) -> str:
        """The merge that others are shown relative to: task arithmetic at the same weights, or the recipe's own."""
        return next((name for name in REFERENCES if name in self.candidates), self.own)

    def relative(self, candidate: str, task: str) -> float | None:
        """Predicted excess loss of a task, as a multiple of the reference merge's; None where that has none."""
        whole = self.prediction.excess(self.reference, task)
        return self.prediction.excess(candidate, task) / whole if whole > 0 else None

    def rank(self, candidate: str, task: str) -> int:
        """1 for the candidate that is predicted to cost a task least."""
        own = self.prediction.excess(candidate, task)
        return 1 + sum(self.prediction.excess(other, task) < own for other in self.candidates)

    def _line(self) -> list[str]:
        data = f"data of {len(self.examples)}" if self.examples else "predicted"
        return [self.own, f"{len(self.prediction.tasks)} tasks", f"{len(self.candidates)} merges", data]

    def _view(self) -> View:
        tasks = self.prediction.tasks
        rows = [[name, *(self.relative(name, task) for task in tasks)] for name in self.candidates]
        return ["merge", *(f"{task}, predicted × {self.reference}" for task in tasks)], rows, self.verdict


def find_costs(
    recipe: Recipe,
    *,
    settings: Sequence[Setting] = (),
    merged: str | None = None,
    target: str | None = None,
    data: Mapping[str, str] | None = None,
    threads: int = 1,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    progress: Progress | None = None,
    **loading: Unpack[LoadOptions],
) -> Diagnosis:
    """What a recipe's merge costs.

    ``settings`` are further settings of its merge to look at; ``merged`` is a model that was merged already, to look at
    instead of what the recipe would give; ``target`` one that was trained on everything. ``data`` maps names of tasks
    (or `base`) to data.
    """
    progress = progress or NoProgress()
    tasks = task_names(recipe)
    if other := [key for setting in settings for key, _ in setting.changes if changes_files(key)]:
        instead = f"set one value with --set {other[0]}=…, or compare several with gradmerge preview and data"
        raise InputError(f"--sweep {other[0]}: a diagnosis reads the same files for all merges; {instead}")
    if len(settings) > MOST_SETTINGS:
        many = f"{len(settings)} settings; a diagnosis looks at {MOST_SETTINGS} at most beside the recipe's own"
        raise InputError(f"--sweep: {many}. gradmerge preview compares more")
    given = match_data(data or {}, [*tasks, BASE])
    if target is not None and not given:
        raise InputError("--target: the true mismatch is measured on data; give some with --data NAME=SRC")
    with contextlib.ExitStack() as opened:
        plan = open_to_look(recipe, allow_pickle=allow_pickle, allow_config=allow_config, dequantize=dequantize)
        opened.callback(plan.inputs.close)

        def checkpoint(reference: str) -> Checkpoint:
            model = open_checkpoint(
                reference, adapter_base=plan.inputs.base, allow_pickle=allow_pickle, dequantize=dequantize
            )
            return opened.enter_context(model)

        progress.begin("looking", plan.total_read)
        plan.note(notes_on(recipe, plan, threads))
        candidates, notes = _candidates(recipe, plan, checkpoint(merged) if merged is not None else None)
        swept = Candidates(recipe, plan, lambda changed: plan)
        candidates[1:1] = [swept.candidate(setting, setting.name) for setting in settings]
        prediction = predict(plan, tasks, candidates, threads=threads, advance=progress.advance)
        found = Diagnosis(recipe, candidates[0].name, prediction, notes=plan.notes + notes)
        if given:
            assert recipe.base is not None
            models = dict(zip(tasks, (model.model for model in recipe.models), strict=True)) | {BASE: recipe.base.model}
            loaded = {name: load_data(name, recipe, models[name], given[name], loading) for name in given}
            goal = state_of(checkpoint(target)) if target is not None else None
            _evaluate(found, plan, candidates, loaded, goal, threads)
            allowed = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
            measure_without_penalty(found, candidates[0], loaded, threads, allowed)
            found.measured = compare_merges(found)
        return found


def _candidates(recipe: Recipe, plan: Plan, merged: Checkpoint | None) -> tuple[list[Candidate], list[str]]:
    """The recipe's merge first, then what it is compared with; and notes on what it is not."""
    notes: list[str] = []
    found: list[Candidate] = []
    if merged is not None:
        found.append(Candidate(merged.label, model=merged))
    elif recipe.rule.fallback is not None:
        raise InputError(
            f"{recipe.method} works on whole matrices: merge it first, and give the result as --merged DIR"
        )
    else:
        found.append(
            Candidate(recipe.method, recipe.method, _weights(recipe, recipe.method), recipe.options, recipe.own_options)
        )
    if recipe.method == "removal":
        negated = [mapped(weight, operator.neg) for weight in recipe.weights]
        found.append(Candidate("task-arithmetic (negated)", "task-arithmetic", negated))
        return found, notes
    for method in OTHERS:
        if method in {c.name for c in found}:
            continue
        if "prior" in METHODS[method].inputs and "prior" not in METHODS[method].when and plan.inputs.prior is None:
            notes.append(f"{method} is not compared: it needs the base's curvature")
            continue
        if plan.layers and METHODS[method].layers is None and "curvature" in METHODS[method].inputs:
            notes.append(f"{method} is not compared: it takes diagonals, and the curvature here is Kronecker")
            continue
        found.append(Candidate(method, method, _weights(recipe, method)))
    return found, notes


def _weights(recipe: Recipe, method: str) -> list[float] | None:
    """None (the recipe's weights) for a method that takes weights, else 1 for every model."""
    return None if "weights" in METHODS[method].inputs else [1.0] * len(recipe.models)


def _evaluate(
    found: Diagnosis,
    plan: Plan,
    candidates: Sequence[Candidate],
    loaded: Mapping[str, TaskData],
    goal: State | None,
    threads: int,
) -> None:
    """Fill in what the data shows: metrics, mismatch and residual."""
    tasks = found.prediction.tasks
    found.examples = {name: data.loaded.examples for name, data in loaded.items()}
    assert plan.inputs.base is not None
    states = {c.name: s for c, s in zip(candidates, materialise(plan, candidates, threads), strict=True)}
    gradients: dict[str, dict[str, State]] = {name: {} for name in ("tuned", *states)}
    for name, data in loaded.items():
        tuned = plan.inputs.base if name == BASE else plan.inputs.tuned[tasks.index(name)]
        models = {BASE: state_of(plan.inputs.base), "tuned": state_of(tuned), **states}
        if goal is not None:
            models["target"] = goal
        at_goal = data.gradient(data.model_with(goal)) if goal is not None else None
        for model, state in models.items():
            module = data.model_with(state)
            found.metrics.setdefault(model, {})[name], rows = data.evaluate_rows(module)
            found.rows.setdefault(model, {})[name] = rows
            if model not in gradients:
                continue
            gradient = data.gradient(module)
            gradients[model][name] = gradient
            if at_goal is not None and model != "tuned":
                found.mismatch[model, name] = _distance(gradient, at_goal) / data.loaded.examples
        data.forget()
    places = {task: place for place, task in enumerate(tasks) if task != BASE}
    found.gauges = find_gauges(found.recipe, plan, places, gradients.pop("tuned"), found.examples, threads)
    if not {task for task in tasks if task != BASE} <= set(loaded):
        found.notes.append("the residual needs data of every task, and is left out")
        return
    if plan.inputs.prior is None:
        found.notes.append("the residual needs the base's curvature, and is left out")
        return
    for candidate in candidates:
        found.residuals[candidate.name] = _residual(found, plan, candidate, gradients[candidate.name], threads)


def _distance(one: State, other: State) -> float:
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))


def _solved(plan: Plan, block: Block, residual: Tensor) -> Tensor:
    """H̄⁻¹ r on a block, 0 where H̄ is not positive."""
    inputs, prior = plan.inputs, block.prior
    weights = inputs.settings.of(block.job.name).weights
    assert prior is not None
    if isinstance(block.job, LayerJob):
        one, rule = residual.new_ones(()), METHODS["gradient-matching"]
        damping = block.job.damping(plan, rule, {"curvature": block.curvature, "base": block.base})
        parts = [(1.0, sound(prior)), (inputs.damping if damping is None else damping, one)]
        parts += [(weight, sound(h)) for weight, h in zip(weights, block.curvature, strict=True)]
        with contextlib.suppress(ValueError):
            return solve(parts, residual)
        return torch.zeros_like(residual)
    precision = torch.zeros_like(residual).add_(diagonal_of(prior)).add_(inputs.damping)
    for weight, h in zip(weights, block.curvature, strict=True):
        precision += weight * diagonal_of(h).double()
    return torch.where(precision > 0, residual / precision, torch.zeros_like(residual))


def _residual(
    found: Diagnosis, plan: Plan, candidate: Candidate, gradients: Mapping[str, State], threads: int
) -> Residual:
    """r = H_0(θ̂ − θ_0) + Σ α_t ∇ℓ_t(θ̂), with gradients scaled to the examples that the curvature was estimated on."""
    inputs = plan.inputs
    tasks = [task for task in found.prediction.tasks if task != BASE]
    scales = [gradient_scale(found.recipe, inputs, place, found.examples[task]) for place, task in enumerate(tasks)]
    sums: dict[str, Tensor] = {}
    lock = threading.Lock()

    def visit(block: Block) -> None:
        assert block.prior is not None
        step = block.merged[0].double() - block.base.double()
        pull = torch.zeros_like(step)
        weights = inputs.settings.of(block.job.name).weights
        for task, weight, scale in zip(tasks, weights, scales, strict=True):
            pull += weight * scale * block.part_of(gradients[task])
        residual = applied(block.prior, step) + inputs.damping * step + pull
        away = _solved(plan, block, residual)
        found_here = torch.stack([v.square().sum() for v in (residual, pull, away, step)])
        with lock:
            group = group_of(block.job.name)
            sums[group] = sums.get(group, torch.zeros(4, dtype=torch.float64)) + found_here

    look_at(plan, [candidate], visit, threads=threads)
    residual, pull, away, step = torch.stack(list(sums.values())).sum(0).sqrt().tolist()
    return Residual(residual, pull, away, step, {group: float(values[2].sqrt()) for group, values in sums.items()})
