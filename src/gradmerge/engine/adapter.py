"""The output of a merge that is written as one LoRA adapter of its base.

Where the rule is a weighted sum and all models are adapters of the base, the factors are concatenated and no weight of
the base is read. Every other tensor goes through the rule, and its difference from the base is factorized.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint, is_same
from ..checkpoints.lora import AdapterCheckpoint
from ..errors import InputError, MachineError
from ..io.atomic_dir import AtomicDir
from ..io.reader import TensorFile, TensorInfo, bytes_of
from ..io.writer import ShardWriter
from ..recipe import Recipe
from .executor import merge_blocks
from .jobs import Block, Job, LayerJob, MergedBlock, MergeOptions
from .journal import Finished, Journal
from .linear import linear_weights
from .low_rank import LowRank, factorize, truncate
from .peft_config import AdapterReport, ModuleTree, lay_out
from .plan import Plan
from .rounding import rounded
from .statistics import Statistics
from .thread_pool import run_parallel

#: A difference from the base below this share of an entry is a rounding error.
ROUNDING = 2.0**-22
#: Elements that are copied at once.
CHUNK = 1 << 22


@dataclass(frozen=True)
class Change:
    """What a merge changes of one tensor, in a file: factors A and B, the `whole` tensor, or nothing."""

    path: Path
    infos: Mapping[str, TensorInfo]
    norm: float
    """The squared Frobenius norm of the change."""
    lost: float
    """The same of what the factors lack."""

    @property
    def rank(self) -> int:
        return self.infos["A"].shape[0]


def save_change(path: Path, tensors: Mapping[str, Tensor], norm: float = 0.0, lost: float = 0.0) -> Change:
    """Save a change; a killed process leaves no incomplete file."""
    unfinished = path.with_suffix(".unfinished")
    try:
        facts = json.dumps({"norm": norm, "lost": lost})
        save_file({key: value.contiguous() for key, value in tensors.items()}, unfinished, {"facts": facts})
        unfinished.rename(path)
    except (OSError, SafetensorError) as error:
        raise MachineError(f"{path}: writing failed: {error}") from error
    return load_change(path)


def load_change(path: Path) -> Change:
    file = TensorFile(path)
    file.close()
    return Change(path, dict(file.entries), **json.loads(file.metadata["facts"]))


@dataclass
class PendingTensor:
    """A tensor whose blocks are being merged: its difference from the base, or the ``whole`` of it."""

    values: Tensor
    whole: bool
    missing: int
    """Elements that have not been merged yet."""
    changed: bool = False
    norms: list[float] = field(default_factory=list)


class AdapterOutput:
    """The unfinished adapter, with the interface of :class:`~gradmerge.engine.output.Output`.

    Each finished tensor has a file, which a resumed merge does not make again.
    """

    def __init__(
        self, recipe: Recipe, plan: Plan, folder: AtomicDir, journal: Journal, threads: int, options: MergeOptions
    ) -> None:
        self.base = adapter_base(recipe, plan)
        adapters = [c for c in plan.inputs.tuned if isinstance(c, AdapterCheckpoint) and is_same(c.base, self.base)]
        self._adapters = adapters if len(adapters) == len(plan.inputs.tuned) else []
        """The merged models, if all of them are adapters of the base."""
        self._tree = ModuleTree(self.base, adapters)
        self._plan, self._folder, self._journal = plan, folder, journal
        self._threads, self._options, self._rank = threads, options, recipe.output.rank
        self._dtype = getattr(torch, recipe.output.dtype, torch.float32)  # also for `auto` and `widest`
        self._stored = plan.merged_tensors
        plan.jobs = [in_float64(job) for job in plan.jobs]
        self._blocks: dict[str, list[Block]] = {job.name: [] for job in plan.merged}
        for block in plan.blocks():
            if block.job.name in self._blocks:
                self._blocks[block.job.name].append(block)
        self._changes: dict[str, Change] = {}
        self._numbers = {name: number for number, name in enumerate(self._stored)}
        self._pending: dict[str, PendingTensor] = {}
        self._wanted_whole: set[str] = set()
        """Tensors that LoRA could represent, but whose modules are saved whole."""
        self._lock = threading.Lock()
        self.report: AdapterReport | None = None
        if self._rank is None:
            self._require_exact()

    def _require_exact(self) -> None:
        """Raise before any work if factors cannot hold the whole change and the recipe allows no loss."""
        why = ""
        if not self._adapters:
            why = "not all models are LoRA adapters of the base"
        elif not all(linear_weights(self._plan, job) for job in self._plan.merged):
            why = f"{self._plan.rule.name} is no weighted sum of what the adapters change"
        else:
            for name in self._stored:
                if any(name in adapter.factors and not adapter.has_only_factors(name) for adapter in self._adapters):
                    why = f"the change of {name} is more than the factors of a module, as with DoRA and fused experts"
        if why:
            raise InputError(
                f"output.rank: {why}, so that an adapter can only approximate the merge. Set its rank (such as 64); "
                "the loss is reported."
            )

    def __enter__(self) -> AdapterOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._journal.close()
        if isinstance(error, InputError):  # a resumed run would fail again
            self._folder.keep = False

    # The steps of a merge, in their order

    def open(self, resume: bool) -> Finished:
        """Open the journal, and return what an earlier run finished."""
        finished = self._journal.load() if resume else None
        if finished is None:
            self._folder.clear()
        self._folder.keep = True
        self._journal.open(fresh=finished is None)
        finished = finished or Finished()
        self._parts.mkdir(exist_ok=True)
        for name in self._stored:
            with contextlib.suppress(InputError, OSError):  # not there, or damaged
                self._changes[name] = load_change(self._path(name))
        finished.blocks = {b.number for blocks in self._blocks.values() for b in blocks if self._is_finished(b.job)}
        return finished

    def start(self, statistics: Statistics, finished: Finished) -> list[Block]:
        """Concatenate the factors of adapters where that is exact, and return the blocks that must be merged."""
        self._statistics = statistics
        left = set[str]()

        def work(job: Job) -> None:
            if not self._is_finished(job) and not self._combine_factors(job):
                left.add(job.name)

        run_parallel(self._plan.merged, lambda: work, self._threads)
        return [block for name, blocks in self._blocks.items() if name in left for block in blocks]

    def put(self, block: MergedBlock) -> None:
        """Add a block to its tensors; the thread with the last block of a tensor factorizes it."""
        for name, values in block.tensors.items():
            self._add(name, block.start, values.double())

    def finish(self) -> dict[str, int]:
        """Write the adapter, and return the bytes of its file."""
        self._changes = {name: self._changes[name] for name in self._stored}
        written = lay_out(self._tree, self._changes, self._adapters)
        needed = {
            name for name, part in written.entries.values() if part == "whole" and "A" in self._changes[name].infos
        }
        if needed:
            self._wanted_whole = needed
            blocks = [b for blocks in self._blocks.values() for b in blocks if needed & b.job.tensors.keys()]
            merge_blocks(
                self._plan, self._statistics, self.put, blocks=blocks, threads=self._threads, options=self._options
            )
        sizes = self._write(written.entries)
        (self._folder.folder / "adapter_config.json").write_text(json.dumps(written.config, indent=2) + "\n", "utf-8")
        for path in self._parts.iterdir():
            path.unlink()
        self._parts.rmdir()
        changes = self._changes
        norm = sum(change.norm for change in changes.values())
        self.report = AdapterReport(
            self.base,
            written.config["r"],
            {name: changes[name].lost / changes[name].norm for name in written.factors},
            sum(changes[name].lost for name in written.factors) / norm if norm else 0.0,
            {name: changes[name].rank for name in written.factors},
            [name for name in written.whole if name in changes and changes[name].norm > 0],
        )
        return sizes

    @property
    def _parts(self) -> Path:
        return self._folder.folder / "parts"

    def _path(self, name: str) -> Path:
        """The file of a change; those that are made a second time are not resumed."""
        again = "-again" if name in self._wanted_whole else ""
        return self._parts / f"{self._numbers[name]:06d}{again}.safetensors"

    def _is_finished(self, job: Job) -> bool:
        return all(name in self._changes for name in job.tensors)

    # Weighted sums of adapters

    def _combine_factors(self, job: Job) -> bool:
        """Save the change of a tensor without merging it, if the factors of the adapters tell it."""
        if not self._adapters:
            return False
        weights = linear_weights(self._plan, job)
        changing = [a for a in self._adapters if any(map(a.changes, job.tensors))]
        if not changing and (weights or not self._rule_changes(job)):
            for name in job.tensors:
                self._keep(name, {})
            return True
        if weights is None or not all(adapter.has_only_factors(job.name) for adapter in changing):
            return False
        pairs = [
            (weight, *adapter.read_factors(job.name))
            for adapter, weight in zip(self._adapters, weights, strict=True)
            if weight and adapter.changes(job.name)
        ]
        if not pairs:
            self._keep(job.name, {})
            return True
        b = torch.cat([weight * b for weight, b, _ in pairs], 1)
        a = torch.cat([a for *_, a in pairs])
        self._keep_factors(job.name, truncate(b, a, self._rank, self._dtype))
        return True

    def _rule_changes(self, job: Job) -> bool:
        """Return whether the rule changes a tensor that no model changes, judged by its first block."""
        changes: list[bool] = []

        def put(block: MergedBlock) -> None:
            changes.extend(_differs(v.double(), self._read(n, block.start, v)) for n, v in block.tensors.items())

        merge_blocks(self._plan, self._statistics, put, blocks=self._blocks[job.name][:1], options=self._options)
        return any(changes)

    # Differences from the base

    def _add(self, name: str, start: int, values: Tensor) -> None:
        """Add merged values of a tensor from element ``start``."""
        base = self._read(name, start, values)
        with self._lock:
            if name not in self._pending:
                self._pending[name] = self._new_pending(name)
            pending = self._pending[name]
        stop = start + len(values)
        pending.values[start:stop] = rounded(values, pending.values.dtype) if pending.whole else values - base
        with self._lock:
            pending.changed |= _differs(values, base)
            pending.norms.append(_squares(values - base))
            pending.missing -= len(values)
            if pending.missing:
                return
            del self._pending[name]
        self._finish_tensor(name, pending)

    def _read(self, name: str, start: int, values: Tensor) -> Tensor:
        """The same elements of the base."""
        return self.base.read(name, start, start + len(values), Buffers()).double()

    def _new_pending(self, name: str) -> PendingTensor:
        info = self._stored[name]
        replaced = any(adapter.changes(name) and name not in adapter.factors for adapter in self._adapters)
        whole = replaced or name in self._wanted_whole or not self._tree.can_factor(name)
        dtype = TORCH_TYPES[info.dtype] if whole else torch.float32
        return PendingTensor(torch.empty(info.numel, dtype=dtype), whole, info.numel)

    def _finish_tensor(self, name: str, pending: PendingTensor) -> None:
        if not pending.changed and name not in self._wanted_whole:
            self._keep(name, {})
        elif pending.whole:
            tensor = pending.values.reshape(self._stored[name].shape)
            self._keep(name, {"whole": tensor}, math.fsum(pending.norms))
        else:
            matrix = pending.values.reshape(self._stored[name].shape[0], -1)
            matrix = matrix.T if self._tree.find(name).transposed else matrix
            assert self._rank is not None
            self._keep_factors(name, factorize(matrix, self._rank, self._dtype))

    def _keep_factors(self, name: str, factors: LowRank) -> None:
        a, b, shape = factors.a, factors.b, self._stored[name].shape
        if len(shape) > 2:  # PEFT's factors of a convolution have its shape
            a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *(1 for _ in shape[2:]))
        self._keep(name, {"A": a, "B": b}, factors.norm, factors.lost)

    def _keep(self, name: str, tensors: Mapping[str, Tensor], norm: float = 0.0, lost: float = 0.0) -> None:
        if not self._options.allow_nonfinite and not all(bool(t.isfinite().all()) for t in tensors.values()):
            raise InputError(
                f"the adapter of {name} has values that are NaN or infinite, or too large for its type. Set "
                "output.dtype to a wider type, or set allow_nonfinite."
            )
        self._changes[name] = save_change(self._path(name), tensors, norm, lost)

    # The adapter's file

    def _write(self, entries: Mapping[str, tuple[str, str]]) -> dict[str, int]:
        """Write adapter_model.safetensors; what has not changed comes from the base. Return its size by name."""
        infos: dict[str, TensorInfo] = {}
        for key, (name, part) in sorted(entries.items()):
            change = self._changes.get(name)
            infos[key] = self.base.tensors[name] if change is None or part not in change.infos else change.infos[part]
        described = {key: (info.dtype, info.shape) for key, info in infos.items()}
        # PEFT looks for a single file, however large.
        with ShardWriter(self._folder.folder, "adapter_model", described, 1 << 62, {"format": "pt"}) as writer:
            for key, (name, part) in entries.items():
                change = self._changes.get(name)
                if change is None or part not in change.infos:
                    _copy(self.base, name, writer, key)
                else:
                    with Checkpoint(str(change.path), files=[TensorFile(change.path)]) as saved:
                        _copy(saved, part, writer, key)
            writer.finish()
            return writer.sizes


def adapter_base(recipe: Recipe, plan: Plan) -> Checkpoint:
    """Return the model that the adapter is for: the recipe's base, or the base of all merged adapters."""
    if recipe.output.curvature:
        raise InputError("output.curvature: an adapter has no curvature; write a model for that")
    base = plan.inputs.base
    if base is None:
        if recipe.exclude or recipe.include != ["*"]:
            raise InputError("output.format: with include or exclude, name the base that the other tensors come from")
        bases = [c.base for c in plan.inputs.tuned if isinstance(c, AdapterCheckpoint)]
        if len(bases) < len(plan.inputs.tuned) or not all(is_same(bases[0], other) for other in bases):
            raise InputError("output.format: an adapter needs a base: name it in the recipe, as base")
        base = bases[0]
    if isinstance(base, AdapterCheckpoint):
        raise InputError(
            f"output.format: the base is itself an adapter, of {base.label}, and an adapter names a model as its base. "
            "Merge it into its base first."
        )
    return base


def in_float64(job: Job) -> Job:
    """Return a job whose result is not rounded, so that its difference from the base is exact."""
    if job.rule is None:
        return job
    job = replace(job, info=TensorInfo("F64", job.info.shape), compute=torch.float64)
    if isinstance(job, LayerJob) and job.bias is not None:
        name, info = job.bias
        job = replace(job, bias=(name, TensorInfo("F64", info.shape)))
    return job


def _differs(values: Tensor, base: Tensor) -> bool:
    """Return whether values differ from those of the base by more than rounding errors."""
    return bool(((values - base).abs() > ROUNDING * base.abs()).any())


def _squares(values: Tensor) -> float:
    return float(values.square().sum())


def _copy(source: Checkpoint, name: str, writer: ShardWriter, key: str) -> None:
    """Copy a tensor to the adapter's file, a chunk at a time."""
    info, buffers = source.tensors[name], Buffers()
    for start in range(0, info.numel, CHUNK):
        block = source.read(name, start, min(start + CHUNK, info.numel), buffers)
        writer.write(key, start, bytes_of(rounded(block, TORCH_TYPES[info.dtype])))
