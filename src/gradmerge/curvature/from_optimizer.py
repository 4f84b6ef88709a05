"""Curvature from the state of an optimizer, in a checkpoint of transformers' Trainer.

**Adam.** v̂ = exp_avg_sq / (1 − β₂^step) is a running mean, over steps, of squared minibatch gradients. If the loss is
the mean over a batch of B examples, the gradient of a step is the mean of B per-example gradients g_i, and

    E[g²] = (1/B) E[g_i²] + (1 − 1/B) (E[g_i])²

So N·B·v̂ is the sum over N examples of squared per-example gradients where the mean gradient is small compared with
their spread, as near the end of fine-tuning, and exactly for B = 1. Otherwise it is too large, by at most a factor B.
The mean covers about the last 1/(1 − β₂) steps, each at its own weights and after gradient clipping.

**IVON.** `hess` estimates the diagonal Hessian of the mean loss under the posterior, without the weight decay. `ess` is
the number of examples, so the sum is ess·hess.

An optimizer's state numbers its parameters. Their names come from the state (`param_names`, PyTorch 2.6 or newer), or
from the order and shapes of the model's parameters.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..checkpoints.open import open_checkpoint
from ..checkpoints.transformers_model import empty_model
from ..errors import InputError
from ..text import first_line, listed
from .checkpoint_names import other_shapes, stored_shapes, stored_tensors
from .curvature import Curvature

OPTIMIZER_FILE = "optimizer.pt"
MAX_EXAMPLES = 10**15
#: Keys of a parameter's state in torch's Adam, AdamW, NAdam and RAdam.
_ADAM_KEYS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "mu_product"}

Shape = tuple[int, ...]
Group = Mapping[str, Any]


@checked()
def import_curvature(
    checkpoint: str | Path, dataset_size: int, batch_size: int, *, model: nn.Module | None = None
) -> Curvature:
    """Return the diagonal curvature in the optimizer of a Trainer checkpoint: Adam, AdamW or IVON.

    Values are sums over the N examples of the training set: N·B·v̂ for Adam, with second moments v̂ and B examples per
    step; ess·hess for IVON. N·B·v̂ assumes that the loss is a mean over the batch. Unless B = 1, it also assumes that
    the mean gradient is small compared with the spread of the examples' gradients.

    Args:
        checkpoint: The folder. Of its pickles, only `optimizer.pt` is read, with ``weights_only``.
        dataset_size: N, the number of training examples.
        batch_size: B, the examples per optimizer step: batch size per device × devices × accumulated batches.
        model: The trained model, if `config.json` does not describe it.

    Returns:
        Sums over the examples, with the names of the checkpoint's weights. Its ``notes`` are doubts, and parameters
        that were not trained.

    Example:
        >>> curvature = gm.import_curvature("out/checkpoint-500", dataset_size=25_000, batch_size=32)
        >>> curvature.save("out/checkpoint-500/curvature")
    """
    for name, number in (("dataset_size", dataset_size), ("batch_size", batch_size)):
        if not 1 <= number <= MAX_EXAMPLES:
            raise InputError(f"{name} is {number}, but must be from 1 to {MAX_EXAMPLES}")
    folder = Path(checkpoint)
    groups, states = _load_state(folder)
    on_disk: Mapping[str, Shape] | None = None
    if model is None:
        model, on_disk = _model_of(folder)
    is_ivon = any("hess" in group and "ess" in group for group in groups)
    try:
        if is_ivon:
            sums, notes = _ivon_sums(model, groups, dataset_size)
        else:
            sums, notes = _adam_sums(model, groups, states, float(dataset_size) * batch_size), token_note(model)
    except InputError as error:
        raise InputError(f"{folder / OPTIMIZER_FILE}: {error}") from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{folder / OPTIMIZER_FILE}: not a state that Adam or IVON saves ({reason})") from error
    stored = stored_tensors(model, sums)
    if on_disk is not None and (wrong := other_shapes(stored, on_disk, ", where the file has")):
        raise InputError(
            f"{folder}: the optimizer's parameters are not those of the weights beside it:\n{listed(wrong, 5)}"
        )
    if missing := [name for name in stored_shapes(model) if name not in stored]:
        notes.append(
            f"{len(missing)} parameters were not trained and have no curvature. A recipe that uses this curvature "
            f"needs `missing: zero`, or must exclude them:\n{listed(missing, 4)}"
        )
    return Curvature(stored, dataset_size, "ivon" if is_ivon else "adam", str(checkpoint), notes=notes)


def _load_state(folder: Path) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """Return parameter groups and states of the optimizer in a Trainer checkpoint, loaded with ``weights_only``."""
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise InputError(
            f"{folder}: no {OPTIMIZER_FILE}. Pass a checkpoint folder of the Trainer, such as checkpoint-500; it has "
            "no such file with save_only_model=True. Sharded optimizers (DeepSpeed, FSDP) cannot be read."
        )
    if (folder / "adapter_config.json").exists():
        raise InputError(
            f"{folder}: is the checkpoint of a PEFT adapter, whose optimizer has no curvature of the full weights. "
            "Run `gradmerge curvature estimate` on it."
        )
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
        groups, states = saved["param_groups"], saved["state"]
        if not all(isinstance(group["params"], list) for group in groups):
            raise TypeError("no list of parameters")
    except Exception as error:
        raise InputError(
            f"{path}: cannot be read as the state of a PyTorch optimizer ({first_line(error)}). It is damaged, or "
            "holds more than tensors and numbers (it is opened with weights_only)."
        ) from error
    return groups, states


def _model_of(folder: Path) -> tuple[Any, Mapping[str, Shape]]:
    """Return the model that `config.json` describes, without weights, and the shapes of the stored tensors."""
    with open_checkpoint(folder) as checkpoint:
        model = empty_model(checkpoint)
        if model is None:
            raise InputError(
                f"{folder}: transformers cannot build the model from config.json, so the names of the parameters are "
                "unknown. Code that comes with a model is not run; pass the model in Python: "
                "gm.import_curvature(folder, …, model=model)."
            )
        return model, {name: info.shape for name, info in checkpoint.tensors.items()}


def _adam_sums(
    model: nn.Module, groups: Sequence[Group], states: Mapping[Any, Any], factor: float
) -> dict[str, Tensor]:
    """Return N·B·v̂ of the parameters that had a gradient, by name in memory."""
    keys = {key for group in groups for i in group["params"] for key in states.get(i) or ()}
    if not keys:
        raise InputError("has no state for any parameter. Was it saved before the first step?")
    if not {"step", "exp_avg_sq"} <= keys <= _ADAM_KEYS:
        raise InputError(
            f"is the state of another optimizer, with {', '.join(sorted(map(str, keys)))}. Only Adam, AdamW and IVON "
            "have a diagonal curvature. Run `gradmerge curvature estimate`."
        )
    sums: dict[str, Tensor] = {}
    shapes = _shapes_of(model)
    for group, names in zip(groups, _names_of_groups(model, groups), strict=True):
        moments = [second_moment(states.get(i), group["betas"][1], factor) for i in group["params"]]
        found = [None if moment is None else tuple(moment.shape) for moment in moments]
        pairs = zip(_trained(names, shapes, found), moments, strict=True)
        sums |= {name: moment for name, moment in pairs if moment is not None}
    return sums


def second_moment(state: Mapping[str, Any] | None, beta: Any, factor: float) -> Tensor | None:
    """Return factor · exp_avg_sq / (1 − β₂^step) in float32, or None before the first step."""
    if not state or (steps := float(state["step"])) < 1:
        return None
    if not 0 <= (beta := float(beta)) < 1:
        raise ValueError(f"beta2 is {beta}, not from 0 to 1")
    # expm1 keeps the digits for β₂ close to 1.
    correction = -math.expm1(steps * math.log(beta)) if beta > 0 else 1.0
    return _dense(state["exp_avg_sq"]).float().mul(factor / correction)


def _ivon_sums(model: nn.Module, groups: Sequence[Group], dataset_size: int) -> tuple[dict[str, Tensor], list[str]]:
    """Return ess·hess of each parameter by name in memory, and notes. IVON stores a group in one vector."""
    shapes = _shapes_of(model)
    sums: dict[str, Tensor] = {}
    for group, names in zip(groups, _names_of_groups(model, groups), strict=True):
        lengths = [math.prod(shapes[name]) for name in names]
        if len(names) != len(group["params"]) or sum(lengths) != group["hess"].numel():
            raise InputError(
                f"is of another model: {group['hess'].numel()} entries in the optimizer, {sum(lengths)} in the model"
            )
        parts = _dense(group["hess"]).reshape(-1).float().mul(float(group["ess"])).split_with_sizes(lengths)
        sums |= {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}
    sizes = {float(group["ess"]) for group in groups} - {float(dataset_size)}
    return sums, [f"IVON's ess is {size:g}, not {dataset_size}: the sums are ess·hess" for size in sizes]


def _dense(value: Any) -> Tensor:
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
        raise TypeError("a value is not a dense tensor of real numbers")
    return value


def _shapes_of(model: nn.Module) -> dict[str, Shape]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def _names_of_groups(model: nn.Module, groups: Sequence[Group]) -> list[list[str]]:
    """Return the names of the parameters that each group may have, in their order.

    Without names in the state, one group has all; two groups are the Trainer's, with and without weight decay.
    """
    if all("param_names" in group for group in groups):
        named = [[re.sub(r"^(_orig_mod\.|module\.)+", "", str(name)) for name in g["param_names"]] for g in groups]
        if len(set(chain(*named))) < sum(map(len, named)):
            raise InputError("the optimizer names a parameter twice. Save the checkpoint again.")
        return named
    names = [name for name, _ in model.named_parameters()]
    if len(groups) == 1:
        return [names]
    if len(groups) != 2:
        raise InputError(
            f"the optimizer has {len(groups)} groups of parameters without names. Only one group, and the Trainer's "
            "two, can be matched. Create the optimizer from named parameters (PyTorch 2.6 or newer)."
        )
    try:
        from transformers import Trainer
    except (ImportError, RuntimeError) as error:
        raise InputError(
            "matching the Trainer's groups of parameters needs accelerate: pip install 'gradmerge[train]'"
        ) from error
    decay_names: Any = Trainer.get_decay_parameter_names  # uses the model only
    decay = set(decay_names(None, model))
    return [[name for name in names if name in decay], [name for name in names if name not in decay]]


def _trained(names: Sequence[str], shapes: Mapping[str, Shape], found: Sequence[Shape | None]) -> list[str]:
    """Return the names of the optimizer's parameters, whose shapes are ``found``; None is a shape without a state.

    They are some of ``names``, in this order. Frozen parameters are left out if the shapes tell which these are.
    """
    first, last = _first_match(names, shapes, found), _first_match(names[::-1], shapes, found[::-1])[::-1]
    if len(first) < len(found):
        raise InputError(
            "the optimizer's state does not fit the model: it belongs to another one, or to another version of "
            f"transformers, which orders parameters differently. It has {len(found)} of {len(names)} parameters; "
            f"the first {len(first)} fit"
        )
    if ambiguous := [f"{a} or {b}" for a, b in zip(first, last, strict=True) if a != b]:
        raise InputError(
            f"the optimizer has {len(found)} parameters, the model has {len(names)}, and shapes do not tell which ones "
            f"were frozen. These could be either:\n{listed(ambiguous, 5)}\n  Run `gradmerge curvature estimate`."
        )
    return first


def _first_match(names: Sequence[str], shapes: Mapping[str, Shape], found: Sequence[Shape | None]) -> list[str]:
    """Return the first names, in order, that have the found shapes. They are fewer if not all can be found."""
    result: list[str] = []
    for name in names:
        if len(result) < len(found) and found[len(result)] in (None, shapes.get(name)):
            result.append(name)
    return result


def token_note(model: nn.Module) -> list[str]:
    """Return a note if the loss is a mean over tokens."""
    if not re.search(r"(CausalLM|LMHeadModel|ConditionalGeneration|MaskedLM)$", type(model).__name__):
        return []
    return [
        "the loss of a language model is a mean over tokens: this curvature is smaller than that of `curvature "
        "estimate`, by the squared number of tokens in a sequence"
    ]
