"""Calibrate a merged model: solve for the weights of each linear layer, in forward order, on unlabeled rows.

For one layer, with a bias as one more input equal to 1:

- X̂_t: its inputs in the model calibrated so far, on the rows of task t; X_t: its inputs in the fine-tuned model of t
- X̃_t = μ X_t + (1 − μ) X̂_t
- A_t = X̂_t X̂_tᵀ / c_t and C_t = X̃_t X̂_tᵀ / c_t with c_t = ‖X̂_t X̂_tᵀ‖_F; m is the mean diagonal of Σ_t A_t
- G_t: Σ g gᵀ over the gradients g of the layer's output, scaled to a mean diagonal of 1, or the identity
- W_t: its weight in the fine-tuned model of t; B: its weight in the merge

The calibrated weight W solves

    Σ_t (G_t + ε I) (W A_t − W_t C_t) + λ m (W − B) = 0
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..progress import NoProgress, Progress
from .blocks import CONVOLUTIONS, Batch, BlockModel, HiddenCache, RowStream, Stage
from .distances import Distances, measure
from .rows import TaskRows, count_rows

#: The equation's μ, λ and the tolerance of conjugate gradients.
ALPHA, RIDGE, TOLERANCE = 0.25, 0.3, 1e-4
MAX_STEPS = 400
#: A ridge that is increased after a failed factorization starts here, and grows by a factor of 10.
SMALLEST_RIDGE = 1e-8

Factors = Mapping[str, Tensor]
"""Layer → G, of shape (groups, outputs, outputs)."""


@dataclass
class InputProducts:
    """A_t and C_t of a group of layers, of shape (groups, inputs, inputs)."""

    inputs: Tensor
    mixed: Tensor


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


def layer_matrix(layer: Any) -> Tensor:
    """Weight and bias of a layer as [W b], of shape (groups, outputs, inputs)."""
    weight: Tensor = layer.weight.detach()
    weight = weight.T if type(layer).__name__ == "Conv1D" else weight
    groups = layer.groups if isinstance(layer, CONVOLUTIONS) else 1
    matrix = weight.reshape(groups, len(weight) // groups, -1)
    return matrix if layer.bias is None else torch.cat([matrix, layer.bias.detach().reshape(groups, -1, 1)], -1)


@torch.no_grad()
def set_layer_matrix(layer: Any, matrix: Tensor) -> None:
    """Write [W b] back into a layer."""
    if layer.bias is not None:
        layer.bias.copy_(matrix[..., -1].reshape(layer.bias.shape))
        matrix = matrix[..., :-1]
    layer.weight.copy_(matrix[0].T if type(layer).__name__ == "Conv1D" else matrix.reshape(layer.weight.shape))


def layer_rows(layer: Any, values: Tensor, counted: Tensor | None) -> Tensor:
    """What a layer multiplies its weight with: (groups, rows, inputs), with a 1 for the bias and without padding."""
    if isinstance(layer, CONVOLUTIONS):
        rows = _patches(layer, values)
    else:
        rows = values[counted] if counted is not None else values.reshape(-1, values.shape[-1])
        rows = rows.unsqueeze(0)
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
    return rows


def _patches(layer: Any, values: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    values = F.pad(values, layer._reversed_padding_repeated_twice, mode=mode)
    dimensions = len(layer.kernel_size)
    for axis, (size, step, dilation) in enumerate(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)):
        values = values.unfold(2 + axis, dilation * (size - 1) + 1, step)[..., ::dilation]
    batch, channels = values.shape[:2]
    # (batch, channels, positions…, kernel…) → (groups, batch · positions, channels / groups · kernel)
    values = values.reshape(batch, layer.groups, channels // layer.groups, -1, *values.shape[-dimensions:])
    values = values.movedim(3, 2).movedim(1, 0)
    rows: Tensor = values.reshape(layer.groups, -1, values[0, 0, 0].numel())
    return rows


def input_products(
    layer: Any,
    inputs: Iterable[tuple[Tensor, Tensor | None]],
    teacher_inputs: Iterable[tuple[Tensor, Tensor | None]],
    alpha: float,
    *,
    scaled: bool = True,
) -> InputProducts:
    """A_t and C_t from a layer's inputs in the model calibrated so far, and in the fine-tuned model."""
    products: InputProducts | None = None
    for (values, counted), (teacher_values, _) in zip(inputs, teacher_inputs, strict=True):
        rows = layer_rows(layer, values, counted)
        if products is None:
            size = rows.shape[-1]
            zeros = torch.zeros(len(rows), size, size, dtype=rows.dtype, device=rows.device)
            products = InputProducts(zeros, zeros.clone())
        products.inputs.baddbmm_(rows.mT, rows)
        products.mixed.baddbmm_(layer_rows(layer, teacher_values, counted).mT, rows)
    assert products is not None
    products.mixed.lerp_(products.inputs, 1 - alpha)
    if scaled:
        norm = products.inputs.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)[:, None, None]
        products.inputs /= norm
        products.mixed /= norm
    return products


