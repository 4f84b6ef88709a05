"""Models larger than a device: sums in CPU memory, and weights that accelerate keeps on the CPU or on disk.

accelerate's hooks put another parameter into a module each time it runs, and an empty one behind it. An estimate knows
a parameter by its identity. So :func:`reachable` replaces each offloaded weight by one parameter without memory. While
its module runs, an attribute of the same name hides it: the weight on the device, tied to the parameter by autograd.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import check_known
from ..errors import InputError

LOCATIONS = ("device", "cpu")
_BLOCK = 1 << 20
_MMAP_THRESHOLD = -3  # a parameter of glibc's mallopt


class StoredSum:
    """A sum on the device that adds to it, or in CPU memory. Both have the same bits."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, accumulate_on: str) -> None:
        check_known(f"accumulate_on {accumulate_on}", accumulate_on, LOCATIONS)
        self._device = device
        self.value = torch.zeros(tuple(shape), dtype=dtype, device="cpu" if accumulate_on == "cpu" else device)

    def add(self, add_to: Callable[[Tensor], Any]) -> None:
        """Call ``add_to`` with the sum on the device."""
        if self.value.device == self._device:
            add_to(self.value)
        else:
            on_device = self.value.to(self._device)
            add_to(on_device)
            self.value.copy_(on_device)


def return_freed_memory() -> None:
    """Make glibc return freed blocks of a megabyte or more to the system, where memory matters more than time."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _BLOCK)


def spread_device(model: nn.Module) -> torch.device | None:
    """Return where inputs go of a model that accelerate has spread over devices; None for any other."""
    hook: Any = getattr(model, "_hf_hook", None)
    for hook_part in getattr(hook, "hooks", (hook,)):
        if getattr(hook_part, "execution_device", None) is not None:
            return torch.device(hook_part.execution_device)
    return None


def input_device(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs."""
    return spread_device(model) or next((p.device for p in model.parameters()), torch.device("cpu"))


def offloaded_modules(model: nn.Module) -> list[tuple[str, nn.Module, Any]]:
    """Return (path, module, hook) of every module whose weights accelerate's hook loads when the module runs."""
    result = []
    for path, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for hook_part in getattr(hook, "hooks", (hook,)):
            if getattr(hook_part, "offload", False) and any(p is not None for p in module._parameters.values()):
                result.append((path, module, hook_part))
    return result


@contextlib.contextmanager
def reachable(model: nn.Module) -> Iterator[None]:
    """Inside, every weight that accelerate offloads is one parameter, which stays the same object."""
    offloaded = offloaded_modules(model)
    if not offloaded:
        yield
        return
    tied = _tied_names(model)
    stand_ins: dict[Any, nn.Parameter] = {}
    with contextlib.ExitStack() as stack:
        for path, module, hook in offloaded:
            device = torch.device(hook.execution_device)
            fetched: dict[str, nn.Parameter] = {}
            for name, empty in list(module._parameters.items()):
                if empty is None:
                    continue
                if type(empty) is not nn.Parameter:
                    raise InputError(f"{path}.{name}: {type(empty).__name__} cannot be offloaded; keep it on a device")
                full = f"{path}.{name}".lstrip(".")
                key = tied.get(full, full)
                if key not in stand_ins:
                    # One number for all entries: whoever reads it outside its module gets NaN, not a wrong result.
                    number = torch.full((), torch.nan, dtype=empty.dtype, device=device)
                    stand_ins[key] = nn.Parameter(number.expand(empty.shape), requires_grad=empty.requires_grad)
                fetched[name] = module._parameters[name] = stand_ins[key]
                stack.callback(module._parameters.__setitem__, name, empty)
            fetch = functools.partial(_fetch, hook.weights_map, device, fetched)
            hook.offload = False
            stack.callback(setattr, hook, "offload", True)
            stack.callback(module.register_forward_pre_hook(fetch, prepend=True).remove)
            stack.callback(module.register_forward_hook(_remove_fetched, always_call=True).remove)
        yield


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Return name → the first name of the same parameter, by identity and by transformers' list of tied weights."""
    first: dict[int, str] = {}
    result: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        result[name] = first.setdefault(id(parameter), name)
    for path, module in model.named_modules():
        keys = getattr(module, "all_tied_weights_keys", None)
        for target, source in keys.items() if isinstance(keys, Mapping) else ():
            name = f"{path}.{source}".lstrip(".")
            result[f"{path}.{target}".lstrip(".")] = result.get(name, name)
    return result


def _fetch(
    weights: Mapping[str, Tensor],
    device: torch.device,
    parameters: Mapping[str, nn.Parameter],
    module: nn.Module,
    *_: Any,
) -> None:
    for name, parameter in parameters.items():
        value = weights[name].to(device, parameter.dtype)
        wanted = parameter.requires_grad and torch.is_grad_enabled()
        module.__dict__[name] = _Fetched.apply(parameter, value) if wanted else value  # type: ignore[no-untyped-call]


def _remove_fetched(module: nn.Module, *_: Any) -> None:
    for name in module._parameters:
        module.__dict__.pop(name, None)


class _Fetched(torch.autograd.Function):
    """Fetched weights, whose gradient is the parameter's."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.detach()

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor, None]:
        return y, None
