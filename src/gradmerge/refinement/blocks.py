"""A model as a sequence of blocks, so that the weights of one block are enough to run it.

A model has *stages*. In a decoder these are the code before the blocks (embeddings), every block, and the code after
them (norm and head). An encoder-decoder has two lists of blocks, and code between them. `find_structure` finds the
stages. A `RowStream` then runs the rows of a task through the model stage by stage.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..curvature.losses import MASKED, decoder_inputs, unwrapped
from ..errors import InputError
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

    def load(self, names: Sequence[str]) -> None: ...

    def set(self, name: str, value: Tensor) -> None: ...

    def free(self, names: Sequence[str]) -> None: ...


class BlockModel:
    """A model with its structure. ``source`` loads the weights of a stage, unless all are in memory."""

    def __init__(self, module: nn.Module, structure: Structure, source: WeightSource | None = None) -> None:
        self.module, self.structure, self.source = module, structure, source
        self.layers = find_layers(module)
        self._weights = weights_by_block(module, [name for blocks in structure.lists for name in blocks])
        self._kept: dict[str, CachedTensor] = {}

    def weights_of(self, stage: Stage) -> list[str]:
        """Names of the parameters and buffers that a stage uses."""
        return self._weights[stage.name if stage.is_block else ""]

    @contextlib.contextmanager
    def loaded(self, stage: Stage) -> Iterator[None]:
        """Hold the weights of a stage in memory."""
        if self.source is None:
            yield
            return
        names = self.weights_of(stage)
        self.source.load(names)
        try:
            yield
        finally:
            self.source.free(names)

    def keep(self, layers: Sequence[Layer], cache: HiddenCache) -> None:
        """Keep loaded weights of the layers' modules in a cache, in place of those that were kept before."""
        for value in self._kept.values():
            value.drop()
        self._kept = {}
        for path, module in {layer.path: layer.module for layer in layers if self.source is not None}.items():
            for name, parameter in module.named_parameters(recurse=False):
                self._kept[f"{path}.{name}"] = cache.put(parameter)

    @contextlib.contextmanager
    def with_kept(self) -> Iterator[None]:
        """Use the weights that were kept. Those of the other layers are not in memory."""
        if self.source is None:
            yield
            return
        for name, value in self._kept.items():
            self.source.set(name, value.get())
        try:
            yield
        finally:
            self.source.free(list(self._kept))


