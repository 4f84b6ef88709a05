"""What a recipe's merge costs: predicted from curvature, evaluated on data, and compared with a target model."""

from __future__ import annotations

import contextlib
import math
import operator
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.open import open_checkpoint
from ..display import Displayed, View
from ..engine.inputs import Inputs
from ..engine.jobs import LayerJob
from ..engine.plan import Plan
from ..errors import InputError
from ..progress import Progress
from ..recipe import Recipe, mapped, reduction_factor
from ..rules import METHODS
from ..rules.kronecker_matching import applied, diagonal_of, solve, sound
from ..tasks import LoadOptions
from .candidates import Candidate, CandidateBlock, derive_plan, notes_on, visit_blocks
from .evaluate import DataEvaluator, StateDict, match_data, merge_in_memory, state_dict_of
from .predict import Prediction, open_for_prediction, predict
from .ranking import Outcome, Preview, set_scores
from .settings import BASE, Axis, Setting, make_setting, recipe_with, task_names, weight_keys

#: The methods that a merge is compared with.
OTHERS = ("task-arithmetic", "average", "fisher-averaging", "gradient-matching")
#: The merges that predictions are relative to.
REFERENCES = ("task-arithmetic", "task-arithmetic (negated)")
#: Names of results beside merges: each task's own model, and the model that was trained on all tasks.
FINE_TUNED = "fine-tuned model"
TARGET = "target"
#: Up to the first ratio, a model counts as trained under the penalty; from the second on, as trained without it.
UNDER_PENALTY, WITHOUT_PENALTY = 0.3, 0.7


@dataclass
class Residual:
    """How far a merge is from the jointly trained model, by the gradients on the data."""

    residual: float
    """‖H_0(θ̂ − θ_0) + Σ α_t ∇ℓ_t(θ̂)‖: zero at the jointly trained model."""
    gradient: float
    """‖Σ α_t ∇ℓ_t(θ̂)‖, to compare the residual with."""
    distance: float
    """‖H̄⁻¹ r‖: the predicted distance to the jointly trained model."""
    moved: float
    """‖θ̂ − θ_0‖, to compare the distance with."""


@dataclass
class PenaltyCheck:
    """Whether a model was trained under the penalty that gradient matching assumes.

    A model trained to convergence under ½‖θ − θ_0‖²_P has ∇ℓ_t(θ_t) + P Δ_t = 0.
    """

    penalty: str
    """P: `recipe` (base.penalty), `recorded` (beside the model), or `H_0` (neither)."""
    ratio: float | None
    """‖P Δ_t + ∇ℓ_t(θ_t)‖ / ‖P Δ_t‖: 0 under the penalty, about 1 or more without; None where P Δ_t is 0."""
    pull: float
    """‖P Δ_t‖"""
    gradient: float
    """‖∇ℓ_t(θ_t)‖, scaled to the number of examples of the penalty."""


