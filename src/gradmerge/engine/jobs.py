"""Jobs: for each tensor of the result, how it is cut into blocks, what is read for a block, and what is computed.

There are three classes. A :class:`CopyJob` copies a tensor from the template. A :class:`BlockJob` merges a tensor block
by block. A :class:`LayerJob` solves for the weight and bias of a linear layer together.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint
from ..errors import InputError
from ..io.reader import FLOATS, TensorInfo
from ..rules import Rule
from ..rules.kronecker_matching import LAYER_DAMPING, KroneckerFactors, LayerHessian, mean_eigenvalue
from ..rules.spec import RANDOM_INPUTS, Granularity, per_model
from ..text import one_line
from .inputs import CurvatureInput
from .randomness import keep_mask, standard_normal, uniform
from .settings import TensorSettings

if TYPE_CHECKING:
    from .plan import Plan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job(ABC):
    """What is done for one tensor of the result."""

    name: str
    info: TensorInfo
    """Type and shape of the result."""
    rule: Rule | None = field(default=None, kw_only=True)
    """None for a copied tensor."""
    compute: torch.dtype = field(default=torch.float32, kw_only=True)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """The tensors of the result that this job writes."""
        return {self.name: self.info}

    def block_size(self, preferred: int) -> int:
        """Return the size of this tensor's blocks in entries: ``preferred``, or what its rule allows."""
        return preferred

    def split(self, size: int) -> Iterator[Block]:
        """Yield blocks of ``size`` entries; one block if the tensor is empty."""
        numel = self.info.numel
        for start in range(0, max(numel, 1), size):
            yield Block(self, start, min(start + size, numel))

    def bytes_read(self, plan: Plan) -> int:
        """Return how many bytes one pass over the job's inputs reads."""
        inputs, base = plan.inputs, [plan.inputs.base] if plan.inputs.base and "base" in plan.needs else []
        total = 0
        for name in self.tensors:
            total += sum(model.tensors[name].nbytes for model in (*base, *inputs.tuned_of(name)))
            total += sum(source.nbytes(name) for source in inputs.curvatures)
        return total

    def memory(self, plan: Plan) -> int:
        """Return the bytes of memory that a thread needs for a tensor that cannot be cut; 0 for others."""
        return 0

    @abstractmethod
    def merge(self, plan: Plan, block: Block, buffers: Buffers) -> MergedBlock:
        """Return the result of a block."""


@dataclass(frozen=True, slots=True)
class Block:
    """A range of entries of one tensor: the unit of work of a thread, and of the journal."""

    job: Job
    start: int
    stop: int
    number: int = -1
    """Its number in the journal."""


@dataclass
class MergedBlock:
    """The result of a block."""

    block: Block
    tensors: dict[str, Tensor]
    """Name → flat values in the type of the result, from ``block.start`` on; a layer has its bias too.

    They may lie in a buffer that the next block overwrites."""
    precision: Tensor | None = None
    """H̄ of the same entries in float32, if the plan writes it."""

    @property
    def job(self) -> Job:
        return self.block.job

    @property
    def start(self) -> int:
        return self.block.start


@dataclass(frozen=True)
class CopyJob(Job):
    """A tensor that is copied from the template."""

    def bytes_read(self, plan: Plan) -> int:
        return plan.inputs.template.tensors[self.name].nbytes

    def merge(self, plan: Plan, block: Block, buffers: Buffers) -> MergedBlock:
        template = plan.inputs.template
        values = template.read(self.name, block.start, block.stop, buffers)
        if self.info.is_float and not plan.allow_nonfinite:
            require_finite(template.label, self.name, values)
        # A view, such as an adapter on its base, may return a wider type than the stored one.
        return MergedBlock(block, {self.name: rounded(values, torch_type(self.info))})


