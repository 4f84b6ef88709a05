"""Run a model block by block, so that the weights of one block are enough.

A model is a sequence of *stages*. In a decoder these are the code before the blocks (embeddings), every block, and the
code after them (norm and head). An encoder-decoder has two lists of blocks, and code between them.

`examine` runs the whole model once on a few rows. It finds the lists of blocks, the layers of every stage, and which of
them read the same input. A `RowStream` then takes the rows of a task through the model stage by stage. It caches the
output of the current block and the arguments of the blocks, such as masks and position biases.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ..curvature.losses import MASKED, decoder_inputs, unwrapped
from ..errors import InputError

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WHOLE = "model"
"""The only stage of a model without a list of blocks."""

Batch = Mapping[str, Any] | Sequence[Any]
"""Keyword arguments of a model, or positional ones. Labels are not passed to it."""


class Link(NamedTuple):
    """A block's argument that is an output of an earlier block."""

    block: str
    leaf: int


class Call(NamedTuple):
    """The arguments of a block for one batch, as pytree leaves: a `Link`, or the value itself."""

    leaves: list[Any]
    spec: pytree.TreeSpec


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
    groups: dict[str, list[list[str]]]
    """Stage → groups of layers that read the same input, in the order in which they run."""
    outputs: dict[str, tuple[list[Any], pytree.TreeSpec]]
    """Block → placeholders for its outputs, of the right shapes and types."""
    reused: list[str] = field(default_factory=list)
    """Layers that run more than once, or share their weight with another layer."""
    unused: list[str] = field(default_factory=list)
    """Layers that did not run."""
    between: list[str] = field(default_factory=list)
    """Layers that run between two blocks of a list."""
    notes: list[str] = field(default_factory=list)

    @property
    def stages(self) -> list[Stage]:
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
        self.changed: dict[str, CachedTensor] = {}
        self._store = store
        self._loaded: Stage | None = None
        blocks = [name for blocks in structure.lists for name in blocks]
        self._weights: dict[str | None, list[str]] = {None: [], **{name: [] for name in blocks}}
        for name, _ in stored_values(module):
            owner = next((block for block in blocks if name.startswith(f"{block}.")), None)
            self._weights[owner].append(name)

    def copy(self) -> BlockModel:
        """A model with the same weights, to be changed."""
        module = copy.deepcopy(self.module) if self.source is None else self.module
        return BlockModel(module, self.structure, self.source, self._store)

    def weights_of(self, stage: Stage) -> list[str]:
        """Names of the parameters and buffers that a stage uses."""
        return self._weights[stage.name if stage.is_block else None]

    @contextlib.contextmanager
    def loaded(self, stage: Stage, layers: Sequence[str] | None = None) -> Iterator[None]:
        """Hold the weights of a stage in memory, or only those of some of its layers.

        Inside another such block for the same stage this does nothing.
        """
        if self.source is None or self._loaded == stage:
            yield
            return
        every = self.weights_of(stage)
        names = every if layers is None else [name for name in every if name.rpartition(".")[0] in layers]
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
        for name in self.weights_of(stage):
            layer, _, _ = name.rpartition(".")
            if layer in layers:
                self.changed[name] = self._store.put(self.module.get_parameter(name).detach().clone())

    def drop_changes(self) -> None:
        """Free the changed weights of a streamed model."""
        for value in self.changed.values():
            value.drop()
        self.changed = {}

    def close(self) -> None:
        """Remove the temporary files of changed weights."""
        self.drop_changes()
        if self._store is not None:
            self._store.close()


