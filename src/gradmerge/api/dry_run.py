"""The size of a job before it runs: bytes read and written, memory, and whether they fit on this machine."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn

from ..curvature.checkpoint_names import stored_unchanged
from ..curvature.estimate import kronecker_layers
from ..curvature.kernels import MAX_KRONECKER_DIM
from ..curvature.per_example_gradients import is_conv1d
from ..engine.executor import LocalExecutor
from ..engine.run import check_merge, damping_and_penalties
from ..progress import NOWHERE
from ..recipe import Recipe, in_words, plain
from ..tasks import LoadOptions, complete
from ..tasks.data import read_rows
from ..tasks.model_args import ModelArgs
from ..tasks.models import device_of, empty_model
from ..text import size
from ..urls import is_url
from .estimate import check_estimate_options
from .merge import number_of_threads, planned

#: Bytes of a process before it loads a model: Python, PyTorch and transformers, or the context of a GPU.
PROCESS = 600_000_000
#: Bytes that curvature in a precision takes for each of its entries.
ENTRY_SIZE = {"float32": 4, "bfloat16": 2, "log8": 1}


@dataclass(frozen=True)
class JobSize:
    """The size of a job, and the free space on this machine, in bytes; None where it is unknown."""

    bytes_read: int
    bytes_written: int | None
    """None for an adapter, whose size depends on the weights."""
    memory: int
    """The peak memory of one process on its device, approximately."""
    free_memory: int | None
    free_disk: int | None
    memory_parts: dict[str, int] = field(default_factory=dict)
    """What the memory is used for, where that is known."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the job would do: numbers, texts, mappings, and lists of these."""
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the memory and the disk suffice; an unknown amount of free space counts as enough."""
        memory_fits = self.free_memory is None or self.memory <= self.free_memory
        return memory_fits and (self.free_disk is None or (self.bytes_written or 0) <= self.free_disk)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--dry-run --json` prints."""
        sizes = asdict(self)
        return {**sizes.pop("facts"), **sizes, "fits": self.fits}

    def lines(self) -> list[str]:
        """Return what `--dry-run` prints."""
        written = "unknown" if self.bytes_written is None else size(self.bytes_written)
        disk, memory = ("" if n is None else f" ({size(n)} free)" for n in (self.free_disk, self.free_memory))
        parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in self.memory_parts.items() if nbytes)
        facts = {name: value for name, value in self.facts.items() if value not in (None, {}, [])}
        return [
            *(f"{name.replace('_', ' ')}: {_text(value)}" for name, value in facts.items()),
            f"reads: {size(self.bytes_read)}",
            f"writes: {written}{disk}",
            f"memory: about {size(self.memory)}{memory}{f': {parts}' if parts else ''}",
            f"fits: {'yes' if self.fits else 'no, it needs more than is free'}",
        ]


def _text(fact: Any) -> str:
    """Return a fact on one line: a number, a text, a mapping, or a list of these."""
    if isinstance(fact, dict):
        if "source" in fact:  # an input
            return f"{fact['source']} ({fact['kind']}, {size(fact['bytes'])})"
        return ", ".join(f"{key} {size(value) if key == 'bytes' else in_words(value)}" for key, value in fact.items())
    return "; ".join(map(_text, fact)) if isinstance(fact, list) else in_words(fact)


def free_disk(out: Path | None) -> int | None:
    """Return the free bytes on the disk of an output folder, which need not exist."""
    if out is None or is_url(out):
        return None
    folder = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), None)
    return None if folder is None else shutil.disk_usage(folder).free


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU or of this machine."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    return None


def dry_run_merge(recipe: Recipe, out: Path | None, *, threads: int | None = None, **reading: Any) -> JobSize:
    """Return what a merge would do, and its size. ``reading`` is as of :func:`planned`."""
    threads, adapter = number_of_threads(threads), recipe.output.format == "adapter"
    with planned(recipe, **reading) as plan:
        bytes_read = plan.total_read + plan.statistics_read  # before the checks, which compute the damping
        check_merge(plan, LocalExecutor(threads), NOWHERE, accept_untrusted=True)
        models = [{"source": c.label, "kind": c.kind, "bytes": c.nbytes} for c in plan.inputs.checkpoints]
        merged = plan.merged_tensors
        curvature = [
            {"source": c.label, "kind": "curvature", "bytes": sum(map(c.nbytes, merged))}
            for c in plan.inputs.curvatures
        ]
        facts = {
            "method": recipe.method,
            "options": {name: plain(value) for name, value in plan.inputs.options.items()},
            "inputs": models + curvature,
            "merged_tensors": len(merged),
            "copied_tensors": plan.copied_tensors,
            **damping_and_penalties(plan),
            "output": str(out) if out else None,
            "threads": threads,
        }
        return JobSize(
            bytes_read=bytes_read,
            bytes_written=None if adapter else plan.total_written,
            memory=plan.memory(threads),
            free_memory=free_memory(torch.device("cpu")),
            free_disk=free_disk(out),
            facts=facts,
            notes=list(plan.notes),
        )


def dry_run_estimate(
    model: str,
    source: str,
    out: Path | None,
    *,
    kind: str = "diagonal",
    likelihood: str = "empirical",
    precision: str = "float32",
    at_delta: str | None = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    accumulate_on: str | None = None,
    **loading: Unpack[LoadOptions],
) -> JobSize:
    """Return what would be estimated, and its size without the activations of a batch."""
    options = complete(loading, dry_run_estimate, None)
    args = ModelArgs.parse(options["model_args"])
    check_estimate_options(likelihood, kind, precision, at_delta, max_kronecker_dim, accumulate_on, args)
    device = device_of(options["device"])
    examples = len(read_rows(source, limit=options["limit"]))
    empty, info = empty_model(model, options["task"], options["dtype"])
    weights = sum(parameter.nbytes for parameter in empty.parameters())
    sums = sums_size(empty, kind, max_kronecker_dim)
    parts = {"process": PROCESS, "weights": weights * (1 if at_delta is None else 2)}
    parts["sums"] = sums if accumulate_on in (None, "device", device.type) else 0
    return JobSize(
        bytes_read=sum(path.stat().st_size for path in info.base_folder.glob("*.safetensors")),
        bytes_written=sums // 4 * ENTRY_SIZE[precision],
        memory=sum(parts.values()),
        free_memory=free_memory(device),
        free_disk=free_disk(out),
        memory_parts=parts,
        facts={"model": model, "data": source, "kind": kind, "examples": examples, "device": str(device)},
        notes=["the memory does not include the activations of a batch; smaller batches have smaller activations"],
    )


def sums_size(model: nn.Module, kind: str, max_kronecker_dim: int = MAX_KRONECKER_DIM) -> int:
    """Return the bytes of a model's curvature in float32."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    total = sum(parameter.numel() for parameter in parameters)
    if kind == "gram":
        tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        layers: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear) or is_conv1d(m)]
        return 4 * sum(int(m.weight.shape[not is_conv1d(m)]) ** 2 for m in layers if m.weight not in tables)
    if kind == "kronecker":
        with_factors, _ = kronecker_layers(model, parameters, stored_unchanged(model), max_kronecker_dim)
        for weight, layer in with_factors.items():
            inputs, outputs = weight.shape[1:].numel(), weight.shape[0]
            bias = 0 if layer.bias is None else outputs
            total += (inputs + bool(bias)) ** 2 + outputs**2 - weight.numel() - bias
    return 4 * total
