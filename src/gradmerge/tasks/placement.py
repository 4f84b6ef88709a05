"""Models larger than a device: spread over devices, CPU and disk by accelerate, shared out by FSDP2, or quantised."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import processes
from ..arguments import check_known
from ..curvature.reaching import blocks_of, elsewhere
from ..curvature.totals import give_memory_back
from ..errors import InputError
from ..storage.smallfile import read_json
from ..text import count

QUANTISATIONS = ("4bit", "8bit", "none")


@dataclass(frozen=True)
class Placement:
    """Where a model's weights are, and what they are held as."""

    device_map: str | None = None
    quantize: str | None = None
    gradient_checkpointing: bool = False
    shard: bool = False
    """Parameters are shared out over the processes of a launcher."""
    gradients: bool = False
    """Gradients will be asked for: of a quantised model there are those of its adapter alone."""
    beside: int = 0
    """Bytes that a parameter needs on its device beside itself, as for its sum."""

    def check(self, device: str) -> None:
        """Raise where options do not go together."""
        if self.quantize is not None:
            check_known(f"--quantize {self.quantize}", self.quantize, QUANTISATIONS)
        if self.device_map is not None:
            if device != "auto":
                raise InputError(f"--device-map and --device {device}: a map says for every layer where it is")
            if processes.announced() is not None:
                several = "is for one process with several devices. With several processes, give --shard"
                raise InputError(f"--device-map {self.device_map}: {several}")
        if self.shard:
            if self.device_map is not None or self.quantize not in (None, "none"):
                raise InputError("--shard goes with neither --device-map nor --quantize")
            if processes.announced() is None:
                run = "torchrun --nproc-per-node N -m gradmerge curvature estimate … --shard"
                raise InputError(f"--shard: parameters are shared out over several processes. Start them: {run}")

    def keywords(self, config: Any, dtype: str, place: torch.device) -> dict[str, Any]:
        """What ``from_pretrained`` needs to be told."""
        give_memory_back()
        for library in ("accelerate", "bitsandbytes"):
            logging.getLogger(library).setLevel(logging.ERROR)  # what matters of it is said in notes of ours
        if self.shard:
            return {"device_map": {"": "disk"}}  # every weight is read when it is asked for
        given: dict[str, Any] = {}
        if self.device_map is not None:
            given = _device_map(self.device_map, config, dtype, self.beside)
        if self.quantize in ("4bit", "8bit"):
            given["quantization_config"] = _bits(self.quantize, config, dtype)
        if "quantization_config" in given or getattr(config, "quantization_config", None) is not None:
            given.setdefault("device_map", {"": place})
        return given


def _device_map(value: str, config: Any, dtype: str, beside: int) -> dict[str, Any]:
    if value == "auto":
        from accelerate.utils import get_max_memory  # type: ignore[import-untyped]

        computes = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
        size = torch.empty(0, dtype=computes if isinstance(computes, torch.dtype) else torch.float32).element_size()
        room = {place: int(free * size / (size + beside)) for place, free in get_max_memory().items()}
        return {"device_map": "auto", "max_memory": room}
    path = Path(value)
    if not path.is_file():
        raise InputError(f"--device-map {value}: neither auto nor a JSON file that maps parts of the model to devices")
    found = read_json(path)
    places = {str(place) for place in found.values()} if isinstance(found, dict) else {""}
    known = {"cpu", "disk", *map(str, range(torch.cuda.device_count()))}
    known |= {f"cuda:{number}" for number in range(torch.cuda.device_count())}
    if odd := sorted(places - known):
        what = f'a mapping such as {{"model.layers.0": 0, "lm_head": "cpu"}}, to one of {", ".join(sorted(known))}'
        raise InputError(f"--device-map {value}: must hold {what}, not {odd[0]!r}")
    return {"device_map": found}


def _bits(quantize: str, config: Any, dtype: str) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InputError(f"--quantize {quantize} needs the library bitsandbytes: pip install bitsandbytes") from error
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"--quantize {quantize}: the model is stored quantised already. Leave the option out.")
    import transformers

    kind: Any = transformers.BitsAndBytesConfig
    if quantize == "8bit":
        return kind(load_in_8bit=True)
    computes = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
    computes = computes if isinstance(computes, torch.dtype) else torch.float32
    return kind(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=computes)


def offloaded(model: nn.Module) -> list[str]:
    """A note on weights that are on no device, if there are some."""
    away = {name for path, module, _ in elsewhere(model) for name in (f"{path}.{n}" for n in module._parameters)}
    share = sum(p.numel() for name, p in model.named_parameters() if name in away)
    whole = sum(p.numel() for p in model.parameters())
    stay = f"{count(share)} of {count(whole)} parameters stay on the CPU or the disk, and are fetched layer by layer"
    return [stay] if share else []


def is_quantised(model: nn.Module) -> bool:
    """Whether it computes with codes."""
    return any(type(p).__name__ in ("Params4bit", "Int8Params") for p in model.parameters())


class OffloadFolder(tempfile.TemporaryDirectory):  # type: ignore[type-arg]
    """Where accelerate puts weights that it cannot read from the model's own files; gone with the model."""

    def __init__(self) -> None:
        super().__init__(prefix="gradmerge-offload-")


def recompute(model: Any) -> bool:
    """Have activations computed again in the backward pass, where the model can do that."""
    inner = model
    while not hasattr(inner, "gradient_checkpointing_enable") and (children := list(inner.children())):
        inner = children[0]
    if not getattr(inner, "supports_gradient_checkpointing", False):
        return False
    inner.gradient_checkpointing_enable({"use_reentrant": False})
    if hasattr(inner, "config"):
        inner.config.use_cache = False
    return True


def share_out(model: nn.Module, place: torch.device) -> nn.Module:
    """Share a model whose weights are not read yet out over the processes; each reads what it keeps."""
    from accelerate.hooks import remove_hook_from_module  # type: ignore[import-untyped]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Shard

    group = processes.current()
    sources = {
        f"{path}.{name}".lstrip("."): hook.weights_map
        for path, module, hook in elsewhere(model)
        for name in module._parameters
    }
    first: dict[Tensor, str] = {}
    names = [name for name, p in model.named_parameters(remove_duplicate=False) if first.setdefault(p, name) != name]
    tied = {name: first[model.get_parameter(name)] for name in names}
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(place)
    with group.guarded("sharing out the model"):
        mesh = init_device_mesh(place.type, (group.count,))
    for module in (*_units(model, {*tied, *tied.values()}), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for name in list(dict(model.named_parameters())):
        whole = sources[name][name.rpartition(".")[2]]
        parts = whole.chunk(group.count)
        mine = parts[group.rank] if group.rank < len(parts) else whole[:0]
        parameter = model.get_parameter(name)
        mine = mine.to(place, parameter.dtype, copy=True)
        spread = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride())
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.load_state_dict({name.rpartition(".")[2]: spread}, strict=False, assign=True)
    for name, source in tied.items():
        model.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = model.get_parameter(source)
    return model


def _units(model: nn.Module, tied: set[str]) -> Iterator[nn.Module]:
    """What is gathered at once: the blocks of the model, and large layers beside them whose weight is theirs alone."""
    blocks = blocks_of(model)
    yield from (block for block in blocks.values() if any(True for _ in block.parameters()))
    inside = tuple(f"{name}." for name in blocks)
    for path, module in model.named_modules():
        own = {f"{path}.{name}" for name, p in module._parameters.items() if p is not None}
        large = isinstance(module, nn.Linear | nn.Embedding) and not f"{path}.".startswith(inside)
        if path and large and not own & tied:
            yield module
