"""The output of a merge that is written as one LoRA adapter of its base.

Where the rule is a weighted sum and all models are adapters of the base, their factors are concatenated, and no weight
of the base is read. Every other tensor goes through the rule, and its difference from the base is factorized. Factors
stay in memory until the end. Tensors that are saved whole are then merged once more, into the adapter's file.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..checkpoints.checkpoint import STORED_TYPES, TORCH_TYPES, Buffers, Checkpoint, is_same
from ..checkpoints.lora import AdapterCheckpoint
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import TensorInfo, bytes_of
from ..io.writer import ShardWriter
from ..recipe import Recipe
from .executor import merge_blocks
from .jobs import Block, BlockJob, Job, LayerJob, MergedBlock, MergeOptions, all_finite, rule_arguments
from .peft_config import AdapterReport, Change, ModuleTree, lay_out
from .plan import Plan
from .rounding import rounded
from .statistics import Statistics
from .thread_pool import run_parallel

#: A difference from the base below this share of an entry is a rounding error.
ROUNDING = 2.0**-22
#: Elements that are copied at once.
CHUNK = 1 << 22
#: The inputs that a rule may read for its weights to be recognized.
LINEAR_INPUTS = {"base", "tuned", "weights", "base_weight"}


#: Entries of a matrix that are converted to float64 at once.
PANEL = 1 << 20
#: Singular values below this share of the largest are rounding errors.
NEGLIGIBLE = 1e-7


@dataclass
class Difference:
    """The difference of one tensor from the base, while its blocks are merged."""

    values: Tensor
    """Without elements if the tensor is saved whole."""
    missing: int
    """Elements that have not been merged yet."""
    changed: bool = False
    """Whether an entry differs by more than a rounding error."""
    norms: list[float] = field(default_factory=list)


class AdapterOutput:
    """The unfinished adapter, with the interface of :class:`~gradmerge.engine.output.Output`.

    A killed merge leaves nothing to resume.
    """

    def __init__(self, recipe: Recipe, plan: Plan, folder: AtomicDir, threads: int, options: MergeOptions) -> None:
        self.base = adapter_base(recipe, plan)
        adapters = [c for c in plan.inputs.tuned if isinstance(c, AdapterCheckpoint) and is_same(c.base, self.base)]
        self._adapters = adapters if len(adapters) == len(plan.inputs.tuned) else []
        """The merged models, if all of them are adapters of the base."""
        self._tree = ModuleTree(self.base, adapters)
        self._plan, self._folder, self._threads, self._options = plan, folder, threads, options
        self._rank = recipe.output.rank
        self._dtype = getattr(torch, recipe.output.dtype, torch.float32)  # also for `auto` and `widest`
        self._stored = plan.merged_tensors
        plan.jobs = [in_float64(job) for job in plan.jobs]
        self._changes: dict[str, Change] = {}
        self._differences: dict[str, Difference] = {}
        self._lock = threading.Lock()
        self.report: AdapterReport | None = None
        if self._rank is None:
            self._require_exact()

    def _require_exact(self) -> None:
        """Raise before any work if factors cannot hold the whole change and the recipe allows no loss."""
        why = ""
        if not self._adapters:
            why = "not all models are LoRA adapters of the base"
        elif not all(linear_weights(self._plan, job) for job in self._plan.merged_jobs):
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

    def __exit__(self, *_: object) -> None:
        """Close nothing: all files are closed already."""

    def open(self) -> list[Block]:
        """Concatenate the factors of adapters where that is exact, and return the blocks that must be merged."""
        self._folder.clear()
        self._folder.keep = False
        left = set[str]()

        def work(job: Job) -> None:
            if not self._combine_factors(job):
                left.add(job.name)

        run_parallel(self._plan.merged_jobs, lambda: work, self._threads)
        return [block for block in self._plan.blocks() if block.job.name in left]

    def _combine_factors(self, job: Job) -> bool:
        """Concatenate the adapters' factors of a tensor where that is exact. Return whether it is."""
        weights = linear_weights(self._plan, job) if self._adapters else None
        if weights is None:
            return False
        changing = [
            (weight, adapter)
            for weight, adapter in zip(weights, self._adapters, strict=True)
            if any(map(adapter.changes, job.tensors))
        ]
        if not all(adapter.has_only_factors(job.name) for _, adapter in changing):
            return False
        pairs = [(weight, *adapter.read_factors(job.name)) for weight, adapter in changing if weight]
        if pairs:
            b = torch.cat([weight * b for weight, b, _ in pairs], 1)
            a = torch.cat([a for *_, a in pairs])
            self._keep_factors(job.name, truncate(b, a, self._rank, self._dtype))
        return True

    def put(self, merged: MergedBlock) -> None:
        """Add a block to its tensors; the thread with the last block of a tensor factorizes it."""
        for name, values in merged.tensors.items():
            self._add(name, merged.start, values.double())

    def _add(self, name: str, start: int, values: Tensor) -> None:
        """Add merged values of a tensor from element ``start``."""
        stop = start + len(values)
        base = self.base.read(name, start, stop, Buffers()).double()
        change = values - base
        differs, norm = bool((change.abs() > ROUNDING * base.abs()).any()), float(change.square().sum())
        with self._lock:
            if name not in self._differences:
                numel = self._stored[name].numel
                self._differences[name] = Difference(torch.zeros(numel if self._can_factor(name) else 0), numel)
            difference = self._differences[name]
        if len(difference.values) and bool(change.any()):  # memory of zeros is not used until something is written
            difference.values[start:stop] = change
        with self._lock:
            difference.changed |= differs
            difference.norms.append(norm)
            difference.missing -= len(values)
            if difference.missing:
                return
            del self._differences[name]
        if not difference.changed:
            return
        if len(difference.values):
            matrix = difference.values.reshape(self._stored[name].shape[0], -1)
            matrix = matrix.T if self._tree.find(name).transposed else matrix
            assert self._rank is not None
            self._keep_factors(name, factorize(matrix, self._rank, self._dtype))
        else:
            self._changes[name] = Change(math.fsum(difference.norms))

    def _can_factor(self, name: str) -> bool:
        replaced = any(adapter.changes(name) and name not in adapter.factors for adapter in self._adapters)
        return not replaced and self._tree.can_factor(name)

    def _keep_factors(self, name: str, factors: LowRank) -> None:
        a, b, shape = factors.a, factors.b, self._stored[name].shape
        if len(shape) > 2:  # PEFT's factors of a convolution have its shape
            a, b = a.reshape(-1, *shape[1:]), b.reshape(*b.shape, *(1 for _ in shape[2:]))
        self._check_finite(name, a, b)
        self._changes[name] = Change(factors.norm, factors.lost, {"A": a.contiguous(), "B": b.contiguous()})

    def _check_finite(self, name: str, *tensors: Tensor) -> None:
        if not self._options.allow_nonfinite and not all(map(all_finite, tensors)):
            raise InputError(
                f"the adapter of {name} has values that are NaN or infinite, or too large for its type. Set "
                "output.dtype to a wider type, or set allow_nonfinite."
            )

    def finish(self, statistics: Statistics) -> dict[str, int]:
        """Write the adapter, and return the bytes of its file."""
        changes = {name: self._changes[name] for name in self._stored if name in self._changes}
        layout = lay_out(self._tree, changes, self._adapters)
        sizes = self._write(layout.entries, statistics)
        config = json.dumps(layout.config, indent=2) + "\n"
        (self._folder.folder / "adapter_config.json").write_text(config, "utf-8")
        norm = sum(change.norm for change in changes.values())
        self.report = AdapterReport(
            self.base,
            layout.config["r"],
            {name: changes[name].lost / changes[name].norm for name in layout.factors},
            sum(changes[name].lost for name in layout.factors) / norm,
            [name for name in layout.whole if name in changes],
        )
        return sizes

    def _write(self, entries: Mapping[str, tuple[str, str]], statistics: Statistics) -> dict[str, int]:
        """Write adapter_model.safetensors, and return its size by name."""
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        whole: dict[str, list[str]] = {}
        """Tensor that the merge changes → the keys under which it is saved."""
        for key, (name, part) in sorted(entries.items()):
            info = self.base.tensors[name]
            if part in ("A", "B"):
                factor = self._changes[name].factors[part]
                info = TensorInfo(STORED_TYPES[factor.dtype], tuple(factor.shape))
            elif part == "whole" and name in self._changes:
                info = self._stored[name]
                whole.setdefault(name, []).append(key)
            tensors[key] = info.dtype, info.shape
        # PEFT looks for a single file, however large.
        with ShardWriter(self._folder.folder, "adapter_model", tensors, 1 << 62, {"format": "pt"}) as writer:

            def put(merged: MergedBlock) -> None:
                for name, values in merged.tensors.items():
                    stored = rounded(values, TORCH_TYPES[self._stored[name].dtype])
                    self._check_finite(name, stored)
                    for key in whole.get(name, ()):
                        writer.write(key, merged.start, bytes_of(stored.contiguous()))

            for key, (name, part) in entries.items():
                if part in ("A", "B"):
                    writer.write(key, 0, bytes_of(self._changes[name].factors[part]))
                elif part == "base" or name not in whole:
                    _copy(self.base, name, writer, key)
            blocks = [block for block in self._plan.blocks() if whole.keys() & block.job.tensors.keys()]
            merge_blocks(self._plan, statistics, put, blocks=blocks, threads=self._threads, options=self._options)
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


