"""Tensors that belong to a model's parameters, found by name: where the penalty pulls to, and how strongly.

They come as mappings or from disk, by the names of ``model.named_parameters()`` or by those of the model's files.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..checkpoints import Buffers, open_checkpoint
from ..curvature import Curvature, open_curvature
from ..curvature.checkpoint_names import _reverted, _untied, names_of_parameters
from ..errors import InputError
from ..text import listed

Reduction = Literal["mean", "sum"]
#: What H_0 can be given as, and what θ_base.
PriorTensors = Curvature | Mapping[str, Tensor] | str | Path
AnchorTensors = Mapping[str, Tensor] | str | Path
#: Where the entries of a parameter are among named tensors, as pairs of a name and an index: None if the tensor is the
#: whole parameter, else which of the parameter's entries (−1: none) each of its entries holds.
_Parts = list[tuple[str, Tensor | None]]


@dataclass(frozen=True)
class NamedTensors:
    """Tensors that are read by name, one at a time; ``label`` says where from."""

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


@contextlib.contextmanager
def open_prior(prior: PriorTensors, reduction: Reduction) -> Iterator[NamedTensors]:
    """Curvature as a sum over examples or as their mean; the tensors of a plain mapping are taken as they are."""
    if isinstance(prior, Mapping):
        number = prior.examples if isinstance(prior, Curvature) and reduction == "mean" else 1
        yield _in_memory("prior", prior, number)
        return
    with open_curvature(str(prior)) as file:
        if file.kind != "diagonal":
            raise InputError(f"{prior}: holds {file.kind} matrices; a prior is a diagonal")
        number = file.examples if reduction == "mean" else 1
        yield NamedTensors(str(prior), file.shapes, lambda name: file.read_whole(name).div_(number))


@contextlib.contextmanager
def open_anchor(anchor: AnchorTensors) -> Iterator[NamedTensors]:
    """A state dict, or a checkpoint: a folder, a `.safetensors` file or a Hub id."""
    if isinstance(anchor, Mapping):
        yield _in_memory("anchor", anchor, 1)
        return
    with open_checkpoint(str(anchor)) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}

        def read(name: str) -> Tensor:
            shape = torch.Size(shapes[name])
            return checkpoint.read(name, 0, shape.numel(), Buffers()).reshape(shape)

        yield NamedTensors(str(anchor), shapes, read)


def trainable(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def find(
    source: NamedTensors, named: Sequence[tuple[str, Tensor]], model: nn.Module | None, *, optional: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """The tensor of each parameter, in turn. A missing one is an error, or with ``optional`` left out."""
    places: dict[str, _Parts] = {name: [(name, None)] for name, _ in named if name in source.shapes}
    if model is not None and len(places) < len(named):
        places = _places(model, source.shapes) | places
    missing = [name for name, _ in named if name not in places]
    if missing and not optional:
        of_files = "If they are the names of files, which may differ from those in memory, give the optimizer the model"
        hint = f" {of_files} itself." if model is None else ""
        raise InputError(
            f"{source.label}: nothing for {len(missing)} of {len(named)} parameters:\n{listed(missing)}\n"
            f"It has {len(source.shapes)} tensors.{hint} Parameters that the base does not have, such as a new head, "
            'go into a group of their own with "strength": 0; with PriorTrainer, missing="zero".'
        )
    found = [(name, value) for name, value in named if name in places]
    wrong = [note for name, value in found if (note := _misfit(name, value, places[name], source.shapes))]
    if wrong:
        raise InputError(f"{source.label}: tensors of another shape than the parameters:\n{listed(wrong)}")
    return ((name, _filled(value, places[name], source)) for name, value in found)


def _misfit(name: str, value: Tensor, parts: _Parts, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    for stored, index in parts:
        expected = tuple(value.shape if index is None else index.shape)
        if tuple(shapes[stored]) != expected:
            as_ = "" if stored == name else f" ({stored})"
            return f"{name}{as_}: {tuple(shapes[stored])}, where the parameter has {expected}"
    return None


def _filled(like: Tensor, parts: _Parts, source: NamedTensors) -> Tensor:
    whole: Tensor | None = None
    for stored, index in parts:
        part = source.read(stored)
        if index is None:
            return part
        whole = part.new_zeros(like.numel()) if whole is None else whole
        mine = index >= 0
        whole[index[mine].to(part.device)] = part[mine.to(part.device)]
    assert whole is not None
    return whole.reshape(like.shape)


def _places(model: nn.Module, known: Iterable[str]) -> dict[str, _Parts]:
    """Where each parameter is, under all its own names, if ``known`` are names of files or other names of it."""
    have = set(known)
    names_of = names_of_parameters(model)
    result: dict[str, _Parts] = {}
    for found, parts in _stored_places(model, names_of).items():
        if all(stored in have for stored, _ in parts):
            result |= dict.fromkeys(names_of[found], parts)
    for names in names_of.values():
        other = next((name for name in names if name in have), None)
        if other is not None:
            result |= {name: [(other, None)] for name in names if name not in result}
    return result


def _stored_places(model: nn.Module, names_of: Mapping[Tensor, list[str]]) -> dict[Tensor, _Parts]:
    """By parameter: the tensors of a checkpoint that hold it.

    Entries are numbered, and the numbers renamed and rearranged as the weights are when they are saved.
    """
    numbers = {names[0]: torch.empty(parameter.shape, device="meta") for parameter, names in names_of.items()}
    whole = {id(numbers[names[0]]): parameter for parameter, names in names_of.items()}
    stored = _reverted(model, _untied(model, numbers))
    result: dict[Tensor, _Parts] = {whole[id(v)]: [(name, None)] for name, v in stored.items() if id(v) in whole}
    # Only parameters that are stored in parts, or fused with others, need a number for every entry.
    first: dict[Tensor, int] = {}
    total = 0
    for parameter, names in names_of.items():
        if parameter not in result:
            first[parameter] = total
            numbers[names[0]] = torch.arange(total, total + parameter.numel()).reshape(parameter.shape)
            total += parameter.numel()
    if not first:
        return result
    parts: dict[Tensor, _Parts] = defaultdict(list)
    for name, entries in _reverted(model, _untied(model, numbers)).items():
        for parameter, start in first.items() if not entries.is_meta else ():
            at = entries - start
            inside = (at >= 0) & (at < parameter.numel())
            if bool(inside.any()):
                parts[parameter].append((name, torch.where(inside, at, -1)))
    return result | parts


def _in_memory(what: str, tensors: Mapping[str, Tensor], number: int) -> NamedTensors:
    odd = [f"{name}: {type(value).__name__}" for name, value in tensors.items() if not isinstance(value, Tensor)]
    if odd:
        raise InputError(f"{what}: a mapping from names to tensors, but some values are none:\n{listed(odd)}")

    def read(name: str) -> Tensor:
        value = tensors[name].detach()
        return value / number if number != 1 else value

    return NamedTensors(what, {name: tuple(value.shape) for name, value in tensors.items()}, read)
