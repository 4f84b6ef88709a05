"""What a merge changes of its base, tensor by tensor, as the parts of an adapter."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.checkpoint import Buffers, Checkpoint, is_same
from ...checkpoints.lora import AdapterCheckpoint
from ...errors import InputError
from ...io.reader import TensorInfo
from ...recipe import Recipe
from ..plan.jobs import Block, Job, LayerJob, MergedBlock, MergeOptions, torch_type
from ..plan.plan import Plan
from ..run.executor import merge_blocks
from ..run.linear import linear_weights
from ..run.rounding import rounded
from ..run.statistics import Statistics
from .layout import AdapterLayout
from .low_rank import factored, narrowed
from .parts import Part, read_part, squares, write_part

#: A difference from the base below this share of an entry is rounding: nothing has changed.
ROUNDING = 2.0**-22


@dataclass
class Changes:
    """What a merge changes of its base, tensor by tensor, as the parts of an adapter."""

    recipe: Recipe
    plan: Plan
    base: Checkpoint
    stored: dict[str, TensorInfo]
    """The tensors as a model would store them."""
    folder: Path
    device: str
    allow_nonfinite: bool
    statistics: Statistics | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    bytes_read: int = 0

    def __post_init__(self) -> None:
        tuned = self.plan.inputs.tuned
        own = [c for c in tuned if isinstance(c, AdapterCheckpoint) and is_same(c.base, self.base)]
        self.adapters = own if len(own) == len(tuned) else []
        """The models, if all of them are adapters of the base."""
        self.layout = AdapterLayout(self.base, own)
        self._numbers = {name: number for number, name in enumerate(self.stored)}
        self.jobs = {name: job for job in self.plan.jobs for name in job.tensors}
        self._lock = threading.Lock()
        self.blocks: dict[str, list[Block]] = defaultdict(list)
        for block in self.plan.blocks():
            self.blocks[block.job.name].append(block)
        self._dtype = getattr(torch, self.recipe.output.dtype, torch.float32)  # also for `auto` and `widest`
        if self.recipe.output.rank is None:
            self._require_exact()

    def _require_exact(self) -> None:
        """Stop before any work if something would be lost, and no rank says how much may be."""
        why = ""
        if not self.adapters:
            why = "not all models are LoRA adapters of the base"
        elif not all(linear_weights(self.plan, job) for job in self.plan.merged):
            why = f"{self.plan.rule.name} is no weighted sum of what the adapters change"
        else:
            for job in self.plan.merged:
                if any(a.changes(job.name) and not self._in_factors(a, job.name) for a in self.adapters):
                    why = f"the change of {job.name} is more than LoRA's factors, as with DoRA"
        if why:
            raise InputError(
                f"output.rank: {why}, so that the adapter can only come near the merge. Give its rank (such as "
                "--set output.rank=64); what is lost is reported."
            )

    def _in_factors(self, adapter: AdapterCheckpoint, name: str) -> bool:
        """Whether an adapter's change can be kept as it is: as factors, or whole as the adapter itself has it."""
        return name not in adapter.factors or adapter.has_only_factors(name)

    def find(self, job: Job) -> Iterator[int]:
        """Find the change of a tensor, and of a bias with it, unless an earlier run has; the units that were read."""
        bias = job.bias[0] if isinstance(job, LayerJob) and job.bias is not None else None
        path = self._path(job.name)
        if (done := read_part(path)) is not None:
            self.parts[job.name] = done
            if bias is None:
                return
            if (part := read_part(self._path(bias))) is not None:
                self.parts[bias] = part
                return
        touching = [adapter for adapter in self.adapters if adapter.changes(job.name)]
        weights = linear_weights(self.plan, job) if self.adapters else None
        if self.adapters and not touching and (weights or not self._moves(job)):
            self.parts[job.name] = write_part(path, {})
        elif weights and all(adapter.has_only_factors(job.name) for adapter in touching):
            self.parts[job.name] = self._side_by_side(job, dict(zip(self.adapters, weights, strict=True)))
        else:
            whole = any(adapter.changes(job.name) and job.name not in adapter.factors for adapter in self.adapters)
            self._through_rule(job, whole)
            yield from (block.number for block in self.blocks[job.name])

    def _path(self, name: str, suffix: str = "") -> Path:
        return self.folder / f"{self._numbers[name]:06d}{suffix}.safetensors"

    def _moves(self, job: Job) -> bool:
        """Whether a tensor that no model changes is changed by the rule all the same: its first block tells."""
        first = self.blocks[job.name][0]
        moved = []

        def put(block: MergedBlock) -> None:
            moved.append(_differs(block.values.double(), self._read(block)))

        self._run([first], put)
        return any(moved)

    def _read(self, block: MergedBlock) -> Tensor:
        """The same block of the base."""
        return self.base.read(block.job.name, block.start, block.stop, Buffers()).to(torch.float64)

    def _run(self, blocks: list[Block], put: Callable[[MergedBlock], None]) -> None:
        assert self.statistics is not None
        options = MergeOptions(torch.device(self.device), self.allow_nonfinite)
        merge_blocks(self.plan, self.statistics, put, blocks=blocks, options=options)

    def _side_by_side(self, job: Job, weights: dict[AdapterCheckpoint, float]) -> Part:
        """The factors of all adapters, each B with its weight: their product is the weighted sum of their products."""
        pairs = [(weight, *a.read_factors(job.name)) for a, weight in weights.items() if a.changes(job.name) and weight]
        self._count(sum(b.numel() + a.numel() for _, b, a in pairs) * 4)
        if not pairs:
            return write_part(self._path(job.name), {})
        b, a = torch.cat([w * b for w, b, _ in pairs], 1), torch.cat([a for *_, a in pairs])
        found = narrowed(b, a, self.recipe.output.rank, self._dtype)
        self._check_finite(job, found.b, found.a)
        return write_part(self._path(job.name), self._shaped(job, found.b, found.a), found.norm, found.lost)

    def _count(self, nbytes: int) -> None:
        with self._lock:
            self.bytes_read += nbytes

    def _shaped(self, job: Job, b: Tensor, a: Tensor) -> dict[str, Tensor]:
        """Factors as PEFT stores them: those of a convolution have its shape."""
        shape = job.info.shape
        if len(shape) > 2:
            a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *(1 for _ in shape[2:]))
        return {"A": a, "B": b}

    def _check_finite(self, job: Job, *tensors: Tensor) -> None:
        if not self.allow_nonfinite and not all(bool(t.isfinite().all()) for t in tensors):
            raise InputError(
                f"the adapter of {job.name} has values that are NaN or infinite, or too large for its type. Set "
                "output.dtype to a wider type, or pass --allow-nonfinite to go on."
            )

    def _through_rule(self, job: Job, whole: bool, suffix: str = "") -> None:
        """Merge a tensor, and keep its difference from the base as factors, or all of it ``whole``."""
        bias = job.bias[0] if isinstance(job, LayerJob) and job.bias is not None else None
        whole = whole or not self._place_if_changed(job.name)
        merged = torch.empty(job.info.numel, dtype=torch_type(self.stored[job.name]) if whole else torch.float32)
        moved: list[bool] = []
        norms: list[float] = []

        def put(block: MergedBlock) -> None:
            start, stop, base = block.start, block.stop, self._read(block)
            values = block.values.double()
            moved.append(_differs(values, base))
            if whole:
                merged[start:stop] = rounded(values, merged.dtype)
                norms.append(squares(values - base))
            else:
                merged[start:stop] = values - base
            if bias is not None:
                self._keep_bias(bias, block.tensors[bias].double())

        self._run(self.blocks[job.name], put)
        self._count(self.plan.bytes_read(job) + self.base.tensors[job.name].nbytes)
        path = self._path(job.name, suffix)
        if not any(moved) and not suffix:
            self.parts[job.name] = write_part(path, {})
        elif whole:
            self._check_finite(job, merged)
            norm = sum(sorted(norms))
            self.parts[job.name] = write_part(path, {"whole": merged.reshape(job.info.shape)}, norm)
        else:
            matrix = merged.reshape(job.info.shape[0], -1)
            matrix = matrix.T if self.layout.place(job.name).transposed else matrix
            assert self.recipe.output.rank is not None
            found = factored(matrix, self.recipe.output.rank, self._dtype)
            self._check_finite(job, found.b, found.a)
            self.parts[job.name] = write_part(path, self._shaped(job, found.b, found.a), found.norm, found.lost)

    def _keep_bias(self, bias: str, values: Tensor) -> None:
        info = self.stored[bias]
        base = self.base.read(bias, 0, info.numel, Buffers()).double()
        kept = {}
        if _differs(values.flatten(), base):
            kept["whole"] = rounded(values, torch_type(info)).reshape(info.shape)
        self.parts[bias] = write_part(self._path(bias), kept, squares(values.flatten() - base))

    def _place_if_changed(self, name: str) -> bool:
        """Whether LoRA can hold the change of a tensor."""
        try:
            return bool(self.layout.place(name).kind) and not self.layout.tied(name)
        except InputError:  # said where it has changed indeed
            return False

    def whole(self, name: str) -> Part:
        """A tensor as it is after the merge, whatever was kept of it before."""
        part = self.parts.get(name)
        if part is not None and part.is_whole:
            return part
        if part is not None and part.keys:
            self._through_rule(self.jobs[name], whole=True, suffix="-whole")
            return self.parts[name]
        self.parts[name] = self.of_base(name)
        return self.parts[name]

    def of_base(self, name: str) -> Part:
        """A tensor as it is in the base."""
        info = self.base.tensors[name]
        values = self.base.read(name, 0, info.numel, Buffers()).reshape(info.shape)
        return write_part(self._path(name, "-base"), {"whole": values})


def _differs(values: Tensor, base: Tensor) -> bool:
    """Whether values are others than the base's, by more than rounding."""
    return bool(((values - base).abs() > ROUNDING * base.abs()).any())