def linear_weights(plan: Plan, job: Job) -> list[float] | None:
    """Return the c_t with which the rule gives base + Σ c_t (θ_t − base) for a tensor; None if no c_t do.

    They are recognized by running the rule on random numbers.
    """
    if not isinstance(job, BlockJob) or job.granularity == "tensor" or not plan.needs <= LINEAR_INPUTS:
        return None
    settings, models = plan.inputs.settings.of(job.name), len(plan.inputs.tuned)

    def merge(base: Tensor, tuned: list[Tensor]) -> Tensor:
        return job.rule(**rule_arguments(job.rule, plan, {"base": base, "tuned": tuned}, settings))

    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    base, *tuned = _random_rows(models + 1)
    try:
        weights = [float(merge(zero, [one if i == t else zero for i in range(models)])) for t in range(models)]
        merged = merge(base, list(tuned))
    except (ValueError, ZeroDivisionError):
        return None
    expected = base + sum(c * (model - base) for c, model in zip(weights, tuned, strict=True))
    scale = 1 + sum(map(abs, weights))
    return weights if bool(((merged - expected).abs() <= 1e-9 * scale * (1 + expected.abs())).all()) else None


@functools.cache
def _random_rows(rows: int) -> Tensor:
    """Random numbers of many sizes and both signs."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 64, generator=generator, dtype=torch.float64) * 10 ** torch.linspace(-2, 2, 64).double()


def _copy(source: Checkpoint, name: str, writer: ShardWriter, key: str) -> None:
    """Copy a tensor to the adapter's file, a chunk at a time."""
    info, buffers = source.tensors[name], Buffers()
    for start in range(0, info.numel, CHUNK):
        block = source.read(name, start, min(start + CHUNK, info.numel), buffers)
        writer.write(key, start, bytes_of(rounded(block, TORCH_TYPES[info.dtype])))


