"""Which tensors of a model are measured, and how the files of its checkpoint name them."""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..checkpoints.lora import CHANGES_BASE, UNSUPPORTED
from ..curvature.stored_names import skeleton, stored_shapes, stored_tensors
from ..errors import InputError
from ..text import listed

#: What to do about adapters whose full weights cannot be measured in place.
_INSTEAD = "Merge the adapter into its base (merge_and_unload) and measure the result: gradmerge curvature estimate."


class Subject(ABC):
    """A model, the parameters of it that are measured, and their names in files."""

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        self.model = model
        self.parameters = dict(parameters)
        """By the names of ``model.named_parameters()``."""
        if not self.parameters:
            raise InputError("no parameter of the model is trained (requires_grad=False for all): nothing to measure")
        # Where names cannot be worked out, that is told now and not after training.
        self.stored({n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in self.parameters.items()})

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    @abstractmethod
    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by the names, and in the shapes, of the files."""

    def notes(self) -> list[str]:
        """What should be known about the result."""
        return []

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """These parameters ask for a gradient, and no others; as before at the end."""
        wanted = [(parameter, parameter.requires_grad) for parameter in self.model.parameters()]
        own = {id(parameter) for parameter in self.parameters.values()}
        try:
            for parameter, _ in wanted:
                if parameter.is_floating_point():
                    parameter.requires_grad_(id(parameter) in own)
            yield
        finally:
            for parameter, requires in wanted:
                if parameter.is_floating_point():
                    parameter.requires_grad_(requires)


class Trained(Subject):
    """The parameters of a model that are trained."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, _trained(model))

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return stored_tensors(self.model, tensors)

    def notes(self) -> list[str]:
        whole = stored_shapes(self.model)
        empty = {n: torch.empty(p.shape, device="meta") for n, p in self.parameters.items()}
        missing = [name for name in whole if name not in self.stored(empty)]
        if not missing:
            return []
        return [
            f"{len(missing)} of {len(whole)} parameters are not trained and get no curvature. A recipe that reads it needs "
            f"`missing: zero`, or `exclude` for them:\n{listed(missing, 4)}"
        ]


class AdapterTensors(Subject):
    """The trained tensors of a PEFT adapter, by the names of `adapter_model.safetensors`."""

    def __init__(self, model: nn.Module) -> None:
        trained = _trained(model)
        self._names = _adapter_names(model, trained)
        self._elsewhere = [name for name in trained if name not in self._names]
        super().__init__(model, {name: p for name, p in trained.items() if name in self._names})

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self._names[name]: value for name, value in tensors.items()}

    def notes(self) -> list[str]:
        notes = [
            "the curvature is that of the adapter's own tensors. A merge of the weights that the adapter changes needs theirs: "
            "CurvatureCallback('online' or 'pass', adapted=True), or gradmerge curvature estimate"
        ]
        if self._elsewhere:
            notes.append(
                f"trained, but not saved with the adapter, and without curvature:\n{listed(self._elsewhere, 4)}"
            )
        return notes


class AdaptedWeights(Subject):
    """The full weights of a model under a LoRA adapter, W + s·BA for y = Wx + s·BAx, by the names of the base's files.

    The gradient of the full weight is the gradient of the base's weight in the adapted model: ∂ℓ/∂(W + s·BA) = ∂ℓ/∂W. So the
    base's weights are measured where the adapter leaves them, and with them all others, those that the adapter replaces whole
    in their replaced form: what merging the adapter into its base and measuring the result would give.
    """

    def __init__(self, model: Any) -> None:
        _check_lora(model)
        base = model.get_base_model()
        self._empty = skeleton(type(base), base.config) if hasattr(base, "config") else None
        if self._empty is None:
            raise InputError(f"adapted=True is for models of transformers with a config, not for {type(base).__name__}")
        if getattr(base, "_weight_conversions", None) is not None:
            # What from_pretrained noted about the files' names; its type is not declared.
            self._empty._weight_conversions = base._weight_conversions
        self._names, parameters = _full_names(model, self._empty)
        super().__init__(model, parameters)

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        assert self._empty is not None
        return stored_tensors(self._empty, {self._names[name]: value for name, value in tensors.items()})


