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

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ..curvature.losses import unwrapped
from ..errors import InputError
from ..progress import NoProgress, Progress
from .blocks import Batch, BlockModel, CachedTensor, CachedTree, HiddenCache, RowStream, Stage, finished_modules
from .distances import Distances, Outputs, measure_outputs, relative_distance, stream_outputs
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


# --- one group of layers


class InputProducts(NamedTuple):
    """A_t and C_t of layers that read the same input, of shape (groups, inputs, inputs)."""

    inputs: Tensor
    mixed: Tensor


def input_products(
    layer: Layer,
    inputs: Iterable[LayerInput],
    teacher_layer: Layer,
    teacher_inputs: Iterable[LayerInput],
    settings: Settings,
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
    mixed.lerp_(total, 1 - settings.alpha)
    if settings.scaled:
        norm = total.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float32).tiny)[:, None, None]
        total /= norm
        mixed /= norm
    return InputProducts(total, mixed)


@dataclass
class Solution:
    """Solved layers that read the same input."""

    matrices: list[Tensor]
    ridge: float
    """λ, which is larger than the setting if the system was singular."""
    idle: list[int]
    """The groups that had no input. They keep B."""
    steps: int = 0
    """Steps of conjugate gradients for the layer that took most."""
    residual: float = 0.0
    """The largest relative residual of conjugate gradients."""


def solve(
    terms: Iterable[tuple[InputProducts, Sequence[Tensor]]],
    anchors: Sequence[Tensor],
    settings: Settings,
    factors: Sequence[Sequence[Tensor] | None],
) -> Solution:
    """Solve the equation in float64 for layers that read the same input.

    All matrices have a leading dimension for the groups of a layer, which are solved independently.

    Args:
        terms: For every task A_t and C_t, and W_t of every layer. Read once: without G, those of one task are in
            memory at a time.
        anchors: B of every layer.
        settings: The numbers of the equation.
        factors: For every layer the G_t of every task; None for the identity, where ε is 0.
    """
    anchors = [anchor.double() for anchor in anchors]
    total, rights, kept = None, [torch.zeros_like(anchor) for anchor in anchors], []
    for products, weights in terms:
        total = products.inputs.to(torch.float64, copy=True) if total is None else total.add_(products.inputs)
        for right, weight in zip(rights, weights, strict=True):
            right += weight @ products.mixed  # as precise as the products are
        if any(factors):
            kept.append((products, weights))
    assert total is not None
    spectrum = torch.linalg.eigh(total) if kept else None
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
    solution = Solution([], ridge, idle.nonzero()[:, 0].tolist())
    for index, (right, anchor, outputs) in enumerate(zip(rights, anchors, factors, strict=True)):
        matrix = torch.cholesky_solve(right.add_(damping * anchor).mT, root).mT
        matrix[idle] = anchor[idle]
        if outputs is not None and spectrum is not None:
            layer_terms = [(products, weights[index]) for products, weights in kept]
            found = _conjugate_gradients(matrix, layer_terms, outputs, anchor, damping, spectrum, settings)
            matrix, steps, residual = found
            solution.steps, solution.residual = max(solution.steps, steps), max(solution.residual, residual)
        solution.matrices.append(matrix)
    return solution


def _conjugate_gradients(
    start: Tensor,
    terms: Sequence[tuple[InputProducts, Tensor]],
    factors: Sequence[Tensor],
    anchor: Tensor,
    damping: Tensor,
    input_spectrum: tuple[Tensor, Tensor],
    settings: Settings,
) -> tuple[Tensor, int, float]:
    """Solve for one layer with output factors, preconditioned in the eigenbases of the mean G and of Σ A.

    Returns the matrix, the number of steps, and the relative residual.
    """
    identity = torch.eye(start.shape[1], dtype=start.dtype, device=start.device)
    outputs = [factor.double() + settings.epsilon * identity for factor in factors]
    inputs = [products.inputs.double() for products, _ in terms]
    output_values, output_basis = torch.linalg.eigh(torch.stack(outputs).mean(0))
    input_values, input_basis = input_spectrum
    spectrum = output_values.clamp(min=0)[:, :, None] * input_values.clamp(min=0)[:, None, :] + damping

    def apply(matrix: Tensor) -> Tensor:
        result = damping * matrix
        for g, a in zip(outputs, inputs, strict=True):
            result += g @ matrix @ a
        return result

    def precondition(matrix: Tensor) -> Tensor:
        result: Tensor = output_basis @ ((output_basis.mT @ matrix @ input_basis) / spectrum) @ input_basis.mT
        return result

    right = damping * anchor
    for g, (products, weight) in zip(outputs, terms, strict=True):
        right += g @ weight.double() @ products.mixed.double()
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