@dataclass(frozen=True)
class LowRank:
    """B and A, with the squared Frobenius norms of the matrix and of its difference from BA."""

    b: Tensor
    a: Tensor
    norm: float
    lost: float


def factorize(matrix: Tensor, rank: int, dtype: torch.dtype) -> LowRank:
    """Return the nearest product of at most this rank, stored in ``dtype``.

    The singular vectors of the shorter side are the eigenvectors of its Gram matrix, in float64. The loss is measured
    on the stored factors. Singular values that are rounding errors are left out.
    """
    tall = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    gram = torch.zeros(tall.shape[1], tall.shape[1], dtype=torch.float64)
    for _, panel in _panels(tall):
        gram.addmm_(panel.T, panel)
    norm = float(gram.trace())
    values, vectors = torch.linalg.eigh(gram)
    roots, vectors = _largest(values.clamp_(min=0).sqrt_(), vectors, rank)
    short = rounded((vectors * roots.sqrt()).T.contiguous(), dtype)
    directions = vectors / roots.sqrt()
    long = torch.empty(tall.shape[0], len(roots), dtype=dtype)
    lost, short64 = 0.0, short.double()
    for row, panel in _panels(tall):
        part = long[row : row + len(panel)] = rounded(panel @ directions, dtype)
        lost += float((panel - part.double() @ short64).square_().sum())
    b, a = (long, short) if tall is matrix else (short.T.contiguous(), long.T.contiguous())
    return LowRank(b, a, norm, lost)


def truncate(b: Tensor, a: Tensor, rank: int | None, dtype: torch.dtype) -> LowRank:
    """Return the nearest product of at most ``rank`` to BA, whose factors are in float64; None keeps their rank."""
    norm, lost = float(((b.T @ b) * (a @ a.T)).sum()), 0.0
    if rank is not None and a.shape[0] > rank:
        left, left_core = torch.linalg.qr(b)
        right, right_core = torch.linalg.qr(a.T)
        u, roots, v = torch.linalg.svd(left_core @ right_core.T)
        lost = float(roots[rank:].square().sum())
        b, a = left @ (u[:, :rank] * roots[:rank].sqrt()), (roots[:rank].sqrt()[:, None] * v[:rank]) @ right.T
    return LowRank(rounded(b.contiguous(), dtype), rounded(a.contiguous(), dtype), norm, lost)


def _largest(roots: Tensor, vectors: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest singular values with their vectors, in falling order; each vector's largest entry is positive."""
    roots, vectors = roots.flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = int((roots > NEGLIGIBLE * roots[0]).sum()) if len(roots) else 0
    roots, vectors = roots[:kept], vectors[:, :kept]
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True)) if kept else vectors[:1]
    return roots, vectors * largest.sign()


def _panels(matrix: Tensor) -> Iterator[tuple[int, Tensor]]:
    """A few rows at a time in float64, each with the number of its first."""
    step = max(1, PANEL // max(1, matrix.shape[1]))
    for row in range(0, matrix.shape[0], step):
        yield row, matrix[row : row + step].double()