def subject_of(model: nn.Module, adapted: bool) -> Subject:
    """What of a model is measured."""
    is_adapter = hasattr(model, "peft_config") and hasattr(model, "get_base_model")
    if adapted and not is_adapter:
        raise InputError(
            f"adapted=True is for PEFT models with a LoRA adapter, and this is a {type(model).__name__}. Without it, all "
            "trained weights of a model are measured."
        )
    if adapted:
        return AdaptedWeights(model)
    return AdapterTensors(model) if is_adapter else Trained(model)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}


def _active_adapter(model: Any) -> str:
    active = model.active_adapter
    names = [active] if isinstance(active, str) else list(active)
    if len(names) != 1:
        raise InputError(
            f"several adapters are active ({', '.join(names)}), and curvature belongs to one of them. Activate it alone: "
            "model.set_adapter(name)."
        )
    return str(names[0])


def _adapter_names(model: Any, trained: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Name in memory → name in the adapter's file, told by the memory that the tensors share."""
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(model, adapter_name=_active_adapter(model), save_embedding_layers=False)
    names = {(value.data_ptr(), value.shape): name for name, value in saved.items() if value.numel()}
    found = {name: names.get((p.data_ptr(), p.shape)) for name, p in trained.items()}
    return {name: stored for name, stored in found.items() if stored is not None}


def _check_lora(model: Any) -> None:
    config = model.peft_config[_active_adapter(model)].to_dict()
    kind = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if kind != "LORA":
        raise InputError(
            f"adapted=True is for LORA adapters, whose weights are W + s·BA; this one is {kind}. {_INSTEAD}"
        )
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise InputError(
                f"adapted=True: the adapter uses {what} ({key}), whose weights are not W + s·BA. {_INSTEAD}"
            )
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter")[0].lower() in CHANGES_BASE:
        raise InputError(
            f"adapted=True: the adapter was initialised with {init}, which changed the base's weights: curvature by the base's "
            f"names would be of weights that no file holds. {_INSTEAD}"
        )


def _full_names(model: Any, empty: nn.Module) -> tuple[dict[str, str], dict[str, nn.Parameter]]:
    """Name in the adapted model → name in the plain one, and the parameters by the former."""
    adapter = re.escape(_active_adapter(model))
    names: dict[str, str] = {}
    parameters: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if re.search(r"\.(lora_[A-Za-z_]+|original_module)(\.|$)", name):
            continue
        names[name] = re.sub(
            rf"\.(base_layer|modules_to_save\.{adapter})(?=\.)", "", name.removeprefix("base_model.model.")
        )
        parameters[name] = parameter
    quantised = [name for name, parameter in parameters.items() if not parameter.is_floating_point()]
    if quantised:
        raise InputError(
            f"adapted=True: weights of the base are quantised and have no gradient:\n{listed(quantised, 4)}\n{_INSTEAD}"
        )
    wanted = dict(empty.named_parameters())
    aliases = {name for name, _ in empty.named_parameters(remove_duplicate=False)}
    odd = [name for name in names.values() if name not in aliases]
    odd += [name for name in wanted if name not in names.values()] if not odd else []
    if odd or max(Counter(names.values()).values()) > 1:
        raise InputError(
            f"adapted=True: the adapted model's weights are not those of {type(empty).__name__}, one by one (is another adapter "
            f"on it, or are weights tied that the adapter unties?):\n{listed(odd, 4)}\n{_INSTEAD}"
        )
    _check_untied(model)
    return names, parameters


def _check_untied(model: Any) -> None:
    """A weight that two modules share, and the adapter changes in one of them, is no longer one weight."""
    users = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    tied = [
        name
        for name, module in model.named_modules()
        if name.endswith(".base_layer") and any(users[id(p)] > 1 for p in module._parameters.values() if p is not None)
    ]
    if tied:
        raise InputError(
            "adapted=True: the adapter changes weights that are tied to others, and unties them:\n"
            f"{listed([name.removeprefix('base_model.model.').removesuffix('.base_layer') for name in tied], 4)}\n{_INSTEAD}"
        )
