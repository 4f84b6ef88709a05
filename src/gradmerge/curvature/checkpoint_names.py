"""From the names and shapes of a model in memory to those of the checkpoint that it is saved as.

A model of transformers may hold its weights under other names, or fused otherwise, than its files do. Curvature belongs
to the files: a merge reads it beside them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..quiet import quiet_transformers
from ..text import listed


def stored_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with the names and shapes that ``save_pretrained`` writes.

    ``tensors`` has the names of ``model.named_parameters()``; some may be missing. A tied parameter may have any of its
    names, and is returned once. Entries are renamed and moved, never computed with. Raises InputError if the checkpoint
    stores a tensor together with one that is missing.
    """
    known = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    if wrong := other_shapes(tensors, known, ", where the model has"):
        raise InputError(f"{type(model).__name__}: tensors that are not this model's:\n{listed(wrong)}")
    untied = _untied(model, tensors)
    stored = _reverted(model, untied)
    # A tensor that is fused on disk comes out too small where some of its parts are missing.
    if wrong := other_shapes(stored, stored_shapes(model), " instead of", "no such tensor"):
        raise InputError(
            f"{type(model).__name__}: a checkpoint stores several of its parameters in one tensor, and only some of "
            f"them have curvature:\n{listed(wrong)}"
        )
    return stored


def stored_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return names and shapes of all parameters in a checkpoint of the model."""
    empty = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in model.named_parameters()}
    return {name: value.shape for name, value in _reverted(model, _untied(model, empty)).items()}


def _untied(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return every parameter once, under the name that a checkpoint keeps."""
    tied: list[str] = []
    for child in (model, *(model.get_submodule(name) for name in _parts(model))):
        if _is_pretrained(child):
            from transformers.modeling_utils import _get_tied_weight_keys

            # Regular expressions for the names that transformers leaves out when a parameter has several.
            tied += _get_tied_weight_keys(child) or []
    untied: dict[str, Tensor] = {}
    for names in names_of_parameters(model).values():
        named = [name for name in names if name in tensors]
        for other in named[1:]:
            if tensors[other] is not tensors[named[0]] and not torch.equal(tensors[other], tensors[named[0]]):
                raise InputError(f"{named[0]} and {other} are one parameter of the model, but differ in what was given")
        if named:
            free = [name for name in names if not any(re.search(pattern, name) for pattern in tied)]
            untied[free[0] if free else max(names)] = tensors[named[0]]
    return untied


def names_of_parameters(model: nn.Module) -> dict[Tensor, list[str]]:
    """Return all names of each parameter: a tied one has several."""
    result: dict[Tensor, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        result[parameter].append(name)
    return result


def _parts(model: Any) -> Mapping[str, str]:
    """Return, for a model that is stored in parts, child → prefix of its names in the files."""
    return getattr(model, "stored_parts", {})


def _is_pretrained(model: nn.Module) -> bool:
    # By name, so that transformers need not be imported for any other model.
    return any(base.__module__ == "transformers.modeling_utils" for base in type(model).__mro__)


def _reverted(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename and rearrange a state dict as ``save_pretrained`` does."""
    if parts := _parts(model):
        return {
            prefix + name: value
            for child, prefix in parts.items()
            for name, value in _reverted(
                model.get_submodule(child),
                {n.removeprefix(f"{child}."): v for n, v in tensors.items() if n.startswith(f"{child}.")},
            ).items()
        }
    if not _is_pretrained(model) or not tensors:
        return tensors
    from transformers.core_model_loading import revert_weight_conversion

    try:
        result: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{type(model).__name__}: the names of its checkpoint cannot be worked out ({error}). A checkpoint may "
            "store several parameters in one tensor; then all of them need curvature."
        ) from error
    return result


def other_shapes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], relation: str, no: str = "nothing"
) -> list[str]:
    """Return a line for each tensor whose shape differs from ``shapes``, or whose name is not there."""
    odd = {name: tuple(value.shape) for name, value in tensors.items() if value.shape != shapes.get(name)}
    return [f"{name}: {shape}{relation} {tuple(shapes[name]) if name in shapes else no}" for name, shape in odd.items()]


def stored_sources(model: nn.Module) -> dict[str, str]:
    """Return name in a checkpoint → name in memory, of every tensor whose entries all come from one parameter."""
    names = [name for name, _ in model.named_parameters()]
    # transformers copies the parts of fused experts: with two columns each, the copies of a large model fit in memory.
    shapes = [p.shape if p.dim() != 3 else (*p.shape[:2], 2) for p in model.parameters()]
    coded = {name: torch.tensor(float(k)).expand(shapes[k]) for k, name in enumerate(names)}
    stored = _reverted(model, _untied(model, coded))
    # All entries of an expanded number are equal; they need not be read.
    return {
        n: names[int(v[(0,) * v.dim()])]
        for n, v in stored.items()
        if v.numel() and (v.untyped_storage().nbytes() == v.element_size() or bool(v.min() == v.max()))
    }


def stored_unchanged(model: nn.Module) -> dict[str, str]:
    """Return name in memory → name in a checkpoint, of parameters that are one tensor of the same shape there."""
    shapes, sources = stored_shapes(model), stored_sources(model)
    parts = Counter(sources.values())
    known = {name: parameter.shape for name, parameter in model.named_parameters()}
    return {source: file for file, source in sources.items() if parts[source] == 1 and shapes[file] == known[source]}


def for_files(model: Any) -> Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None:
    """Return a function that renames tensors from memory to files. It does not keep the model alive."""
    if is_adapted(model) and len(model.active_adapters) == 1:
        names = adapter_names(model)
        return lambda tensors: {names.get(name, name): value for name, value in tensors.items()}
    if _parts(model):
        empty = model.skeleton()
        return lambda tensors: stored_tensors(empty, tensors)
    if not _is_pretrained(model):
        return None
    kind, config = type(model), model.config
    return lambda tensors: stored_tensors(skeleton(kind, config), tensors)


def is_adapted(model: nn.Module) -> bool:
    """Return whether it is a PEFT model."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def active_adapter(model: Any) -> str:
    names = model.active_adapters
    if len(names) != 1:
        raise InputError(
            f"several adapters are active ({', '.join(names)}), and curvature belongs to one of them. Activate it "
            "alone: model.set_adapter(name)."
        )
    return str(names[0])


def adapter_names(model: nn.Module) -> dict[str, str]:
    """Return name in memory → name in the file of the active adapter, matched by shared memory."""
    from peft import get_peft_model_state_dict

    saved = get_peft_model_state_dict(model, adapter_name=active_adapter(model), save_embedding_layers=False)
    names = {(value.data_ptr(), value.shape): name for name, value in saved.items() if value.numel()}
    return {name: names[key] for name, p in model.named_parameters() if (key := (p.data_ptr(), p.shape)) in names}


def skeleton(kind: Any, config: Any) -> nn.Module:
    """Return a model without memory for its weights."""
    with quiet_transformers(), torch.device("meta"):  # not while another thread loads a model
        model: nn.Module = kind(config)
    return model
