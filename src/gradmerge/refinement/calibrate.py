"""Calibrate a merged model: solve for the weights of each linear layer, in forward order, on unlabeled rows.

For one layer, with a bias as one more input equal to 1:

- X̂_t: its inputs in the model calibrated so far, on the rows of task t; X_t: its inputs in the fine-tuned model of t
- X̃_t = μ X_t + (1 − μ) X̂_t; μ is the option ``alpha``
- A_t = X̂_t X̂_tᵀ / c_t and C_t = X̃_t X̂_tᵀ / c_t with c_t = ‖X̂_t X̂_tᵀ‖_F; m is the mean diagonal of Σ_t A_t
- G_t: Σ g gᵀ over the gradients g of the layer's output, scaled to a mean diagonal of 1, or the identity
- W_t: its weight in the fine-tuned model of t; B: its weight in the merge

The calibrated weight W solves

    Σ_t (G_t + ε I) (W A_t − W_t C_t) + λ m (W − B) = 0

λ is the option ``ridge``. ``anchor`` is B in the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..curvature.losses import unwrapped
from ..errors import InputError
from ..progress import NoProgress, Progress
from .blocks import Batch, BlockModel, RowStream, Stage
from .distances import Distances, measure
from .hidden_cache import HiddenCache
from .layers import ExpertLayer, Layer, LayerInput
from .rows import TaskRows, count_rows, join_batches

#: The equation's μ, λ and the tolerance of conjugate gradients.
ALPHA, RIDGE, TOLERANCE = 0.25, 0.3, 1e-4
MAX_STEPS = 400
#: A ridge that is increased after a failed factorization starts here, and grows by a factor of 10.
SMALLEST_RIDGE = 1e-8

Factors = Mapping[str, Tensor]
"""Layer → G, of shape (groups, outputs, outputs)."""


@dataclass(frozen=True)
class Settings:
    """The numbers of the equation."""

    alpha: float = ALPHA
    """μ, the share of the fine-tuned model's inputs in the target."""
    ridge: float = RIDGE
    """λ, how strongly a layer is held to the merge."""
    epsilon: float = 0.0
    """Is added to the diagonal of every G."""
    tolerance: float = TOLERANCE
    """Relative residual at which conjugate gradients stop."""
    scaled: bool = True
    """Whether c_t is the norm of the products; otherwise it is 1."""


@dataclass
class PassReport:
    """What one pass over all layers did."""

    layers: list[str] = field(default_factory=list)
    """The layers that were solved."""
    ridges: dict[str, float] = field(default_factory=dict)
    """Layer → its ridge, where the system was singular and needed a larger one."""
    most_steps: int = 0
    """Steps of conjugate gradients for the layer that took most."""
    residuals: dict[str, float] = field(default_factory=dict)
    """Layer → relative residual, where conjugate gradients did not reach the tolerance."""
    idle_experts: dict[str, set[int]] = field(default_factory=dict)
    """Module of experts → the experts that no token was routed to. They keep the merge's weights."""


@dataclass
class Calibration:
    """A calibrated model, and how it was chosen."""

    model: BlockModel
    chosen: str
    """The candidate that was closest to the fine-tuned models on held-out rows; `MERGE` if none was closer."""
    distances: dict[str, Distances]
    """Candidate → distances on held-out rows; `MERGE` is the model before calibration."""
    report: PassReport
    notes: list[str] = field(default_factory=list)


# --- one layer


class InputProducts(NamedTuple):
    """A_t and C_t of a group of layers, of shape (groups, inputs, inputs)."""

    inputs: Tensor
    mixed: Tensor


