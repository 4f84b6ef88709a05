"""Estimating curvature in the middle of training, which goes on as if nothing had happened."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..curvature.batches import Placed, with_places
from ..curvature.estimate import estimate_curvature
from ..curvature.verify import Trial
from ..errors import InputError
from .curvature_targets import MeasuredTensors

Batch = Mapping[str, Any]
#: What the Trainer gives to a model besides the batch.
_NOT_INPUTS = ("num_items_in_batch", "return_dict")


def squared_gradients(
    measured: MeasuredTensors, batches: Iterable[Batch], likelihood: str, seed: int, first: int, trial: Trial
) -> dict[str, Tensor]:
    """Σ_i [∇ℓ_i]², the sum over the examples of some batches, by names in memory.

    ``first`` is the place of the first example in the data, on which drawn labels depend. Gradients, modes, hooks and
    the states of random numbers are left as they were. With one ``trial`` for many calls, layers are tried out once.
    """
    model, device = measured.model, measured.device
    with random_states_kept(device), modes_kept(model), measured.chosen():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                # With the batch's statistics instead of the running ones, no example has a gradient of its own.
                module.training = False
        placed = Placed(lambda: with_places(map(_checked, batches), first))
        found = estimate_curvature(model, placed, likelihood, seed=seed, device=device, trial=trial)
    return found.sum()


def _checked(batch: Batch) -> Batch:
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    check_labels(inputs)
    return inputs


def check_labels(inputs: Batch) -> None:
    """Raise if a batch has no labels for the model's own loss."""
    if not isinstance(inputs.get("labels"), Tensor):
        raise InputError(
            f"CurvatureCallback: the model is given {', '.join(inputs)} and no 'labels', so that the loss of an "
            "example is not known. Name the column of labels `labels`; label smoothing and compute_loss_func keep the "
            "labels from the model, and their loss is another one than the log-likelihood that curvature is of "
            "(source='adam' takes it as it is)."
        )


@contextlib.contextmanager
def random_states_kept(device: torch.device) -> Iterator[None]:
    """Restore the states of all random number generators afterwards."""
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices, device_type=kind))
        yield


@contextlib.contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restore the training or evaluation mode of every module afterwards."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        yield


class BatchWatch:
    """Remembers what a model in training mode is called with, while ``listening`` is set."""

    def __init__(self, model: nn.Module) -> None:
        self.batches: list[dict[str, Any]] = []
        self.listening = False
        self._handle = model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.listening and model.training and torch.is_grad_enabled():
            self.batches.append(dict(kwargs))

    def taken(self) -> list[dict[str, Any]]:
        """The batches since the last call. It stops listening."""
        batches, self.batches, self.listening = self.batches, [], False
        return batches

    def remove(self) -> None:
        self._handle.remove()
        self.taken()
