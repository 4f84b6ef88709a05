"""A model in memory whose weights are replaced again and again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..curvature.checkpoint_names import stored_sources
from ..errors import InputError
from .models import model_with


class WeightSwap:
    """A model like another, which takes weights by the names of checkpoint files.

    transformers loads the first weights. That shows which stored tensor belongs to which parameter, so later weights
    are copied. If parameters are not stored one by one and unchanged, transformers loads all weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._template = model
        self._model: nn.Module | None = None
        self._sources: list[tuple[Tensor, str]] | None = None

    def with_state(self, state: Mapping[str, Tensor], name: str | None = None) -> nn.Module:
        """Return the model with these weights, until the next call. ``name`` is for errors."""
        if self._model is None or self._sources is None:
            model: nn.Module = model_with(self._template, state, name)
            if self._model is None:
                self._model, self._sources = model, _sources(model, state)
            return model
        with torch.no_grad():
            for tensor, stored_name in self._sources:
                tensor.copy_(state[stored_name])
        return self._model


def _sources(model: nn.Module, state: Mapping[str, Tensor]) -> list[tuple[Tensor, str]] | None:
    """Return every tensor of the model with its name in the state; None if one is not stored unchanged."""
    try:
        stored_names = {name: stored for stored, name in stored_sources(model).items()}
    except InputError:  # the names cannot be derived
        return None
    saved = model.state_dict()
    buffers = {name: value for name, value in model.named_buffers() if name in saved}
    sources = []
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        stored_name = stored_names.get(name, name)
        if name in buffers and stored_name not in state:
            continue  # the model computes it
        value = state.get(stored_name)
        if value is None or value.shape != tensor.shape or not torch.equal(value.to(tensor), tensor.detach()):
            return None
        sources.append((tensor, stored_name))
    return sources
