"""Data-parallel training: sums over processes, and whether each process holds whole parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def all_reduce(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the processes. All processes pass the same shapes in the same order."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


def all_gather(number: int, device: torch.device) -> list[int]:
    """Return the ``number`` of every process, by rank."""
    if not is_distributed():
        return [number]
    mine = torch.tensor([number], device=device)
    numbers = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, mine)
    return [int(value) for value in numbers]


def rows_of_rank(total: int) -> range:
    """Return this process's contiguous part of ``total`` rows."""
    rank, world_size = rank_and_world_size()
    return range(total * rank // world_size, total * (rank + 1) // world_size)


def sharding(args: Any, model: nn.Module) -> str | None:
    """Return what shards the parameters of a Trainer (FSDP, DEEPSPEED, …), or None if each process holds them whole."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
    from torch.distributed.tensor import DTensor

    state = AcceleratorState()  # also knows what `accelerate launch` set up
    uses_fsdp = args.fsdp or getattr(state, "fsdp_plugin", None) is not None
    kind = "FSDP" if uses_fsdp else str(state.distributed_type.value)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        return kind
    return "DTensor" if any(isinstance(p, DTensor) for p in model.parameters()) else None
