"""The plan of a merge: what becomes of every tensor, and what is read and written for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...checkpoints.checkpoint import TORCH_TYPES
from ...io.reader import TensorInfo
from ...notes import Note
from ...rules import Rule
from ...rules.kronecker_matching import KroneckerFactors
from ...rules.measures import Measure
from ...rules.spec import Granularity
from ...text import natural
from .inputs import Inputs
from .per_layer import Numbers

#: Elements that go through a rule at once. Smaller blocks stay in a core's own cache, but threads then spend their time
#: waiting for one another at the interpreter's lock; larger ones take more memory.
BLOCK = 1 << 18
#: How many blocks of a tensor a thread takes at once where it has at most so many in memory: threads then wait for one
#: another half as often. With more in memory, they no longer stay in the processor's cache.
TOGETHER, FEW = 2, 12


@dataclass(frozen=True)
class Job:
    """One tensor of the result."""

    name: str
    info: TensorInfo
    """Type and shape of the result."""
    rule: Rule | None
    """None: copied from the template."""
    compute: torch.dtype = torch.float32
    layer: Layer | None = None
    """For the weight of a layer with Kronecker curvature, which is solved whole."""
    inside: bool = False
    """A bias that is solved and written with its layer's weight."""
    grain: Granularity = "entries"
    """How the tensor may be cut for the rule."""

    @property
    def solved(self) -> bool:
        """Whether the rule solves for the matrix as a whole, from Gram matrices or Kronecker factors."""
        return self.layer is not None or (self.rule is not None and self.rule.fallback is not None)

    @property
    def whole(self) -> bool:
        """Whether the rule works on the tensor as a whole."""
        return self.solved or self.grain == "tensor"


