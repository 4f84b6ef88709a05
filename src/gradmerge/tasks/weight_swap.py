"""One model in memory that takes the weights of one merge after another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..curvature.checkpoint_names import stored_sources
from ..errors import InputError
from .models import model_with


class RefilledModel:
    """A model like another, with weights by the names of checkpoint files, which are copied into it.

    transformers loads the first weights, and what it made of them says which tensor goes where. Where that is not one
    tensor for each parameter, as it is, it loads all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._like = model
        self._made: nn.Module | None = None
        self._places: list[tuple[Tensor, str]] | None = None

    def with_state(self, state: Mapping[str, Tensor], name: str | None = None) -> nn.Module:
        """The model, which the next call fills anew; ``name`` is for errors."""
        if self._made is None or self._places is None:
            made: nn.Module = model_with(self._like, state, name)
            if self._made is None:
                self._made, self._places = made, _places(made, state)
            return made
        with torch.no_grad():
            for own, stored in self._places:
                own.copy_(state[stored])
        return self._made


def _places(model: nn.Module, state: Mapping[str, Tensor]) -> list[tuple[Tensor, str]] | None:
    """Every tensor of a model that was loaded from a state, with its name there; None if some is not as it is there."""
    try:
        names = {own: stored for stored, own in stored_sources(model).items()}
    except InputError:  # names that cannot be worked out
        return None
    saved = model.state_dict()
    buffers = {name: value for name, value in model.named_buffers() if name in saved}
    found = []
    for own, tensor in (*model.named_parameters(), *buffers.items()):
        stored = names.get(own, own)
        if own in buffers and stored not in state:
            continue  # it makes itself
        value = state.get(stored)
        if value is None or value.shape != tensor.shape or not torch.equal(value.to(tensor), tensor.detach()):
            return None
        found.append((tensor, stored))
    return found
