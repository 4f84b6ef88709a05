"""The output of a merge that is written as one LoRA adapter of its base.

Where the rule is a weighted sum and all models are adapters of the base, their factors are concatenated, and no weight
of the base is read. Every other tensor goes through the rule, and its difference from the base is factorized. Factors
stay in memory until the end. Tensors that are saved whole are then merged once more.
"""

from __future__ import annotations

import functools
import json
import math
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint, is_same
from ..checkpoints.lora import AdapterCheckpoint
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import TensorInfo
from ..recipe import Recipe
from .executor import Advance, Executor
from .jobs import Block, BlockJob, Job, LayerJob, MergeOptions, all_finite, rule_arguments
from .peft_config import AdapterReport, Change, ModuleTree, lay_out
from .plan import Plan
from .rounding import rounded
from .statistics import Statistics
from .thread_pool import run_parallel, with_buffers

#: A difference from the base below this share of an entry is a rounding error.
ROUNDING = 2.0**-22
#: The inputs that a rule may read for its weights to be recognized.
LINEAR_INPUTS = {"base", "tuned", "weights", "base_weight"}
#: Entries of a matrix that are converted to float64 at once.
PANEL = 1 << 20
#: Singular values below this share of the largest are rounding errors.
NEGLIGIBLE = 1e-7