@dataclass(repr=False)
class Diagnosis(Displayed):
    """The costs of a recipe's merge."""

    recipe: Recipe
    own: str
    """Name of the merge that is diagnosed: the recipe's, or the merged model that was given."""
    prediction: Prediction
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """With data: results of the merges by name, of `base`, of each task's `fine-tuned model`, and of `target`."""
    without_penalty: str = ""
    """Name of the recipe's merge with `base.penalty: none`, measured if the models were trained without a penalty."""
    measured: Preview | None = None
    """The merges ranked on the data; the reference is the merge that is diagnosed."""
    residuals: dict[str, Residual] = field(default_factory=dict)
    """By merge, if every task has data."""
    penalty_checks: dict[str, PenaltyCheck] = field(default_factory=dict)
    """By task with data."""
    mismatch: dict[tuple[str, str], float] = field(default_factory=dict)
    """(merge, task) → ‖∇ℓ_t(θ) − ∇ℓ_t(target)‖ of the mean loss over the data."""
    examples: dict[str, int] = field(default_factory=dict)
    """Task → number of rows of its data."""
    notes: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    """Commands to run next: merge, preview, calibrate."""
    verdict: list[str] = field(default_factory=list)
    """The result in sentences."""

    @property
    def candidates(self) -> list[str]:
        return self.prediction.candidates

    @property
    def tuned(self) -> list[str]:
        """The tasks of the fine-tuned models."""
        return [task for task in self.prediction.tasks if task != BASE]

    @property
    def base_name(self) -> str:
        return self.recipe.base.model if self.recipe.base is not None else "nothing"

    @property
    def reference(self) -> str:
        """The merge that predictions are relative to: task arithmetic at the same weights, or the recipe's own."""
        return next((name for name in REFERENCES if name in self.candidates), self.own)

    @property
    def merges(self) -> dict[str, Outcome]:
        """The results of all merges on the data, by name, the one that is diagnosed first."""
        names = [*self.candidates, self.without_penalty]
        return {name: self.outcomes[name] for name in names if name in self.outcomes}

    def metrics(self, model: str, task: str) -> dict[str, Any]:
        """Return the metrics of a model on a task; empty if it was not evaluated there."""
        return self.outcomes[model].metrics.get(task, {})

    def relative(self, candidate: str, task: str) -> float | None:
        """Predicted excess loss of a task, as a multiple of the reference's; None if that has none."""
        whole = self.prediction.excess(self.reference, task)
        return self.prediction.excess(candidate, task) / whole if whole > 0 else None

    def rank(self, candidate: str, task: str) -> int:
        """1 for the merge with the smallest predicted loss of a task."""
        own = self.prediction.excess(candidate, task)
        return 1 + sum(self.prediction.excess(other, task) < own for other in self.candidates)

    def rank_measured(self) -> None:
        """Set ``measured`` from the outcomes of the merges."""
        merges, tasks = [*self.merges.values()], [*self.examples]
        criterion, axis = set_scores(merges, True), Axis("")
        models = task_names(self.recipe)
        self.measured = Preview(
            self.recipe, tasks, models, True, criterion, merges, merges[0], axis, examples=self.examples
        )

    def _line(self) -> list[str]:
        data = f"data of {len(self.examples)}" if self.examples else "predicted"
        return [self.own, f"{len(self.prediction.tasks)} tasks", f"{len(self.candidates)} merges", data]

    def _view(self) -> View:
        tasks = self.prediction.tasks
        rows = [[name, *(self.relative(name, task) for task in tasks)] for name in self.candidates]
        return ["merge", *(f"{task}, predicted × {self.reference}" for task in tasks)], rows, self.verdict


def find_costs(
    recipe: Recipe,
    loading: LoadOptions,
    *,
    merged: str | None = None,
    target: str | None = None,
    data: Mapping[str, str] | None = None,
    threads: int = 1,
    progress: Progress,
    **reading: Any,
) -> Diagnosis:
    """Diagnose a recipe's merge.

    Args:
        recipe: The recipe.
        loading: How models and data are loaded.
        merged: A merged model to diagnose instead of the recipe's merge.
        target: A model that was trained on all tasks.
        data: Task (or `base`) → data.
        threads, progress: As of :func:`gradmerge.merge`.
        reading: ``allow_pickle``, ``allow_config`` and ``dequantize``.
    """
    tasks = task_names(recipe)
    given = match_data(data or {}, [*tasks, BASE])
    if target is not None and not given:
        raise InputError("target: the true mismatch is measured on data; give data NAME=SRC")
    with contextlib.ExitStack() as opened:
        plan = open_for_prediction(recipe, **reading)
        opened.callback(plan.inputs.close)

        def checkpoint(reference: str | None) -> Checkpoint | None:
            if reference is None:
                return None
            how = {"allow_pickle": reading["allow_pickle"], "dequantize": reading["dequantize"]}
            return opened.enter_context(open_checkpoint(reference, adapter_base=plan.inputs.base, **how))

        progress.begin("comparing", plan.total_read)
        plan.note(notes_on(recipe, plan, threads))
        merge = checkpoint(merged)
        settings = _settings(recipe, recipe.method if merge is None else merge.label)
        candidates = _candidates(recipe, plan, settings, merge)
        prediction = predict(plan, tasks, candidates, threads=threads, advance=progress.advance)
        found = Diagnosis(recipe, next(iter(candidates)), prediction)
        if given:
            evaluator = DataEvaluator(recipe, [], given, loading, threads=threads, plan=plan, **reading)
            opened.callback(evaluator.close)
            _measure(found, evaluator, candidates, settings, checkpoint(target))
            found.notes += evaluator.notes()
        found.notes = list(dict.fromkeys([*plan.notes, *found.notes]))
        return found


def _settings(recipe: Recipe, own: str) -> dict[str, Setting]:
    """Return name → setting: the diagnosed one, under the name ``own``, and those to compare it with."""
    found = {own: make_setting(recipe, recipe.method)}
    if recipe.rule.removes:
        weights = [mapped(weight, operator.neg) for weight in recipe.weights]
        negated = {"method": "task-arithmetic", **dict(zip(weight_keys(recipe), weights, strict=True))}
        return found | {REFERENCES[1]: Setting(negated)}
    return found | {method: make_setting(recipe, method) for method in OTHERS if method != own}