# --- all layers

FIT, HELD_OUT = PARTS = TaskRows._fields
"""The parts of a task's rows."""

Streams = Mapping[str, RowStream]
"""Part of a task's rows → these rows on their way through a model."""


@dataclass
class CalibrationInputs:
    """A merge, its fine-tuned models, and unlabeled rows."""

    merged: BlockModel
    teachers: Mapping[str, BlockModel]
    """Task → fine-tuned model with the same blocks."""
    rows: Mapping[str, TaskRows]
    cache: HiddenCache
    """Holds the hidden states of all rows in all models."""
    store: HiddenCache
    """Holds new weights."""
    settings: Settings = field(default_factory=Settings)
    keep: Callable[[Layer], bool] = lambda layer: False
    """Says for which layers the merge keeps its weights."""
    shared_head: bool = True
    """Whether the fine-tuned models share their head, so that answers can be compared."""

    def groups(self, stage: Stage) -> list[list[Layer]]:
        """The layers of a stage that are solved, in groups that read the same input, in the order in which they run."""
        layers = self.merged.layers
        groups = [[layers[name] for name in group] for group in self.merged.structure.groups.get(stage.name, [])]
        return [solved for group in groups if (solved := [layer for layer in group if not self.keep(layer)])]

    def streams(self, model: BlockModel, task: str, parts: Sequence[str] = PARTS) -> Streams:
        """Rows of a task at the start of a model; those of other ``parts`` are left out."""
        rows = self.rows[task]._asdict()
        return {part: RowStream(model, rows[part] if part in parts else [], self.cache) for part in PARTS}


@dataclass
class Candidate:
    """A way to calibrate the merge, and what comes out of it."""

    name: str
    epsilon: float | None = None
    """ε; None for G = I."""
    solved_with: Sequence[str] = (FIT,)
    """The parts of the rows that the layers are solved with; empty for the merge as it is."""
    report: PassReport = field(default_factory=PassReport)
    distances: Distances = field(default_factory=Distances)
    """On held-out rows, unless the layers are solved with them."""
    weights: dict[str, CachedTensor] = field(default_factory=dict)
    """Parameter → new value, if the layers are solved with all rows."""
    streams: Mapping[str, Streams] = field(default_factory=dict)
    """Task → its rows on their way through the candidate."""

    @property
    def is_final(self) -> bool:
        """Whether the layers are solved with all rows."""
        return len(self.solved_with) == len(PARTS)

    @contextlib.contextmanager
    def own_weights(self, inputs: CalibrationInputs, stage: Stage) -> Iterator[None]:
        """Let the candidate change the merge's weights of a stage, and restore them at the end."""
        solved = {name for group in inputs.groups(stage) for layer in group for name in layer.parameters}
        names = [name for name in inputs.merged.weights_of(stage) if name in solved or name in self.weights]
        parameters = {name: inputs.merged.module.get_parameter(name).data for name in names if self.solved_with}
        before = {name: parameter.clone() for name, parameter in parameters.items()}
        for name in parameters.keys() & self.weights.keys():  # several stages run the code outside the blocks
            parameters[name].copy_(self.weights[name].get())
            self.weights.pop(name).drop()
        yield
        is_run_again = not stage.is_block and stage != inputs.merged.structure.stages[-1]
        for name, parameter in parameters.items():
            if self.is_final or is_run_again:
                self.weights[name] = inputs.store.put(parameter)
            parameter.copy_(before[name])

    def drop(self) -> None:
        """Drop all hidden states, and the weights of a candidate that is not final."""
        for stream in (stream for streams in self.streams.values() for stream in streams.values()):
            stream.drop()
        for value in {} if self.is_final else self.weights.values():
            value.drop()


