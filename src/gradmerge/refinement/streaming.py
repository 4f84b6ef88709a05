"""A model whose weights stay in its files, and are read for one block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints import Checkpoint
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.open import open_checkpoint
from ..checkpoints.quantization import quantisation
from ..curvature.checkpoint_names import names_of_parameters, stored_sources
from ..curvature.totals import give_memory_back
from ..errors import InputError
from ..quiet import quiet_transformers
from ..tasks.models import LoadingInfo, class_name, locate
from ..tasks.resolve_model import offline
from ..text import first_line, listed

#: Elements that are read at a time.
CHUNK = 1 << 22


@dataclass
class ModelFiles:
    """A model without weights in memory, and the checkpoint that holds them."""

    reference: str
    module: nn.Module
    checkpoint: Checkpoint
    info: LoadingInfo
    names: dict[str, str]
    """Parameter or buffer of the module → tensor of the checkpoint. Tied parameters have one of their names."""
    missing: list[str]
    """Parameters that the checkpoint does not hold, as those of a head."""

    def source(self, device: torch.device) -> CheckpointWeights:
        return CheckpointWeights(self, device)


def open_model_files(reference: str, task: str = "auto", attn_implementation: str | None = None) -> ModelFiles:
    """Open a model folder, Hub id or LoRA adapter without reading its weights.

    No remote code is run, and only safetensors are read.
    """
    info, config, adapter, setup = locate(reference, task)
    prefix = ""
    if setup is not None:
        place = setup.transformer.relative_to(info.folder).as_posix()
        prefix = "" if place == "." else f"{place}/"
    checkpoint = open_checkpoint(info.folder, dequantize=True)
    try:
        if adapter is None and (found := quantisation(checkpoint)):
            raise InputError(f"{reference}: {found}. Give the unquantized model.")
        module = module_without_weights(reference, info.task, config, attn_implementation)
        names, missing = _tensor_names(module, checkpoint, prefix)
        _check_shapes(reference, module, checkpoint, names)
    except BaseException:
        checkpoint.close()
        raise
    return ModelFiles(reference, module, checkpoint, info, names, missing)


def module_without_weights(reference: str, task: str, config: Any, attn_implementation: str | None = None) -> nn.Module:
    """A model of transformers with its parameters on the meta device, and its buffers computed."""
    import transformers

    kind: Any = getattr(transformers, class_name(task, config))
    try:
        with quiet_transformers(), offline(), parameters_on_meta():
            more = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
            module: nn.Module = kind.from_config(config, dtype=torch.float32, trust_remote_code=False, **more)
    except MemoryError:
        raise
    except Exception as error:
        problem = f"its config makes no model for task {task}: {first_line(error)}"
        raise InputError(f"{reference}: {problem}") from error
    return module.eval().requires_grad_(False)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Put every new parameter on the meta device. Buffers are computed as usual."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and parameter.device.type != "meta":  # else it is tied to another
            module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _tensor_names(module: nn.Module, checkpoint: Checkpoint, prefix: str) -> tuple[dict[str, str], list[str]]:
    """Weights of the module → tensors of the checkpoint; and the parameters that it lacks."""
    base = getattr(module, "base_model_prefix", "")
    stored = {memory: file for file, memory in stored_sources(module).items()}
    state = module.state_dict(keep_vars=True)
    buffers = {name: name for name, _ in module.named_buffers() if name in state}
    aliases = {name: names for names in names_of_parameters(module).values() for name in names}
    names: dict[str, str] = {}
    missing = []
    for name in [*dict(module.named_parameters()), *buffers]:
        known = [stored.get(alias, alias) for alias in aliases.get(name, [name])]
        known += [text for one in known for text in (one.removeprefix(f"{base}."), f"{base}.{one}")]
        found = next((prefix + one for one in known if prefix + one in checkpoint.tensors), None)
        if found is not None:
            names[name] = found
        elif name not in buffers:
            missing.append(name)
    return names, missing


def _check_shapes(reference: str, module: nn.Module, checkpoint: Checkpoint, names: dict[str, str]) -> None:
    wrong = []
    for name, stored in names.items():
        wanted, found = tuple(_tensor(module, name).shape), checkpoint.tensors[stored].shape
        if wanted != found:
            wrong.append(f"{stored}: {list(found)}, and its config makes {list(wanted)}")
    if wrong:
        raise InputError(f"{reference}: tensors have other shapes than the config says:\n{listed(wrong)}")


def _tensor(module: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    value: Tensor = getattr(module.get_submodule(path), own)
    return value


class CheckpointWeights:
    """Reads weights of a checkpoint into a module, as float32 (float64 where they are stored so), and frees them."""

    def __init__(self, files: ModelFiles, device: torch.device) -> None:
        give_memory_back()  # else the allocator keeps more of what is freed
        self.files, self.device = files, device
        self._aliases = {names[0]: names for names in names_of_parameters(files.module).values()}
        self._buffers = Buffers()

    def load(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.files.names:
                self._set(name, self.read(name))
            else:  # a head that the checkpoint lacks, and that is not used
                self._set(name, torch.zeros(_tensor(self.files.module, name).shape, device=self.device))

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            self._set(name, torch.empty(_tensor(self.files.module, name).shape, device="meta"))

    def read(self, name: str) -> Tensor:
        """A weight of the module, from the checkpoint."""
        checkpoint, stored = self.files.checkpoint, self.files.names[name]
        info = checkpoint.tensors[stored]
        dtype = TORCH_TYPES[info.dtype]
        wide = torch.float32 if dtype.is_floating_point and dtype != torch.float64 else dtype
        values = torch.empty(info.numel, dtype=wide)
        for start in range(0, info.numel, CHUNK):
            stop = min(start + CHUNK, info.numel)
            values[start:stop] = checkpoint.read(stored, start, stop, self._buffers)
        return values.reshape(info.shape).to(self.device)

    def _set(self, name: str, value: Tensor) -> None:
        module = self.files.module
        if name not in self._aliases:
            path, _, own = name.rpartition(".")
            module.get_submodule(path)._buffers[own] = value
            return
        parameter = nn.Parameter(value, requires_grad=False)
        for alias in self._aliases[name]:
            path, _, own = alias.rpartition(".")
            module.get_submodule(path)._parameters[own] = parameter


def load_whole(files: ModelFiles, device: torch.device) -> nn.Module:
    """Read all weights; the module then stays in memory."""
    source = files.source(device)
    source.load([*files.names, *files.missing])
    return files.module.to(device)


def load_model_whole(reference: str, task: str, device: torch.device) -> nn.Module:
    """Read a model with all its weights as float32."""
    files = open_model_files(reference, task)
    try:
        return load_whole(files, device)
    finally:
        files.checkpoint.close()
