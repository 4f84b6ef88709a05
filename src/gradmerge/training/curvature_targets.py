"""Which parameters of a model get curvature during training, and how its checkpoint files name them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.checkpoint_names import adapter_names, is_adapted, stored_shapes, stored_tensors
from ..errors import InputError
from ..text import listed


class CurvatureTargets:
    """The trained parameters of a model; for a PEFT model, those that its adapter file holds."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._adapter_names = adapter_names(model) if is_adapted(model) else None
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
        self._not_in_adapter = [n for n in trained if self._adapter_names is not None and n not in self._adapter_names]
        self.parameters: dict[str, nn.Parameter] = {n: p for n, p in trained.items() if n not in self._not_in_adapter}
        """By the names of ``model.named_parameters()``."""
        if not self.parameters:
            raise InputError("no parameter of the model is trained (requires_grad=False for all)")
        # Raise before training, not after it, if the names of files cannot be determined.
        empty = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in self.parameters.items()}
        self._stored_names = frozenset(self.to_stored(empty))

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def to_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the names and shapes of the checkpoint's files."""
        if self._adapter_names is None:
            return stored_tensors(self.model, tensors)
        return {self._adapter_names[name]: value for name, value in tensors.items()}

    def notes(self) -> list[str]:
        """Return what the user should know about the result."""
        if self._adapter_names is None:
            every = stored_shapes(self.model)
            missing = [name for name in every if name not in self._stored_names]
            if not missing:
                return []
            return [
                f"{len(missing)} of {len(every)} parameters are not trained and get no curvature. A recipe that uses "
                f"it needs `missing: zero`, or must exclude them:\n{listed(missing, 4)}"
            ]
        notes = [
            "this is the curvature of the adapter's own tensors. To merge the full weights, run `gradmerge curvature "
            "estimate` on the saved adapter."
        ]
        if self._not_in_adapter:
            notes.append(f"trained, but not saved with the adapter:\n{listed(self._not_in_adapter, 4)}")
        return notes

    @contextlib.contextmanager
    def only_these_require_gradients(self) -> Iterator[None]:
        """Set requires_grad for exactly these parameters, and restore it at the end."""
        targets = set(self.parameters.values())
        with contextlib.ExitStack() as stack:
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(parameter in targets)
            yield


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