class Teacher:
    """A fine-tuned model, and the rows of its task on their way through it."""

    def __init__(self, inputs: CalibrationInputs, task: str) -> None:
        self.task, self.model, self._cache = task, inputs.teachers[task], inputs.cache
        self.streams = inputs.streams(self.model, task)
        self._outputs: list[CachedTree] = []

    def run(self, stage: Stage, groups: Sequence[Sequence[Layer]]) -> None:
        """Run all rows through a stage. Keep the weights of the layers to solve, and what they read."""
        layers = [self.model.layers[layer.name] for group in groups for layer in group]
        with self.model.loaded(stage):
            for stream in self.streams.values():
                stream.run_stage(stage, {layer.path for layer in layers})
            self.model.keep(layers, self._cache)
            if stage == self.model.structure.stages[-1]:
                outputs = stream_outputs(self.streams[HELD_OUT])
                self._outputs = [self._cache.put_tree((one.representation, one.logits)) for one in outputs]

    def outputs(self) -> Iterator[Outputs]:
        """What the model returns for the held-out rows, after the last stage."""
        return (Outputs(*outputs.get()) for outputs in self._outputs)

    def terms(
        self, candidate: Candidate, stage: Stage, group: Sequence[Layer], finished: Sequence[str], settings: Settings
    ) -> tuple[InputProducts, list[Tensor]]:
        """A_t and C_t of layers that read the same input, and W_t of each of them."""
        first, layers = group[0], [self.model.layers[layer.name] for layer in group]
        own, other = candidate.streams[self.task], self.streams
        inputs = chain(*(own[part].layer_inputs(stage, first.path, finished) for part in candidate.solved_with))
        targets = chain(*(other[part].captured_inputs(first.path) for part in candidate.solved_with))
        with self.model.with_kept():
            products = input_products(first, inputs, layers[0], targets, settings)
            if not all(bool(matrix.isfinite().all()) for matrix in products):
                raise InputError(f"{stage.name}: the inputs of {first.name} are not finite on the rows of {self.task}")
            return products, [layer.matrix() for layer in layers]

    def drop(self) -> None:
        """Drop all hidden states."""
        self.model.keep([], self._cache)
        for stream in self.streams.values():
            stream.drop()
        for outputs in self._outputs:
            outputs.drop()


@torch.no_grad()
def calibrate_layers(
    inputs: CalibrationInputs,
    candidates: Sequence[Candidate],
    factors: Mapping[str, Factors] | None = None,
    advance: Callable[[int], None] = lambda amount: None,
) -> None:
    """Solve the layers of candidates in forward order, and measure their distances on held-out rows.

    All candidates go through a stage before the next stage begins. So every weight is read once, and the rows run
    through the fine-tuned models once.

    Args:
        inputs: The models and the rows. The weights of the merge are as before at the end.
        candidates: What to solve; the results are written into them.
        factors: Task → layer → G, which is scaled here. Layers without factors have G = I.
        advance: Called with 1 after every stage.
    """
    merged = inputs.merged
    teachers = [Teacher(inputs, task) for task in inputs.rows]
    for candidate in candidates:
        parts = PARTS if candidate.solved_with else (HELD_OUT,)
        candidate.streams = {task: inputs.streams(merged, task, parts) for task in inputs.rows}
    try:
        for stage in merged.structure.stages:
            groups = inputs.groups(stage)
            for teacher in teachers:
                teacher.run(stage, groups)
            with merged.loaded(stage):
                for candidate in candidates:
                    with candidate.own_weights(inputs, stage):
                        for number, group in enumerate(groups if candidate.solved_with else []):
                            finished = finished_modules(merged.module, groups[:number], groups[number:])
                            terms = (
                                teacher.terms(candidate, stage, group, finished, inputs.settings)
                                for teacher in teachers
                            )
                            _solve_group(candidate, group, terms, inputs.settings, factors)
                        _run_stage(candidate, stage, teachers, inputs.shared_head)
            advance(1)
    finally:
        for teacher in teachers:
            teacher.drop()
        for candidate in candidates:
            candidate.drop()
        inputs.cache.free_unused()


def _solve_group(
    candidate: Candidate,
    group: Sequence[Layer],
    terms: Iterable[tuple[InputProducts, list[Tensor]]],
    settings: Settings,
    factors: Mapping[str, Factors] | None,
) -> None:
    """Solve layers that read the same input, and set their weights. The next group sees them."""
    report = candidate.report
    used: list[list[Tensor] | None] = [None] * len(group)
    if candidate.epsilon is not None and factors is not None:
        settings = replace(settings, epsilon=candidate.epsilon)
        used = [_scaled_factors([of_task.get(layer.name) for of_task in factors.values()]) for layer in group]
    solution = solve(terms, [layer.matrix() for layer in group], settings, used)
    for layer, matrix in zip(group, solution.matrices, strict=True):
        if not bool(matrix.isfinite().all()):
            raise InputError(f"{layer.name}: the calibrated weight is not finite. Try a larger ridge.")
        layer.set_matrix(matrix)
        report.layers.append(layer.name)
        if solution.ridge > settings.ridge:
            report.ridges[layer.name] = solution.ridge
        if solution.residual > settings.tolerance:
            report.residuals[layer.name] = solution.residual
        if isinstance(layer, ExpertLayer) and solution.idle:
            idle = report.idle_experts.setdefault(layer.path, set())
            idle.update(layer.experts[expert] for expert in solution.idle)
    report.most_steps = max(report.most_steps, solution.steps)


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


