"""Running a plan on this machine: blocks of every input through the rule, to wherever the result goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers
from ...errors import InputError
from ...io.reader import FLOATS
from ..plan.kronecker_layers import parted, read_layer, solve_layer
from ..plan.plan import Job, Plan, Unit, converted, rule_arguments, torch_type
from ..thread_pool import run_parallel, with_buffers
from .reading import all_finite, is_transposed, not_finite, read_block, read_matrices, shaped
from .reduce import Advance
from .rounding import rounded
from .statistics import Statistics

Watch = Callable[[str, Tensor, list[Tensor]], None]
"""Is shown every block of a tensor, by its name, of the base and of the tuned models, from several threads at once."""


@dataclass
class MergedBlock:
    """Some units of the result that follow one another."""

    units: list[Unit]
    values: Tensor
    """Flat, in the type that they are stored in. They may lie in a buffer that the next block overwrites."""
    precision: Tensor | None = None
    """H̄ of the same entries, in float32, if the plan writes it."""
    beside: dict[str, Tensor] = field(default_factory=dict)
    """Other tensors that the unit gives whole, by name: the bias of a layer that is solved together with its weight."""

    @property
    def job(self) -> Job:
        return self.units[0].job

    @property
    def place(self) -> tuple[int, int]:
        """Its first entry in the flattened tensor, and one past the last."""
        return self.units[0].start, self.units[-1].stop


def run(
    plan: Plan,
    statistics: Statistics,
    put: Callable[[MergedBlock], None],
    *,
    units: Iterable[Unit] | None = None,
    threads: int = 1,
    device: str = "cpu",
    allow_nonfinite: bool = False,
    precision_factor: float = 1.0,
    advance: Advance = lambda nbytes: None,
    watch: Watch | None = None,
) -> None:
    """Merge every unit of the plan (or those given) and ``put`` it where it goes. ``watch`` sees what is merged.

    The result of a unit depends on the plan alone, so that neither the number of threads nor the order matters.
    """
    place = torch.device(device)
    soon = dict(zip((job.name for job in plan.jobs), plan.jobs[2:], strict=False))
    sizes = {job.name: plan.bytes_read(job) for job in plan.jobs}
    lock = threading.Lock()

    def work(buffers: Buffers, units: list[Unit]) -> None:
        job, start, stop = units[0].job, units[0].start, units[-1].stop
        if start == 0 and job.name in soon:
            _read_ahead(plan, soon[job.name])
        if job.rule is None:
            block = _copy(plan, units, buffers, allow_nonfinite)
        else:
            block = _merge(plan, units, statistics, buffers, place, allow_nonfinite, precision_factor, watch)
        put(block)
        with lock:
            advance(sizes[job.name] * (stop - start) // max(1, job.info.numel))

    run_parallel(plan.stretches(plan.units() if units is None else units), with_buffers(work), threads)


def _read_ahead(plan: Plan, job: Job) -> None:
    """Ask for a tensor that comes soon, so that the disk works while the processor does."""
    for checkpoint in plan.inputs.checkpoints:
        checkpoint.will_need(plan.inputs.stored_name(checkpoint, job.name))
    for source in plan.inputs.curvatures:
        source.will_need(job.name)


def _copy(plan: Plan, units: list[Unit], buffers: Buffers, allow_nonfinite: bool) -> MergedBlock:
    template, job = plan.inputs.template, units[0].job
    block = template.read(job.name, units[0].start, units[-1].stop, buffers)
    if job.info.is_float and not allow_nonfinite and not all_finite(block):
        raise not_finite(template.label, job.name)
    # An adapter's block may be wider than what is stored.
    return MergedBlock(units, rounded(block, torch_type(job.info)))


def _merge(
    plan: Plan,
    units: list[Unit],
    statistics: Statistics,
    buffers: Buffers,
    device: torch.device,
    allow_nonfinite: bool,
    precision_factor: float,
    watch: Watch | None,
) -> MergedBlock:
    job, start, stop = units[0].job, units[0].start, units[-1].stop
    assert job.rule is not None
    if job.layer is not None:
        return _solve_layer(plan, units, device, allow_nonfinite)
    if job.solved:
        tensors = read_matrices(plan, job, buffers)
    else:
        tensors = read_block(plan, job, start, stop, buffers) | statistics.of(job.name)
        tensors = shaped(job, start, stop, tensors)
        if watch is not None:
            watch(job.name, tensors["base"], tensors["tuned"])
        if device.type != "cpu":
            tensors = converted(tensors, lambda tensor: tensor.to(device))
    arguments = rule_arguments(job.rule, plan, tensors, plan.inputs.settings.of(job.name))
    try:
        merged = job.rule(**arguments)
    except ValueError as error:
        raise InputError(f"{job.name}: {job.rule.name}: {error}") from error
    merged = merged.T if job.solved and is_transposed(plan, job) else merged
    merged = merged if merged.dim() == 1 else merged.reshape(-1)
    stored = rounded(merged if device.type == "cpu" else merged.cpu(), torch_type(job.info))
    if not allow_nonfinite:
        _check_finite(plan, job, tensors, merged, stored)
    precision = None
    if plan.write_precision and job.rule.precision is not None:
        precision = _storable(job.rule.precision(**arguments).cpu() * precision_factor, job.name)
    return MergedBlock(units, stored, precision)


def _solve_layer(plan: Plan, units: list[Unit], device: torch.device, allow_nonfinite: bool) -> MergedBlock:
    """Weight and bias of a layer with Kronecker curvature, solved for together."""
    job = units[0].job
    assert job.rule is not None and job.rule.layers is not None
    tensors = converted(read_layer(plan, job), lambda tensor: tensor.to(device))
    merged = solve_layer(plan, job.rule, tensors, job.name).cpu()
    stored = {part.name: rounded(values, torch_type(part.info)) for part, values in parted(job, merged)}
    if not allow_nonfinite:
        _check_finite(plan, job, tensors, merged, torch.cat([values.double() for values in stored.values()]))
    return MergedBlock(units, stored.pop(job.name), beside=stored)


def _storable(precision: Tensor, name: str) -> Tensor:
    """H̄ as it is written: not negative, in float32."""
    stored = precision.clamp_(min=0).float()
    if not all_finite(stored):
        raise InputError(
            f"output.curvature: H̄ of {name} is as large as {float(precision.max()):.3g}, which does not fit float32. "
            "Scale the weights or the curvature of all models down alike."
        )
    return stored


def _check_finite(plan: Plan, job: Job, tensors: dict[str, Any], merged: Tensor, stored: Tensor) -> None:
    """Stop if an input or the result has NaN or infinity.

    With weights above 0, NaN or infinity in a model shows in the result of every rule, so that the models are checked
    only if the result is not finite. They are always checked where a weight, or the rule, may leave one of them out.
    """
    assert job.rule is not None
    inputs, base = plan.inputs, tensors.get("base")
    fine = all_finite(stored)
    if fine and job.rule.propagates_nonfinite and min(inputs.settings.of(job.name).weights) > 0:
        return
    for checkpoint, tensor in ((inputs.base, base), *zip(inputs.tuned_of(job.name), tensors["tuned"], strict=True)):
        if checkpoint is not None and tensor is not None and not all_finite(tensor):
            raise not_finite(checkpoint.label, job.name)
    if fine:
        return
    if all_finite(merged):
        raise InputError(
            f"the merge of {job.name} has values that are too large for {FLOATS[job.info.dtype]} (largest "
            f"{float(merged.abs().max()):.6g}, limit {torch.finfo(stored.dtype).max:.6g}). Set output.dtype to a wider "
            "type."
        )
    raise InputError(
        f"the merge of {job.name} has values that are NaN or infinite, although its inputs have none: a weight, "
        "an option or the curvature is too extreme. Pass --allow-nonfinite to go on."
    )
