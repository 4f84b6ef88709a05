"""The size of a job before it runs: bytes read and written, memory, and whether they fit on this machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from ..cards.metadata import license_notes, read_all_metadata
from ..curvature.accumulate import kronecker_layers
from ..curvature.checkpoint_names import stored_unchanged
from ..curvature.kernels import HELD_CPU, HELD_CUDA
from ..curvature.kfac import MAX_KRONECKER_DIM
from ..curvature.offload import blocks_of
from ..curvature.per_example_gradients import is_conv1d
from ..engine.checks import check_step_size, coefficient_notes
from ..engine.executor import LocalExecutor
from ..engine.write_cards import damping_and_penalties
from ..errors import InputError
from ..io.reader import close_files, open_files
from ..io.writer import split_into_shards
from ..quiet import quiet_transformers
from ..recipe import Recipe, plain
from ..tasks import LoadedTask, LoadOptions, complete
from ..tasks.data.read import read_rows
from ..tasks.loading import make_task
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
#: Batches whose rows are tokenized to find the longest.
SAMPLED_BATCHES = 16
#: Activations that autograd keeps, relative to the inputs and outputs of the linear layers. The result is 1.0 (GPT-2,
#: Llama) to 1.4 times (BERT, ViT) what autograd keeps.
KEPT = 1.25


@dataclass(frozen=True)
class JobSize:
    """The size of a job, and the free space on this machine, in bytes."""

    bytes_read: int
    bytes_written: int | None
    """None for an adapter, whose size depends on the weights."""
    memory: int
    """The peak memory of one process on its device, approximately."""
    free_memory: int | None
    """None if it is unknown."""
    free_disk: int | None
    """None if the output folder is unknown, or a URL."""
    memory_parts: dict[str, int] = field(default_factory=dict)
    """What the memory is used for, where that is known."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the job would do: numbers, texts, and tables as lists of mappings."""
    notes: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the memory and the disk suffice; an unknown amount of free space counts as enough."""
        memory_fits = self.free_memory is None or self.memory <= self.free_memory
        return memory_fits and (self.free_disk is None or (self.bytes_written or 0) <= self.free_disk)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--dry-run --json` prints."""
        return {
            **self.facts,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "memory": self.memory,
            "memory_parts": self.memory_parts,
            "free_memory": self.free_memory,
            "free_disk": self.free_disk,
            "fits": self.fits,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """Return what `--dry-run` prints."""
        written = "unknown" if self.bytes_written is None else size(self.bytes_written)
        parts = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in self.memory_parts.items() if nbytes)
        return [
            f"reads: {size(self.bytes_read)}",
            f"writes: {written}{_of(self.free_disk)}",
            f"memory: about {size(self.memory)}{_of(self.free_memory)}{f': {parts}' if parts else ''}",
            f"fits: {'yes' if self.fits else 'no, it needs more than is free'}",
        ]


def _of(free: int | None) -> str:
    return "" if free is None else f" ({size(free)} free)"


def free_disk(out: Path | None) -> int | None:
    """Return the free bytes on the disk of an output folder, which need not exist."""
    if out is None or is_url(out):
        return None
    folder = next((folder for folder in (out, *out.absolute().parents) if folder.is_dir()), None)
    return None if folder is None else shutil.disk_usage(folder).free