class AdapterOutput:
    """The unfinished adapter, with the interface of :class:`~gradmerge.engine.output.Output`.

    A killed merge leaves nothing to resume.
    """

    finished: frozenset[int] = frozenset()

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
        self.report: AdapterReport | None = None

    def __enter__(self) -> AdapterOutput:
        return self

    def __exit__(self, *_: object) -> None:
        """Close nothing: no file is open."""

    def open(self) -> list[Block]:
        """Concatenate the factors of adapters where that is exact, and return the blocks that must be merged."""
        self._folder.clear()
        self._folder.keep = False
        left = set[str]()

        def work(job: Job) -> None:
            if not self._combine_factors(job):
                left.add(job.name)

        run_parallel(self._plan.merged_jobs, lambda: work, self._threads)
        if self._rank is None and (inexact := [name for name in self._stored if name in left and self._lora_may(name)]):
            raise InputError(
                f"output.rank: the change of {inexact[0]} is no weighted sum of LoRA adapters of the base, so that an "
                "adapter can only approximate it. Set its rank (such as 64); the loss is reported."
            )
        return [block for block in self._plan.blocks() if block.job.name in left]

    def _combine_factors(self, job: Job) -> bool:
        """Concatenate the adapters' factors of a tensor where that is exact. Return whether it is."""
        weights = linear_weights(self._plan, job) if self._adapters else None
        if weights is None:
            return False
        pairs = zip(weights, self._adapters, strict=True)
        changing = [(weight, adapter) for weight, adapter in pairs if any(map(adapter.changes, job.tensors))]
        if not all(adapter.has_only_factors(job.name) for _, adapter in changing):
            return False
        factors = [(weight, *adapter.read_factors(job.name)) for weight, adapter in changing if weight]
        if factors:
            b = torch.cat([weight * b for weight, b, _ in factors], 1)
            a = torch.cat([a for *_, a in factors])
            self._keep_factors(job.name, truncate(b, a, self._rank, self._dtype))
        return True

    def _lora_may(self, name: str) -> bool:
        """Return whether LoRA can represent the change of a tensor, and no adapter saves it whole."""
        replaced = any(adapter.changes(name) and name not in adapter.factors for adapter in self._adapters)
        return not replaced and self._tree.can_factor(name)

    def merge(
        self,
        executor: Executor,
        statistics: Statistics,
        blocks: list[Block],
        options: MergeOptions,
        advance: Advance,
    ) -> None:
        """Merge the tensors of these blocks, and factorize their differences from the base."""
        lock = threading.Lock()

        def work(buffers: Buffers, job: Job) -> None:
            self._factorize(job, statistics, buffers)
            with lock:
                advance(self._plan.bytes_read(job))

        jobs = {block.job.name: block.job for block in blocks}
        run_parallel(jobs.values(), with_buffers(work), self._threads)

    def _factorize(self, job: Job, statistics: Statistics, buffers: Buffers) -> None:
        """Set the changes of a job's tensors."""
        changes = {name: torch.zeros(info.numel if self._lora_may(name) else 0) for name, info in job.tensors.items()}
        norms: dict[str, list[float]] = {name: [] for name in changes}
        changed = set[str]()
        for name, start, values in self._values([job], statistics, buffers):
            base = self.base.read(name, start, start + len(values), Buffers()).double()
            change = values.double() - base
            norms[name].append(float(change.square().sum()))
            if bool((change.abs() > ROUNDING * base.abs()).any()):
                changed.add(name)
            if len(changes[name]) and bool(change.any()):  # memory of zeros is not used until something is written
                changes[name][start : start + len(values)] = change
        for name in changed:
            if not len(changes[name]):
                self._changes[name] = Change(math.fsum(norms[name]))
                continue
            matrix = changes[name].reshape(self._stored[name].shape[0], -1)
            matrix = matrix.T if self._tree.find(name).transposed else matrix
            assert self._rank is not None
            self._keep_factors(name, factorize(matrix, self._rank, self._dtype))

    def _values(
        self, jobs: Iterable[Job], statistics: Statistics, buffers: Buffers
    ) -> Iterator[tuple[str, int, Tensor]]:
        """Merge tensors, and yield name, first entry and values of every block."""
        for block in self._plan.blocks(jobs=jobs):
            merged = block.job.merge(self._plan, block, statistics, buffers, self._options)
            for name, values in merged.tensors.items():
                yield name, merged.start, values

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
        whole = {name: self._whole(name) for name, part in layout.entries.values() if part == "whole"}
        jobs = [job for job in self._plan.merged_jobs if whole.keys() & changes.keys() & job.tensors.keys()]
        for name, start, values in self._values(jobs, statistics, Buffers()):
            if name in whole:
                whole[name].view(-1)[start : start + len(values)] = rounded(values, whole[name].dtype)
        for name, tensor in whole.items():
            self._check_finite(name, tensor)
        tensors = {
            key: whole[name].clone() if part == "whole" else changes[name].factors[part]
            for key, (name, part) in sorted(layout.entries.items())
        }
        path = self._folder.folder / "adapter_model.safetensors"
        save_file(tensors, path, {"format": "pt"})
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
        return {path.name: path.stat().st_size}

    def _whole(self, name: str) -> Tensor:
        """Return a tensor of the base, in the type of the result if the merge changes it."""
        info = self.base.tensors[name]
        dtype = TORCH_TYPES[self._stored[name].dtype if name in self._changes else info.dtype]
        return rounded(self.base.read(name, 0, info.numel, Buffers()), dtype).reshape(info.shape)


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
    panels = max(1, PANEL // max(1, tall.shape[1]))
    for panel in tall.split(panels):
        gram.addmm_(panel.T.double(), panel.double())
    values, vectors = torch.linalg.eigh(gram)
    roots, vectors = values.clamp_(min=0).sqrt_().flip(0)[:rank], vectors.flip(1)[:, :rank]
    kept = int((roots > NEGLIGIBLE * roots[0]).sum()) if len(roots) else 0
    roots, vectors = roots[:kept], vectors[:, :kept]
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    short = rounded((vectors * roots.sqrt()).T.contiguous(), dtype)
    long = torch.cat([rounded(panel.double() @ (vectors / roots.sqrt()), dtype) for panel in tall.split(panels)])
    pairs = zip(tall.split(panels), long.split(panels), strict=True)
    lost = sum(float((panel.double() - part.double() @ short.double()).square_().sum()) for panel, part in pairs)
    b, a = (long, short) if tall is matrix else (short.T.contiguous(), long.T.contiguous())
    return LowRank(b, a, float(gram.trace()), lost)


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