def step_of(job: Job, block: int) -> int:
    """How many elements of a tensor go through its rule at once: about a block, or what may not be cut."""
    shape, numel = job.info.shape, job.info.numel
    if job.whole or (job.grain == "rows" and (len(shape) < 2 or numel == 0)):
        return max(numel, 1)
    row = numel // shape[0] if job.grain == "rows" else 1
    return max(1, block // row) * row


@dataclass(frozen=True)
class Layer:
    """How a layer's matrix X = [W b] lies in its tensors."""

    transposed: bool
    """The weight is stored as (in, out), as of GPT-2's Conv1D."""
    bias: Job | None


@dataclass(frozen=True)
class Unit:
    """A block of one tensor: what a thread works on at a time."""

    number: int
    job: Job
    start: int
    stop: int


@dataclass
class Plan:
    """What a merge will do."""

    rule: Rule
    inputs: Inputs
    jobs: list[Job]
    needs: frozenset[str]
    """Inputs that are read: the rule's, as far as the recipe gives them, or those that a caller wants to look at."""
    write_precision: bool = False
    notes: list[Note] = field(default_factory=list)
    block: int = BLOCK

    def note(self, texts: Iterable[str]) -> None:
        self.notes += [text if isinstance(text, Note) else Note(text) for text in texts]

    @property
    def merged(self) -> list[Job]:
        return [job for job in self.jobs if job.rule is not None]

    @property
    def by_name(self) -> dict[str, Job]:
        return {job.name: job for job in self.jobs}

    @property
    def entrywise(self) -> list[Job]:
        """Tensors that go through the rule entry by entry."""
        return [job for job in self.merged if job.layer is None and not job.inside]

    @property
    def layers(self) -> list[Job]:
        """Weights of layers that are solved whole, each with its bias."""
        return [job for job in self.merged if job.layer is not None]

    def units(self) -> Iterator[Unit]:
        """Blocks in the order of the template's files."""
        number = 0
        for job in self.jobs:
            if job.inside:
                continue
            step = step_of(job, self.block)
            for start in range(0, max(job.info.numel, 1), step):
                yield Unit(number, job, start, min(start + step, job.info.numel))
                number += 1

    def stretches(self, units: Iterable[Unit]) -> Iterator[list[Unit]]:
        """Units as a thread takes them: those that follow one another, as long as the rule may be given such a cut."""
        most, taken = self._together, list[Unit]()
        for unit in units:
            follows = taken and unit.job is taken[-1].job and unit.start == taken[-1].stop
            if taken and not (follows and len(taken) < most and step_of(unit.job, self.block) == self.block):
                yield taken
                taken = []
            taken.append(unit)
        if taken:
            yield taken

    @property
    def measures(self) -> Mapping[str, Measure]:
        """What is measured on whole tensors before the merge."""
        return self.rule.measures_of(self.inputs.options)

    @property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (type, shape) of the result, in an order that does not depend on how the inputs are stored."""
        jobs = sorted(self.jobs, key=lambda job: natural(job.name))
        return {job.name: (job.info.dtype, job.info.shape) for job in jobs}

    @property
    def precision_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name → (type, shape) of the result's curvature, in the same order."""
        merged = {job.name for job in self.merged}
        return {name: ("F32", shape) for name, (_, shape) in self.tensors.items() if name in merged}

    @property
    def examples(self) -> int:
        """Number of examples behind the curvature of the result: the sum over all inputs."""
        inputs = self.inputs
        every = (*([inputs.prior] if inputs.prior else []), *inputs.curvature, *inputs.grams)
        return max(1, sum(source.stands_for for source in every))

    def bytes_read(self, job: Job) -> int:
        """Bytes that one pass over a tensor reads."""
        if job.rule is None:
            return self.inputs.template.tensors[job.name].nbytes
        if job.inside:
            return 0
        return sum(map(self._bytes_of, [job, job.layer.bias] if job.layer and job.layer.bias else [job]))

    def _bytes_of(self, job: Job) -> int:
        base = [self.inputs.base] if self.inputs.base and "base" in self.needs else []
        models = sum(
            c.tensors[self.inputs.stored_name(c, job.name)].nbytes for c in (*base, *self.inputs.tuned_of(job.name))
        )
        return models + sum(source.nbytes(job.name) for source in self.inputs.curvatures)

    @property
    def total_read(self) -> int:
        return sum(self.bytes_read(job) for job in self.jobs)

    @property
    def statistics_read(self) -> int:
        """Bytes read for statistics alone, a pass for each: none for thresholds where a sample tells those."""
        passes = len(self.measures) + ("thresholds" in self.needs)
        return passes * sum(self.bytes_read(job) for job in self.merged) if passes else 0

    @property
    def damping_read(self) -> int:
        """Bytes of curvature that are read to find the damping, where the recipe leaves it open."""
        inputs = self.inputs
        if (
            self.rule.auto_damping != "mean-curvature"
            or not inputs.damping_is_open
            or inputs.mean_curvature is not None
        ):
            return 0
        return sum(source.nbytes(job.name) for source in inputs.curvature for job in self.merged)

    @property
    def total_written(self) -> int:
        model = sum(job.info.nbytes for job in self.jobs)
        return model + (sum(job.info.numel * 4 for job in self.merged) if self.write_precision else 0)

    def memory(self, threads: int) -> int:
        """Bytes of memory that the merge needs at most, about: the interpreter, and each thread's blocks."""
        tensors = 1 + len(self.inputs.tuned) + len(self.inputs.curvatures)
        largest = max((step_of(job, self.block) for job in self.merged if not job.whole), default=0)
        blocks = threads * max(self._together * self.block, largest) * (8 if self._wide else 4) * self._tensors
        whole = max((self._bytes_of_whole(job, tensors) for job in self.jobs if job.whole), default=0)
        return 330_000_000 + blocks + threads * whole

    @property
    def _tensors(self) -> int:
        """How many blocks a thread has in memory, about: inputs as they are stored and converted, and temporaries."""
        base, tuned = int(self.inputs.base is not None and "base" in self.needs), len(self.inputs.tuned)
        return 2 * (base + tuned + len(self.inputs.curvatures)) + tuned + 6

    @property
    def _wide(self) -> bool:
        """Whether some blocks are in float64."""
        every = self.inputs.settings.every(job.name for job in self.merged)
        wide = any(self.rule.needs_float64(numbers.all_weights, numbers.options) for numbers in every)
        return wide or any(job.compute == torch.float64 for job in self.jobs)

    @property
    def _together(self) -> int:
        """How many blocks a thread takes at once; of random masks, which take memory of their own, only one."""
        few = self._tensors <= FEW and not self._wide and not self.needs & {"kept", "uniform"}
        return TOGETHER if few else 1

    def _bytes_of_whole(self, job: Job, tensors: int) -> int:
        """Bytes that a matrix takes while it is solved for; factors are stored in float32 and used in float64.

        All copies count: eigenvectors, the vectors of conjugate gradients, and what is freed and not yet given back.
        """
        if job.layer is None:
            return job.info.numel * 8 * (tensors + (job.rule.workspace if job.rule is not None else 0))
        factors = [source.nbytes(job.name) for source in self.inputs.curvatures]
        return job.info.numel * 8 * (tensors + 24) + 6 * sum(factors) + 12 * max(factors)


def rule_arguments(rule: Rule, plan: Plan, tensors: Mapping[str, Any], numbers: Numbers) -> dict[str, Any]:
    """The arguments of a rule: tensors from this block, the tensor's numbers and options from the recipe.

    Where weights make float32 too narrow for the rule, the tensors are widened.
    """
    inputs = plan.inputs
    if rule.needs_float64(numbers.all_weights, numbers.options):
        tensors = converted(tensors, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    given: dict[str, Any] = {"weights": numbers.weights, "base_weight": numbers.base_weight}
    if "damping" in rule.inputs:
        given["damping"] = tensors["damping"] if "damping" in tensors else inputs.damping_of(rule)
    read = plan.needs if rule is plan.rule else frozenset(rule.inputs)
    arguments = {
        name: given[name] if name in given else tensors.get(name) if name in read else None for name in rule.inputs
    }
    return arguments | {name: value for name, value in numbers.options.items() if name in rule.option_names}


def converted(inputs: Mapping[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Inputs of a rule with every tensor converted, those in lists too."""

    def one(value: Any) -> Any:
        if isinstance(value, list):
            return [one(item) for item in value]
        if isinstance(value, KroneckerFactors):
            return KroneckerFactors(*map(one, value))
        return convert(value) if isinstance(value, Tensor) else value

    return {name: one(value) for name, value in inputs.items()}


def torch_type(info: TensorInfo) -> torch.dtype:
    return TORCH_TYPES[info.dtype]
