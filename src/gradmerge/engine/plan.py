"""The plan of a merge: what becomes of every tensor, what is read and written, and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checkpoints.compare import compare
from ..checkpoints.model import TORCH_TYPES, Checkpoint
from ..checkpoints.ties import same_values, tied_to
from ..errors import InputError
from ..rules import Rule
from ..rules.spherical import Geometry
from ..storage.tensorfile import FLOATS, TensorInfo
from ..text import listed, natural
from .inputs import CurvatureInput, Inputs

#: Elements that go through a rule at once. Smaller blocks stay in a core's own cache, but threads then spend their time waiting
#: for one another at the interpreter's lock; larger ones take more memory.
BLOCK = 1 << 18
_STORED = {word: code for code, word in FLOATS.items()}


@dataclass(frozen=True)
class Job:
    """One tensor of the result."""

    name: str
    info: TensorInfo
    """Type and shape of the result."""
    rule: Rule | None
    """None: copied from the template."""
    compute: torch.dtype = torch.float32

    @property
    def whole(self) -> bool:
        """Whether the rule works on the matrix as a whole."""
        return self.rule is not None and self.rule.otherwise is not None


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
    """The rule's inputs, less those that the recipe does not ask for."""
    write_precision: bool = False
    notes: list[str] = field(default_factory=list)
    block: int = BLOCK

    @property
    def merged(self) -> list[Job]:
        return [job for job in self.jobs if job.rule is not None]

    def units(self) -> Iterator[Unit]:
        """Blocks in the order of the template's files."""
        number = 0
        for job in self.jobs:
            step = max(job.info.numel, 1) if job.whole else self.block
            for start in range(0, max(job.info.numel, 1), step):
                yield Unit(number, job, start, min(start + step, job.info.numel))
                number += 1

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
        """Number of examples that the curvature of the result stands for."""
        return max(1, sum(c.examples for c in self.inputs.curvatures))

    def bytes_read(self, job: Job) -> int:
        """Bytes that one pass over a tensor reads."""
        if job.rule is None:
            return self.inputs.template.tensors[job.name].nbytes
        sources = [
            *self.inputs.tuned,
            *([self.inputs.base] if self.inputs.base and "base" in self.needs else []),
        ]
        return sum(c.tensors[self.inputs.stored_name(c, job.name)].nbytes for c in sources) + sum(
            c.nbytes(job.name) for c in self.inputs.curvatures
        )

    @property
    def total_read(self) -> int:
        return sum(self.bytes_read(job) for job in self.jobs)

    @property
    def statistics_read(self) -> int:
        """Bytes that are read for thresholds or angles alone: about one pass, or none where a sample tells the thresholds."""
        return sum(self.bytes_read(job) for job in self.merged) if self.needs & {"thresholds", "geometry"} else 0

    @property
    def total_written(self) -> int:
        model = sum(job.info.nbytes for job in self.jobs)
        return model + (sum(job.info.numel * 4 for job in self.merged) if self.write_precision else 0)

    def memory(self, threads: int) -> int:
        """Bytes of memory that the merge needs at most, about: the interpreter, and each thread's blocks."""
        wide = self.rule.wide(self.inputs.all_weights, self.inputs.options)
        width = 8 if wide or any(job.compute == torch.float64 for job in self.jobs) else 4
        tensors = 1 + len(self.inputs.tuned) + len(self.inputs.curvatures)
        blocks = threads * self.block * width * (2 * tensors + len(self.inputs.tuned) + 6)
        whole = max((job.info.numel * 8 * (tensors + 3) for job in self.jobs if job.whole), default=0)
        return 330_000_000 + blocks + threads * whole


def make_plan(
    rule: Rule,
    inputs: Inputs,
    *,
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    missing: str = "error",
    dtype: str = "auto",
    write_precision: bool = False,
    allow_config: Sequence[str] = (),
) -> Plan:
    """Compare all inputs and lay out the work; raises with every difference if they do not fit together."""
    needs = set(rule.needs(inputs.options))
    if inputs.base is None or ("base_weight" in needs and inputs.base_weight is None):
        needs -= rule.optional & {"base"}
    template = inputs.template
    others = [c for c in inputs.tuned if c is not template]
    comparison = compare(
        template, others, include, exclude, allow_config=allow_config, first_is_base=inputs.base is not None
    )
    inputs.aliases = {id(c): a for c, a in zip(others, comparison.aliases, strict=True)}
    problems = list(comparison.problems)
    diagonals = [source for source in inputs.curvatures if source not in inputs.grams]
    lacking = {
        n for source in diagonals if source.shapes is not None for n in comparison.merged if n not in source.shapes
    }
    ties = {name: tied for name in lacking if (tied := _tied_in(template, name))}
    for source in diagonals:
        source.aliases = ties
        problems += _curvature_problems(source, inputs, comparison.merged, missing)
    gram_names, gram_problems = _gram_names(inputs, comparison.merged)
    problems += gram_problems
    if problems:
        raise InputError("these cannot be merged:\n" + "\n".join(f"• {p}" for p in problems))

    wanted = set(comparison.merged)
    jobs = []
    for name, info in template.tensors.items():
        if name not in wanted:
            jobs.append(Job(name, info, None))
            continue
        stored = info.dtype if dtype == "auto" else _STORED[dtype]
        chosen = rule if rule.otherwise is None or name in gram_names else rule.otherwise
        types = {c.tensors[inputs.stored_name(c, name)].dtype for c in inputs.checkpoints}
        compute = torch.float64 if "F64" in types or chosen.otherwise is not None else torch.float32
        jobs.append(Job(name, TensorInfo(stored, info.shape), chosen, compute))
    notes = [
        *comparison.notes,
        *(note for c in inputs.checkpoints for note in c.notes),
        *_rule_notes(rule, inputs),
    ]
    plan = Plan(rule, inputs, jobs, frozenset(needs), write_precision, notes)
    rehearse(plan)
    return plan


