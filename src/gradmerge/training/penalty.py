"""The penalty of a training, on disk: its anchor and prior, matched with parameters by name, and its record.

Anchor and prior come from mappings or files, with the names of ``model.named_parameters()`` or those of the model's
files. The record is P of ½‖θ − θ_base‖²_P for the **sum** of the losses, saved beside the trained model. Training
minimizes the mean of M terms, L = (1/M) Σ_i ℓ_i, plus ½ strength · ‖θ − θ_base‖²_{H_0}. It converges where, with
D = √v̂ + ε of Adam:

    adam        ∇L + strength · H_0 ⊙ Δ = 0          P = M · strength · H_0
    decoupled   ∇L / D + strength · H_0 ⊙ Δ = 0      P = M · strength · D ⊙ H_0, with the final D

In both cases ∇ Σ_i ℓ_i + P ⊙ Δ = 0, which is what gradient matching assumes.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..checkpoints import Buffers, open_checkpoint
from ..curvature import Curvature, open_curvature
from ..curvature.checkpoint_names import adapter_names, for_files, is_adapted, names_of_parameters, stored_tensors
from ..curvature.format import PENALTY
from ..errors import InputError
from ..io.atomic_dir import atomic_file
from ..text import listed

RECORD = "gradmerge_penalty.json"
FORMAT = "gradmerge-penalty/1"
#: The folder inside the model's folder that holds P, unless P is a multiple of the identity.
FOLDER = "penalty"

Reduction = Literal["mean", "sum"]
PriorTensors = Curvature | Mapping[str, Tensor] | str | Path
AnchorTensors = Mapping[str, Tensor] | str | Path


class NamedTensors(NamedTuple):
    """Tensors that are read by name, one at a time; ``label`` names them in messages."""

    label: str
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], Tensor]


class _Part(NamedTuple):
    """A stored tensor that holds a parameter, or some of its elements."""

    name: str
    positions: Tensor | None
    """Which of the parameter's elements each stored element is, or −1 for none; None if all are, in this order."""


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


def match_parameters(
    source: NamedTensors, named: Sequence[tuple[str, Tensor]], model: nn.Module | None, *, optional: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for each parameter. A missing tensor is an error, or left out if ``optional``."""
    parts = {name: [_Part(name, None)] for name, _ in named if name in source.shapes}
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
        f"{name} ({part.name}): {source.shapes[part.name]}, but the parameter needs {needed}"
        for name, parameter in found
        for part in parts[name]
        if source.shapes[part.name]
        != (needed := tuple((parameter if part.positions is None else part.positions).shape))
    ]
    if wrong:
        raise InputError(f"{source.label}: shapes differ from those of the parameters:\n{listed(wrong)}")
    return ((name, _assemble(parameter, parts[name], source)) for name, parameter in found)


def _hint(model: nn.Module | None) -> str:
    if model is None:
        return "If these names differ from those in the model's files, pass model=…"
    if is_adapted(model):
        return "Curvature of the base's weights W does not apply to an adapter's factors A and B."
    return ""


def _assemble(parameter: Tensor, parts: Sequence[_Part], source: NamedTensors) -> Tensor:
    """Read the stored tensors of a parameter, and put their elements in order."""
    if parts[0].positions is None:
        return source.read(parts[0].name)
    values = [source.read(part.name) for part in parts]
    whole = values[0].new_zeros(parameter.numel())
    for part, value in zip(parts, values, strict=True):
        assert part.positions is not None
        index = part.positions.to(value.device)
        whole[index[index >= 0]] = value[index >= 0]
    return whole.reshape(parameter.shape)


def _stored_parts(model: nn.Module, known: Collection[str]) -> dict[str, list[_Part]]:
    """Return the stored parts of each parameter, by each of its names in memory.

    Elements are numbered, and the numbers renamed and rearranged as transformers does when it saves the model.
    """
    if is_adapted(model):
        return {name: [_Part(stored, None)] for name, stored in adapter_names(model).items() if stored in known}
    empty = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    names = {id(value): name for name, value in empty.items()}
    parts: dict[str, list[_Part]] = defaultdict(list)
    for stored, value in stored_tensors(model, empty).items():
        if id(value) in names:
            parts[names[id(value)]] = [_Part(stored, None)]
    # Only parameters that are stored in parts, or fused with others, need a number for every element.
    numbers: dict[str, Tensor] = {}
    first = 0
    for name in empty.keys() - parts.keys():
        numbers[name] = torch.arange(first, first + empty[name].numel()).reshape(empty[name].shape)
        first += empty[name].numel()
    for stored, elements in stored_tensors(model, numbers).items():
        for name, own in numbers.items():
            index = elements - own.min()
            inside = (index >= 0) & (index < own.numel())
            if bool(inside.any()):
                parts[name].append(_Part(stored, torch.where(inside, index, -1)))
    result: dict[str, list[_Part]] = {}
    for aliases in names_of_parameters(model).values():
        found = parts[aliases[0]]
        if not found or not all(part.name in known for part in found):
            found = [_Part(name, None) for name in aliases if name in known][:1]
        result |= dict.fromkeys(aliases, found) if found else {}
    return result


def write_penalty(
    folder: Path, penalties: Iterable[tuple[Tensor, float | Tensor]], model: nn.Module, mean_over: float
) -> None:
    """Write the record of a penalty beside a model whose training loss was a mean over ``mean_over`` terms.

    ``penalties`` has P / ``mean_over`` of each parameter: its diagonal, or a number for a multiple of the identity.
    """
    if is_adapted(model):
        raise InputError(
            "record_penalty: the penalty of an adapter is on its factors A and B, but a merge needs one on the full "
            "weights W + s·BA"
        )
    if not isinstance(mean_over, int | float) or not 0 < mean_over < math.inf:
        raise InputError(f"mean_over={mean_over}: must be the number of terms that the loss is a mean of; 1 for a sum")
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder. Save the model first, then record its penalty.")
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    found: dict[str, float | Tensor] = {}
    for parameter, penalty in penalties:
        if parameter not in names:
            shape = tuple(parameter.shape)
            raise InputError(f"{type(model).__name__}: does not have a parameter of the optimizer, of shape {shape}")
        found[names[parameter]] = penalty * mean_over
    multiples = {penalty if isinstance(penalty, float) else None for penalty in found.values()}
    value: Any = FOLDER
    if len(multiples) == 1 and (multiple := multiples.pop()) is not None:
        value = {"identity": multiple} if multiple else "none"
    else:
        # Weights that are not trained have P = 0.
        sums = {
            name: torch.as_tensor(found.get(name, 0.0), dtype=torch.float32).expand(parameter.shape).contiguous()
            for name, parameter in model.named_parameters()
            if parameter.is_floating_point()
        }
        Curvature(sums, 1, PENALTY, stored=for_files(model)).save(folder / FOLDER, force=True)
    with atomic_file(folder / RECORD) as partial:
        partial.write_text(json.dumps({"format": FORMAT, "penalty": value}, indent=2) + "\n", "utf-8")
