"""Models on disk: weights that are read for one block at a time, and a new folder with changed weights.

The new folder has the same tensors in the same dtypes. Tensors that did not change keep their bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..cards.card import with_evaluations, write_card
from ..cards.metadata import CARD, ModelMetadata, may_be_hub_id, name_of, read_metadata
from ..cards.provenance import write_record
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers, Checkpoint
from ..checkpoints.lora import AdapterCheckpoint, is_adapter, read_adapter_config
from ..checkpoints.open import open_checkpoint
from ..checkpoints.quantization import detect_quantization
from ..checkpoints.sidecars import copy_sidecars
from ..checkpoints.tied_weights import same_values, tied_to
from ..checkpoints.transformers_model import Slice, find_slices
from ..curvature.checkpoint_names import adapter_names, names_of_parameters, stored_sources
from ..engine.jobs import rounded
from ..errors import InputError
from ..io.atomic_dir import AtomicDir, require_space
from ..io.reader import bytes_of
from ..io.writer import ShardWriter
from ..quiet import quiet_transformers
from ..tasks.model_files import LoadingInfo, class_name, locate, offline
from ..tasks.models import load_model
from ..text import first_line, listed
from .blocks import CachedTensor, stored_values

SHARD_SIZE = 5_000_000_000
#: Elements that are read at a time.
CHUNK = 1 << 22
#: Bytes that the memory of a weight is aligned to.
ALIGNMENT = 64


@dataclass
class ModelFiles:
    """A model without weights in memory, and the checkpoint that holds them."""

    reference: str
    module: nn.Module
    checkpoint: Checkpoint
    info: LoadingInfo
    stored: dict[str, dict[str, Slice | None]]
    """Parameter or buffer of the module → tensors of the checkpoint that hold it, or parts of it for fused experts.
    Tied parameters have one of their names."""
    missing: list[str]
    """Parameters that the checkpoint does not hold, as those of a head."""

    @property
    def task(self) -> str:
        return self.info.task

    def source(self, device: torch.device, memory: WeightMemory | None = None) -> CheckpointWeights | None:
        """Return what loads weights for a stage."""
        return CheckpointWeights(self, device, memory)

    def load(self, device: torch.device) -> nn.Module:
        """Read all weights into the module, which then stays in memory."""
        CheckpointWeights(self, device).load([*self.stored, *self.missing])
        return self.module.to(device)

    def whole(self, device: torch.device) -> nn.Module:
        """Return a module with all weights as float32."""
        files = open_model_files(self.reference, self.task)
        with contextlib.closing(files.checkpoint):
            return files.load(device)

    def trainable(self, device: torch.device) -> ModelFiles:
        """Read all weights, and require gradients. Of an adapter only the adapter requires gradients and is written."""
        if not isinstance(self.checkpoint, AdapterCheckpoint):
            self.load(device).requires_grad_(True)
            return self
        wide = any(info.dtype == "F64" for info in self.checkpoint.adapter.tensors.values())
        dtype = "float64" if wide else "float32"
        module, _ = load_model(self.reference, self.task, device=str(device), dtype=dtype, merge_adapter=False)
        stored: dict[str, dict[str, Slice | None]] = {name: {key: None} for name, key in adapter_names(module).items()}
        return replace(self, module=module, checkpoint=self.checkpoint.adapter, stored=stored, missing=[])

    def tensors_of(self, name: str) -> list[str]:
        """The tensors of the checkpoint that hold a parameter."""
        return list(self.stored.get(name, {}))

    def round_weights(self) -> None:
        """Round the parameters that require gradients to the dtypes of the files, as when they are written."""
        types = {name: TORCH_TYPES[info.dtype] for name, info in self.checkpoint.tensors.items() if info.is_float}
        usual = Counter(types.values()).most_common(1)[0][0]
        with torch.no_grad():
            for name, parameter in self.module.named_parameters():
                if parameter.requires_grad:
                    tensors = self.tensors_of(name)
                    parameter.copy_(rounded(parameter, types[tensors[0]] if tensors else usual))

    def new_tensors(self, changed: Mapping[str, Tensor | CachedTensor]) -> dict[str, Callable[[], Tensor]]:
        """Tensor of the checkpoint → what returns its new value, from parameter → new value."""
        return {
            tensor: partial(_part_of, value, part)
            for name, value in changed.items()
            for tensor, part in self.stored.get(name, {}).items()
        }


def _part_of(value: Tensor | CachedTensor, part: Slice | None) -> Tensor:
    """A new value, or the slice of fused experts' new weights that a tensor of the checkpoint holds."""
    whole = value if isinstance(value, Tensor) else value.get()
    return whole.detach() if part is None else slice_of(whole.detach(), part).contiguous()


