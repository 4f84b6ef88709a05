"""Blocks of the inputs, as the tensors that a rule takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers, Checkpoint
from ...errors import InputError
from ...rules.spec import per_model
from ...text import one_line
from ..plan.inputs import CurvatureInput
from ..plan.plan import Job, Plan, converted
from .randomness import keep_mask, uniform


def read_models(plan: Plan, job: Job, start: int, stop: int, buffers: Buffers) -> tuple[Tensor | None, list[Tensor]]:
    """The block of the base (None if the rule does not use it) and of every tuned model, in the job's type."""
    inputs = plan.inputs

    def read(checkpoint: Checkpoint, slot: str) -> Tensor:
        block = checkpoint.read(inputs.stored_name(checkpoint, job.name), start, stop, buffers, slot)
        return block.to(job.compute)

    base = read(inputs.base, "base") if inputs.base is not None and "base" in plan.needs else None
    return base, [read(checkpoint, f"tuned {i}") for i, checkpoint in enumerate(inputs.tuned_of(job.name))]


def read_block(plan: Plan, job: Job, start: int, stop: int, buffers: Buffers) -> dict[str, Any]:
    """Every tensor input that the plan needs for one block."""
    inputs = plan.inputs
    base, tuned = read_models(plan, job, start, stop, buffers)
    block: dict[str, Any] = {"base": base, "tuned": tuned}

    def curvature(source: CurvatureInput, slot: str) -> Tensor:
        return read_curvature(source, job, start, stop, buffers, slot, job.compute)

    if "prior" in plan.needs:
        block["prior"] = None if inputs.prior is None else curvature(inputs.prior, "prior")
    if "penalty" in plan.needs and inputs.penalty:
        sources = dict.fromkeys(source for source in inputs.penalty if source is not None)
        read = {source: curvature(source, f"penalty {i}") for i, source in enumerate(sources)}
        block["penalty"] = [None if source is None else read[source] for source in inputs.penalty]
    if "curvature" in plan.needs:
        block["curvature"] = [curvature(source, f"curvature {i}") for i, source in enumerate(inputs.curvature)]
    for name in plan.needs & {"kept", "uniform"}:
        block[name] = random_inputs(plan, name, job.name, start, stop)
    return block


def random_inputs(plan: Plan, kind: str, tensor: str, start: int, stop: int) -> list[Tensor]:
    """Masks (``kept``) or numbers (``uniform``) of a block, for every tuned model."""
    options, models = plan.inputs.settings.of(tensor).options, range(len(plan.inputs.tuned_of(tensor)))
    if kind == "uniform":
        return [uniform(options["seed"], i, tensor, start, stop) for i in models]
    shares = enumerate(per_model(options["density"], models))
    return [keep_mask(options["seed"], i, tensor, start, stop, share) for i, share in shares]


def shaped(job: Job, start: int, stop: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """A block as its rule sees it: in the shape of the tensor, or of those of its rows that are there."""
    shape = job.info.shape
    if job.grain == "entries":
        return dict(tensors)
    if job.grain == "rows" and len(shape) > 1 and job.info.numel:
        shape = ((stop - start) * shape[0] // job.info.numel, *shape[1:])
    return converted(tensors, lambda tensor: tensor.reshape(shape) if tensor.dim() else tensor)


def read_curvature(
    source: CurvatureInput,
    job: Job,
    start: int,
    stop: int,
    buffers: Buffers,
    slot: str,
    dtype: torch.dtype,
) -> Tensor:
    """The block of one curvature, reduced; 0 where the recipe lets it be missing."""
    name = source.stored_name(job.name, job.info.shape)
    if name is None:
        return torch.tensor(0.0, dtype=dtype)
    return source.read(name, start, stop, buffers, slot, dtype)


def read_matrices(plan: Plan, job: Job, buffers: Buffers) -> dict[str, Any]:
    """Whole weights (out × in) and Gram matrices (in × in) of a linear layer."""
    numel, shape = job.info.numel, job.info.shape
    _, tuned = read_models(plan, job, 0, numel, buffers)
    grams = [source.read_matrix(job.name) for source in plan.inputs.grams]
    turned = is_transposed(plan, job)
    weights = [t.reshape(shape).T if turned else t.reshape(shape) for t in tuned]
    return {"tuned": weights, "grams": grams}


def is_transposed(plan: Plan, job: Job) -> bool:
    """Whether a weight stores (in, out): what its Gram matrix's size says, or its file where the weight is square."""
    source = plan.inputs.grams[0]
    size = (source.shapes or {})[job.name][0]
    rows, columns = job.info.shape
    if rows != columns:
        return size == rows
    return source.file is not None and job.name in source.file.transposed


def not_finite(label: str, name: str) -> InputError:
    return InputError(
        f"{label}: {one_line(name)} has values that are NaN or infinite. The model is damaged; to merge it all the "
        "same, pass --allow-nonfinite."
    )


def all_finite(values: Tensor) -> bool:
    """Whether no value is NaN or infinite. A sum tells fastest: it is finite unless a value is not, or it overflows."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())
