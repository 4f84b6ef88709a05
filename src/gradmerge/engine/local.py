"""Running a plan on this machine: blocks of every input through the rule, to wherever the result goes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..checkpoints.model import Buffers, block_digest
from ..errors import InputError
from ..storage.tensorfile import FLOATS
from .memory import keep_freed_memory
from .plan import Job, Plan, Unit, rule_arguments, torch_type
from .reading import all_finite, is_transposed, not_finite, read_block, read_matrices
from .rounding import rounded
from .statistics import Advance, Statistics
from .workers import one_thread_each, run_parallel

Watch = Callable[[Tensor, list[Tensor]], None]
"""Is shown every block of the base and of the tuned models, from several threads at once."""


class Sink(Protocol):
    """Where blocks of the result go."""

    def write(self, name: str, start: int, block: Tensor) -> None: ...
    def write_precision(self, name: str, start: int, block: Tensor) -> None: ...
    def done(self, unit: Unit, digests: dict[int, int]) -> None: ...


def run(
    plan: Plan,
    statistics: Statistics,
    sink: Sink,
    *,
    units: Iterable[Unit] | None = None,
    threads: int = 1,
    device: str = "cpu",
    allow_nonfinite: bool = False,
    precision_factor: float = 1.0,
    advance: Advance = lambda nbytes: None,
    watch: Watch | None = None,
) -> None:
    """Merge every unit of the plan (or those given) and hand the blocks to the sink. ``watch`` sees what is merged.

    The result of a unit depends on the plan alone, so that neither the number of threads nor the order matters.
    """
    keep_freed_memory()
    place = torch.device(device)
    following = _following(plan.jobs)
    sizes = {job.name: plan.bytes_read(job) for job in plan.jobs}
    lock = threading.Lock()

    def worker() -> Callable[[Unit], None]:
        buffers = Buffers()

        def work(unit: Unit) -> None:
            job = unit.job
            if unit.start == 0:
                _read_ahead(plan, following.get(job.name, ()))
            digests: dict[int, int] = {}
            if job.rule is None:
                template = plan.inputs.template
                block = template.read(job.name, unit.start, unit.stop, buffers)
                digests[id(template)] = block_digest(block)
                if job.info.is_float and not allow_nonfinite and not all_finite(block):
                    raise not_finite(template.label, job.name)
                # An adapter's block may be wider.
                sink.write(job.name, unit.start, rounded(block, torch_type(job.info)))
            else:
                merged, precision = _merge(plan, unit, statistics, buffers, place, allow_nonfinite, digests, watch)
                sink.write(job.name, unit.start, merged)
                if precision is not None:
                    sink.write_precision(job.name, unit.start, _storable(precision * precision_factor, job.name))
            sink.done(unit, digests)
            with lock:
                advance(sizes[job.name] * (unit.stop - unit.start) // max(1, job.info.numel))

        return work

    with one_thread_each():
        run_parallel(plan.units() if units is None else units, worker, threads)


def _storable(precision: Tensor, name: str) -> Tensor:
    """H̄ as it is written: not negative, in float32."""
    stored = precision.clamp_(min=0).float()
    if not all_finite(stored):
        raise InputError(
            f"output.curvature: H̄ of {name} is as large as {float(precision.max()):.3g}, which does not fit float32. Scale the "
            "weights or the curvature of all models down alike."
        )
    return stored


def _following(jobs: list[Job], distance: int = 2) -> dict[str, tuple[Job, ...]]:
    return {job.name: tuple(jobs[i + distance : i + distance + 1]) for i, job in enumerate(jobs)}


def _read_ahead(plan: Plan, jobs: Iterable[Job]) -> None:
    """Ask for tensors that come soon, so that the disk works while the processor does."""
    for job in jobs:
        for checkpoint in plan.inputs.checkpoints:
            checkpoint.will_need(plan.inputs.stored_name(checkpoint, job.name))
        for source in plan.inputs.curvatures:
            source.will_need(job.name)


def _merge(
    plan: Plan,
    unit: Unit,
    statistics: Statistics,
    buffers: Buffers,
    device: torch.device,
    allow_nonfinite: bool,
    digests: dict[int, int],
    watch: Watch | None,
) -> tuple[Tensor, Tensor | None]:
    """The merged block in the type that it is stored in, and H̄ of it if the plan writes that."""
    job = unit.job
    assert job.rule is not None
    if job.whole:
        tensors = read_matrices(plan, job, buffers, digests)
    else:
        tensors = read_block(plan, job, unit.start, unit.stop, buffers, digests) | statistics.of(job.name)
        if watch is not None:
            watch(tensors["base"], tensors["tuned"])
    if not job.whole and device.type != "cpu":
        tensors = {name: _to(value, device) for name, value in tensors.items()}
    arguments = rule_arguments(job.rule, plan, tensors)
    merged = job.rule(**arguments)
    if job.whole:
        merged = (merged.T if is_transposed(plan, job) else merged).reshape(-1)
    stored = rounded(merged.cpu(), torch_type(job.info))
    if not allow_nonfinite:
        _check_finite(plan, job, tensors, merged, stored)
    precision = None
    if plan.write_precision and job.rule.precision is not None:
        precision = job.rule.precision(**arguments).cpu()
    return stored, precision


def _check_finite(plan: Plan, job: Job, tensors: dict[str, Any], merged: Tensor, stored: Tensor) -> None:
    """Stop if an input or the result has NaN or infinity.

    With weights above 0 no rule makes a finite number of a model's NaN or infinity: it shows in the result, and only then
    are the models looked at. They are looked at always where a weight, or the rule, may leave one out.
    """
    assert job.rule is not None
    inputs, base = plan.inputs, tensors.get("base")
    fine = all_finite(stored)
    if fine and job.rule.base_shows and min(inputs.weights) > 0:
        return
    if base is not None and inputs.base is not None and not all_finite(base):
        raise not_finite(inputs.base.label, job.name)
    for checkpoint, tensor in zip(inputs.tuned, tensors["tuned"], strict=True):
        if not all_finite(tensor):
            raise not_finite(checkpoint.label, job.name)
    if fine:
        return
    if all_finite(merged):
        raise InputError(f"the merge of {job.name} has values that are too large for {FLOATS[job.info.dtype]} (largest "
                         f"{float(merged.abs().max()):.6g}, limit {torch.finfo(stored.dtype).max:.6g}). Set output.dtype to a wider type.")  # fmt: skip
    raise InputError(f"the merge of {job.name} has values that are NaN or infinite, although its inputs have none: a weight, "
                     "an option or the curvature is too extreme. Pass --allow-nonfinite to go on.")  # fmt: skip


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    return value