def input_products(
    layer: Layer,
    inputs: Iterable[LayerInput],
    teacher_layer: Layer,
    teacher_inputs: Iterable[LayerInput],
    alpha: float,
    *,
    scaled: bool = True,
) -> InputProducts:
    """A_t and C_t from a layer's inputs in the model calibrated so far, and in the fine-tuned model.

    Padding and the routing to experts are those of the model calibrated so far, so that both have the same tokens.
    """
    shape = layer.matrix().shape
    total, mixed = torch.zeros(2, shape[0], shape[2], shape[2], dtype=layer.weight.dtype, device=layer.weight.device)
    for merged, teacher in zip(inputs, teacher_inputs, strict=True):
        teacher_rows = teacher_layer.rows(merged._replace(values=teacher.values))
        for (groups, rows), (_, target_rows) in zip(layer.rows(merged), teacher_rows, strict=True):
            total[groups].baddbmm_(rows.mT, rows)
            mixed[groups].baddbmm_(target_rows.mT, rows)
    mixed.lerp_(total, 1 - alpha)
    if scaled:
        norm = total.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)[:, None, None]
        total /= norm
        mixed /= norm
    return InputProducts(total, mixed)


@dataclass
class Solution:
    """A solved layer."""

    matrix: Tensor
    ridge: float
    """λ, which is larger than the setting if the system was singular."""
    idle: list[int]
    """The groups that had no input. They keep B."""
    steps: int = 0
    """Steps of conjugate gradients."""
    residual: float = 0.0
    """Relative residual of conjugate gradients."""


def solve(
    terms: Iterable[tuple[InputProducts, Tensor]],
    anchor: Tensor,
    settings: Settings,
    factors: Sequence[Tensor] | None = None,
) -> Solution:
    """Solve the equation for one layer in float64; without ``factors`` G_t is the identity and ε is 0.

    All matrices have a leading dimension for the groups of a layer, which are solved independently.

    Args:
        terms: For every task A_t and C_t, and W_t. Without ``factors``, those of one task are needed at a time.
        anchor: B.
        settings: The numbers of the equation.
        factors: G_t for every task.
    """
    terms = terms if factors is None else list(terms)
    anchor = anchor.double()
    total, right = None, torch.zeros_like(anchor)
    for products, weight in terms:
        total = products.inputs.to(torch.float64, copy=True) if total is None else total.add_(products.inputs)
        right += weight @ products.mixed  # as precise as the products are
    assert total is not None
    diagonal = total.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(1)[:, None]
    idle = mean[:, 0] == 0
    mean[idle], diagonal[idle] = 1.0, 1.0
    ridge, added = settings.ridge, 0.0
    while True:
        diagonal += (ridge - added) * mean
        added = ridge
        root, failed = torch.linalg.cholesky_ex(total)
        if not bool(failed.any()):
            break
        ridge = max(10 * ridge, SMALLEST_RIDGE)
    damping = (ridge * mean)[:, :, None]
    del total, diagonal
    matrix = torch.cholesky_solve(right.add_(damping * anchor).mT, root).mT
    matrix[idle] = anchor[idle]
    solution = Solution(matrix, ridge, idle.nonzero()[:, 0].tolist())
    if factors is not None:
        all_products, teachers = [p for p, _ in terms], [w for _, w in terms]
        refined = _conjugate_gradients(matrix, all_products, teachers, anchor, damping, factors, settings)
        solution.matrix, solution.steps, solution.residual = refined
    return solution


def _conjugate_gradients(
    start: Tensor,
    products: Sequence[InputProducts],
    teachers: Sequence[Tensor],
    anchor: Tensor,
    damping: Tensor,
    factors: Sequence[Tensor],
    settings: Settings,
) -> tuple[Tensor, int, float]:
    """Solve with output factors, preconditioned in the eigenbases of the mean G and of Σ A."""
    identity = torch.eye(start.shape[1], dtype=start.dtype, device=start.device)
    outputs = [factor.double() + settings.epsilon * identity for factor in factors]
    inputs = [p.inputs.double() for p in products]
    output_values, output_basis = torch.linalg.eigh(sum_of(outputs) / len(outputs))
    input_values, input_basis = torch.linalg.eigh(sum_of(inputs))
    spectrum = output_values.clamp(min=0)[:, :, None] * input_values.clamp(min=0)[:, None, :] + damping

    def apply(matrix: Tensor) -> Tensor:
        return damping * matrix + sum_of(g @ matrix @ a for g, a in zip(outputs, inputs, strict=True))

    def precondition(matrix: Tensor) -> Tensor:
        result: Tensor = output_basis @ ((output_basis.mT @ matrix @ input_basis) / spectrum) @ input_basis.mT
        return result

    right = sum_of(g @ w.double() @ p.mixed.double() for g, w, p in zip(outputs, teachers, products, strict=True))
    right = right + damping * anchor
    matrix, residual = start, right - apply(start)
    goal = settings.tolerance * float(right.norm())
    direction = conditioned = precondition(residual)
    product = float((residual * conditioned).sum())
    steps = 0
    while float(residual.norm()) > goal and steps < MAX_STEPS:
        image = apply(direction)
        step = product / float((direction * image).sum())
        matrix = matrix + step * direction
        residual = residual - step * image
        conditioned = precondition(residual)
        product, before = float((residual * conditioned).sum()), product
        direction = conditioned + (product / before) * direction
        steps += 1
    return matrix, steps, float(residual.norm()) / max(float(right.norm()), 1e-300)


