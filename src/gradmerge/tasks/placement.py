"""Models larger than a device, shared out over processes by FSDP2."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .. import processes
from ..curvature.reaching import blocks_of, elsewhere


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