def free_memory(device: torch.device) -> int | None:
    """Return the free bytes of a GPU or of this machine; on other systems than Linux, all of its memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def dry_run_merge(recipe: Recipe, out: Path | None, *, threads: int | None = None, **reading: Any) -> JobSize:
    """Return what a merge would do, and its size. ``reading`` is as of :func:`planned`."""
    threads, adapter = number_of_threads(threads), recipe.output.format == "adapter"
    with planned(recipe, **reading) as plan:
        # The checks below read what they need for the damping and the notes, so this comes first.
        bytes_read = plan.total_read + plan.statistics_read + plan.damping_read
        executor = LocalExecutor(threads)
        plan.note(check_step_size(plan, executor))
        plan.note(coefficient_notes(recipe, plan, executor))
        plan.note(license_notes(read_all_metadata(plan.inputs.checkpoints), recipe.output.license))
        outputs = [plan.tensors, *([plan.precision_tensors] if plan.write_precision else [])]
        inputs: list[dict[str, Any]] = [
            {"source": c.label, "kind": c.kind, "bytes": c.nbytes, "parameters": c.parameters}
            for c in plan.inputs.checkpoints
        ]
        for c in plan.inputs.curvatures:
            nbytes = sum(c.nbytes(name) for name in plan.merged_tensors)
            inputs.append({"source": c.label, "kind": "curvature", "bytes": nbytes})
        facts = {
            "method": recipe.method,
            "options": {name: plain(value) for name, value in plan.inputs.options.items()},
            "inputs": inputs,
            "merged_tensors": len(plan.merged_tensors),
            "copied_tensors": plan.copied_tensors,
            **damping_and_penalties(recipe, plan),
            "output": str(out) if out else None,
            "output_files": 1 if adapter else sum(len(split_into_shards(t, recipe.output.shard_size)) for t in outputs),
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
    """Return what would be estimated, and its size. Reads the config, the headers and some of the rows."""
    options = complete(loading, dry_run_estimate, None)
    args = ModelArgs.parse(options["model_args"])
    check_estimate_options(likelihood, kind, precision, at_delta, max_kronecker_dim, accumulate_on, args)
    device = device_of(options["device"])
    rows = read_rows(source, limit=options["limit"])
    empty, info = empty_model(model, options["task"], options["dtype"])
    options["device"] = "cpu"
    loaded = make_task(model, empty, info, rows, options)
    read, _ = stored_size(info.base_folder, "model")
    adapter, adapter_entries = stored_size(info.folder, "adapter_model")
    weights = sum(parameter.nbytes for parameter in empty.parameters())
    summed = sums_size(empty, kind, max_kronecker_dim)
    if args.bits:
        if not adapter:
            raise InputError(
                f"{model}: model_args: load_in_{args.bits}bit: quantized weights have no gradients. Give the folder of "
                "a PEFT adapter."
            )
        weights, summed = round(weights * args.bits / 8 / next(empty.parameters()).itemsize), 4 * adapter_entries
    parts = {
        "weights": weights * (2 if at_delta is not None else 1),
        "sums": summed if accumulate_on in (None, "device") or (accumulate_on == "cpu" and device.type == "cpu") else 0,
        "activations": activations_size(loaded, args.gradient_checkpointing) if kind != "gram" else 0,
        "gradients": 4 * (HELD_CPU if device.type == "cpu" else HELD_CUDA),
        "process": PROCESS,
    }
    free = free_memory(device)
    if args.device_map is not None and device.type != "cpu":  # what does not fit the GPU is on the CPU
        free = sum(filter(None, (free, free_memory(torch.device("cpu")))))
    notes = list(loaded.notes)
    if kind != "gram" and not parts["activations"]:
        notes.append("the activations of a batch are not counted for this model")
    facts = {
        "model": model,
        "data": source,
        "out": None if out is None else str(out),
        "kind": kind,
        "task": loaded.task,
        "examples": loaded.examples,
        "device": str(device),
        "dtype": str(next(empty.parameters()).dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in empty.parameters()),
    }
    return JobSize(
        bytes_read=read + adapter,
        bytes_written=summed // 4 * ENTRY_SIZE[precision],
        memory=sum(parts.values()),
        free_memory=free,
        free_disk=free_disk(out),
        memory_parts=parts,
        facts=facts,
        notes=notes,
    )


def stored_size(folder: Path, stem: str) -> tuple[int, int]:
    """Return the bytes of the weight files ``stem`` in a folder, and the entries of their tensors."""
    files = open_files(folder, stem) or []
    close_files(files)
    entries = sum(entry.numel for file in files for entry in file.entries.values())
    return sum(file.path.stat().st_size for file in files), entries


def sums_size(model: nn.Module, kind: str, max_kronecker_dim: int = MAX_KRONECKER_DIM) -> int:
    """Return the bytes of a model's curvature in float32."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    total = sum(parameter.numel() for parameter in parameters)
    if kind == "gram":
        tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        layers = [layer for layer in linear_layers(model) if layer.weight not in tables]
        return 4 * sum(int(layer.weight.shape[not is_conv1d(layer)]) ** 2 for layer in layers)
    if kind == "kronecker":
        with_factors, _ = kronecker_layers(model, parameters, stored_unchanged(model), max_kronecker_dim)
        for weight, (_, module) in with_factors.items():
            inputs, outputs = weight.shape[1:].numel(), weight.shape[0]
            bias = 0 if module._parameters.get("bias") is None else outputs
            total += (inputs + bool(bias)) ** 2 + outputs**2 - weight.numel() - bias
    return 4 * total


def activations_size(loaded: LoadedTask, recomputed: bool) -> int:
    """Return the bytes that autograd keeps of the longest batch, approximately; 0 if the tokens cannot be counted."""
    model: Any = loaded.model
    step = max(loaded.batch_size, loaded.examples // SAMPLED_BATCHES)
    with quiet_transformers():
        starts = range(0, loaded.examples, step)
        batches = [range(start, min(start + loaded.batch_size, loaded.examples)) for start in starts]
        tokens = max((tokens_in(loaded.data.batch(rows), model) for rows in batches), default=0)
    itemsize = next(model.parameters()).itemsize
    kept = KEPT * itemsize * sum(sum(layer.weight.shape) for layer in linear_layers(model))
    blocks = len(blocks_of(model))
    if recomputed and blocks:  # one tensor per block, and all of one block
        hidden = getattr(getattr(model, "config", None), "hidden_size", 0)
        kept = kept / blocks + itemsize * hidden * blocks
    if loaded.task in ("causal-lm", "seq2seq"):  # logits and their logarithms, in float32
        kept += 2 * 4 * model.get_input_embeddings().weight.shape[0]
    return int(tokens * kept)


def tokens_in(batch: Mapping[str, Tensor], model: Any) -> int:
    """Return the tokens or image patches of a batch, with padding; 0 for images without patches."""
    if texts := [value for name, value in batch.items() if name.startswith(("input_ids", "decoder_input_ids"))]:
        return sum(value.numel() for value in texts)
    pixels, patch = batch.get("pixel_values"), getattr(model.config, "patch_size", None)
    if pixels is None or not isinstance(patch, int):
        return 0
    return pixels.shape[0] * (pixels.shape[-2] // patch * (pixels.shape[-1] // patch) + 1)


def linear_layers(model: nn.Module) -> list[Any]:
    """Return the linear layers of a model, and GPT-2's transposed ones."""
    return [module for module in model.modules() if isinstance(module, nn.Linear) or is_conv1d(module)]