def sum_of(tensors: Iterator[Tensor] | Sequence[Tensor]) -> Tensor:
    """The sum of at least one tensor."""
    parts = iter(tensors)
    total = next(parts)
    for tensor in parts:
        total = total + tensor
    return total


# --- all layers


class TaskStreams(NamedTuple):
    """The rows of a task on their way through the merge and through the task's fine-tuned model."""

    task: str
    merged: RowStream
    teacher: RowStream
    factors: Factors

    def run_teacher(self, stage: Stage, capture: Sequence[str] = ()) -> None:
        """Run the rows through a stage of the fine-tuned model, and capture the inputs of some modules."""
        with self.teacher.model.loaded(stage):
            self.teacher.run_stage(stage, capture)

    def products(self, stage: Stage, layers: Sequence[Layer], settings: Settings) -> tuple[InputProducts, list[Tensor]]:
        """A_t and C_t of layers that read the same input, and W_t of each of them, until other weights are loaded."""
        first, model = layers[0], self.teacher.model
        teachers = [model.layers[layer.name] for layer in layers]
        with model.loaded(stage, teachers if stage.is_block else None):
            inputs = (self.merged.layer_inputs(stage, first.path), self.teacher.layer_inputs(stage, first.path))
            products = input_products(first, inputs[0], teachers[0], inputs[1], settings.alpha, scaled=settings.scaled)
            if not all(bool(matrix.isfinite().all()) for matrix in products):
                raise InputError(f"{stage.name}: the inputs of {first.name} are not finite on the rows of {self.task}")
            return products, [layer.matrix() for layer in teachers]


def calibrate_layers(
    merged: BlockModel,
    teachers: Mapping[str, BlockModel],
    rows: Mapping[str, Sequence[Batch]],
    cache: HiddenCache,
    settings: Settings,
    *,
    factors: Mapping[str, Factors] | None = None,
    keep: Callable[[Layer], bool] = lambda layer: False,
    advance: Callable[[int], None] = lambda amount: None,
) -> PassReport:
    """Solve the layers of ``merged`` in place, in forward order.

    Args:
        merged: The merge. Its weights change stage by stage.
        teachers: Task → fine-tuned model with the same blocks.
        rows: Task → batches of unlabeled rows.
        cache: Holds the hidden states of all rows in all models.
        settings: The numbers of the equation.
        factors: Task → layer → G, which is scaled here. Layers without factors have G = I.
        keep: Says for which layers the merge keeps its weights.
        advance: Called with 1 after every stage.
    """
    report = PassReport()
    streams = [
        TaskStreams(
            task,
            RowStream(merged, batches, cache),
            RowStream(teachers[task], batches, cache),
            {} if factors is None else factors[task],
        )
        for task, batches in rows.items()
    ]
    try:
        for stage in merged.structure.stages:
            groups = [[merged.layers[name] for name in group] for group in merged.structure.groups.get(stage.name, [])]
            groups = [solved for group in groups if (solved := [layer for layer in group if not keep(layer)])]
            if stage.is_block:  # a fine-tuned model does not change, so that one pass is enough for all groups
                for stream in streams:
                    stream.run_teacher(stage, list(dict.fromkeys(layers[0].path for layers in groups)))
            with merged.loaded(stage):
                for number, layers in enumerate(groups):  # the next group sees the calibrated layers
                    _solve_group(streams, stage, layers, settings, report)
                    for stream in streams:
                        stream.teacher.drop_captured(but=[later[0].path for later in groups[number + 1 :]])
                merged.store(stage, report.layers)
                for stream in streams:
                    stream.merged.run_stage(stage)
            if not stage.is_block:
                for stream in streams:
                    stream.run_teacher(stage)
            advance(1)
    finally:
        for stream in streams:
            stream.merged.close()
            stream.teacher.close()
        cache.free_unused()
    return report