def _run_stage(candidate: Candidate, stage: Stage, teachers: Sequence[Teacher], shared_head: bool) -> None:
    """Run the rows through a calibrated stage, and measure the distances on held-out rows."""
    for teacher in teachers:
        streams = candidate.streams[teacher.task]
        for stream in streams.values():
            stream.run_stage(stage)
        own, other, distances = streams[HELD_OUT], teacher.streams[HELD_OUT], candidate.distances
        if candidate.is_final:
            continue
        if stage.is_block:
            pairs = zip(own.hidden(stage), other.hidden(stage), strict=True)
            distances.blocks.setdefault(stage.name, {})[teacher.task] = relative_distance(pairs)
        if stage == own.model.structure.stages[-1]:
            measure_outputs(distances, teacher.task, own, teacher.outputs(), shared_head)


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


@dataclass
class Calibration:
    """A calibrated merge, and how it was chosen."""

    chosen: str
    """The candidate that was closest to the fine-tuned models on held-out rows; `MERGE` if none was closer."""
    weights: dict[str, CachedTensor]
    """Parameter → new value, for the layers that were solved."""
    report: PassReport
    distances: dict[str, Distances] = field(default_factory=dict)
    """Candidate → distances on held-out rows; `MERGE` is the model before calibration."""


def calibrate_model(
    inputs: CalibrationInputs,
    curvature: str = "auto",
    find_factors: Callable[[str, Sequence[Batch], int], dict[str, Tensor]] | None = None,
    *,
    check: bool = True,
    max_positions: int = 0,
    progress: Progress | None = None,
) -> Calibration:
    """Calibrate a merge with the G that brings it closest to the fine-tuned models on held-out rows.

    Every candidate is solved with nine tenths of the rows and compared on the last tenth. The closest one is solved
    again with all rows. If no candidate is closer than the merge, nothing changes.

    Args:
        inputs: The models and the rows.
        curvature: ``none``, ``merge`` or ``auto``, a key of `CANDIDATES`.
        find_factors: Task, batches and number of the first row → Σ g gᵀ per layer. None: only G = I is possible.
        check: Compare with the merge. Without it the first candidate is solved with all rows.
        max_positions: Join batches up to this number of tokens or patches, since small passes leave a GPU idle. 0 joins
            none.
        progress: Receives the number of finished stages.
    """
    progress, stages = progress or NoProgress(), len(inputs.merged.structure.stages)
    epsilons = CANDIDATES[curvature] if find_factors is not None else {PLAIN: None}
    rows, factors = inputs.rows, {}
    if find_factors is not None:
        for task, (fit, held_out) in rows.items():
            factors[task] = find_factors(task, fit if check else [*fit, *held_out], 0)
    inputs = replace(inputs, rows=_joined(inputs, max_positions))
    if not check:
        final = Candidate(*next(iter(epsilons.items())), PARTS)
        progress.begin("calibrating", stages)
        calibrate_layers(inputs, [final], factors, progress.advance)
        return Calibration(final.name, final.weights, final.report)

    tried = [Candidate(MERGE, solved_with=()), *(Candidate(name, epsilon) for name, epsilon in epsilons.items())]
    # Without other candidates, that with all rows is solved at the same time.
    finals = [Candidate(PLAIN, solved_with=PARTS)] if find_factors is None else []
    progress.begin("calibrating", stages if finals else 2 * stages)
    calibrate_layers(inputs, [*tried, *finals], factors, progress.advance)
    distances = {candidate.name: candidate.distances for candidate in tried}
    chosen = min(tried, key=lambda candidate: candidate.distances.total)
    if chosen.name == MERGE:
        return Calibration(MERGE, {}, PassReport(), distances)
    if not finals:
        finals = [Candidate(chosen.name, chosen.epsilon, PARTS)]
        if chosen.epsilon is not None and find_factors is not None:
            for task, (fit, held_out) in rows.items():
                for layer, factor in find_factors(task, held_out, count_rows(fit)).items():
                    factors[task][layer] += factor
        calibrate_layers(inputs, finals, factors, progress.advance)
    return Calibration(chosen.name, finals[0].weights, finals[0].report, distances)


def _joined(inputs: CalibrationInputs, max_positions: int) -> dict[str, TaskRows]:
    """All rows in larger batches."""
    pad_token = getattr(getattr(unwrapped(inputs.merged.module), "config", None), "pad_token_id", None) or 0
    return {
        task: TaskRows(*([batch for _, batch in join_batches(part, max_positions, pad_token)] for part in rows))
        for task, rows in inputs.rows.items()
    }
