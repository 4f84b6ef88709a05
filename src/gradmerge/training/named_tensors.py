"""Tensors for a model's parameters, matched by name: the anchor of the penalty, and its curvature.

They come from mappings or files, with the names of ``model.named_parameters()`` or those of the model's files.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..checkpoints import Buffers, open_checkpoint
from ..curvature import Curvature, open_curvature
from ..curvature.checkpoint_names import adapter_names, is_adapted, names_of_parameters, stored_tensors
from ..errors import InputError
from ..text import listed

Reduction = Literal["mean", "sum"]
PriorTensors = Curvature | Mapping[str, Tensor] | str | Path
AnchorTensors = Mapping[str, Tensor] | str | Path
#: The stored tensors that hold a parameter: (name, index). The index says which of the parameter's elements (−1: none)
#: each element of the stored tensor is; None means that the stored tensor is the whole parameter.
_Parts = list[tuple[str, Tensor | None]]


@dataclass(frozen=True)
class NamedTensors:
    """Tensors that are read by name, one at a time; ``label`` names them in messages."""

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@contextlib.contextmanager
def open_prior(prior: PriorTensors, reduction: Reduction) -> Iterator[NamedTensors]:
    """Open curvature, as a sum over examples or as their mean. The tensors of a plain mapping are not changed."""
    if isinstance(prior, Mapping):
        examples = prior.examples if isinstance(prior, Curvature) and reduction == "mean" else 1
        yield _in_memory("prior", prior, examples)
        return
    with open_curvature(str(prior)) as file:
        if file.kind != "diagonal":
            raise InputError(f"{prior}: holds {file.kind} matrices; a prior is a diagonal")
        examples = file.examples if reduction == "mean" else 1
        yield NamedTensors(str(prior), file.shapes, lambda name: file.read_whole(name).div_(examples))


@contextlib.contextmanager
def open_anchor(anchor: AnchorTensors) -> Iterator[NamedTensors]:
    """Open a state dict, or a checkpoint: a folder, a `.safetensors` file or a Hub id."""
    if isinstance(anchor, Mapping):
        yield _in_memory("anchor", anchor, 1)
        return
    with open_checkpoint(str(anchor)) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}

        def read(name: str) -> Tensor:
            shape = torch.Size(shapes[name])
            return checkpoint.read(name, 0, shape.numel(), Buffers()).reshape(shape)

        yield NamedTensors(str(anchor), shapes, read)


def _in_memory(label: str, tensors: Mapping[str, Tensor], examples: int) -> NamedTensors:
    wrong = [f"{name}: {type(value).__name__}" for name, value in tensors.items() if not isinstance(value, Tensor)]
    if wrong:
        raise InputError(f"{label}: must map names to tensors, but some values are not tensors:\n{listed(wrong)}")

    def read(name: str) -> Tensor:
        value = tensors[name].detach()
        return value / examples if examples != 1 else value

    return NamedTensors(label, {name: tuple(value.shape) for name, value in tensors.items()}, read)


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def match_parameters(
    source: NamedTensors, named: Sequence[tuple[str, Tensor]], model: nn.Module | None, *, optional: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each parameter. A missing tensor is an error, or left out if ``optional``."""
    parts: dict[str, _Parts] = {name: [(name, None)] for name, _ in named if name in source.shapes}
    if model is not None and len(parts) < len(named):
        parts = _stored_parts(model, source.shapes.keys()) | parts
    found = [(name, parameter) for name, parameter in named if name in parts]
    missing = [name for name, _ in named if name not in parts]
    if missing and not (optional and found):
        raise InputError(
            f"{source.label}: no tensor for {len(missing)} of {len(named)} parameters:\n{listed(missing)}\n"
            f'Pass missing="zero" if the base does not have them, as a new head. {_hint(model)}'
        )
    wrong = [
        f"{name}{'' if stored == name else f' ({stored})'}: {source.shapes[stored]}, but the parameter needs {expected}"
        for name, parameter in found
        for stored, index in parts[name]
        if source.shapes[stored] != (expected := tuple((parameter if index is None else index).shape))
    ]
    if wrong:
        raise InputError(f"{source.label}: shapes differ from those of the parameters:\n{listed(wrong)}")
    return ((name, _assembled(parameter, parts[name], source)) for name, parameter in found)


def _hint(model: nn.Module | None) -> str:
    if model is None:
        return "If these names differ from those in the model's files, pass model=…"
    if is_adapted(model):
        return "Curvature of the base's weights W does not apply to an adapter's factors A and B."
    return ""


def _assembled(parameter: Tensor, parts: _Parts, source: NamedTensors) -> Tensor:
    """Read the stored tensors of a parameter, and put their elements in order."""
    if len(parts) == 1 and parts[0][1] is None:
        return source.read(parts[0][0])
    whole: Tensor | None = None
    for stored, index in parts:
        assert index is not None
        part = source.read(stored)
        whole = part.new_zeros(parameter.numel()) if whole is None else whole
        inside = index >= 0
        whole[index[inside].to(part.device)] = part[inside.to(part.device)]
    assert whole is not None
    return whole.reshape(parameter.shape)


def _stored_parts(model: nn.Module, known: Collection[str]) -> dict[str, _Parts]:
    """Return the stored parts of each parameter, by each of its names in memory.

    Elements are numbered, and the numbers renamed and rearranged as transformers does when it saves the model.
    """
    if is_adapted(model):
        return {name: [(stored, None)] for name, stored in adapter_names(model).items() if stored in known}
    empty = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    names = {id(value): name for name, value in empty.items()}
    parts: dict[str, _Parts] = defaultdict(list)
    for stored, value in stored_tensors(model, empty).items():
        if id(value) in names:
            parts[names[id(value)]] = [(stored, None)]
    # Only parameters that are stored in parts, or fused with others, need a number for every element.
    split = {name: value.numel() for name, value in empty.items() if name not in parts}
    ends = dict(zip(split, itertools.accumulate(split.values()), strict=True))
    numbers = {n: torch.arange(ends[n] - size, ends[n]).reshape(empty[n].shape) for n, size in split.items()}
    for stored, elements in stored_tensors(model, numbers).items():
        for name, size in split.items():
            index = elements - (ends[name] - size)
            inside = (index >= 0) & (index < size)
            if bool(inside.any()):
                parts[name].append((stored, torch.where(inside, index, -1)))
    result: dict[str, _Parts] = {}
    for aliases in names_of_parameters(model).values():
        found: _Parts = parts[aliases[0]]
        if not found or not all(stored in known for stored, _ in found):
            others: _Parts = [(name, None) for name in aliases if name in known]
            found = others[:1]
        result |= dict.fromkeys(aliases, found) if found else {}
    return result
