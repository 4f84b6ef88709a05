"""What estimating curvature would cost, before any weight is loaded."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch

from ..curvature.kronecker import WIDEST
from ..curvature.needs import EstimateCost, Rate, activations_of, estimate_cost, quantised, shapes_of
from ..engine.calibration import USUAL_NETWORK, read_rate
from ..errors import InputError
from ..tasks import LargeLoading
from ..tasks.loading import complete_large
from ..tasks.models import device_of
from ..tasks.outlines import outline_task
from . import estimating
from .large_models import check_large

#: A pass of a model reaches about this share of what the product of two large matrices does.
REACHED = 0.5


@dataclass
class Forecast:
    """The cost of an estimate, and whether a process fits into the memory that it has."""

    cost: EstimateCost
    task: str
    device: str
    dtype: str
    available: int
    """Bytes that the device of a process has."""
    available_from: str
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.cost.memory["total"] <= self.available

    def to_json(self) -> dict[str, Any]:
        given = {"task": self.task, "device": self.device, "dtype": self.dtype}
        found = {"memory_available": self.available, "fits": self.fits}
        return {**given, **self.cost.to_json(), **found, "notes": self.notes}


def forecast_estimate(
    model: str,
    source: str,
    *,
    kind: str = "diagonal",
    likelihood: str = "empirical",
    precision: str = "float32",
    at_delta: str | None = None,
    widest: int = WIDEST,
    sums: str | None = None,
    shard: bool = False,
    nodes: int = 1,
    per_node: int = 1,
    compute: Rate | None = None,
    disk: Rate | None = None,
    network: Rate | None = None,
    memory: int | None = None,
    **loading: Unpack[LargeLoading],
) -> Forecast:
    """What `gradmerge curvature estimate` would need, from the config, the headers of the files and some of the rows.

    ``nodes`` machines like this one have ``per_node`` processes each. Rates that are not given are measured here.
    """
    options = complete_large(loading, forecast_estimate)
    estimating._check_options(likelihood, kind, precision, at_delta)
    estimating._check_widest(widest, kind)
    place = _place(options["device"], known=compute is not None and memory is not None)
    device_map, quantize = options["device_map"], options["quantize"]
    check_large(kind, sums, shard, True, False, at_delta, device_map, quantize)
    outline = outline_task(model, source, place.type, options)
    made = outline.loaded.model
    shapes = shapes_of(made, kind, widest)
    notes = list(outline.loaded.notes)
    bits = {"4bit": 4, "8bit": 8, "none": 0}.get(quantize or "", outline.bits)
    if bits and not outline.adapter:
        raise InputError(f"{model}: codes have no gradients. Give the folder of a PEFT adapter on a quantised base.")
    if bits:
        shapes = quantised(made, shapes, bits, outline.adapter)
    if kind == "kronecker" and shapes.wide:
        notes.append(f"{shapes.wide} layers are wider than {widest:,} and have a diagonal")
    dtype = next(made.parameters()).dtype
    rates = {"compute": compute or measured_compute(place, dtype), "disk": disk or read_rate(outline.files, 4)}
    rates |= {"network": network or USUAL_NETWORK} if nodes > 1 else {}
    activations, forward = 0, None
    recomputed = options["gradient_checkpointing"] or shard or device_map is not None
    if outline.needs is not None:
        hidden = getattr(getattr(made, "config", None), "hidden_size", 0)
        between = outline.longest * dtype.itemsize * (hidden if isinstance(hidden, int) else 0)
        activations = activations_of(shapes, outline.needs, kind, between, recomputed)
        forward = outline.needs.operations / max(1, outline.longest)
    else:
        why = f"it does not run without weights: {outline.why}"
        notes.append(f"what autograd keeps of a batch is not counted for this model, as {why}. Leave room for it")
    if device_map is not None:
        notes.append(
            "with --device-map, what does not fit is on the CPU or on disk, and comes from there for each batch"
        )
    if at_delta is not None:
        notes.append(f"{at_delta} is loaded beside the model first, and takes its memory until it is subtracted")
    labels = getattr(getattr(made, "config", None), "num_labels", 1)
    cost = estimate_cost(
        shapes,
        rates,
        examples=outline.loaded.examples,
        tokens=outline.tokens,
        batch_size=options["batch_size"],
        activations=activations,
        forward=forward,
        passes=labels if likelihood == "exact" and isinstance(labels, int) else 1,
        recomputed=recomputed,
        kind=kind,
        device=place.type,
        sums=sums or "device",
        shard=shard,
        nodes=nodes,
        per_node=per_node,
    )
    available, available_from = (memory, "given") if memory is not None else memory_of(place)
    if place.type == "cpu" and memory is None:
        available //= per_node
        available_from += f", for each of {per_node}" if per_node > 1 else ""
    return Forecast(
        cost, outline.loaded.task, str(place), str(dtype).removeprefix("torch."), available, available_from, notes
    )


def _place(name: str, known: bool) -> torch.device:
    """The device, which need not be here if its speed and memory are known."""
    with contextlib.suppress(RuntimeError):
        if known and name != "auto":
            return torch.device(name)
    try:
        return device_of(name)
    except InputError as error:
        advice = "To plan for one that is elsewhere, give what it has: --memory GB and --compute-rate TFLOP/S"
        raise InputError(f"{error}\n  {advice}.") from error


def measured_compute(place: torch.device, dtype: torch.dtype) -> Rate:
    """Operations a second that a pass of a model reaches here: a share of what one product of matrices does."""
    side = 1024 if place.type == "cpu" else 8192
    matrix = torch.ones(side, side, dtype=dtype, device=place)
    seconds = []
    for _ in range(3):
        begun = time.perf_counter()
        float((matrix @ matrix)[0, 0])  # waits for a device
        seconds.append(time.perf_counter() - begun)
    source = f"measured: half of what a product of two {side} × {side} matrices reaches on {place}"
    return Rate(REACHED * 2 * side**3 / min(seconds), source)


def memory_of(place: torch.device) -> tuple[int, str]:
    """Bytes of a device, and whose they are."""
    if place.type == "cuda":
        return int(torch.cuda.get_device_properties(place).total_memory), torch.cuda.get_device_name(place)
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this computer"
    except (AttributeError, ValueError, OSError):
        return 0, "not known"