@dataclass
class ModelInMemory:
    """A module in memory, with the methods of `ModelFiles`."""

    reference: str
    module: nn.Module
    missing: Sequence[str] = ()

    @property
    def task(self) -> str:
        """The kind of task that the class is made for, as far as defaults depend on it."""
        name = type(self.module).__name__
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            return "causal-lm"
        if name.endswith("ForConditionalGeneration"):
            return "seq2seq"
        return "classify" if name.endswith("Classification") else "other"

    def source(self, device: torch.device, memory: WeightMemory | None = None) -> None:
        return None

    def load(self, device: torch.device) -> nn.Module:
        return self.module

    def whole(self, device: torch.device) -> nn.Module:
        return self.module.requires_grad_(False)

    def trainable(self, device: torch.device) -> ModelInMemory:
        return self

    def tensors_of(self, name: str) -> list[str]:
        return [name]


AnyModel = ModelFiles | ModelInMemory


def slice_of(weight: Tensor, part: Slice) -> Tensor:
    """The part of fused experts' weights that a tensor of the checkpoint holds, as a view in that tensor's shape."""
    view = weight[..., part.rows, :] if part.expert is None else weight[part.expert, part.rows]
    return view.mT if part.flipped else view


def open_model_files(reference: str, task: str = "auto", attn_implementation: str | None = None) -> ModelFiles:
    """Open a model folder, Hub id or LoRA adapter without reading its weights.

    No remote code is run, and only safetensors are read.
    """
    info = locate(reference, task)
    prefix = "" if info.sentence_config is None else info.sentence_config.prefix
    checkpoint = open_checkpoint(info.folder, dequantize=True)
    try:
        if info.adapter is None and (quantization := detect_quantization(checkpoint)):
            raise InputError(f"{reference}: {quantization}. Give the unquantized model.")
        module = module_without_weights(info, attn_implementation)
        stored, missing = _find_tensors(module, checkpoint, prefix)
        _check_shapes(reference, module, checkpoint, stored)
    except BaseException:
        checkpoint.close()
        raise
    return ModelFiles(reference, module, checkpoint, info, stored, missing)


def module_without_weights(info: LoadingInfo, attn_implementation: str | None = None) -> nn.Module:
    """A model of transformers with its parameters on the meta device, and its buffers computed."""
    import transformers

    kind: Any = getattr(transformers, class_name(info))
    try:
        with quiet_transformers(), offline(), parameters_on_meta():
            more = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
            module: nn.Module = kind.from_config(info.config, dtype=torch.float32, trust_remote_code=False, **more)
    except MemoryError:
        raise
    except Exception as error:
        problem = f"its config makes no model for task {info.task}: {first_line(error)}"
        raise InputError(f"{info.reference}: {problem}") from error
    return module.eval().requires_grad_(False)


class _EmptyOnMeta(TorchFunctionMode):
    """Puts tensors without values on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {}) | ({"device": "meta"} if func is torch.empty else {})
        return func(*args, **kwargs)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every new parameter on the meta device. Buffers are computed as usual.

    Layers make their weights with ``torch.empty``, which allocates nothing here.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":  # else it is tied to another
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _find_tensors(
    module: nn.Module, checkpoint: Checkpoint, prefix: str
) -> tuple[dict[str, dict[str, Slice | None]], list[str]]:
    """Weights of the module → tensors of the checkpoint that hold them; and the parameters that it lacks."""
    base = getattr(module, "base_model_prefix", "")
    sources = {memory: file for file, memory in stored_sources(module).items()}
    state = module.state_dict(keep_vars=True)
    buffers = {name: name for name, _ in module.named_buffers() if name in state}
    aliases = {name: names for names in names_of_parameters(module).values() for name in names}
    stored: dict[str, dict[str, Slice | None]] = {}
    missing = []
    for name, value in (*module.named_parameters(), *((name, None) for name in buffers)):
        if value is not None and value.dim() == 3 and (parts := _slices(module, name, value, checkpoint, prefix)):
            stored[name] = parts
            continue
        known = [sources.get(alias, alias) for alias in aliases.get(name, [name])]
        known += [text for alias in known for text in (alias.removeprefix(f"{base}."), f"{base}.{alias}")]
        tensor_name = next((prefix + tensor for tensor in known if prefix + tensor in checkpoint.tensors), None)
        if tensor_name is not None:
            stored[name] = {tensor_name: None}
        elif name not in buffers:
            missing.append(name)
    return stored, missing


def _slices(
    module: nn.Module, name: str, value: Tensor, checkpoint: Checkpoint, prefix: str
) -> dict[str, Slice | None] | None:
    """Tensors of the checkpoint → the parts of fused experts' weights that they hold; None if it stores them whole."""
    slices = find_slices(module, name)
    if not slices or len(slices) == 1:
        return None
    shapes = {prefix + tensor: slice_of(value, part).shape for tensor, part in slices.items()}
    fits = all(
        tensor in checkpoint.tensors and checkpoint.tensors[tensor].shape == shape for tensor, shape in shapes.items()
    )
    return {prefix + tensor: part for tensor, part in slices.items()} if fits else None


