"""Linear layers that a merge solves whole, as X = [W b]: those that some curvature file has Kronecker factors for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers
from ...curvature.format import INPUTS, OUTPUTS
from ...errors import InputError
from ...io.reader import TensorInfo
from ...rules import Rule
from ...rules.kronecker_matching import OF_MERGES, KroneckerFactors, LayerHessian, diagonal_of, mean_eigenvalue
from ...text import listed
from ..run.reading import read_models
from .inputs import CurvatureInput, Inputs
from .plan import Job, Plan, rule_arguments

Layers = dict[str, tuple[bool, str | None]]
"""Weights that are solved with Kronecker factors → (whether they are stored transposed, their bias)."""


def find_layers(inputs: Inputs, rule: Rule, names: Sequence[str], looking: bool = False) -> tuple[Layers, list[str]]:
    """The layers among the tensors to merge, and what is wrong with their curvature.

    Who is ``looking`` at merges only may hold them against any rule.
    """
    sources = [source for source in inputs.curvatures if source.tokens is not None]
    if not sources:
        return {}, []
    problems = _kinds(inputs, None if looking else rule, sources)
    tensors, wanted = inputs.template.tensors, set(names)
    found: Layers = {}
    for source in sources:
        wrong: list[str] = []
        assert source.tokens is not None and source.shapes is not None
        for name in source.tokens:
            bias = bias_of(name)
            size, outputs = (source.shapes[name + part] for part in (INPUTS, OUTPUTS))
            turned = name in source.transposed
            if name not in wanted:
                if bias in wanted and bias not in source.shapes:
                    problems.append(_apart(source, bias, name))
                continue
            rows, columns = matrix_shape(tensors[name], turned)
            wide = size == (columns + 1, columns + 1)
            if outputs != (rows, rows) or not (wide or size == (columns, columns)):
                factors = f"factors {list(outputs)} and {list(size)}"
                wrong.append(f"{name}: {factors}, but the weight is {list(tensors[name].shape)}")
            elif wide and (bias not in tensors or tensors[bias].shape != (rows,)):
                wrong.append(f"{name}: factors with a bias, but there is no {bias} of {rows} numbers")
            elif wide and bias not in wanted:
                problems.append(_apart(source, name, bias))
            elif found.setdefault(name, (turned, bias if wide else None)) != (turned, bias if wide else None):
                problems.append(f"{source.label}: {name} has factors of another shape than in the other files")
        if wrong:
            problems.append(f"{source.label}: curvature of another model, its factors do not fit\n{listed(wrong)}")
    return found, problems


def _kinds(inputs: Inputs, rule: Rule | None, sources: Sequence[CurvatureInput]) -> list[str]:
    """What is wrong with the mixture of kinds, before any shape is looked at."""
    if rule is not None and rule.layers is None:
        why = f"which {rule.name} does not take; gradient-matching and removal do. Estimate it with --kind diagonal"
        return [f"{source.label}: holds Kronecker factors, {why}" for source in sources]
    others = [source.label for source in inputs.curvature if source.kind not in ("kronecker", "constant")]
    if others:
        mixed = "models of one recipe have curvature of one kind"
        return [
            f"{sources[0].label}: holds Kronecker factors, but {label} a diagonal; {mixed}. Estimate all of them with "
            "--kind kronecker, or all as diagonals"
            for label in others
        ]
    return []


def _apart(source: CurvatureInput, merged: str, excluded: str) -> str:
    return (
        f"{source.label}: {merged} is merged and {excluded} is not; Kronecker curvature holds the weight and bias of a "
        "layer together: include both or exclude both"
    )


def held_by_factors(source: CurvatureInput, layers: Layers) -> set[str]:
    """The weights that a source has factors for, and those of their biases that the factors hold too."""
    held = set(source.tokens or ())
    return held | {bias_of(name) for name in held if name not in layers or layers[name][1] is not None}


def bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def matrix_shape(info: TensorInfo, turned: bool) -> tuple[int, int]:
    """(out, in) of a layer's matrix; a convolution's kernel counts as inputs."""
    shape = info.shape or (0,)
    rows, columns = shape[0], info.numel // max(1, shape[0])
    return (columns, rows) if turned else (rows, columns)


def read_layer(plan: Plan, job: Job) -> dict[str, Any]:
    """The inputs of a rule for one layer, in float64: matrices X = [W b], and curvature that acts on them."""
    inputs = plan.inputs
    found = [read_models(plan, piece, 0, piece.info.numel, Buffers()) for piece in pieces_of(job)]
    bases, tuned = [base for base, _ in found if base is not None], zip(*(models for _, models in found), strict=True)
    values: dict[str, Any] = {"base": joined(job, bases), "tuned": [joined(job, parts) for parts in tuned]}
    read = {source: read_hessian(source, job) for source in inputs.curvatures}
    if inputs.prior is not None:
        values["prior"] = read[inputs.prior]
    if inputs.penalty:
        values["penalty"] = [None if source is None else read[source] for source in inputs.penalty]
    return values | {"curvature": [read[source] for source in inputs.curvature]}


def read_hessian(source: CurvatureInput, job: Job) -> LayerHessian:
    """The curvature of a layer: factors, a matrix with one number per entry of X, or one number for all."""
    if source.constant is not None:
        return torch.tensor(source.constant, dtype=torch.float64)
    if source.tokens is not None and job.name in source.tokens:
        return source.read_factors(job.name)
    parts: list[Tensor] = []
    for piece in pieces_of(job):
        name, numel = source.stored_name(piece.name, piece.info.shape), piece.info.numel
        if name is None:
            parts.append(torch.zeros(numel, dtype=torch.float64))
        else:
            parts.append(source.read(name, 0, numel, Buffers(), "curvature", torch.float64))
    return joined(job, parts)


def diagonal_block(plan: Plan, job: Job) -> dict[str, Any]:
    """The same as :func:`read_layer` with nothing but the diagonals of the curvature, as the rule for entries takes."""

    def diagonal(value: Any) -> Any:
        if isinstance(value, list):
            return [diagonal(item) for item in value]
        return diagonal_of(value) if isinstance(value, KroneckerFactors) else value

    tensors = read_layer(plan, job)
    block = {name: diagonal(value) for name, value in tensors.items()}
    if (damping := open_damping(plan, plan.rule, tensors, job.name)) is not None:
        block["damping"] = damping
    return block


def open_damping(plan: Plan, rule: Rule, tensors: Mapping[str, Any], name: str) -> float | None:
    """δ of a layer where the recipe leaves it open, and the rule goes by the layer; else None.

    A base of curvature c · I is damped already: what H_t say is trusted beside it.
    """
    if not plan.inputs.damps_layers or rule.auto_damping == "mean-curvature":
        return None
    mean = mean_eigenvalue(plan.inputs.settings.of(name).weights, tensors["curvature"], tensors["base"].numel())
    return OF_MERGES * mean


def solve_layer(plan: Plan, rule: Rule, tensors: Mapping[str, Any], name: str) -> Tensor:
    """The rule on the matrices of one layer."""
    assert rule.layers is not None
    damping = open_damping(plan, rule, tensors, name)
    numbers = plan.inputs.settings.of(name)
    arguments = rule_arguments(rule, plan, tensors if damping is None else {**tensors, "damping": damping}, numbers)
    try:
        return rule.layers(**{key: arguments[key] for key in rule.inputs})
    except ValueError as error:
        raise InputError(f"{name}: {error}") from error


def pieces_of(job: Job) -> list[Job]:
    """The tensors of a layer: its weight, and its bias if it has one."""
    return [job] if job.layer is None or job.layer.bias is None else [job, job.layer.bias]


def joined(job: Job, parts: Sequence[Tensor]) -> Tensor:
    """[W b] from a weight as it is stored and its bias."""
    assert job.layer is not None
    shape = job.info.shape
    matrix = parts[0].reshape(shape).T if job.layer.transposed else parts[0].reshape(shape[0], -1)
    return torch.cat([matrix, parts[1].reshape(-1, 1)], 1) if len(parts) > 1 else matrix


def parted(job: Job, matrix: Tensor) -> list[tuple[Job, Tensor]]:
    """The tensors that [W b] is stored as, each flat."""
    assert job.layer is not None
    bias = job.layer.bias
    weight = matrix if bias is None else matrix[:, :-1]
    flat = (weight.T if job.layer.transposed else weight).reshape(-1)
    return [(job, flat)] if bias is None else [(job, flat), (bias, matrix[:, -1].contiguous())]