def _solve_group(
    streams: Sequence[TaskStreams], stage: Stage, layers: Sequence[Layer], settings: Settings, report: PassReport
) -> None:
    """Solve layers that read the same input: one set of products, one solve per layer."""
    anchors = [layer.matrix() for layer in layers]
    scaled = [_scaled_factors([stream.factors.get(layer.name) for stream in streams]) for layer in layers]
    terms: Iterable[tuple[InputProducts, list[Tensor]]]
    terms = (stream.products(stage, layers, settings) for stream in streams)
    if any(scaled):
        terms = [(products, [weight.clone() for weight in weights]) for products, weights in terms]
    solutions: dict[int, Solution] = {}
    for index, factors in enumerate(scaled):
        if factors is not None:
            layer_terms = [(products, weights[index]) for products, weights in terms]
            solutions[index] = solve(layer_terms, anchors[index], settings, factors)
    if plain := [index for index, factors in enumerate(scaled) if factors is None]:
        # With G = I the outputs are independent, so that all layers are one solve.
        stacked = ((products, _joined([weights[index] for index in plain])) for products, weights in terms)
        solution = solve(stacked, _joined([anchors[index] for index in plain]), settings)
        parts = solution.matrix.split([anchors[index].shape[1] for index in plain], 1)
        solutions |= {index: replace(solution, matrix=part) for index, part in zip(plain, parts, strict=True)}
    for index, layer in enumerate(layers):
        solution = solutions[index]
        if not bool(solution.matrix.isfinite().all()):
            raise InputError(f"{layer.name}: the calibrated weight is not finite. Try a larger ridge.")
        layer.set_matrix(solution.matrix)
        report.layers.append(layer.name)
        report.most_steps = max(report.most_steps, solution.steps)
        if solution.ridge > settings.ridge:
            report.ridges[layer.name] = solution.ridge
        if solution.residual > settings.tolerance:
            report.residuals[layer.name] = solution.residual
        if isinstance(layer, ExpertLayer) and solution.idle:
            idle = report.idle_experts.setdefault(layer.path, set())
            idle.update(layer.experts[group] for group in solution.idle)


def _joined(matrices: Sequence[Tensor]) -> Tensor:
    return matrices[0] if len(matrices) == 1 else torch.cat(list(matrices), 1)


def _scaled_factors(factors: Sequence[Tensor | None]) -> list[Tensor] | None:
    """G with a mean diagonal of 1; None (the identity) for a layer that lacks G or has no gradient in a task."""
    scaled = []
    for factor in factors:
        if factor is None:
            return None
        mean = factor.double().diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
        if not bool((mean > 0).all()):
            return None
        scaled.append(factor / mean.to(factor.dtype))
    return scaled


# --- the choice of G

MERGE = "merge"
"""The model before calibration, among the candidates."""
PLAIN = "no output factors"
"""The candidate with G = I."""
#: Setting of ``curvature`` → candidates: a name, and the ε that goes with G; None stands for G = I.
CANDIDATES: Mapping[str, Mapping[str, float | None]] = {
    "none": {PLAIN: None},
    "merge": {"output factors, epsilon 0.1": 0.1},
    "auto": {PLAIN: None, "output factors, epsilon 1": 1.0, "output factors, epsilon 0.1": 0.1},
}