def finished_modules(
    module: nn.Module, solved: Sequence[Sequence[Layer]], later: Sequence[Sequence[Layer]]
) -> list[str]:
    """The outermost modules that contain layers of ``solved`` groups, and no layer of ``later`` groups."""
    unfinished = {""}
    for path in (layer.path for group in later for layer in group):
        while path not in unfinished:
            unfinished.add(path)
            path = path.rpartition(".")[0]
    finished = {}
    for path in (layer.path for group in solved for layer in group):
        outermost = None
        while path not in unfinished:
            if not isinstance(module.get_submodule(path), nn.ModuleList | nn.ModuleDict):  # these are not called
                outermost = path
            path = path.rpartition(".")[0]
        finished[outermost] = True
    return [path for path in finished if path is not None]


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
    """Rows of one task on their way through one model, stage by stage.

    It caches the output of the current block and the arguments of the blocks, such as masks and position biases. Call
    `layer_inputs` for the groups of layers of a stage in turn, then `run_stage` to move to the next stage.
    """

    def __init__(self, model: BlockModel, batches: Sequence[Batch], cache: HiddenCache) -> None:
        self.model, self.batches, self.cache = model, list(batches), cache
        self._calls: list[dict[str, Call]] = [{} for _ in self.batches]
        self._outputs: list[dict[Link, Any]] = [{} for _ in self.batches]
        """For every batch the outputs of blocks that are still needed."""
        self._results: list[dict[str, CachedTree]] = [{} for _ in self.batches]
        """For every batch the outputs of modules in this stage whose layers are all solved."""
        self._captured: dict[str, list[CachedTensor]] = {}
        self._arguments: list[Any] = []
        """The arguments that a block was run with last."""

    def drop(self) -> None:
        """Drop all hidden states."""
        for batch in range(len(self.batches)):
            self._drop_arguments(batch)
            self._drop_results(batch)
            for value in self._outputs[batch].values():
                _drop(value)
            self._outputs[batch] = {}
        self._drop_captured()

    @torch.no_grad()
    def run_stage(self, stage: Stage, capture: Collection[str] = ()) -> None:
        """Run all rows through a stage. Capture the inputs of some modules, for `captured_inputs`.

        Without modules to capture, the code after the last block is left to `finish`.
        """
        self._drop_captured()
        is_last = stage == self.model.structure.stages[-1]
        for batch in range(len(self.batches)):
            with contextlib.ExitStack() as stack:
                for path in capture:
                    child, hook = self.model.module.get_submodule(path), partial(self._capture, path)
                    stack.callback(child.register_forward_pre_hook(hook, with_kwargs=True).remove)
                stack.enter_context(self._replayed(batch))
                if stage.is_block:
                    self._run_block(stage, batch)
                elif not is_last:
                    self._record_arguments(stage, batch)
                elif capture:
                    self._run_outside(batch, stage)
            self._drop_results(batch)

    def _capture(self, path: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        self._captured.setdefault(path, []).append(self.cache.put(input_of(args, kwargs)))

    def _drop_captured(self) -> None:
        for values in self._captured.values():
            for value in values:
                value.drop()
        self._captured = {}

    def captured_inputs(self, path: str) -> Iterator[LayerInput]:
        """For every batch what a module read in this stage, without the positions that count."""
        return (LayerInput(cached.get()) for cached in self._captured.get(path, []))

    @torch.no_grad()
    def layer_inputs(self, stage: Stage, path: str, finished: Sequence[str] = ()) -> Iterator[LayerInput]:
        """For every batch what a module reads.

        ``finished``: modules before it whose weights no longer change. Each of them runs once in a stage.
        """

        def reached(child: nn.Module, args: Any, kwargs: Any) -> None:
            raise _Reached((args, kwargs))

        for batch, inputs in enumerate(self.batches):
            hook = self.model.module.get_submodule(path).register_forward_pre_hook(reached, with_kwargs=True)
            with self._replayed(batch, finished):
                args, kwargs = _until(hook, self._runner(batch, stage))
            values, others = input_of(args, kwargs), tensors_in((args, kwargs))
            counted = counted_positions(self.model.module, inputs, values, self._is_encoded(stage, values))
            yield LayerInput(values, counted, next((t for t in others if not t.is_floating_point()), None))

    @contextlib.contextmanager
    def _replayed(self, batch: int, finished: Sequence[str] = ()) -> Iterator[None]:
        """Let modules return their output from an earlier run, and keep the outputs of ``finished`` ones."""
        results = self._results[batch]

        def keep(path: str, child: nn.Module, args: Any, result: Any) -> None:
            results[path] = self.cache.put_tree(result)

        with contextlib.ExitStack() as stack:
            for path, cached in results.items():
                module = self.model.module.get_submodule(path)
                stack.enter_context(replaced_forward(module, lambda *args, value=cached, **kwargs: value.get()))
            for path in finished:
                if path not in results:
                    child = self.model.module.get_submodule(path)
                    stack.callback(child.register_forward_hook(partial(keep, path)).remove)
            yield
        inner = [path for path in results if any(path.startswith(f"{outer}.") for outer in results)]
        self._drop_results(batch, inner)

    def _drop_results(self, batch: int, paths: Collection[str] | None = None) -> None:
        for path in list(self._results[batch]) if paths is None else paths:
            self._results[batch].pop(path).drop()

    def hidden(self, stage: Stage) -> Iterator[Tensor]:
        """For every batch the first output of the block that the rows went through last."""
        return (_value(outputs[Link(stage.name, 0)]) for outputs in self._outputs)

    @torch.no_grad()
    def finish(self, batch: int) -> Any:
        """Run the code after the last block; return what the model returns."""
        return self._run_outside(batch, self.model.structure.stages[-1])

    def _run_block(self, stage: Stage, batch: int) -> None:
        """Run a block, and cache what later stages need of its output."""
        blocks = self.model.structure.lists[stage.index]
        later = blocks[blocks.index(stage.name) + 1 :]
        leaves = pytree.tree_leaves(self._runner(batch, stage)())
        outputs = self._outputs[batch]
        needed = {leaf for name in later for leaf in self._calls[batch][name].leaves if isinstance(leaf, Link)}
        passed = [link for link in outputs if link.block in blocks and link not in needed]
        for index, leaf in enumerate(leaves):
            if not later or index == 0 or Link(stage.name, index) in needed:
                outputs[Link(stage.name, index)] = self.cache.put(leaf) if isinstance(leaf, Tensor) else leaf
        for link in passed:  # only now: an output may be an input that was passed on
            _drop(outputs.pop(link))

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
                    stack.enter_context(replaced_forward(self.model.module.get_submodule(name), stub))
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

    def _is_encoded(self, stage: Stage, values: Tensor) -> bool:
        """Whether a value has a position per token of the encoder, in a model with encoder and decoder."""
        if not stage.is_block or len(self.model.structure.lists) < 2:
            return False
        if stage.index == 0:
            return True
        others = (leaf for leaf in self._arguments[1:] if isinstance(leaf, Tensor))  # the first is the hidden state
        return any(leaf.data_ptr() == values.data_ptr() and leaf.shape == values.shape for leaf in others)


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Call something else in place of a module's forward."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


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


# --- cached hidden states


class CachedTensor:
    """A tensor in a `HiddenCache`: in memory, or in a file."""

    def __init__(self, cache: HiddenCache, tensor: Tensor, path: Path | None) -> None:
        self._cache, self._path = cache, path
        self._tensor: Tensor | None = tensor if path is None else None
        self._dtype, self._shape, self._device = tensor.dtype, tensor.shape, tensor.device
        if path is not None:
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(path)

    def get(self) -> Tensor:
        """Return the tensor, read from its file if it has one."""
        if self._tensor is not None:
            return self._tensor
        size = self._shape.numel()
        if not size:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        stored = torch.from_file(str(self._path), size=size, dtype=self._dtype)
        return stored.reshape(self._shape).to(self._device)

    def drop(self) -> None:
        """Give back the memory, or delete the file."""
        if self._tensor is not None:
            self._cache.take_back(self._tensor)
            self._tensor = None
        elif self._path is not None:
            self._path.unlink(missing_ok=True)


class CachedTree(NamedTuple):
    """What a module returned, with its tensors in a `HiddenCache`."""

    leaves: list[Any]
    spec: pytree.TreeSpec

    def get(self) -> Any:
        """Return the value."""
        leaves = [leaf.get() if isinstance(leaf, CachedTensor) else leaf for leaf in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def drop(self) -> None:
        """Give back the memory."""
        for leaf in self.leaves:
            if isinstance(leaf, CachedTensor):
                leaf.drop()


class HiddenCache:
    """Keeps hidden states in memory up to a limit in bytes, and the others in temporary files.

    A dropped tensor's memory is used for the next one of its shape. Without that, small hidden states that stay lie
    between large blocks that are freed, and the C library's heap grows with every block of the model.
    """

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self.limit, self.nbytes, self.spilled = limit, 0, 0
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0
        self._unused: dict[tuple[Any, ...], list[Tensor]] = {}

    def put(self, tensor: Tensor) -> CachedTensor:
        """Keep a tensor."""
        if unused := self._unused.get(_layout(tensor)):
            return CachedTensor(self, unused.pop().copy_(tensor), None)
        size = _bytes_held(tensor)
        if self.nbytes + size > self.limit:
            self.free_unused()
        if self.nbytes + size <= self.limit:
            self.nbytes += size
            # A view, such as an expanded mask, is kept as it is: a copy would be larger.
            return CachedTensor(self, tensor.detach().clone() if tensor.is_contiguous() else tensor, None)
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="gradmerge-hidden-", dir=self._folder)
        self._number += 1
        self.spilled += tensor.nbytes
        return CachedTensor(self, tensor, Path(self._temporary.name) / str(self._number))

    def put_tree(self, value: Any) -> CachedTree:
        """Keep all tensors in a value."""
        leaves, spec = pytree.tree_flatten(value)
        return CachedTree([self.put(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)

    def take_back(self, tensor: Tensor) -> None:
        """Keep the memory of a tensor for the next one of its shape."""
        if tensor.is_contiguous():
            self._unused.setdefault(_layout(tensor), []).append(tensor)
        else:
            self.nbytes -= _bytes_held(tensor)

    def free_unused(self) -> None:
        """Free the memory of dropped tensors."""
        self.nbytes -= sum(_bytes_held(tensor) for tensors in self._unused.values() for tensor in tensors)
        self._unused = {}

    def close(self) -> None:
        """Free what is unused, and delete the files."""
        self.free_unused()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def _bytes_held(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())
