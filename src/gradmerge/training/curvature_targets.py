"""Which tensors of a model get curvature during training, and how the files of its checkpoint name them."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.adapter_config import CHANGES_BASE, MORE_THAN_FACTORS, UNSUPPORTED
from ..curvature.checkpoint_names import (
    active_adapter,
    adapter_names,
    is_adapted,
    skeleton,
    stored_shapes,
    stored_tensors,
)
from ..errors import InputError
from ..text import listed

#: What to do about adapters whose full weights get no curvature during training.
_INSTEAD = "Merge the adapter into its base (merge_and_unload), then run gradmerge curvature estimate on it."


class MeasuredTensors(ABC):
    """The parameters of a model whose curvature is estimated, and their names in files."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.model = model
        self.parameters = dict(parameters)
        """By the names of ``model.named_parameters()``."""
        if not self.parameters:
            raise InputError("no parameter of the model is trained (requires_grad=False for all): nothing to estimate")
        # Names that cannot be worked out raise here, before training, and not after it.
        empty = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in self.parameters.items()}
        self.stored_names = frozenset(self.stored(empty))

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @abstractmethod
    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names, and in the shapes, of the files."""

    def notes(self) -> list[str]:
        """What a user should know about the result."""
        return []

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """Inside, only these parameters require a gradient."""
        own = set(self.parameters.values())
        with contextlib.ExitStack() as stack:
            for parameter in self.model.parameters():
                if parameter.is_floating_point():
                    stack.callback(parameter.requires_grad_, parameter.requires_grad)
                    parameter.requires_grad_(parameter in own)
            yield


class TrainedTensors(MeasuredTensors):
    """The parameters of a model that are trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, _trained(model))

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return stored_tensors(self.model, tensors)

    def notes(self) -> list[str]:
        whole = stored_shapes(self.model)
        missing = [name for name in whole if name not in self.stored_names]
        if not missing:
            return []
        return [
            f"{len(missing)} of {len(whole)} parameters are not trained and get no curvature. A recipe that reads it "
            f"needs `missing: zero`, or `exclude` for them:\n{listed(missing, 4)}"
        ]


class AdapterTensors(MeasuredTensors):
    """The trained tensors of a PEFT adapter, by the names of `adapter_model.safetensors`."""

    def __init__(self, model: nn.Module) -> None:
        trained = _trained(model)
        self._names = adapter_names(model)
        self._elsewhere = [name for name in trained if name not in self._names]
        super().__init__(model, {name: p for name, p in trained.items() if name in self._names})

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._names[name]: value for name, value in tensors.items()}

    def notes(self) -> list[str]:
        notes = [
            "the curvature is that of the adapter's own tensors. A merge of the weights that the adapter changes needs "
            "theirs: CurvatureCallback('online' or 'pass', adapted=True), or gradmerge curvature estimate"
        ]
        if self._elsewhere:
            unsaved = listed(self._elsewhere, 4)
            notes.append(f"trained, but not saved with the adapter, and without curvature:\n{unsaved}")
        return notes


class AdaptedWeights(MeasuredTensors):
    """The full weights of a model under a LoRA adapter, W + s·BA for y = Wx + s·BAx, by the names of the base's files.

    ∂ℓ/∂(W + s·BA) = ∂ℓ/∂W: the full weight has the gradient that the base's weight has in the adapted model. So the
    squared gradients of the base's weights are taken in place, with those of the modules that the adapter replaces.
    The result is what merging the adapter into its base and estimating there would give.
    """

    def __init__(self, model: Any) -> None:
        _check_lora(model)
        base = model.get_base_model()
        if not hasattr(base, "config"):
            raise InputError(f"adapted=True is for models of transformers with a config, not for {type(base).__name__}")
        self._empty = skeleton(type(base), base.config)
        if getattr(base, "_weight_conversions", None) is not None:
            # What from_pretrained noted about the files' names; its type is not declared.
            self._empty._weight_conversions = base._weight_conversions
        self._names, parameters = _full_names(model, self._empty)
        super().__init__(model, parameters)

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return stored_tensors(self._empty, {self._names[name]: value for name, value in tensors.items()})


def measured_tensors(model: nn.Module, adapted: bool) -> MeasuredTensors:
    """The tensors of a model that get curvature; with ``adapted``, the full weights under its LoRA adapter."""
    if not adapted:
        return AdapterTensors(model) if is_adapted(model) else TrainedTensors(model)
    if not is_adapted(model):
        raise InputError(
            f"adapted=True is for PEFT models with a LoRA adapter, and this is a {type(model).__name__}. Without it, "
            "all trained weights of a model get curvature."
        )
    return AdaptedWeights(model)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}


def _check_lora(model: Any) -> None:
    config = model.peft_config[active_adapter(model)].to_dict()
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind != "LORA":
        told = f"adapted=True is for LORA adapters, whose weights are W + s·BA; this one is {kind}"
        raise InputError(f"{told}. {_INSTEAD}")
    for key, what in (UNSUPPORTED | MORE_THAN_FACTORS).items():
        if config.get(key):
            told = f"the adapter uses {what} ({key}), whose weights are not W + s·BA"
            raise InputError(f"adapted=True: {told}. {_INSTEAD}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter")[0].lower() in CHANGES_BASE:
        told = f"the adapter was initialised with {init}, which changed the base's weights"
        unheld = "curvature by the base's names would be of weights that no file holds"
        raise InputError(f"adapted=True: {told}: {unheld}. {_INSTEAD}")


def _full_names(model: Any, empty: nn.Module) -> tuple[dict[str, str], dict[str, nn.Parameter]]:
    """Name in the adapted model → name in the plain one, and the parameters by the former."""
    adapter = re.escape(active_adapter(model))
    added = re.compile(r"\.(lora_[A-Za-z_]+|original_module)(\.|$)")
    parameters = {name: p for name, p in model.named_parameters() if not added.search(name)}
    inserted = re.compile(rf"\.(base_layer|modules_to_save\.{adapter})(?=\.)")
    names = {name: inserted.sub("", name.removeprefix("base_model.model.")) for name in parameters}
    quantised = [name for name, parameter in parameters.items() if not parameter.is_floating_point()]
    if quantised:
        told = f"weights of the base are quantised and have no gradient:\n{listed(quantised, 4)}"
        raise InputError(f"adapted=True: {told}\n{_INSTEAD}")
    plain = set(names.values())
    aliases = {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    odd = [name for name in names.values() if name not in aliases]
    odd = odd or [name for name, _ in empty.named_parameters() if name not in plain]
    if odd or len(plain) < len(names):
        raise InputError(
            f"adapted=True: the adapted model's weights are not those of {type(empty).__name__}, one by one (is "
            "another adapter on it, or are weights tied that the adapter unties?):\n"
            f"{listed(odd, 4)}\n{_INSTEAD}"
        )
    _check_untied(model)
    return names, parameters


def _check_untied(model: Any) -> None:
    """A weight that two modules share, and the adapter changes in one of them, is no longer one weight."""
    users = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    tied = [
        name.removeprefix("base_model.model.").removesuffix(".base_layer")
        for name, module in model.named_modules()
        if name.endswith(".base_layer") and any(users[id(p)] > 1 for p in module._parameters.values() if p is not None)
    ]
    if tied:
        told = f"the adapter changes weights that are tied to others, and unties them:\n{listed(tied, 4)}"
        raise InputError(f"adapted=True: {told}\n{_INSTEAD}")