def calibrate_model(
    merged: BlockModel,
    teachers: Mapping[str, BlockModel],
    rows: Mapping[str, TaskRows],
    cache: HiddenCache,
    settings: Settings,
    *,
    curvature: str = "auto",
    find_factors: Callable[[str, Sequence[Batch], int], Factors] | None = None,
    keep: Callable[[Layer], bool] = lambda layer: False,
    shared_head: bool = True,
    check: bool = True,
    max_positions: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate a copy of a merge with the G that brings it closest to the fine-tuned models on held-out rows.

    Every candidate is solved with nine tenths of the rows and compared on the last tenth. The closest one is solved
    again with all rows. If no candidate is closer than the merge, the merge is returned.

    Args:
        merged: The merge, which is not changed.
        teachers: Task → fine-tuned model.
        rows: Task → its rows.
        cache: Holds hidden states.
        settings: The numbers of the equation; a candidate brings its own ε.
        curvature: ``none``, ``merge`` or ``auto``, a key of `CANDIDATES`.
        find_factors: Task, batches and number of the first row → Σ g gᵀ per layer. None: only G = I is possible.
        keep: Says for which layers the merge keeps its weights.
        shared_head: Whether the fine-tuned models share their head, so that answers can be compared.
        check: Compare with the merge. Without it the first candidate is solved with all rows.
        max_positions: Join batches up to this number of tokens or patches, since small passes leave a GPU idle. 0 joins
            none.
        progress: Receives the number of finished stages.
    """
    progress = progress or NoProgress()
    pad_token = getattr(getattr(unwrapped(merged.module), "config", None), "pad_token_id", None) or 0
    candidates = dict(CANDIDATES[curvature])
    notes: list[str] = []
    if find_factors is None:
        candidates = {PLAIN: None}
    fit = {task: task_rows.fit for task, task_rows in rows.items()}
    held_out = {task: task_rows.held_out for task, task_rows in rows.items()}
    all_rows = {task: [*task_rows.fit, *task_rows.held_out] for task, task_rows in rows.items()}
    passes = len(candidates) + 1 if check else 1
    progress.begin("calibrating", passes * len(merged.structure.stages))
    factors: dict[str, dict[str, Tensor]] = {}
    if find_factors is not None and any(epsilon is not None for epsilon in candidates.values()):
        factors = {task: dict(find_factors(task, batches, 0)) for task, batches in (fit if check else all_rows).items()}

    def solve_candidate(name: str, batches: Mapping[str, Sequence[Batch]]) -> tuple[BlockModel, PassReport]:
        epsilon, model = candidates[name], merged.copy()
        candidate_settings = replace(settings, epsilon=epsilon or 0.0)
        used_factors = factors if epsilon is not None else None
        report = calibrate_layers(
            model,
            teachers,
            {
                task: [joined for _, joined in join_batches(task_batches, max_positions, pad_token)]
                for task, task_batches in batches.items()
            },
            cache,
            candidate_settings,
            factors=used_factors,
            keep=keep,
            advance=progress.advance,
        )
        return model, report

    if not check:
        name = next(iter(candidates))
        model, report = solve_candidate(name, all_rows)
        return Calibration(model, name, {}, report, notes)
    distances = {MERGE: measure(merged, teachers, held_out, cache, shared_head)}
    for name in candidates:
        model, report = solve_candidate(name, fit)
        distances[name] = measure(model, teachers, held_out, cache, shared_head)
        model.drop_changes()
    chosen = min(distances, key=lambda name: distances[name].total)
    if chosen == MERGE:
        notes.append("no candidate is closer to the fine-tuned models than the merge on held-out rows")
        return Calibration(merged, MERGE, distances, PassReport(), notes)
    if candidates[chosen] is not None and find_factors is not None:
        for task, batches in held_out.items():
            for layer, factor in find_factors(task, batches, count_rows(fit[task])).items():
                factors[task][layer] += factor
    model, report = solve_candidate(chosen, all_rows)
    return Calibration(model, chosen, distances, report, notes)