def _rule_notes(rule: Rule, inputs: Inputs) -> list[str]:
    if rule.name == "gradient-matching" and min(inputs.weights) < 0:
        return ["a weight is negative: where H̄ = H_0 + Σ α_t H_t is not positive the merged loss has no minimum, and 0 is written "
                "as its curvature. To take a task out of the base, use removal."]  # fmt: skip
    return []


def _tied_in(template: Checkpoint, name: str) -> str | None:
    """The tensor whose curvature stands for that of a tied head; both are stored in the template, with the same values."""
    tied = tied_to(name, template)
    return tied if tied is not None and same_values(template, name, tied) else None


def _curvature_problems(source: CurvatureInput, inputs: Inputs, names: Sequence[str], missing: str) -> list[str]:
    shapes = source.shapes
    if shapes is None:
        return []
    tensors = inputs.template.tensors
    if source.file is not None and source.file.kind != "diagonal":
        return [f"{source.label}: holds {source.file.kind} matrices, where a diagonal is needed"]
    problems = []
    wrong = [f"{n}: {list(shapes[n])}, but the weight is {list(tensors[n].shape)}"
             for n in names if n in shapes and shapes[n] != tensors[n].shape]  # fmt: skip
    if wrong:
        problems.append(f"{source.label}: curvature of another model, its shapes do not fit\n{listed(wrong)}")
    absent = [n for n in names if source.stored_name(n, tensors[n].shape) is None]
    if absent and len(absent) == len(names):
        problems.append(
            f"{source.label}: curvature of another model: it has none of the tensors to merge\n{listed(absent, 3)}"
        )
    elif absent and missing != "zero":
        problems.append(f"{source.label}: no curvature for {len(absent)} of {len(names)} tensors\n{listed(absent)}\n"
                        "  Exclude them, or set `missing: zero` to take it as 0.")  # fmt: skip
    return problems


def _gram_names(inputs: Inputs, names: Sequence[str]) -> tuple[set[str], list[str]]:
    """Weights that every model has a Gram matrix for, and what is wrong with those that do not."""
    found: set[str] = set()
    problems: list[str] = []
    if not inputs.grams:
        return found, problems
    for source in inputs.grams:
        if source.shapes is None or (source.file is not None and source.file.kind != "gram"):
            problems.append(
                f"{source.label}: regmean needs Gram matrices (XᵀX of the inputs of linear layers), not a diagonal"
            )
    if problems:
        return found, problems
    every = [source.shapes or {} for source in inputs.grams]
    for name in names:
        shape = inputs.template.tensors[name].shape
        having = [s for s in every if name in s]
        if not having:
            continue
        if len(having) < len(every):
            problems.append(f"{name}: some models have a Gram matrix for it and some do not")
        elif (
            len(shape) != 2
            or len(having[0][name]) != 2
            or any(s[name] != (n, n) for s in having for n in having[0][name])
            or having[0][name][0] not in shape
        ):
            problems.append(
                f"{name}: its Gram matrices {[list(s[name]) for s in having]} do not fit the weight {list(shape)}"
            )
        else:
            found.add(name)
    if not found and not problems:
        problems.append(f"{inputs.grams[0].label}: has no Gram matrix for any tensor to merge; is it of another model?")
    return found, problems


def rehearse(plan: Plan) -> None:
    """Run the rule once on single numbers, so that a setting which cannot work fails before any file is read."""
    models = len(plan.inputs.tuned)
    one = torch.ones(1, 1)
    stand_ins: dict[str, Any] = {
        "base": one, "tuned": [one] * models, "prior": one, "curvature": [one] * models, "penalty": one,
        "thresholds": [0.0] * models, "kept": [one > 0] * models, "geometry": Geometry(1.0, 1.0, 1.0), "grams": [one] * models,
    }  # fmt: skip
    for rule in (plan.rule, plan.rule.otherwise):
        if rule is not None:
            try:
                rule(**rule_arguments(rule, plan, stand_ins))
            except ValueError as error:
                raise InputError(f"{rule.name}: {error}") from error


def rule_arguments(rule: Rule, plan: Plan, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a rule: tensors from this block, numbers and options from the recipe.

    Where weights make float32 too narrow for the rule, the tensors are widened.
    """
    inputs = plan.inputs
    if rule.wide(inputs.all_weights, inputs.options):
        tensors = {name: _widened(value) for name, value in tensors.items()}
    numbers = {"weights": inputs.weights, "base_weight": inputs.base_weight, "damping": inputs.damping}
    arguments = {
        name: numbers[name]
        if name in numbers
        else tensors.get(name)
        if name in plan.needs or rule is not plan.rule
        else None
        for name in rule.inputs
    }
    own = {option.name for option in rule.options}
    return arguments | {name: value for name, value in inputs.options.items() if name in own}


def _widened(value: Any) -> Any:
    if isinstance(value, list):
        return [_widened(item) for item in value]
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def torch_type(info: TensorInfo) -> torch.dtype:
    return TORCH_TYPES[info.dtype]
