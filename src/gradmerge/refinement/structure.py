"""Find the blocks of a model, its layers, and which of them read the same input."""

from __future__ import annotations

import contextlib
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..curvature.per_example_gradients import has_fused_experts
from ..errors import InputError
from .blocks import (
    Batch,
    BlockModel,
    HiddenCache,
    RowStream,
    Structure,
    WeightSource,
    forward,
    input_of,
    placeholder,
    tensors_in,
    weights_by_block,
)
from .layers import Layer, LinearLayer, find_layers


def find_structure(module: nn.Module, batch: Batch, source: WeightSource | None = None) -> Structure:
    """Run the whole model on one small batch, and find its blocks and layers.

    The weights of a block are loaded when the block runs, and freed after it. Without a list of blocks, the groups of
    layers are found only in a model whose weights are in memory.
    """
    structure, result = _trace(module, batch, block_lists(module), source)
    if structure.lists and not runs_block_by_block(module, structure, batch, result, source):
        structure = Structure([], {}, notes=["block by block the model gives other outputs than whole"])
    if not structure.lists and source is None:
        notes, (structure, _) = structure.notes, _trace(module, batch, [], source)
        structure.notes += notes
    return structure


def block_lists(module: nn.Module) -> list[list[str]]:
    """The outermost lists of modules."""
    paths = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and len(child) > 1]
    outer = [name for name in paths if not any(name.startswith(f"{other}.") for other in paths)]
    return [[f"{path}.{index}" for index in range(len(module.get_submodule(path)))] for path in outer]  # type: ignore[arg-type]