def stored_values(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers that a checkpoint stores, by name."""
    yield from module.named_parameters()
    stored = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in module.named_buffers() if name in stored)


# --- finding the structure


def is_linear(module: nn.Module) -> bool:
    """Whether calibration can solve for the weight of a layer."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS)) or type(module).__name__ == "Conv1D"


def examine(module: nn.Module, batch: Batch, source: WeightSource | None = None) -> Structure:
    """Run the whole model on one small batch, and find its blocks and layers.

    The weights of a block are loaded when the block runs, and freed after it.
    """
    lists = block_lists(module)
    structure, result = _trace(module, batch, lists, source)
    if structure.lists and not _same_block_by_block(module, structure, batch, result, source):
        structure.lists = []
        structure.notes.append("running the model block by block gives other outputs than running it whole")
    if not structure.lists:
        if source is not None:
            return structure
        structure, _ = _trace(module, batch, [], source, structure.notes)
    return structure


def block_lists(module: nn.Module) -> list[list[str]]:
    """The outermost lists of modules."""
    paths = [name for name, child in module.named_modules() if isinstance(child, nn.ModuleList) and len(child) > 1]
    outer = [name for name in paths if not any(name.startswith(f"{other}.") for other in paths)]
    return [[f"{path}.{index}" for index in range(len(module.get_submodule(path)))] for path in outer]  # type: ignore[arg-type]


def _trace(
    module: nn.Module,
    batch: Batch,
    candidates: list[list[str]],
    source: WeightSource | None,
    notes: Sequence[str] = (),
) -> tuple[Structure, list[Tensor]]:
    """Run the model with hooks on blocks and layers; return its structure and its outputs."""
    trace = _Trace(module, candidates, source)
    if source is not None:
        source.load(trace.outside)
    with contextlib.ExitStack() as stack, torch.no_grad(), trace.used:
        for name in trace.blocks:
            block = module.get_submodule(name)
            stack.callback(block.register_forward_pre_hook(trace.before_block, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(trace.after_block, with_kwargs=True).remove)
        for layer in trace.layers.values():
            stack.callback(layer.register_forward_pre_hook(trace.before_layer, with_kwargs=True).remove)
        result = run_whole(module, batch)
    trace.check_called("")
    if source is not None:
        source.free(trace.outside)
    return trace.structure(notes), result


class _Trace:
    """What hooks note while the whole model runs once."""

    def __init__(self, module: nn.Module, candidates: list[list[str]], source: WeightSource | None) -> None:
        self.module, self.candidates, self.source = module, candidates, source
        self.blocks = [name for names in candidates for name in names]
        self.names = {child: name for name, child in module.named_modules()}
        self.layers = {name: child for child, name in self.names.items() if is_linear(child)}
        stored = [name for name, _ in stored_values(module)]
        self.weights = {block: [n for n in stored if n.startswith(f"{block}.")] for block in self.blocks}
        self.outside = [name for name in stored if not any(name.startswith(f"{block}.") for block in self.blocks)]
        times = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
        self.tied = {name for name, layer in self.layers.items() if times[id(layer.weight)] > 1}
        self.used = _UsedWeights()
        self.ran: list[str] = []
        self.reads: dict[str, set[str]] = {}
        """Block → the blocks whose outputs it reads."""
        self.outputs: dict[str, tuple[list[Any], pytree.TreeSpec]] = {}
        self.calls: dict[str, list[tuple[str, Any]]] = {}
        """Block, or other part of the model → the layers called there, each with a key of its input."""
        self._current: list[str] = []
        self._produced: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self._versions: dict[str, list[tuple[Tensor, int]]] = {}
        self._alive: list[Tensor] = []  # so that no later tensor gets the same address
        self._changed: set[str] = set()

    def before_block(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        name = self.names[block]
        self.ran.append(name)
        self._current.append(name)
        if self.source is not None:
            self.source.load(self.weights[name])
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        found = [self._produced[id(leaf)] for leaf in tensors if id(leaf) in self._produced]
        self.reads[name] = {origin for reference, origin in found if reference() is not None}
        self._versions[name] = [(leaf, leaf._version) for leaf in tensors]

    def after_block(self, block: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        name = self.names[block]
        self.check_called(f"{name}.")
        leaves, spec = pytree.tree_flatten(result)
        self.outputs[name] = [_placeholder(leaf) for leaf in leaves], spec
        self._produced |= {id(leaf): (weakref.ref(leaf), name) for leaf in leaves if isinstance(leaf, Tensor)}
        if any(leaf._version != version for leaf, version in self._versions.pop(name)):
            self._changed.add(name)
        if self.source is not None:
            self.source.free(self.weights[name])
        self._current.pop()
        self._alive.clear()

    def before_layer(self, layer: nn.Module, args: Any, kwargs: Any) -> None:
        values = input_of(args, kwargs)
        self._alive.append(values)
        self.calls.setdefault(self._where(), []).append((self.names[layer], _input_key(layer, values)))

    def _where(self) -> str:
        if self._current:
            return self._current[0]
        begun = [names for names in self.candidates if names[0] in self.ran]
        if any(names[-1] not in self.ran for names in begun):
            return "between"
        return f"after {len(begun)} lists"

    def check_called(self, prefix: str) -> None:
        """Raise for a layer below ``prefix`` whose weight was used although the layer was not called."""
        called = {name for made in self.calls.values() for name, _ in made}
        for name, layer in self.layers.items():
            if name.startswith(prefix) and name not in called | self.tied and id(layer.weight) in self.used.seen:
                raise InputError(
                    f"{name}: its weight is used, but the layer is not called as a module, so that its inputs cannot "
                    "be read. Another implementation of attention may help: model_args attn_implementation=eager"
                )
        here = {id(layer.weight) for name, layer in self.layers.items() if not name.startswith(prefix)}
        self.used.seen &= here  # the weights of a block are freed, and others may get their addresses

    def structure(self, notes: Sequence[str]) -> Structure:
        lists = [names for names in self.candidates if self._is_chain(names)]
        lists.sort(key=lambda names: self.ran.index(names[0]))
        structure = Structure(lists, {}, self.outputs, notes=list(notes))
        if self.candidates and not lists:
            structure.notes.append("the model has no list of blocks in which every block reads the one before it")
        self._sort_layers(structure)
        return structure

    def _is_chain(self, blocks: list[str]) -> bool:
        """Whether the blocks run once each, in order, and every one reads an output of the one before it."""
        if any(self.ran.count(name) != 1 or name in self._changed for name in blocks):
            return False
        first = self.ran.index(blocks[0])
        in_order = self.ran[first : first + len(blocks)] == blocks
        return in_order and all(before in self.reads[name] for before, name in pairwise(blocks))

    def _sort_layers(self, structure: Structure) -> None:
        """Put layers with the same input into groups, and leave out those that do not run exactly once."""
        times = Counter(name for made in self.calls.values() for name, _ in made)
        structure.unused = [name for name in self.layers if not times[name] and name not in self.tied]
        structure.reused = [name for name in self.layers if times[name] > 1 or (times[name] and name in self.tied)]
        structure.between = [name for name, _ in self.calls.get("between", []) if structure.lists]
        skipped = {*structure.reused, *structure.unused, *structure.between}
        blocks = [name for names in structure.lists for name in names]
        finished = 0
        for where, made in self.calls.items():
            if where in blocks:
                finished = next(i for i, names in enumerate(structure.lists) if where in names) + 1
                stage = where
            else:
                stage = next(one.name for one in structure.stages if not one.is_block and one.index == finished)
            groups: dict[Any, list[str]] = {}
            for name, key in made:
                if name not in skipped:
                    groups.setdefault((where, key), []).append(name)
            structure.groups.setdefault(stage, []).extend(groups.values())


def _input_key(layer: nn.Module, values: Tensor) -> Any:
    """The same for layers that read the same tensor in the same way."""
    how: Any = ()
    if isinstance(layer, CONVOLUTIONS):
        how = (id(layer),)
    tensor = (values.data_ptr(), tuple(values.shape), values.stride(), values._version)
    return (*tensor, layer.bias is not None, how)


def _placeholder(value: Any) -> Any:
    """A tensor of the same shape and type that takes no memory, or any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros((), dtype=value.dtype, device=value.device).expand(value.shape)


class _UsedWeights(TorchFunctionMode):
    """Notes which parameters take part in a computation, so that a hook that does not fire is noticed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in ("__get__", "to", "type"):
            given = (*args, *(kwargs or {}).values())
            self.seen.update(id(value) for value in given if isinstance(value, nn.Parameter))
        return func(*args, **(kwargs or {}))


# --- running


class _Reached(Exception):
    """Ends a forward pass at the value that is wanted."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


def input_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The input of a layer."""
    value: Tensor = args[0] if args else next(iter(kwargs.values()))
    return value


def forward(module: nn.Module, batch: Batch) -> Any:
    """Run a model on a batch without its labels."""
    if not isinstance(batch, Mapping):
        return module(*batch)
    inputs = {name: value for name, value in batch.items() if name != "labels"} | decoder_inputs(module, batch)
    config = getattr(unwrapped(module), "config", None)
    if getattr(config, "use_cache", None) is not None:
        inputs["use_cache"] = False
    return module(**inputs)


def run_whole(module: nn.Module, batch: Batch) -> list[Tensor]:
    """All tensors that a model returns."""
    return [leaf for leaf in pytree.tree_leaves(forward(module, batch)) if isinstance(leaf, Tensor)]


def _until(module: nn.Module, hook: Callable[..., None], run: Callable[[], Any], *, after: bool = False) -> Any:
    """Run until ``hook``, before or after a module, raises `_Reached`; return its value."""
    register = module.register_forward_hook if after else module.register_forward_pre_hook
    handle = register(hook, with_kwargs=True)
    try:
        run()
    except _Reached as reached:
        return reached.value
    finally:
        handle.remove()
    raise InputError("a layer that ran on the first rows did not run on later ones")


class CachedTensor:
    """A tensor in a `HiddenCache`: in memory, or in a file."""

    def __init__(self, cache: HiddenCache, tensor: Tensor, path: Path | None) -> None:
        self._cache, self._path = cache, path
        self._tensor: Tensor | None = tensor if path is None else None
        self._dtype, self._shape, self._device = tensor.dtype, tensor.shape, tensor.device
        if path is not None:
            tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tofile(path)

    def get(self) -> Tensor:
        if self._tensor is not None:
            return self._tensor
        size = self._shape.numel()
        if not size:
            return torch.empty(self._shape, dtype=self._dtype, device=self._device)
        stored = torch.from_file(str(self._path), size=size, dtype=self._dtype)
        return stored.reshape(self._shape).to(self._device)

    def drop(self) -> None:
        if self._tensor is not None:
            self._cache.take_back(self._tensor)
            self._tensor = None
        elif self._path is not None:
            self._path.unlink(missing_ok=True)


class HiddenCache:
    """Keeps hidden states in memory up to a limit in bytes, and the others in temporary files.

    A dropped tensor's memory is used for the next one of its shape. Without that, small hidden states that stay lie
    between large blocks that are freed, and the C library's heap grows with every block of the model.
    """

    def __init__(self, limit: int, folder: Path | None = None) -> None:
        self.limit, self.nbytes, self.peak, self.spilled = limit, 0, 0, 0
        self._folder = folder
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._number = 0
        self._unused: dict[tuple[Any, ...], list[Tensor]] = {}

    def put(self, tensor: Tensor) -> CachedTensor:
        if unused := self._unused.get(_layout(tensor)):
            return CachedTensor(self, unused.pop().copy_(tensor), None)
        size = _bytes_held(tensor)
        if self.nbytes + size > self.limit:
            self.free_unused()
        if self.nbytes + size <= self.limit:
            self.nbytes += size
            self.peak = max(self.peak, self.nbytes)
            # A view, such as an expanded mask, is kept as it is: a copy would be larger.
            return CachedTensor(self, tensor.detach().clone() if tensor.is_contiguous() else tensor, None)
        if self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="gradmerge-hidden-", dir=self._folder)
        self._number += 1
        self.spilled += tensor.nbytes
        return CachedTensor(self, tensor, Path(self._temporary.name) / str(self._number))

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
        self.free_unused()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.device, tensor.shape


def _bytes_held(tensor: Tensor) -> int:
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


class RowStream:
    """The rows of one task on their way through one model, stage by stage.

    Call `layer_inputs` as often as needed for the layers of a stage, then `go_through` to move to the next stage.
    `go_through` can capture the inputs of a block's layers, for `layer_inputs` to return afterwards.
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
        for batch in range(len(self.batches)):
            self._drop_arguments(batch)
            for value in self._outputs[batch].values():
                _drop(value)
            self._outputs[batch] = {}
        for values in self._captured.values():
            for value in values:
                value.drop()
        self._captured = {}

    def go_through(self, stage: Stage, capture: Sequence[str] = ()) -> None:
        """Run all rows through a stage, and capture the inputs of some layers of a block."""
        if stage.is_block:
            self._run_block(stage, capture)
        elif stage.index < len(self.model.structure.lists):
            self._record_arguments(stage)

    def _record_arguments(self, stage: Stage) -> None:
        """Record the arguments of the blocks that follow code outside the blocks."""
        for batch, inputs in enumerate(self.batches):
            self._drop_arguments(batch)
            with torch.no_grad():
                calls = self._run_outside(batch, stage, partial(forward, self.model.module, inputs))
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

    def _run_outside(self, batch: int, stage: Stage, run: Callable[[], Any]) -> Any:
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
                        stub = partial(self._done_block, batch, name, is_last)
                    else:
                        stub = partial(self._coming_block, name, is_last, recorded, placeholders)
                    block = self.model.module.get_submodule(name)
                    block.forward = stub
                    stack.callback(delattr, block, "forward")
            try:
                return run()
            except _Reached as reached:
                if reached.value is not recorded:
                    raise
        return recorded

    def _done_block(self, batch: int, name: str, is_last: bool, *args: Any, **kwargs: Any) -> Any:
        """Stands in for a block that the rows have gone through."""
        leaves, spec = self.model.structure.outputs[name]
        if is_last:
            leaves = [_value(self._outputs[batch][Link(name, index)]) for index in range(len(leaves))]
        return pytree.tree_unflatten(leaves, spec)

    def _coming_block(
        self,
        name: str,
        is_last: bool,
        recorded: dict[str, Call],
        placeholders: dict[int, tuple[Any, Link]],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Stands in for a block that is still to run: notes its arguments."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        linked = [placeholders[id(leaf)][1] if id(leaf) in placeholders else leaf for leaf in leaves]
        recorded[name] = Call(linked, spec)
        if is_last:
            raise _Reached(recorded)
        outputs, spec = self.model.structure.outputs[name]
        made = [_placeholder(leaf) for leaf in outputs]
        placeholders |= {id(leaf): (leaf, Link(name, index)) for index, leaf in enumerate(made) if leaf is not None}
        return pytree.tree_unflatten(made, spec)

    def _runner(self, batch: int, stage: Stage) -> Callable[[], Any]:
        """Runs one batch through a stage."""
        if not stage.is_block:
            return partial(self._run_outside, batch, stage, partial(forward, self.model.module, self.batches[batch]))
        call = self._calls[batch][stage.name]
        leaves = [_value(self._outputs[batch][leaf] if isinstance(leaf, Link) else leaf) for leaf in call.leaves]
        self._arguments = leaves
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        return partial(self.model.module.get_submodule(stage.name), *args, **kwargs)

    @torch.no_grad()
    def layer_inputs(self, stage: Stage, layer: str) -> Iterator[tuple[Tensor, Tensor | None]]:
        """For every batch the input of a layer, and which positions of it count (None: all).

        Captured inputs are returned once, without the positions that count.
        """
        if layer in self._captured:
            for cached in self._captured.pop(layer):
                yield cached.get(), None
                cached.drop()
            return

        def reached(child: nn.Module, args: Any, kwargs: Any) -> None:
            raise _Reached(input_of(args, kwargs))

        module = self.model.module.get_submodule(layer)
        for batch, inputs in enumerate(self.batches):
            values = _until(module, reached, self._runner(batch, stage))
            yield values, counted_positions(self.model.module, inputs, values, self._is_encoded(stage, values))

    @torch.no_grad()
    def _run_block(self, stage: Stage, capture: Sequence[str]) -> None:
        """Run all rows through a block, and cache what later stages need of its output."""
        blocks = self.model.structure.lists[stage.index]
        later = blocks[blocks.index(stage.name) + 1 :]
        for batch in range(len(self.batches)):
            with contextlib.ExitStack() as stack:
                for layer in capture:
                    child, hook = self.model.module.get_submodule(layer), partial(self._capture, layer)
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

    def _capture(self, layer: str, child: nn.Module, args: Any, kwargs: Any) -> None:
        self._captured.setdefault(layer, []).append(self.cache.put(input_of(args, kwargs)))

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

        def reached(child: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            raise _Reached(result)

        return _until(until, reached, run, after=True)


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
        if mask is not None and values.shape[:2] == mask.shape:
            return torch.as_tensor(mask).bool()
        if mask is not None and values.dim() == 2 and len(values) == mask.numel():
            return torch.as_tensor(mask).reshape(-1).bool()
    return None


def _same_block_by_block(
    module: nn.Module, structure: Structure, batch: Batch, expected: list[Tensor], source: WeightSource | None
) -> bool:
    """Whether running block by block gives the outputs of the whole model."""
    model = BlockModel(module, structure, source)
    cache = HiddenCache(2**62)
    stream = RowStream(model, [batch], cache)
    try:
        for stage in structure.stages:
            with model.loaded(stage):
                stream.go_through(stage)
                if stage == structure.stages[-1]:
                    leaves = pytree.tree_leaves(stream.finish(0))
    except InputError:
        raise
    except Exception:  # code between the blocks that cannot do without the blocks' real outputs
        return False
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    pairs = [pair for pair in zip(found, expected, strict=False) if pair[0].is_floating_point()]
    return len(found) == len(expected) and all(map(_is_close, *zip(*pairs, strict=True)))


def _is_close(found: Tensor, expected: Tensor) -> bool:
    if not bool(expected.isfinite().all()):  # calibration names the layer where this begins
        return True
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-4, atol=1e-5 * scale + 1e-30)
