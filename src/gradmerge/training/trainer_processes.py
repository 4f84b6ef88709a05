"""The processes of a data-parallel run: sums over them, and whether each holds whole parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def rank_and_number() -> tuple[int, int]:
    """This process's number, and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def add_up(tensors: Iterable[Tensor]) -> None:
    """Replace each tensor by its sum over the processes, which must all give the same shapes in the same order."""
    if is_distributed():
        for tensor in tensors:
            dist.all_reduce(tensor)


def numbers_of_all(number: int, device: torch.device) -> list[int]:
    """The ``number`` of every process, in the order of the processes."""
    if not is_distributed():
        return [number]
    own = torch.tensor([number], device=device)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [int(value) for value in found]


def share(number: int) -> range:
    """This process's part of ``number`` rows: one stretch, in the order of the processes."""
    rank, processes = rank_and_number()
    return range(number * rank // processes, number * (rank + 1) // processes)


def sharding(args: Any, model: nn.Module) -> str | None:
    """What spreads parameters over the processes of a Trainer (FSDP, DEEPSPEED, …), so that none holds them whole."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
    from torch.distributed.tensor import DTensor

    # The Trainer's accelerator also knows what `accelerate launch` has set up.
    state = AcceleratorState()
    is_fsdp = args.fsdp or getattr(state, "fsdp_plugin", None) is not None
    kind = "FSDP" if is_fsdp else str(state.distributed_type.value)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        return kind
    return "DTensor" if any(isinstance(p, DTensor) for p in model.parameters()) else None