def _candidates(
    recipe: Recipe, plan: Plan, settings: Mapping[str, Setting], merged: Checkpoint | None
) -> dict[str, Candidate]:
    """Name → merge. The plan's notes say which are left out."""
    found: dict[str, Candidate] = {}
    if merged is None and recipe.rule.fallback is not None:
        raise InputError(f"{recipe.method} works on whole matrices: merge it first, and diagnose the result (merged=)")
    for number, (name, setting) in enumerate(settings.items()):
        try:
            found[name] = merged if merged and not number else derive_plan(plan, recipe_with(recipe, setting))
        except InputError as error:
            if not number:
                raise
            plan.note([f"{name} is not compared: {error}"])
    return found


def _measure(
    diagnosis: Diagnosis,
    evaluator: DataEvaluator,
    candidates: Mapping[str, Candidate],
    settings: Mapping[str, Setting],
    target: Checkpoint | None,
) -> None:
    """Evaluate all models on the data, and compute what needs gradients."""
    evaluator.evaluate_models_alone()
    plan, data, alone = evaluator.plan, evaluator.data, evaluator.outcomes_alone
    tuned = {task: alone[task] for task in evaluator.tasks if task in alone}
    own_models = Outcome(Setting({}))
    own_models.metrics = {task: outcome.metrics[task] for task, outcome in tuned.items()}
    own_models.rows = {task: outcome.rows[task] for task, outcome in tuned.items()}
    diagnosis.examples, diagnosis.outcomes = evaluator.examples, {BASE: alone[BASE], FINE_TUNED: own_models}

    def gradients_of(name: str, state: StateDict) -> dict[str, StateDict]:
        """Evaluate a model on all tasks; returns the gradient of each."""
        model = evaluator.model_with(state, name)
        diagnosis.outcomes[name] = evaluator.outcome(settings.get(name, Setting({})), model)
        if evaluator.failures:
            raise InputError(evaluator.failures[0])
        return {task: data[task].gradient(model) for task in evaluator.tasks}

    numbers = {task: evaluator.names.index(task) for task in tuned if task != BASE}
    at_tuned = {
        task: data[task].gradient(evaluator.model_with(state_dict_of(plan.inputs.tuned[number]), task))
        for task, number in numbers.items()
    }
    at_target = {} if target is None else gradients_of(TARGET, state_dict_of(target))
    diagnosis.penalty_checks = check_penalties(
        diagnosis.recipe, plan, numbers, at_tuned, diagnosis.examples, evaluator.threads
    )
    lacking = "the base's curvature" if plan.inputs.prior is None else ""
    if not set(evaluator.names) <= set(evaluator.tasks):
        lacking = "data of every task"
    if lacking:
        diagnosis.notes.append(f"the residual is not computed: it needs {lacking}")
    states = merge_in_memory(plan, [*candidates.values()], evaluator.threads)
    for name, candidate in candidates.items():
        gradients = gradients_of(name, states.pop(0))
        for task, gradient in at_target.items():
            diagnosis.mismatch[name, task] = _distance(gradients[task], gradient) / diagnosis.examples[task]
        if not lacking:
            diagnosis.residuals[name] = _residual(diagnosis, evaluator, candidate, gradients)
    _measure_without_penalty(diagnosis, evaluator)
    diagnosis.rank_measured()


def _measure_without_penalty(diagnosis: Diagnosis, evaluator: DataEvaluator) -> None:
    """Evaluate the merge with `base.penalty: none` if a model was trained without the penalty."""
    without = any((check.ratio or 0.0) >= WITHOUT_PENALTY for check in diagnosis.penalty_checks.values())
    recipe = diagnosis.recipe
    if without and diagnosis.own == recipe.method and "penalty" in recipe.rule.inputs and not recipe.rule.removes:
        setting = make_setting(recipe, recipe.method, {"base.penalty": "none"})
        diagnosis.without_penalty = f"{recipe.method}, base.penalty none"
        (diagnosis.outcomes[diagnosis.without_penalty],) = evaluator.evaluate([setting], lambda done: None)


