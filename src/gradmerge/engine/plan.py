"""The plan of a merge: a job for every tensor, and what is read and written for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..io.reader import TensorInfo
from ..notes import Note
from ..rules import Rule
from ..rules.measures import Measure
from ..rules.spec import RANDOM_INPUTS
from ..text import natural
from .inputs import Inputs
from .jobs import Block, BlockJob, Job, LayerJob

BLOCK = 1 << 18
"""Entries that go through a rule at once. Smaller blocks stay in a core's cache, but threads then spend their time
waiting for the interpreter's lock. Larger ones take more memory."""
FEW_BLOCKS = 12
"""A thread that holds at most this many blocks in memory takes blocks of twice the size, so that threads wait half as
often for each other. More blocks of that size would not fit the processor's cache."""


@dataclass
class Plan:
    """What a merge will do."""

    rule: Rule
    inputs: Inputs
    jobs: list[Job]
    needs: frozenset[str]
    """Inputs that are read: those that the rule needs and the recipe names, or those that a caller asks for."""
    write_precision: bool = False
    notes: list[Note] = field(default_factory=list)
    block: int = BLOCK

    def note(self, texts: Iterable[str]) -> None:
        self.notes += [text if isinstance(text, Note) else Note(text) for text in texts]

    @property
    def merged_jobs(self) -> list[Job]:
        """The jobs of tensors that go through the rule."""
        return [job for job in self.jobs if job.rule is not None]

    @property
    def by_name(self) -> dict[str, Job]:
        return {job.name: job for job in self.jobs}

    @property
    def block_jobs(self) -> list[BlockJob]:
        return [job for job in self.jobs if isinstance(job, BlockJob)]

    @property
    def kronecker_jobs(self) -> list[LayerJob]:
        """The jobs of layers with Kronecker curvature. Layers with Gram matrices are not among them."""
        return [] if self.inputs.grams else [job for job in self.jobs if isinstance(job, LayerJob)]

    @property
    def merged_tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the result that go through the rule."""
        return {name: info for job in self.merged_jobs for name, info in job.tensors.items()}

    @property
    def copied_tensors(self) -> int:
        return len(self.jobs) - len(self.merged_jobs)

    def blocks(self, size: int | None = None, jobs: Iterable[Job] | None = None) -> Iterator[Block]:
        """Yield all blocks (of some jobs) of about ``size`` entries, in the order of the template's files."""
        size = size or self.block_size
        cut = ((job, *range_) for job in (self.jobs if jobs is None else jobs) for range_ in job.cut(job.step(size)))
        for number, (job, start, stop) in enumerate(cut):
            yield Block(number, job, start, stop)

    @property
    def measures(self) -> Mapping[str, Measure]:
        """Statistics of whole tensors that the rule needs."""
        return self.rule.measures_of(self.inputs.options)

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (type, shape) of the result, in an order that does not depend on how the inputs are stored."""
        infos = {name: info for job in self.jobs for name, info in job.tensors.items()}
        return {name: (infos[name].dtype, infos[name].shape) for name in sorted(infos, key=natural)}

    @property
    def precision_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (type, shape) of the result's curvature, in the same order."""
        merged = self.merged_tensors
        return {name: ("F32", shape) for name, (_, shape) in self.tensors.items() if name in merged}

    @property
    def examples(self) -> int:
        """The number of examples behind the curvature of the result: the sum over all inputs."""
        inputs = self.inputs
        sources = (*([inputs.prior] if inputs.prior else []), *inputs.curvature, *inputs.grams)
        return max(1, sum(source.dataset_size for source in sources))

    def bytes_read(self, job: Job) -> int:
        """Return how many bytes one pass over a job's inputs reads."""
        return job.bytes_read(self)

    @property
    def total_read(self) -> int:
        return sum(map(self.bytes_read, self.jobs))

    @property
    def merged_read(self) -> int:
        """Bytes that one pass over the merged tensors reads."""
        return sum(map(self.bytes_read, self.merged_jobs))

    @property
    def statistics_read(self) -> int:
        """Bytes that are read for statistics: one pass for each measure, and one for thresholds."""
        passes = len(self.measures) + ("thresholds" in self.needs)
        return passes * self.merged_read if passes else 0

    @property
    def damping_read(self) -> int:
        """Bytes of curvature that are read to compute the damping, if the recipe has `damping: auto`."""
        inputs = self.inputs
        if not inputs.needs_mean_curvature(self.rule):
            return 0
        return sum(source.nbytes(name) for source in inputs.curvature for name in self.merged_tensors)

    @property
    def total_written(self) -> int:
        model = sum(info.nbytes for job in self.jobs for info in job.tensors.values())
        precision = sum(info.numel * 4 for info in self.merged_tensors.values())
        return model + (precision if self.write_precision else 0)

    def memory(self, threads: int) -> int:
        """Return the approximate peak memory in bytes: the interpreter, and each thread's blocks."""
        size = self.block_size
        entries = max((job.step(size) for job in self.block_jobs if job.granularity != "tensor"), default=size)
        blocks = threads * max(size, entries) * (8 if self._needs_float64 else 4) * self._blocks_in_memory
        return 330_000_000 + blocks + threads * max((job.memory(self) for job in self.jobs), default=0)

    @property
    def _blocks_in_memory(self) -> int:
        """How many blocks a thread has in memory, about: inputs as they are stored and converted, and temporaries."""
        base, tuned = int(self.inputs.base is not None and "base" in self.needs), len(self.inputs.tuned)
        return 2 * (base + tuned + len(self.inputs.curvatures)) + tuned + 6

    @property
    def _needs_float64(self) -> bool:
        settings = self.inputs.settings.distinct(self.merged_tensors)
        needed = any(self.rule.needs_float64(some.all_weights, some.options) for some in settings)
        return needed or any(job.compute == torch.float64 for job in self.jobs)

    @property
    def block_size(self) -> int:
        """Entries of a block. Random masks take memory too, so that their blocks are not doubled."""
        few = self._blocks_in_memory <= FEW_BLOCKS and not self._needs_float64 and not self.needs & RANDOM_INPUTS
        return 2 * self.block if few else self.block