def _check_shapes(
    reference: str, module: nn.Module, checkpoint: Checkpoint, stored: Mapping[str, Mapping[str, Slice | None]]
) -> None:
    wrong = []
    for name, tensors in stored.items():
        for tensor, part in tensors.items():
            expected, shape = tuple(_tensor(module, name).shape), checkpoint.tensors[tensor].shape
            if part is None and expected != shape:
                wrong.append(f"{tensor}: {list(shape)}, and its config makes {list(expected)}")
    if wrong:
        raise InputError(f"{reference}: tensors have other shapes than the config says:\n{listed(wrong)}")


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, attribute = name.rpartition(".")
    value: Tensor = getattr(module.get_submodule(path), attribute)
    return value


class WeightMemory:
    """Memory for the weights of one stage at a time, of one model or of several in turn.

    Blocks of equal size use the same memory, so that nothing is allocated and freed between them.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._unused: Tensor | None = None

    def take(self, nbytes: int) -> Tensor:
        memory, self._unused = self._unused, None
        if memory is not None and len(memory) == nbytes:
            return memory
        del memory  # before more is allocated
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def give_back(self, memory: Tensor) -> None:
        self._unused = memory


class CheckpointWeights:
    """Reads weights of a checkpoint into a module, as float32 (float64 where they are stored so), and frees them."""

    def __init__(self, files: ModelFiles, device: torch.device, memory: WeightMemory | None = None) -> None:
        self.files = files
        self._memory = memory or WeightMemory(device)
        self._aliases = {names[0]: names for names in names_of_parameters(files.module).values()}
        self._buffers = Buffers()
        self._without_weights = dict(stored_values(files.module))
        self._loaded: dict[str, Tensor] = {}
        """First name of what was loaded together → its memory."""

    def load(self, names: Sequence[str]) -> None:
        if not names:
            return
        memory = self._loaded[names[0]] = self._memory.take(sum(map(self._nbytes, names)))
        for name in names:
            part, memory = memory.split([self._nbytes(name), len(memory) - self._nbytes(name)])
            shape, dtype = self._without_weights[name].shape, self._dtype(name)
            values = part[: shape.numel() * dtype.itemsize].view(dtype)
            self._read(name, values)
            self.set(name, values.reshape(shape))

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self.set(name, self._without_weights[name])
        if names and names[0] in self._loaded:
            self._memory.give_back(self._loaded.pop(names[0]))

    def _nbytes(self, name: str) -> int:
        size = self._without_weights[name].numel() * self._dtype(name).itemsize
        return -(-size // ALIGNMENT) * ALIGNMENT

    def _dtype(self, name: str) -> torch.dtype:
        tensors = self.files.tensors_of(name)
        if not tensors:
            return torch.float32
        dtype = TORCH_TYPES[self.files.checkpoint.tensors[tensors[0]].dtype]
        return torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype

    def _read(self, name: str, values: Tensor) -> None:
        """Read a weight of the module from the checkpoint; zeros for a head that it lacks, which is not used."""
        checkpoint, tensors = self.files.checkpoint, self.files.stored.get(name, {})
        if not tensors:
            values.zero_()
        for tensor, part in tensors.items():
            info = checkpoint.tensors[tensor]
            if part is not None:
                target = slice_of(values.reshape(self._without_weights[name].shape), part)
                target.copy_(checkpoint.read(tensor, 0, info.numel, self._buffers).reshape(info.shape))
                continue
            for start in range(0, len(values), CHUNK):
                stop = min(start + CHUNK, len(values))
                values[start:stop] = checkpoint.read(tensor, start, stop, self._buffers)

    def set(self, name: str, value: Tensor) -> None:
        module = self.files.module
        if name not in self._aliases:
            path, _, buffer = name.rpartition(".")
            module.get_submodule(path)._buffers[buffer] = value
            return
        parameter = value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False)
        for alias in self._aliases[name]:
            path, _, last = alias.rpartition(".")
            module.get_submodule(path)._parameters[last] = parameter


def write_folder(
    staging: AtomicDir,
    files: ModelFiles,
    changed: Mapping[str, Tensor | CachedTensor],
    *,
    action: str,
    card: str,
    facts: Mapping[str, Any],
    inputs: Sequence[Mapping[str, Any]],
    measured: Sequence[Mapping[str, Any]] = (),
    seconds: float,
    notes: Sequence[str] = (),
) -> None:
    """Write a model folder or an adapter folder: weights, configuration and tokenizer files, record and model card.

    Args:
        staging: The temporary folder.
        files: The model before.
        changed: Parameter → new value. All others are copied.
        action: What was done, as a tag of the card.
        card: The text of the model card, in Markdown, without its title.
        facts: The facts of the record.
        inputs: The inputs of the record.
        measured: Evaluations of the result, for the card and the record.
        seconds: How long it took.
        notes: What a user should know.
    """
    checkpoint, folder = files.checkpoint, files.info.folder
    adapter = is_adapter(folder) and not isinstance(checkpoint, AdapterCheckpoint)  # this is the full model
    stem = "adapter_model" if adapter else "model"
    sizes = _write_weights(staging, checkpoint, files.new_tensors(changed), stem)
    copy_sidecars(checkpoint, staging.folder, "auto")
    base, base_folder = None, None
    if adapter:
        copy_adapter_config(folder, staging.folder)
        name = str(read_adapter_config(folder).get("base_model_name_or_path") or "")
        base = ModelMetadata(name_of(name), ids=(name,) if may_be_hub_id(name, folder) else ())
        base_folder = files.info.base_folder
    write_card(
        staging.folder,
        staging.out.name,
        card.rstrip(),
        [read_metadata(checkpoint)],
        relation="finetune",
        tags=[action],
        base=base,
        base_folder=base_folder,
    )
    if measured:
        path = staging.folder / CARD
        path.write_text(with_evaluations(path.read_text("utf-8"), staging.out.name, measured), "utf-8")
        facts = {**facts, "evaluations": list(measured)}
    write_record(staging.folder, facts, inputs=inputs, sizes=sizes, seconds=seconds, notes=notes)


def _write_weights(
    staging: AtomicDir, checkpoint: Checkpoint, changed: Mapping[str, Callable[[], Tensor]], stem: str
) -> dict[str, int]:
    """Write all tensors of a checkpoint, some of them changed; return the bytes of each file."""
    for module in checkpoint.modules:
        (staging.folder / module).mkdir(exist_ok=True)
    folders = checkpoint.modules if stem == "model" else ()
    writer = ShardWriter(staging.folder, stem, checkpoint.tensors, SHARD_SIZE, {"format": "pt"}, folders)
    require_space(staging.folder, writer.nbytes)
    buffers = Buffers()
    with writer:
        for name, info in checkpoint.tensors.items():
            value = changed.get(name)
            if value is None and (source := tied_to(name, checkpoint)) in changed and source is not None:
                value = changed[source] if same_values(checkpoint, name, source) else None  # tied, but stored twice
            if value is not None:
                new = rounded(value().cpu(), TORCH_TYPES[info.dtype])
                if not bool(new.isfinite().all()):
                    raise InputError(f"{name}: the new weight is too large for the type {info.dtype}")
                writer.write(name, 0, bytes_of(new.contiguous().reshape(-1)))
                continue
            for start in range(0, info.numel, CHUNK):
                block = checkpoint.read(name, start, min(start + CHUNK, info.numel), buffers)
                writer.write(name, start, bytes_of(block.contiguous()))
        writer.finish()
    return dict(writer.sizes)


def copy_adapter_config(home: Path, folder: Path) -> None:
    """Copy the adapter's config; a relative path of its base model is relative to the new folder."""
    config = read_adapter_config(home)
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and not Path(base).exists() and (home / base).is_dir():
        config["base_model_name_or_path"] = os.path.relpath(home / base, folder)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