def check_penalties(
    recipe: Recipe,
    plan: Plan,
    tasks: Mapping[str, int],
    gradients: Mapping[str, Mapping[str, Tensor]],
    examples: Mapping[str, int],
    threads: int = 1,
) -> dict[str, PenaltyCheck]:
    """Check the penalty of every task that has a gradient.

    Args:
        recipe, plan, threads: The recipe and its plan.
        tasks: Task → number of its model.
        gradients: Task → gradient of the summed loss at its own model. Tensors that are not merged do not count.
        examples: Task → number of rows of the gradient.
    """
    inputs = plan.inputs
    origins = {task: _origin(recipe, inputs, number) for task, number in tasks.items() if task in gradients}
    origins = {task: origin for task, origin in origins.items() if origin != "H_0" or inputs.prior is not None}
    scales = {
        task: _gradient_scale(recipe, inputs, tasks[task], examples[task], whole=origin == "recorded")
        for task, origin in origins.items()
    }
    sums = {task: torch.zeros(3, dtype=torch.float64) for task in origins}
    lock = threading.Lock()

    def visit(block: CandidateBlock) -> None:
        for task in origins:
            if block.job.name not in gradients[task]:  # a tied tensor, whose gradient has another name
                continue
            change = block.tuned[tasks[task]].double() - block.base.double()
            penalty = block.penalty[tasks[task]] if block.penalty else None
            if penalty is None:
                assert block.prior is not None
                pull = applied(block.prior, change) + _damping(plan, block) * change
            else:
                pull = applied(penalty, change)
            slope = scales[task] * block.part_of(gradients[task])
            squares = torch.stack([v.square().sum() for v in (pull + slope, pull, slope)])
            with lock:
                sums[task] += squares

    if origins:
        visit_blocks(plan, [], visit, threads=threads)
    result = {}
    for task, origin in origins.items():
        balance, pull, slope = (math.sqrt(value) for value in sums[task].tolist())
        result[task] = PenaltyCheck(origin, balance / pull if pull else None, pull, slope)
    return result


def _origin(recipe: Recipe, inputs: Inputs, number: int) -> str:
    if recipe.base is not None and recipe.base.penalty is not None:
        return "recipe"
    return "recorded" if inputs.penalty and inputs.penalty[number] is not None else "H_0"


def _gradient_scale(recipe: Recipe, inputs: Inputs, number: int, examples: int, whole: bool = False) -> float:
    """Return the factor of a gradient summed over ``examples`` that matches the task's reduced curvature.

    ``whole``: to match the sum over all examples of the task, whatever the reduction.
    """
    curvature = inputs.curvature[number]
    if not curvature.examples:
        return 1.0 if whole else reduction_factor(recipe.reduction, examples)
    factor = 1.0 if whole and recipe.reduction == "mean" else curvature.factor
    return curvature.examples * factor / examples


def _damping(plan: Plan, block: CandidateBlock) -> float:
    """δ of H_0; a layer with Kronecker curvature may have its own."""
    own = None
    if isinstance(block.job, LayerJob):
        own = block.job.damping(plan, plan.rule, {"curvature": block.curvature, "base": block.base})
    return plan.inputs.damping_of(plan.rule) if own is None else own


def _distance(one: StateDict, other: StateDict) -> float:
    return math.sqrt(sum(float((one[name].double() - other[name].double()).square().sum()) for name in one))


def _residual(
    diagnosis: Diagnosis, evaluator: DataEvaluator, candidate: Candidate, gradients: Mapping[str, StateDict]
) -> Residual:
    """r = H_0(θ̂ − θ_0) + Σ α_t ∇ℓ_t(θ̂), with gradients scaled to the examples of the curvature."""
    plan, inputs = evaluator.plan, evaluator.plan.inputs
    scales = [
        _gradient_scale(diagnosis.recipe, inputs, number, diagnosis.examples[task])
        for number, task in enumerate(evaluator.names)
    ]
    sums = torch.zeros(4, dtype=torch.float64)
    lock = threading.Lock()

    def visit(block: CandidateBlock) -> None:
        assert block.prior is not None
        step = block.merged[0].double() - block.base.double()
        pull = torch.zeros_like(step)
        weights = inputs.settings.of(block.job.name).weights
        for task, weight, scale in zip(evaluator.names, weights, scales, strict=True):
            pull += weight * scale * block.part_of(gradients[task])
        residual = applied(block.prior, step) + inputs.damping * step + pull
        squares = torch.stack([v.square().sum() for v in (residual, pull, _solved(plan, block, residual), step)])
        with lock:
            sums.add_(squares)

    visit_blocks(plan, [candidate], visit, threads=evaluator.threads)
    return Residual(*sums.sqrt().tolist())


def _solved(plan: Plan, block: CandidateBlock, residual: Tensor) -> Tensor:
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
