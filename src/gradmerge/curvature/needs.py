"""What estimating curvature needs: memory, arithmetic and bytes moved, from the shapes of a model. No weight is read.

A pass over a batch takes 6 operations per weight and token: 2 in the forward pass, 4 in the backward pass. Squares of
single examples' gradients add :data:`OVER_PLAIN` to that, Kronecker factors and Gram matrices the products that they
are. What autograd keeps for the backward pass is counted by running the model on tensors without values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from .formulas import is_conv1d
from .kernels import HELD_CPU, HELD_CUDA
from .kronecker import WIDEST, factors_for, stored_alone
from .losses import ExampleLoss, logits_of
from .reaching import blocks_of

#: Time of a pass that squares single gradients over that of a plain one: measured at 1.1 B parameters on an NVIDIA
#: H200 (`benchmarks/results/curvature-cuda-llama-1b.json`).
OVER_PLAIN = 1.06
#: Bytes of a process before any weight: Python, PyTorch and transformers; and on a GPU its context and libraries.
PROCESS, GPU_CONTEXT = 600_000_000, 600_000_000
#: Seconds until a process reads the first weight: Python, PyTorch and transformers.
START = 5.0
#: Bytes a second between the memory of a GPU and of its computer, where sums are kept in the latter.
BUS = 20e9


@dataclass(frozen=True)
class ModelShapes:
    """What of a model decides what its curvature costs."""

    parameters: int
    """Those that are estimated."""
    multiplied: int
    """Entries of weights that every token is multiplied with: all but tables that are only looked up."""
    largest: int
    """Entries of the largest parameter."""
    weights: int
    """Bytes in memory."""
    gathered: int
    """Bytes of weights that are whole at once where processes share the model: two of its blocks, or a large table."""
    sums: int
    """Bytes of what is added up, at 4 bytes a number (8 for a model in float64)."""
    products: int
    """Multiplications for each token beyond the pass itself, in Gram matrices or factors."""
    blocks: int = 0
    """Layers of the model, in the sense of what is gathered or computed again at once."""
    wide: int = 0
    """Layers that have a diagonal because they are too wide for Kronecker factors."""


def shapes_of(model: nn.Module, kind: str = "diagonal", widest: int = WIDEST) -> ModelShapes:
    """The sizes of a model, which may be on the meta device or hold no values otherwise."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    tables = {m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    heads = {m.weight for m in model.modules() if isinstance(m, nn.Linear)}
    total, nbytes = sum(p.numel() for p in parameters), sum(p.nbytes for p in model.parameters())
    number = 8 if any(p.dtype == torch.float64 for p in parameters) else 4
    sums, products, wide = number * total, 0, 0
    if kind == "gram":
        sides = [m.weight.shape[not is_conv1d(m)] for m in _linear(model) if m.weight not in tables]
        sums, products = number * sum(n * n for n in sides), sum(n * n for n in sides)
    elif kind == "kronecker":
        alone = stored_alone(model)
        with getattr(parameters[0], "fake_mode", None) or nullcontext():  # where factors take no memory either
            factors, names = factors_for(model, parameters, alone, widest)
        wide = len(names)
        for weight, one in factors.items():
            rows, columns = weight.shape[0], weight.numel() // weight.shape[0]
            rows, columns = (columns, rows) if one.turned else (rows, columns)
            bias = one.bias.numel() if one.bias is not None else 0
            inputs = columns + (one.bias is not None)
            sums += number * (inputs**2 + rows**2 - weight.numel() - bias)
            products += (inputs**2 + rows**2) // 2  # on one side of the diagonal alone
    blocks = [sum(p.nbytes for p in block.parameters()) for block in blocks_of(model).values()]
    units = [*blocks, *(p.nbytes for p in tables | heads)]
    return ModelShapes(
        parameters=total,
        multiplied=total - sum(table.numel() for table in tables - heads),
        largest=max((p.numel() for p in parameters), default=0),
        weights=nbytes,
        gathered=2 * max(units, default=0),
        sums=sums,
        products=products,
        blocks=len(blocks),
        wide=wide,
    )


def activations_of(shapes: ModelShapes, needs: BatchNeeds, kind: str, between: int, recomputed: bool = False) -> int:
    """Bytes of activations at their peak. ``between`` is what goes from one block to the next, ``recomputed`` whether
    all else is computed again in the backward pass."""
    if kind == "gram":  # no backward pass: a few tensors at a time
        return 4 * needs.largest
    if not recomputed or not shapes.blocks:
        return needs.kept + needs.largest  # all that is kept, and the gradient of one of them
    return between * shapes.blocks + (needs.kept - needs.largest) // shapes.blocks + 2 * needs.largest


def quantised(model: nn.Module, shapes: ModelShapes, bits: int, adapter: int) -> ModelShapes:
    """The same with linear layers of the blocks as codes of so many bits, and sums of an adapter's parameters alone."""
    inside = [layer.weight for block in blocks_of(model).values() for layer in _linear(block)]
    codes = sum(weight.numel() * (bits / 8 + 4 / 64) for weight in inside)  # a scale of 4 bytes for 64 codes
    weights = shapes.weights - sum(weight.nbytes for weight in inside) + round(codes)
    return replace(shapes, weights=weights, parameters=adapter, sums=4 * adapter, products=0)


def _linear(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Linear) or is_conv1d(module)]


@dataclass(frozen=True)
class BatchNeeds:
    """What a forward pass over one batch leaves and takes."""

    kept: int
    """Bytes that autograd keeps for the backward pass."""
    largest: int
    """Bytes of the largest tensor among them."""
    operations: int
    """In products of matrices, and convolutions; a multiplication and an addition are two."""


