"""A model as a sequence of blocks, so that the weights of one block are enough to run it.

A model has *stages*. In a decoder these are the code before the blocks (embeddings), every block, and the code after
them (norm and head). An encoder-decoder has two lists of blocks, and code between them. `find_structure` finds the
stages. A `RowStream` then runs the rows of a task through the model stage by stage.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..curvature.losses import MASKED, decoder_inputs, unwrapped
from ..errors import InputError
from .hidden_cache import CachedTensor, HiddenCache
from .layers import Layer, LayerInput, find_layers

WHOLE = "model"
"""The only stage of a model without a list of blocks."""

Batch = Mapping[str, Any] | Sequence[Any]
"""Keyword arguments of a model, or positional ones. Labels are not passed to it."""


@dataclass(frozen=True)
class Stage:
    """A part of the model: one block, or the code before, between or after the blocks."""

    name: str
    index: int
    """For a block the number of its list. For other code the number of block lists that run before it."""
    is_block: bool


@dataclass
class Structure:
    """The stages of a model and the layers in each of them."""

    lists: list[list[str]]
    """The blocks of every list by module path. Empty if the model has to run whole."""
    outputs: dict[str, tuple[list[Any], pytree.TreeSpec]]
    """Block → placeholders for its outputs, of the right shapes and types."""
    groups: dict[str, list[list[str]]] = field(default_factory=dict)
    """Stage → groups of layers that read the same input, in the order in which they run."""
    skipped: dict[str, list[str]] = field(default_factory=dict)
    """Why layers are in no group → these layers."""
    notes: list[str] = field(default_factory=list)

    @property
    def stages(self) -> list[Stage]:
        """All stages in the order in which they run."""
        if not self.lists:
            return [Stage(WHOLE, 0, False)]
        stages = [Stage("inputs", 0, False)]
        for index, blocks in enumerate(self.lists):
            stages += [Stage(name, index, True) for name in blocks]
            last = index + 1 == len(self.lists)
            stages.append(Stage("outputs" if last else f"after {blocks[-1]}", index + 1, False))
        return stages


class WeightSource(Protocol):
    """Loads weights into a module, and frees them."""

    def load(self, names: Sequence[str], within: Sequence[str] = ()) -> None: ...

    def free(self, names: Sequence[str]) -> None: ...


class BlockModel:
    """A model with its structure. ``source`` loads the weights of a stage, unless all are in memory.

    A streamed model keeps the weights that were changed in ``changed``, and applies them whenever it loads a stage.
    """

    def __init__(
        self,
        module: nn.Module,
        structure: Structure,
        source: WeightSource | None = None,
        store: HiddenCache | None = None,
    ) -> None:
        self.module, self.structure, self.source = module, structure, source
        self.layers = find_layers(module)
        self.changed: dict[str, CachedTensor] = {}
        self._store = store
        self._loaded: Stage | None = None
        self._weights = weights_by_block(module, [name for blocks in structure.lists for name in blocks])

    def copy(self) -> BlockModel:
        """A model with the same weights, to be changed."""
        module = copy.deepcopy(self.module) if self.source is None else self.module
        return BlockModel(module, self.structure, self.source, self._store)

    def weights_of(self, stage: Stage) -> list[str]:
        """Names of the parameters and buffers that a stage uses."""
        return self._weights[stage.name if stage.is_block else ""]

    @contextlib.contextmanager
    def loaded(self, stage: Stage, layers: Sequence[Layer] | None = None) -> Iterator[None]:
        """Hold the weights of a stage in memory, or only those of the modules of some layers.

        Inside another such block for the same stage this does nothing.
        """
        if self.source is None or self._loaded == stage:
            yield
            return
        names = every = self.weights_of(stage)
        if layers is not None:
            paths = {layer.path for layer in layers}
            names = [name for name in every if name.rpartition(".")[0] in paths]
        self.source.load(names, every)
        self._loaded = stage
        try:
            with torch.no_grad():
                for name in names:
                    if name in self.changed:
                        self.module.get_parameter(name).copy_(self.changed[name].get())
            yield
        finally:
            self._loaded = None
            self.source.free(names)

    def store(self, stage: Stage, layers: Sequence[str]) -> None:
        """Keep the weights of changed layers of a stage beyond the time that it is loaded."""
        if self.source is None or self._store is None:
            return
        changed = {name for layer in layers for name in self.layers[layer].parameters}
        for name in self.weights_of(stage):
            if name in changed:
                self.changed[name] = self._store.put(self.module.get_parameter(name).detach().clone())

    def drop_changes(self) -> None:
        """Free the changed weights of a streamed model."""
        for value in self.changed.values():
            value.drop()
        self.changed = {}


def stored_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that a checkpoint stores, by name."""
    yield from module.named_parameters()
    stored = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