@dataclass
class Solution:
    """A solved layer."""

    matrix: Tensor
    ridge: float
    """λ, larger than asked for if the system was singular."""
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

    All matrices have a leading dimension for the groups of a convolution, which are solved independently.

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
    mean = diagonal.mean(1)
    mean = torch.where(mean > 0, mean, torch.ones_like(mean))[:, None]
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
    if factors is None:
        return Solution(matrix, ridge)
    every, teachers = [p for p, _ in terms], [w for _, w in terms]
    matrix, steps, residual = _conjugate_gradients(matrix, every, teachers, anchor, damping, factors, settings)
    return Solution(matrix, ridge, steps, residual)


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


def calibrate_layers(
    merged: BlockModel,
    teachers: Mapping[str, BlockModel],
    rows: Mapping[str, Sequence[Batch]],
    cache: HiddenCache,
    settings: Settings,
    *,
    factors: Mapping[str, Factors] | None = None,
    keep: Callable[[str], bool] = lambda layer: False,
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
    students = {task: RowStream(merged, batches, cache) for task, batches in rows.items()}
    guides = {task: RowStream(teachers[task], batches, cache) for task, batches in rows.items()}
    try:
        for stage in merged.structure.stages:
            solved = [[n for n in group if not keep(n)] for group in merged.structure.groups.get(stage.name, [])]
            groups = [group for group in solved if group]
            if stage.is_block:  # a fine-tuned model does not change, so that one pass is enough for all groups
                _run_teachers(teachers, guides, stage, [group[0] for group in groups])
            with merged.loaded(stage):
                for layers in groups:
                    _solve_group(merged, teachers, students, guides, stage, layers, settings, factors, report)
                merged.store(stage, report.layers)
                for student in students.values():
                    student.go_through(stage)
            if not stage.is_block:
                _run_teachers(teachers, guides, stage)
            advance(1)
    finally:
        for stream in (*students.values(), *guides.values()):
            stream.close()
        cache.free_unused()
    return report


def _run_teachers(
    teachers: Mapping[str, BlockModel], guides: Mapping[str, RowStream], stage: Stage, capture: Sequence[str] = ()
) -> None:
    for task, guide in guides.items():
        with teachers[task].loaded(stage):
            guide.go_through(stage, capture)


def _solve_group(
    merged: BlockModel,
    teachers: Mapping[str, BlockModel],
    students: Mapping[str, RowStream],
    guides: Mapping[str, RowStream],
    stage: Stage,
    layers: Sequence[str],
    settings: Settings,
    factors: Mapping[str, Factors] | None,
    report: PassReport,
) -> None:
    """Solve layers that read the same input: one set of products, one solve per layer."""
    scaled = {layer: _scaled_factors([factors[task].get(layer) for task in students]) for layer in layers if factors}
    plain = [layer for layer in layers if scaled.get(layer) is None]
    anchors = {layer: layer_matrix(merged.module.get_submodule(layer)) for layer in layers}

    def products_and_weights() -> Iterator[tuple[InputProducts, dict[str, Tensor]]]:
        first = merged.module.get_submodule(layers[0])
        for task, student in students.items():
            with teachers[task].loaded(stage, layers if stage.is_block else None):
                inputs, targets = student.layer_inputs(stage, layers[0]), guides[task].layer_inputs(stage, layers[0])
                found = input_products(first, inputs, targets, settings.alpha, scaled=settings.scaled)
                if not bool(found.inputs.isfinite().all() and found.mixed.isfinite().all()):
                    raise InputError(f"{stage.name}: the inputs of {layers[0]} are not finite on the rows of {task}")
                yield found, {layer: layer_matrix(teachers[task].module.get_submodule(layer)) for layer in layers}

    terms: Iterable[tuple[InputProducts, dict[str, Tensor]]] = products_and_weights()
    solutions: dict[str, Solution] = {}
    if len(plain) < len(layers):
        terms = [(found, {name: w.clone() for name, w in weights.items()}) for found, weights in terms]
    for layer in layers:
        if layer not in plain:
            given = [(found, weights[layer]) for found, weights in terms]
            solutions[layer] = solve(given, anchors[layer], settings, scaled[layer])
    if plain:  # with G = I the outputs are independent, so that all layers are one solve
        stacked = ((found, torch.cat([weights[layer] for layer in plain], 1)) for found, weights in terms)
        solution = solve(stacked, torch.cat([anchors[layer] for layer in plain], 1), settings)
        parts = solution.matrix.split([anchors[layer].shape[1] for layer in plain], 1)
        solutions |= {layer: replace(solution, matrix=part) for layer, part in zip(plain, parts, strict=True)}
    for layer in layers:
        solution = solutions[layer]
        if not bool(solution.matrix.isfinite().all()):
            raise InputError(f"{layer}: the calibrated weight is not finite. Try a larger ridge.")
        set_layer_matrix(merged.module.get_submodule(layer), solution.matrix)
        report.layers.append(layer)
        report.most_steps = max(report.most_steps, solution.steps)
        if solution.ridge > settings.ridge:
            report.ridges[layer] = solution.ridge
        if solution.residual > settings.tolerance:
            report.residuals[layer] = solution.residual


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
    keep: Callable[[str], bool] = lambda layer: False,
    shared_head: bool = True,
    check: bool = True,
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
        progress: Is told how many stages are done.
    """
    progress = progress or NoProgress()
    candidates = dict(CANDIDATES[curvature])
    notes: list[str] = []
    if find_factors is None:
        candidates = {PLAIN: None}
    fit = {task: one.fit for task, one in rows.items()}
    held_out = {task: one.held_out for task, one in rows.items()}
    every = {task: [*one.fit, *one.held_out] for task, one in rows.items()}
    passes = len(candidates) + 1 if check else 1
    progress.begin("calibrating", passes * len(merged.structure.stages))
    factors: dict[str, dict[str, Tensor]] = {}
    if find_factors is not None and any(epsilon is not None for epsilon in candidates.values()):
        factors = {task: dict(find_factors(task, batches, 0)) for task, batches in (fit if check else every).items()}

    def solve_candidate(name: str, batches: Mapping[str, Sequence[Batch]]) -> tuple[BlockModel, PassReport]:
        epsilon, model = candidates[name], merged.copy()
        chosen = replace(settings, epsilon=epsilon or 0.0)
        given = factors if epsilon is not None else None
        report = calibrate_layers(
            model,
            teachers,
            batches,
            cache,
            chosen,
            factors=given,
            keep=keep,
            advance=progress.advance,
        )
        return model, report

    if not check:
        name = next(iter(candidates))
        model, report = solve_candidate(name, every)
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
            for layer, more in find_factors(task, batches, count_rows(fit[task])).items():
                factors[task][layer] += more
    model, report = solve_candidate(chosen, every)
    return Calibration(model, chosen, distances, report, notes)