def _trace(
    module: nn.Module, batch: Batch, candidates: list[list[str]], source: WeightSource | None
) -> tuple[Structure, list[Tensor]]:
    """Run the model with hooks on blocks and layers; return its structure and its outputs."""
    trace = _Trace(module, candidates, source)
    if source is not None:
        source.load(trace.weights[""])
    with contextlib.ExitStack() as stack, torch.no_grad(), trace.used:
        for name in trace.blocks:
            block = module.get_submodule(name)
            stack.callback(block.register_forward_pre_hook(trace.before_block, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(trace.after_block, with_kwargs=True).remove)
        for child in trace.hooked:
            stack.callback(child.register_forward_pre_hook(trace.before_layer, with_kwargs=True).remove)
        result = tensors_in(forward(module, batch))
    trace.check_called("")
    if source is not None:
        source.free(trace.weights[""])
    return trace.structure(), result


class _Trace:
    """What the hooks record while the whole model runs once."""

    def __init__(self, module: nn.Module, candidates: list[list[str]], source: WeightSource | None) -> None:
        self.module, self.candidates, self.source = module, candidates, source
        self.blocks = [name for names in candidates for name in names]
        self.layers = find_layers(module)
        self.hooked: dict[nn.Module, list[Layer]] = {}
        for layer in self.layers.values():
            self.hooked.setdefault(layer.module, []).append(layer)
        self.weights = weights_by_block(module, self.blocks)
        self.used = _UsedWeights()
        self._names = {child: name for name, child in module.named_modules()}
        times = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        self._tied = {name for name, layer in self.layers.items() if times[id(layer.weight)] > 1}
        self._ran: list[str] = []
        """The blocks in the order in which they ran."""
        self._inside = False
        self._outputs: dict[str, tuple[list[Any], pytree.TreeSpec]] = {}
        self._calls: list[tuple[int, bool, str, Any]] = []
        """For every layer that ran: the number of blocks until then, whether it is in a block, and its input's key."""
        self._last_outputs: list[Tensor] = []
        self._inputs: list[tuple[Tensor, int]] = []
        self._chained: set[str] = set()
        """Blocks that read an output of the block before them."""
        self._changing: set[str] = set()
        """Blocks that change their input in place."""
        self._alive: list[Tensor] = []  # so that no later tensor gets the same address

    def before_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[block]
        self._ran.append(name)
        self._inside = True
        if self.source is not None:
            self.source.load(self.weights[name])
        self._inputs = [(leaf, leaf._version) for leaf in tensors_in((args, kwargs))]
        if any(leaf is other for leaf, _ in self._inputs for other in self._last_outputs):
            self._chained.add(name)

    def after_block(self, block: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        name = self._names[block]
        self.check_called(f"{name}.")
        leaves, spec = pytree.tree_flatten(result)
        self._outputs[name] = [placeholder(leaf) for leaf in leaves], spec
        self._last_outputs = tensors_in(result)
        if any(leaf._version != version for leaf, version in self._inputs):
            self._changing.add(name)
        if self.source is not None:
            self.source.free(self.weights[name])
        self._inside = False
        self._alive.clear()

    def before_layer(self, child: nn.Module, args: Any, kwargs: Any) -> None:
        values = input_of(args, kwargs)
        self._alive.append(values)
        tensor = (values.data_ptr(), tuple(values.shape), values.stride(), values._version)
        for layer in self.hooked[child]:  # convolutions and experts have rows of their own
            key = (*tensor, layer.has_bias) if isinstance(layer, LinearLayer) else layer.name
            self._calls.append((len(self._ran), self._inside, layer.name, key))

    def check_called(self, prefix: str) -> None:
        """Raise for a layer below ``prefix`` whose weight was used although the layer was not called."""
        called = {name for *_, name, _ in self._calls}
        for name, layer in self.layers.items():
            if name.startswith(prefix) and name not in called | self._tied and id(layer.weight) in self.used.seen:
                raise InputError(
                    f"{name}: its weight is used, but the layer is not called as a module, so that its inputs cannot "
                    "be read. Another implementation of attention may help: model_args attn_implementation=eager"
                )
        elsewhere = {id(layer.weight) for name, layer in self.layers.items() if not name.startswith(prefix)}
        self.used.seen &= elsewhere  # the weights of a block are freed, and others may get their addresses

    def structure(self) -> Structure:
        lists = [names for names in self.candidates if self._is_chain(names)]
        lists.sort(key=lambda names: self._ran.index(names[0]))
        structure = Structure(lists, self._outputs)
        if self.candidates and not lists:
            structure.notes.append("the model has no list of blocks in which every block reads the one before it")
        if others := [m for m in self.module.modules() if has_fused_experts(m) and m not in self.hooked]:
            structure.notes.append(f"{len(others)} modules with experts of another form keep the merge's weights")
        times = Counter(name for *_, name, _ in self._calls)
        unused = [name for name in self.layers if not times[name] and name not in self._tied]
        reused = [name for name in self.layers if times[name] > 1 or (times[name] and name in self._tied)]
        between: list[str] = []
        structure.skipped = {
            "run more than once or share their weight": reused,
            "did not run": unused,
            "run between two blocks": between,
        }
        groups: dict[Any, list[str]] = {}
        for ran, inside, name, key in self._calls:
            if name in reused:
                continue
            if (stage := self._stage_of(structure, ran, inside)) is None:
                between.append(name)
                continue
            if (ran, inside, key) not in groups:
                structure.groups.setdefault(stage, []).append(groups.setdefault((ran, inside, key), []))
            groups[ran, inside, key].append(name)
        return structure

    def _is_chain(self, blocks: list[str]) -> bool:
        """Whether the blocks run once each, in order, and every one reads an output of the one before it."""
        if any(self._ran.count(name) != 1 or name in self._changing for name in blocks):
            return False
        first = self._ran.index(blocks[0])
        in_order = self._ran[first : first + len(blocks)] == blocks
        return in_order and all(name in self._chained for name in blocks[1:])

    def _stage_of(self, structure: Structure, ran: int, inside: bool) -> str | None:
        """The stage of a layer that ran when so many blocks had begun; None for code between two blocks of a list."""
        if inside and any(self._ran[ran - 1] in blocks for blocks in structure.lists):
            return self._ran[ran - 1]
        finished = sum(blocks[-1] in self._ran[:ran] for blocks in structure.lists)
        if any(blocks[0] in self._ran[:ran] for blocks in structure.lists[finished:]):
            return None
        return next(stage.name for stage in structure.stages if not stage.is_block and stage.index == finished)


class _UsedWeights(TorchFunctionMode):
    """Notes which parameters take part in a computation, so that a hook that does not fire is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "to", "type"):
            values = (*args, *(kwargs or {}).values())
            self.seen.update(id(value) for value in values if isinstance(value, nn.Parameter))
        return func(*args, **(kwargs or {}))


def runs_block_by_block(
    module: nn.Module, structure: Structure, batch: Batch, expected: list[Tensor], source: WeightSource | None
) -> bool:
    """Whether running block by block gives the outputs of the whole model."""
    model = BlockModel(module, structure, source)
    stream = RowStream(model, [batch], HiddenCache(2**62))
    try:
        for stage in structure.stages:
            with model.loaded(stage):
                stream.run_stage(stage)
                if stage == structure.stages[-1]:
                    outputs = tensors_in(stream.finish(0))
    except InputError:
        raise
    except Exception:  # code between the blocks that cannot do without the blocks' real outputs
        return False
    return len(outputs) == len(expected) and all(map(_is_close, outputs, expected))


def _is_close(outputs: Tensor, expected: Tensor) -> bool:
    if not expected.is_floating_point() or not bool(expected.isfinite().all()):
        return True  # calibration names the layer where values become infinite
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return outputs.shape == expected.shape and torch.allclose(outputs, expected, rtol=1e-4, atol=1e-5 * scale + 1e-30)