def weights_by_block(module: nn.Module, blocks: Sequence[str]) -> dict[str, list[str]]:
    """Block → names of its parameters and buffers; those outside all blocks are under the empty name."""
    weights: dict[str, list[str]] = {"": [], **{name: [] for name in blocks}}
    for name, _ in stored_values(module):
        weights[next((block for block in blocks if name.startswith(f"{block}.")), "")].append(name)
    return weights


def forward(module: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch without its labels."""
    if not isinstance(batch, Mapping):
        return module(*batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"} | decoder_inputs(module, batch)
    config = getattr(unwrapped(module), "config", None)
    if getattr(config, "use_cache", None) is not None:
        inputs["use_cache"] = False
    return module(**inputs)


@contextlib.contextmanager
def float32_precision(device: torch.device, precision: str) -> Iterator[None]:
    """Set the precision of float32 matrix products on a GPU; a CPU multiplies exactly.

    With ``high``, a GPU rounds factors to 10 bits (TF32), and adds in float32. In sums over thousands of tokens these
    errors cancel.
    """
    if device.type != "cuda":
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in what a module takes or returns."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a layer."""
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


def placeholder(value: Any) -> Any:
    """A tensor of the same shape and type that takes no memory, or any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


# --- running


class Link(NamedTuple):
    """A block's argument that is an output of an earlier block."""

    block: str
    leaf: int


class Call(NamedTuple):
    """The arguments of a block for one batch, as pytree leaves: a `Link`, a `CachedTensor`, or the value itself."""

    leaves: list[Any]
    spec: pytree.TreeSpec


class _Reached(Exception):
    """Ends a forward pass as soon as a hook has the value that it is for."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class RowStream:
    """The rows of one task on their way through one model, stage by stage.

    It caches the output of the current block and the arguments of the blocks, such as masks and position biases. Call
    `layer_inputs` as often as needed for the layers of a stage, then `run_stage` to move to the next stage.
    `run_stage` can capture the inputs of a block's modules, for `layer_inputs` to return afterwards.
    """

    def __init__(self, model: BlockModel, batches: Sequence[Batch], cache: HiddenCache) -> None:
        self.model, self.batches, self.cache = model, list(batches), cache
        self._calls: list[dict[str, Call]] = [{} for _ in self.batches]
        self._outputs: list[dict[Link, Any]] = [{} for _ in self.batches]
        """For every batch the outputs of blocks that are still needed: a `CachedTensor`, or the value itself."""
        self._captured: dict[str, list[CachedTensor]] = {}
        self._arguments: list[Any] = []
        """The arguments that a block was run with last."""

    def close(self) -> None:
        """Drop all hidden states."""
        for batch in range(len(self.batches)):
            self._drop_arguments(batch)
            for value in self._outputs[batch].values():
                _drop(value)
            self._outputs[batch] = {}
        self.drop_captured()

    @torch.no_grad()
    def run_stage(self, stage: Stage, capture: Sequence[str] = ()) -> None:
        """Run all rows through a stage, and capture the inputs of some modules of a block."""
        for batch in range(len(self.batches)):
            if stage.is_block:
                self._run_block(stage, batch, capture)
            elif stage.index < len(self.model.structure.lists):
                self._record_arguments(stage, batch)

    def _run_block(self, stage: Stage, batch: int, capture: Sequence[str]) -> None:
        """Run a block, and cache what later stages need of its output."""
        blocks = self.model.structure.lists[stage.index]
        later = blocks[blocks.index(stage.name) + 1 :]
        with contextlib.ExitStack() as stack:
            for path in capture:
                child, hook = self.model.module.get_submodule(path), partial(self._capture, path)
                stack.callback(child.register_forward_pre_hook(hook, with_kwargs=True).remove)
            leaves = pytree.tree_leaves(self._runner(batch, stage)())
        outputs = self._outputs[batch]
        needed = {leaf for name in later for leaf in self._calls[batch][name].leaves if isinstance(leaf, Link)}
        passed = [link for link in outputs if link.block in blocks and link not in needed]
        for index, leaf in enumerate(leaves):
            if not later or Link(stage.name, index) in needed:
                outputs[Link(stage.name, index)] = self.cache.put(leaf) if isinstance(leaf, Tensor) else leaf
        for link in passed:  # only now: an output may be an input that was passed on
            _drop(outputs.pop(link))

    def _capture(self, path: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        self._captured.setdefault(path, []).append(self.cache.put(input_of(args, kwargs)))

    def drop_captured(self, but: Collection[str] = ()) -> None:
        """Drop the captured inputs of all modules except those in ``but``."""
        for path in self._captured.keys() - set(but):
            for value in self._captured.pop(path):
                value.drop()

    def _record_arguments(self, stage: Stage, batch: int) -> None:
        """Record the arguments of the blocks that follow code outside the blocks."""
        self._drop_arguments(batch)
        calls = self._run_outside(batch, stage)
        cached: dict[int, CachedTensor] = {}  # an argument of several blocks is cached once
        for name, call in calls.items():
            for leaf in call.leaves:
                if isinstance(leaf, Tensor) and id(leaf) not in cached:
                    cached[id(leaf)] = self.cache.put(leaf)
            leaves = [cached[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
            self._calls[batch][name] = Call(leaves, call.spec)

    def _drop_arguments(self, batch: int) -> None:
        for value in {id(leaf): leaf for call in self._calls[batch].values() for leaf in call.leaves}.values():
            _drop(value)
        self._calls[batch] = {}

    def _run_outside(self, batch: int, stage: Stage) -> Any:
        """Run the model without its blocks: those before the stage give their cached outputs.

        The first list of blocks after the stage ends the run; returns the arguments of its blocks.
        """
        recorded: dict[str, Call] = {}
        placeholders: dict[int, tuple[Any, Link]] = {}
        with contextlib.ExitStack() as stack:
            for index, blocks in enumerate(self.model.structure.lists):
                for name in blocks:
                    is_last = name == blocks[-1]
                    if index < stage.index:
                        stub = partial(self._earlier_block, batch, name, is_last)
                    else:
                        stub = partial(self._later_block, name, is_last, recorded, placeholders)
                    block = self.model.module.get_submodule(name)
                    block.forward = stub
                    stack.callback(delattr, block, "forward")
            try:
                return forward(self.model.module, self.batches[batch])
            except _Reached as reached:
                if reached.value is not recorded:
                    raise
        return recorded

    def _earlier_block(self, batch: int, name: str, is_last: bool, *args: Any, **kwargs: Any) -> Any:
        """Replace the forward of a block that has run on these rows already."""
        leaves, spec = self.model.structure.outputs[name]
        if is_last:
            leaves = [_value(self._outputs[batch][Link(name, index)]) for index in range(len(leaves))]
        return pytree.tree_unflatten(leaves, spec)

    def _later_block(
        self,
        name: str,
        is_last: bool,
        recorded: dict[str, Call],
        placeholders: dict[int, tuple[Any, Link]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Replace the forward of a block that has not run yet, and record its arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        linked = [placeholders[id(leaf)][1] if id(leaf) in placeholders else leaf for leaf in leaves]
        recorded[name] = Call(linked, spec)
        if is_last:
            raise _Reached(recorded)
        outputs, spec = self.model.structure.outputs[name]
        stand_ins = [placeholder(leaf) for leaf in outputs]
        placeholders |= {
            id(leaf): (leaf, Link(name, index)) for index, leaf in enumerate(stand_ins) if leaf is not None
        }
        return pytree.tree_unflatten(stand_ins, spec)

    def _runner(self, batch: int, stage: Stage) -> Callable[[], Any]:
        """Runs one batch through a stage."""
        if not stage.is_block:
            return partial(self._run_outside, batch, stage)
        call = self._calls[batch][stage.name]
        leaves = [_value(self._outputs[batch][leaf] if isinstance(leaf, Link) else leaf) for leaf in call.leaves]
        self._arguments = leaves
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        return partial(self.model.module.get_submodule(stage.name), *args, **kwargs)

    @torch.no_grad()
    def layer_inputs(self, stage: Stage, path: str) -> Iterator[LayerInput]:
        """For every batch what a module reads. Captured inputs come without the positions that count."""
        if path in self._captured:
            yield from (LayerInput(cached.get()) for cached in self._captured[path])
            return

        def reached(child: nn.Module, args: Any, kwargs: Any) -> None:
            raise _Reached((args, kwargs))

        for batch, inputs in enumerate(self.batches):
            hook = self.model.module.get_submodule(path).register_forward_pre_hook(reached, with_kwargs=True)
            args, kwargs = _until(hook, self._runner(batch, stage))
            values, others = input_of(args, kwargs), tensors_in((args, kwargs))
            counted = counted_positions(self.model.module, inputs, values, self._is_encoded(stage, values))
            yield LayerInput(values, counted, next((t for t in others if not t.is_floating_point()), None))

    def hidden(self, stage: Stage, batch: int) -> Tensor:
        """The first output of the block that the rows went through last."""
        value: Tensor = _value(self._outputs[batch][Link(stage.name, 0)])
        return value

    def _is_encoded(self, stage: Stage, values: Tensor) -> bool:
        """Whether a value has a position per token of the encoder, in a model with encoder and decoder."""
        if not stage.is_block or len(self.model.structure.lists) < 2:
            return False
        if stage.index == 0:
            return True
        others = (leaf for leaf in self._arguments[1:] if isinstance(leaf, Tensor))  # the first is the hidden state
        return any(leaf.data_ptr() == values.data_ptr() and leaf.shape == values.shape for leaf in others)

    @torch.no_grad()
    def finish(self, batch: int, until: nn.Module | None = None) -> Any:
        """Run the code after the blocks; with ``until``, only to the output of that module."""
        run = self._runner(batch, self.model.structure.stages[-1])
        if until is None:
            return run()

        def reached(child: nn.Module, args: Any, result: Any) -> None:
            raise _Reached(result)

        return _until(until.register_forward_hook(reached), run)


def _until(hook: Any, run: Callable[[], Any]) -> Any:
    """Run until a hook raises `_Reached`; return its value, and remove the hook."""
    try:
        run()
    except _Reached as reached:
        return reached.value
    finally:
        hook.remove()
    raise InputError("a layer that ran on the first rows did not run on later ones")


def _value(leaf: Any) -> Any:
    return leaf.get() if isinstance(leaf, CachedTensor) else leaf


def _drop(leaf: Any) -> None:
    if isinstance(leaf, CachedTensor):
        leaf.drop()


def counted_positions(module: nn.Module, batch: Batch, values: Tensor, encoded: bool = False) -> Tensor | None:
    """Which positions of an activation are not padding; None if all count.

    In an encoder-decoder, ``encoded`` says that the positions are those of the encoder's tokens.
    """
    if not isinstance(batch, Mapping) or values.dim() < 2:
        return None
    masks = [batch.get("attention_mask")]
    if getattr(getattr(unwrapped(module), "config", None), "is_encoder_decoder", False):
        decoder = batch.get("decoder_attention_mask")
        if decoder is None and "labels" in batch:
            decoder = batch["labels"] != MASKED
        masks = [masks[0], decoder] if encoded else [decoder, masks[0]]
    for mask in masks:
        if mask is not None and values.dim() > 2 and values.shape[:2] == mask.shape:
            return torch.as_tensor(mask).bool()
        if mask is not None and values.dim() == 2 and len(values) == mask.numel():
            return torch.as_tensor(mask).reshape(-1).bool()
    return None