def batch_needs(model: nn.Module, batch: Mapping[str, Tensor], loss: ExampleLoss) -> BatchNeeds:
    """For a model and a batch of fake tensors, which have shapes and types alone, inside their mode."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage  # held, so that no other gets its address
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value), FlopCounterMode(display=False) as counter:
        logits = logits_of(model, batch)
        loss.losses(logits, batch["labels"])
    sizes = [storage.nbytes() for storage in kept.values()]
    return BatchNeeds(sum(sizes), max(sizes, default=0), counter.get_total_flops())


@dataclass(frozen=True)
class Rate:
    """So much a second, and where the number comes from."""

    amount: float
    source: str


@dataclass(frozen=True)
class EstimateCost:
    """What an estimate needs, and how long it takes. Sizes are in bytes and, but for the disk, of one process."""

    shapes: ModelShapes
    examples: int
    tokens: int
    """Of all examples, about."""
    batches: int
    """For each process."""
    nodes: int
    processes: int
    """Of all nodes together."""
    memory: dict[str, int]
    """Of the device, by what is in it: weights, sums, activations, gradients, process; and the total."""
    memory_cpu: int
    """Of the computer, where the device is another; and where sums are kept there."""
    disk: int
    """Bytes of the result, and of sums on disk."""
    network: int
    """Bytes through the connections of all nodes."""
    seconds: dict[str, float]
    limit: str
    rates: Mapping[str, Rate]
    """compute: operations that a pass of the model reaches, two for a multiplication and an addition; disk: bytes from
    or to the storage, for all nodes together; network, of several nodes: bytes through the connection of one."""

    def to_json(self) -> dict[str, Any]:
        given = asdict(self)
        shapes, rates = given.pop("shapes"), given.pop("rates")
        renamed = {"bytes_disk": given.pop("disk"), "bytes_network": given.pop("network")}
        seconds = {name: round(value, 3) for name, value in given.pop("seconds").items()}
        return {**shapes, **given, **renamed, "rates": rates, "seconds": seconds}


def estimate_cost(
    shapes: ModelShapes,
    rates: Mapping[str, Rate],
    *,
    examples: int,
    tokens: int,
    batch_size: int,
    activations: int,
    forward: float | None = None,
    passes: int = 1,
    recomputed: bool = False,
    kind: str = "diagonal",
    device: str = "cpu",
    sums: str = "device",
    shard: bool = False,
    nodes: int = 1,
    per_node: int = 1,
) -> EstimateCost:
    """The cost of an estimate. ``tokens`` are those of all examples, padding included.

    ``activations`` are the bytes of the longest batch, ``forward`` the operations of the forward pass for each token
    (by default two for each weight), ``passes`` the backward passes over a batch, and ``recomputed`` says whether the
    forward pass is done again for them. With ``shard``, processes share the model; without, each has a copy, and their
    sums are added in the end.
    """
    processes = nodes * per_node
    share = processes if shard else 1
    on_gpu = device != "cpu"
    batches = math.ceil(math.ceil(examples / processes) / batch_size)
    held = 4 * (HELD_CUDA if on_gpu else HELD_CPU)
    # What is kept elsewhere comes to the device whole while something is added to it.
    near = 4 * shapes.largest if shard or sums != "device" else 0
    own = shapes.sums // share
    memory = {
        "weights": shapes.weights if not shard else shapes.weights // share + shapes.gathered,
        "sums": own if sums == "device" else 0,
        "activations": activations,
        "gradients": max(held, near),
        "process": GPU_CONTEXT if on_gpu else PROCESS,
    }
    beside = own if sums == "cpu" else 0
    if not on_gpu:
        memory["sums"] += beside
        beside = 0
    memory["total"] = sum(memory.values())
    # While it loads, a process reads the weights into the computer's memory, and the result is written from there.
    memory_cpu = (PROCESS + max(shapes.weights, shapes.sums) + beside) if on_gpu else 0
    forward = 2.0 * shapes.multiplied if forward is None else forward
    work = forward * (1 if kind == "gram" else 1 + (2 + recomputed) * passes) + 2 * shapes.products
    compute = work * (OVER_PLAIN if kind == "diagonal" else 1.0) * tokens / processes / rates["compute"].amount
    added = 2 * shapes.sums * batches  # every batch reads and writes a sum that is kept elsewhere
    disk = (1 if shard else nodes) * shapes.weights + shapes.sums
    disk += added * processes // share if sums == "disk" else 0
    network = 0
    if nodes > 1:
        # Shared: weights are gathered for the forward and the backward pass, and sums reduced, batch by batch.
        through = (2 * shapes.weights + shapes.sums) * batches if shard else 2 * shapes.sums
        network = through * (nodes - 1)
    seconds = {
        "compute": compute + (added / share / BUS if sums == "cpu" and on_gpu else 0.0),
        "disk": disk / rates["disk"].amount,
        "network": network / nodes / rates["network"].amount if nodes > 1 else 0.0,
    }
    return EstimateCost(
        shapes=shapes,
        examples=examples,
        tokens=tokens,
        batches=batches,
        nodes=nodes,
        processes=processes,
        memory=memory,
        memory_cpu=memory_cpu,
        disk=shapes.sums + (own * processes if sums == "disk" else 0),
        network=network,
        seconds={"start": START, **seconds, "total": START + sum(seconds.values())},
        limit=max(seconds, key=lambda name: seconds[name]),
        rates=rates,
    )