@dataclass(frozen=True)
class BlockJob(Job):
    """A tensor that goes through its rule block by block."""

    rule: Rule = field(kw_only=True)
    granularity: Granularity = field(default="entries", kw_only=True)
    """How the rule allows the tensor to be cut."""

    def block_size(self, preferred: int) -> int:
        shape, numel = self.info.shape, self.info.numel
        if self.granularity == "tensor" or (self.granularity == "rows" and (len(shape) < 2 or numel == 0)):
            return max(numel, 1)
        row = numel // shape[0] if self.granularity == "rows" else 1
        return max(1, preferred // row) * row

    def memory(self, plan: Plan) -> int:
        models = 1 + len(plan.inputs.tuned) + len(plan.inputs.curvatures)
        return self.info.numel * 8 * (models + self.rule.workspace) if self.granularity == "tensor" else 0

    def read(self, plan: Plan, start: int, stop: int, buffers: Buffers) -> dict[str, Any]:
        """Read the block of every input that the plan needs, flat."""
        base, tuned = read_models(plan, self.name, self.compute, start, stop, buffers)

        def read_curvature(source: CurvatureInput, slot: str) -> Tensor:
            return source.read(self.name, start, stop, buffers, slot, self.compute)

        block = {"base": base, "tuned": tuned} | read_curvatures(plan, read_curvature)
        for name in plan.needs & RANDOM_INPUTS:
            block[name] = random_inputs(plan, name, self.name, start, stop)
        return block

    def shaped(self, start: int, stop: int, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a block in the shape that the rule expects: flat, some rows, or the whole tensor."""
        if self.granularity == "entries":
            return dict(tensors)
        shape = self.info.shape
        if self.granularity == "rows" and len(shape) > 1 and self.info.numel:
            shape = ((stop - start) * shape[0] // self.info.numel, *shape[1:])
        return converted(tensors, lambda tensor: tensor.reshape(shape) if tensor.dim() else tensor)

    def solve(self, plan: Plan, tensors: Mapping[str, Any]) -> Tensor:
        """Return the rule's result for a block."""
        arguments = rule_arguments(self.rule, plan, tensors, plan.inputs.settings.of(self.name))
        with errors_of_rule(self):
            return self.rule(**arguments)

    def merge(self, plan: Plan, block: Block, buffers: Buffers) -> MergedBlock:
        tensors = self.read(plan, block.start, block.stop, buffers) | plan.statistics.inputs_of(self.name)
        tensors = self.shaped(block.start, block.stop, tensors)
        if plan.device != CPU:
            tensors = converted(tensors, lambda tensor: tensor.to(plan.device))
        merged = self.solve(plan, tensors)
        merged = (merged if merged.dim() == 1 else merged.reshape(-1)).to(CPU)
        stored = rounded(merged, torch_type(self.info))
        if not plan.allow_nonfinite:
            check_finite(plan, self, tensors, merged, stored)
        if plan.precision_factor is None or self.rule.precision is None:
            return MergedBlock(block, {self.name: stored})
        arguments = rule_arguments(self.rule, plan, tensors, plan.inputs.settings.of(self.name))
        precision = (self.rule.precision(**arguments).to(CPU) * plan.precision_factor).clamp_(min=0)
        if not all_finite(precision.float()):
            raise InputError(
                f"output.curvature: H̄ of {self.name} is as large as {float(precision.max()):.3g}, which does not fit "
                "float32. Scale the weights or the curvature of all models down alike."
            )
        return MergedBlock(block, {self.name: stored}, precision.float())


@dataclass(frozen=True)
class LayerJob(Job):
    """A linear layer whose matrix X = [W b] is solved for as a whole, from Kronecker factors or Gram matrices."""

    rule: Rule = field(kw_only=True)
    compute: torch.dtype = field(default=torch.float64, kw_only=True)
    transposed: bool = field(default=False, kw_only=True)
    """The weight is stored as (in, out), as in GPT-2's Conv1D."""
    bias: tuple[str, TensorInfo] | None = field(default=None, kw_only=True)

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        return {self.name: self.info} | ({} if self.bias is None else {self.bias[0]: self.bias[1]})

    @property
    def numel(self) -> int:
        """Return the number of entries of [W b]."""
        return sum(info.numel for info in self.tensors.values())

    def block_size(self, preferred: int) -> int:
        return max(self.info.numel, 1)

    def memory(self, plan: Plan) -> int:
        """Return an upper bound that counts all copies: eigenvectors, conjugate gradients, freed blocks."""
        sources = plan.inputs.curvatures
        models = 1 + len(plan.inputs.tuned) + len(sources)
        if self.rule.layers is None:
            return self.info.numel * 8 * (models + self.rule.workspace)
        factors = [source.nbytes(self.name) for source in sources]  # stored in float32, used in float64
        return self.info.numel * 8 * (models + 24) + 6 * sum(factors) + 12 * max(factors)

    def join_bias(self, parts: Sequence[Tensor]) -> Tensor:
        """Return [W b] (out × in + 1) from the weight as it is stored and the bias."""
        shape = self.info.shape
        matrix = parts[0].reshape(shape).T if self.transposed else parts[0].reshape(shape[0], -1)
        return torch.cat([matrix, parts[1].reshape(-1, 1)], 1) if len(parts) > 1 else matrix

    def split_bias(self, matrix: Tensor) -> dict[str, Tensor]:
        """Return the stored tensors of [W b], flat."""
        weight = matrix if self.bias is None else matrix[:, :-1]
        values = {self.name: (weight.T if self.transposed else weight).reshape(-1)}
        return values if self.bias is None else values | {self.bias[0]: matrix[:, -1].contiguous()}

    def read(self, plan: Plan) -> dict[str, Any]:
        """Read the whole layer: matrices [W b] of all models, and its curvature."""
        inputs = plan.inputs
        read = [read_models(plan, n, self.compute, 0, i.numel, Buffers()) for n, i in self.tensors.items()]
        bases = [base for base, _ in read if base is not None]
        values: dict[str, Any] = {"base": self.join_bias(bases)} if bases else {}
        values["tuned"] = [self.join_bias(parts) for parts in zip(*(tuned for _, tuned in read), strict=True)]
        if "grams" in plan.needs:
            return values | {"grams": [source.read_matrix(self.name) for source in inputs.curvature]}
        return values | read_curvatures(plan, lambda source, slot: self.read_hessian(source))

    def read_hessian(self, source: CurvatureInput) -> LayerHessian:
        """Read the layer's curvature: Kronecker factors, one number per entry of X, or one number for all."""
        if source.constant is not None:
            return torch.tensor(source.constant, dtype=torch.float64)
        if self.name in source.tokens:
            return source.read_factors(self.name)
        parts = []
        for name, info in self.tensors.items():
            diagonal = source.read(name, 0, info.numel, Buffers(), "curvature", torch.float64)
            parts.append(diagonal.expand(info.numel))
        return self.join_bias(parts)

    def damping(self, plan: Plan, rule: Rule, tensors: Mapping[str, Any]) -> float | None:
        """Return the layer's δ, if the recipe has `damping: auto` and the rule damps each layer for itself.

        A base with curvature c · I is damped already.
        """
        if not plan.inputs.damps_layers or rule.auto_damping == "mean-curvature":
            return None
        weights = plan.inputs.settings.of(self.name).weights
        return LAYER_DAMPING * mean_eigenvalue(weights, tensors["curvature"], tensors["base"].numel())

    def solve(self, plan: Plan, tensors: Mapping[str, Any]) -> Tensor:
        """Return the rule's result for the whole layer."""
        rule = self.rule
        damping = None if rule.layers is None else self.damping(plan, rule, tensors)
        tensors = tensors if damping is None else {**tensors, "damping": damping}
        arguments = rule_arguments(rule, plan, tensors, plan.inputs.settings.of(self.name))
        with errors_of_rule(self):
            if rule.layers is None:
                return rule(**arguments)
            return rule.layers(**{name: arguments[name] for name in rule.inputs})

    def merge(self, plan: Plan, block: Block, buffers: Buffers) -> MergedBlock:
        device = CPU if self.rule.layers is None else plan.device
        tensors = converted(self.read(plan), lambda tensor: tensor.to(device))
        merged = self.solve(plan, tensors).to(CPU)
        infos = self.tensors
        stored = {name: rounded(values, torch_type(infos[name])) for name, values in self.split_bias(merged).items()}
        if not plan.allow_nonfinite:
            check_finite(plan, self, tensors, merged, torch.cat([values.double() for values in stored.values()]))
        return MergedBlock(block, stored)


@contextlib.contextmanager
def errors_of_rule(job: BlockJob | LayerJob) -> Iterator[None]:
    """Name the tensor in an error of a rule."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{job.name}: {job.rule.name}: {error}") from error


def read_models(
    plan: Plan, name: str, dtype: torch.dtype, start: int, stop: int, buffers: Buffers
) -> tuple[Tensor | None, list[Tensor]]:
    """Read a block of the base (None if the plan does not need it) and of every tuned model."""
    inputs = plan.inputs

    def read(checkpoint: Checkpoint, slot: str) -> Tensor:
        return checkpoint.read(name, start, stop, buffers, slot).to(dtype)

    base = read(inputs.base, "base") if inputs.base is not None and "base" in plan.needs else None
    return base, [read(checkpoint, f"tuned {i}") for i, checkpoint in enumerate(inputs.tuned_of(name))]


def read_curvatures(plan: Plan, read: Callable[[CurvatureInput, str], Any]) -> dict[str, Any]:
    """Read the curvature that the plan needs, every source once, each with its own slot of the buffers."""
    inputs, values = plan.inputs, dict[CurvatureInput, Any]()

    def values_of(sources: Sequence[CurvatureInput | None]) -> list[Any]:
        for source in sources:
            if source is not None and source not in values:
                values[source] = read(source, f"curvature {len(values)}")
        return [None if source is None else values[source] for source in sources]

    result: dict[str, Any] = {}
    if "prior" in plan.needs:
        (result["prior"],) = values_of([inputs.prior])
    if "penalty" in plan.needs and inputs.penalty:
        result["penalty"] = values_of(inputs.penalty)
    if "curvature" in plan.needs:
        result["curvature"] = values_of(inputs.curvature)
    return result


def random_inputs(plan: Plan, kind: str, tensor: str, start: int, stop: int) -> list[Tensor]:
    """Return the masks (``kept``) or random numbers (``uniform``, ``normal``) of a block, one for each tuned model."""
    options, models = plan.inputs.settings.of(tensor).options, range(len(plan.inputs.tuned_of(tensor)))
    stream = plan.inputs.tied_copies.get(tensor, tensor)
    if kind == "uniform":
        return [uniform(options["seed"], i, stream, start, stop) for i in models]
    if kind == "normal":
        return [standard_normal(options["seed"], options["sample"], stream, start, stop) for _ in models]
    shares = enumerate(per_model(options["density"], models))
    return [keep_mask(options["seed"], i, stream, start, stop, share) for i, share in shares]


def rule_arguments(rule: Rule, plan: Plan, tensors: Mapping[str, Any], settings: TensorSettings) -> dict[str, Any]:
    """Return the arguments of a rule: the tensors of a block, with weights and options from the recipe.

    The tensors are converted to float64 where the rule says that float32 is too narrow for the weights.
    """
    inputs = plan.inputs
    if rule.needs_float64(settings.all_weights, settings.options):
        tensors = converted(tensors, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    numbers: dict[str, Any] = {"weights": settings.weights, "base_weight": settings.base_weight}
    if "damping" in rule.inputs:
        numbers["damping"] = tensors["damping"] if "damping" in tensors else inputs.damping_of(rule)
    read = plan.needs if rule is plan.rule else frozenset(rule.inputs)
    arguments = {
        name: numbers[name] if name in numbers else tensors.get(name) if name in read else None for name in rule.inputs
    }
    return arguments | {name: value for name, value in settings.options.items() if name in rule.option_names}


def converted(inputs: Mapping[str, Any], convert: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """Return inputs of a rule with every tensor converted, also those in lists and Kronecker factors."""

    def convert_value(value: Any) -> Any:
        if isinstance(value, list):
            return [convert_value(item) for item in value]
        if isinstance(value, KroneckerFactors):
            return KroneckerFactors(*map(convert_value, value))
        return convert(value) if isinstance(value, Tensor) else value

    return {name: convert_value(value) for name, value in inputs.items()}


def torch_type(info: TensorInfo) -> torch.dtype:
    return TORCH_TYPES[info.dtype]


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return values rounded once to the nearest number of a type, ties to even.

    PyTorch converts float64 to 16 bits through float32 and rounds twice, which can give the wrong neighbor. Here the
    first step truncates and sets the last bit if anything was cut off (round to odd), so that the second is correct.
    """
    if values.dtype != torch.float64 or dtype.itemsize >= 4 or not dtype.is_floating_point:
        return values.to(dtype)
    near = values.float()
    wide = near.double()
    # The bits of floats are ordered like their magnitudes: one less is the next number towards 0, also from infinity.
    bits = near.view(torch.int32) - (wide.abs() > values.abs()).int()
    bits |= (wide != values).int()
    return bits.view(torch.float32).to(dtype)


def all_finite(values: Tensor) -> bool:
    """Return whether no value is NaN or infinite. A finite sum is the fastest proof."""
    return math.isfinite(float(values.sum())) or bool(torch.isfinite(values).all())


def check_finite(plan: Plan, job: Job, tensors: Mapping[str, Any], merged: Tensor, stored: Tensor) -> None:
    """Raise if an input or the result has NaN or infinity.

    With weights above 0, NaN or infinity in a model reaches the result of most rules. The models are then checked only
    if the result is not finite. They are always checked where a weight, or the rule, may leave one of them out.
    """
    assert job.rule is not None
    inputs = plan.inputs
    finite = all_finite(stored)
    if finite and job.rule.propagates_nonfinite and min(inputs.settings.of(job.name).weights) > 0:
        return
    models = [(inputs.base, tensors.get("base")), *zip(inputs.tuned_of(job.name), tensors["tuned"], strict=True)]
    for checkpoint, tensor in models:
        if checkpoint is not None and tensor is not None:
            require_finite(checkpoint.label, job.name, tensor)
    if not finite:
        largest, limit = float(merged.abs().max()), torch.finfo(torch_type(job.info)).max
        raise InputError(
            f"the merge of {job.name} has values up to {largest:.6g}, and {FLOATS[job.info.dtype]} holds up to "
            f"{limit:.6g}. Set output.dtype to a wider type, or less extreme weights, options or curvature. To write "
            "them, pass allow_nonfinite=True."
        )


def require_finite(label: str, name: str, values: Tensor) -> None:
    """Raise if a tensor of a model has NaN or infinity."""
    if not all_finite(values):
        raise InputError(
            f"{label}: {one_line(name)} has values that are NaN or infinite. The model is damaged; to merge it all the "
            "same, pass allow_nonfinite=True."
        )
