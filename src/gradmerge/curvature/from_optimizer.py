"""Curvature from the state of an optimizer, in a checkpoint of transformers' Trainer.

**Adam.** v̂ = exp_avg_sq / (1 − β₂^step) is a running mean, over steps, of squared minibatch gradients. If the loss is
the mean over a batch of B examples, the gradient of a step is the mean of B per-example gradients g_i, and

    E[g²] = (1/B) E[g_i²] + (1 − 1/B) (E[g_i])²

So N·B·v̂ is the sum over N examples of squared per-example gradients where the mean gradient is small compared with
their spread, as near the end of fine-tuning, and exactly for B = 1. Otherwise it is too large, by at most a factor B.
The mean covers about the last 1/(1 − β₂) steps, each at its own weights and after gradient clipping.

**IVON.** `hess` estimates the diagonal Hessian of the mean loss under the posterior, without the weight decay. `ess` is
the number of examples, so the sum is ess·hess.
"""

from __future__ import annotations

import contextlib
import math
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..arguments import checked
from ..errors import InputError
from ..io.reader import close_files, open_files
from ..quiet import quiet_transformers
from ..text import first_line, listed
from .checkpoint_names import other_shapes, stored_shapes, stored_tensors
from .curvature import Curvature
from .match_parameters import Shape, check_names, empty_model, parameter_names

OPTIMIZER_FILE = "optimizer.pt"
MAX_EXAMPLES = 10**15
#: Keys of a parameter's state for which `exp_avg_sq` means what it does in Adam; the last two are PriorAdamW's.
_ADAM_KEYS = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "mu_product", "anchor", "prior"}
#: Other optimizers, by a key of a parameter's state.
_OTHER_OPTIMIZERS = {
    "exp_avg_sq_row": "Adafactor",
    "state1": "an 8-bit optimizer of bitsandbytes",
    "absmax1": "an 8-bit optimizer of bitsandbytes",
    "square_avg": "RMSprop or Adadelta",
    "momentum_buffer": "SGD",
    "exp_inf": "Adamax",
    "sum": "Adagrad",
}


@dataclass
class ImportedCurvature:
    """Curvature from an optimizer, and what the user should know about it."""

    curvature: Curvature
    missing: list[str]
    """Parameters of the checkpoint that were not trained."""
    notes: list[str]


@checked()
def import_curvature(
    checkpoint: str | Path, dataset_size: int, batch_size: int, *, model: nn.Module | None = None
) -> Curvature:
    """Return the diagonal curvature in the optimizer of a Trainer checkpoint: Adam, AdamW or IVON.

    Values are sums over the N examples of the training set: N·B·v̂ for Adam, with second moments v̂ and B examples per
    step; ess·hess for IVON. N·B·v̂ assumes that the loss is a mean over the batch. Unless B = 1, it also assumes that
    the mean gradient is small compared with the spread of the examples' gradients. Doubts are warnings.

    Args:
        checkpoint: The folder. Of its pickles, only `optimizer.pt` is read, with ``weights_only``.
        dataset_size: N, the number of training examples.
        batch_size: B, the examples per optimizer step: batch size per device × devices × accumulated batches.
        model: The trained model, if `config.json` does not describe it.

    Returns:
        Sums over the examples, with the names of the checkpoint's weights.

    Example:
        >>> curvature = gm.import_curvature("out/checkpoint-500", dataset_size=25_000, batch_size=32)
        >>> curvature.save("out/checkpoint-500/curvature")
    """
    result = read_optimizer(checkpoint, dataset_size, batch_size, model)
    for text in result.notes:
        warnings.warn(text, UserWarning, stacklevel=3)
    return result.curvature


def read_optimizer(checkpoint: str | Path, dataset_size: int, batch_size: int, model: Any = None) -> ImportedCurvature:
    """Return what `import_curvature` returns, with its notes."""
    for name, number in (("dataset_size", dataset_size), ("batch_size", batch_size)):
        if not 1 <= number <= MAX_EXAMPLES:
            raise InputError(f"{name} is {number}, but must be from 1 to {MAX_EXAMPLES}")
    folder = Path(checkpoint)
    _check_folder(folder)
    path = folder / OPTIMIZER_FILE
    groups, states = _load_state(path)
    notes: list[str] = []
    built_here = model is None
    model = empty_model(folder) if built_here else model
    try:
        if any("hess" in group and "ess" in group for group in groups):
            likelihood, read = "ivon", [_ivon_group(group) for group in groups]
            sizes = {float(group["ess"]) for group in groups}
            if sizes != {float(dataset_size)}:
                notes.append(
                    f"IVON's ess is {', '.join(f'{size:g}' for size in sorted(sizes))}, not {dataset_size}: the sums "
                    "are ess·hess"
                )
        else:
            likelihood, read = "adam", _adam_groups(path, groups, states, float(dataset_size) * batch_size)
            notes += decay_note(groups) + token_note(model)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{path}: not a state that Adam or IVON saves ({reason})") from error
    if built_here:
        notes += _version_note(model)
    try:
        sums = _named_sums(model, read)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    stored, every = _to_stored(folder, model, sums)
    missing = [name for name in every if name not in stored]
    if missing:
        notes.append(
            f"{len(missing)} of {len(every)} parameters were not trained and have no curvature. A recipe that uses "
            f"this curvature needs `missing: zero`, or must exclude them:\n{listed(missing, 4)}"
        )
    return ImportedCurvature(Curvature(stored, dataset_size, likelihood, str(checkpoint)), missing, notes)


def _check_folder(folder: Path) -> None:
    """Raise InputError unless the folder is a Trainer checkpoint of a whole model, with its optimizer in one file."""
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise InputError(f"{folder}: {what}. Name a checkpoint folder of the Trainer, such as checkpoint-500.")
    names = {path.name for path in folder.iterdir()}
    if OPTIMIZER_FILE in names:
        if "adapter_config.json" in names:
            raise InputError(
                f"{folder}: is the checkpoint of a PEFT adapter, whose optimizer has no curvature of the full weights. "
                "Run `gradmerge curvature estimate` on it."
            )
        return
    sharded = [n for n in names if re.fullmatch(r"global_step\d+|optimizer_\d+|rank\d+-of-\d+-optimizer\.pt", n)]
    if sharded or "optimizer.bin" in names:
        raise InputError(
            f"{folder}: {min(sharded, default='optimizer.bin')} is a sharded optimizer (DeepSpeed, FSDP or XLA). Only "
            f"{OPTIMIZER_FILE} of one process, or of data-parallel training, can be read."
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{OPTIMIZER_FILE}"))
    hint = f" Did you mean {inside[-1]}?" if inside else ""
    raise InputError(f"{folder}: no {OPTIMIZER_FILE}. The Trainer writes it unless save_only_model is set.{hint}")


def _load_state(path: Path) -> tuple[list[dict[str, Any]], Mapping[Any, Any]]:
    """Return parameter groups and states of an optimizer, loaded with ``weights_only``."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise InputError(
            f"{path}: cannot be read as the state of an optimizer ({first_line(error)}). It is damaged, or holds more "
            "than tensors and numbers (it is opened with weights_only)."
        ) from error
    groups, states = (saved.get("param_groups"), saved.get("state")) if isinstance(saved, dict) else (None, None)
    if (
        not isinstance(groups, list)
        or not isinstance(states, dict)
        or not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups)
    ):
        raise InputError(f"{path}: not the state of a PyTorch optimizer, which has `state` and `param_groups`")
    return groups, states


@dataclass
class _Group:
    """The parameters of one group, in the optimizer's order."""

    shapes: list[Shape | None]
    """None if the optimizer has no state that shows the shape."""
    names: list[str] | None
    sums: Callable[[Sequence[Shape]], list[Tensor | None]]
    """Returns sums over examples, in these shapes."""


def _adam_groups(
    path: Path, groups: Sequence[Mapping[str, Any]], states: Mapping[Any, Any], factor: float
) -> list[_Group]:
    keys = {key for group in groups for i in group["params"] for key in states.get(i) or ()}
    if not keys:
        raise InputError(f"{path}: has no state for any parameter. Was it saved before the first step?")
    if not {"step", "exp_avg_sq"} <= keys <= _ADAM_KEYS or not all("betas" in group for group in groups):
        name = next((name for key, name in _OTHER_OPTIMIZERS.items() if key in keys), None)
        raise InputError(
            f"{path}: is the state of {name or 'an optimizer with ' + ', '.join(sorted(map(str, keys)))}. Only Adam, "
            "AdamW and IVON have a diagonal curvature. Run `gradmerge curvature estimate`."
        )
    return [_adam_group(group, states, factor) for group in groups]


def _adam_group(group: Mapping[str, Any], states: Mapping[Any, Any], factor: float) -> _Group:
    moments = [second_moment(states.get(number), float(group["betas"][1])) for number in group["params"]]

    def sums(_: Sequence[Shape]) -> list[Tensor | None]:
        return [None if m is None else m[0].float().mul(m[1] * factor) for m in moments]

    return _Group([None if m is None else tuple(m[0].shape) for m in moments], _group_names(group), sums)


def _ivon_group(group: Mapping[str, Any]) -> _Group:
    """IVON stores the parameters of a group in one vector."""
    hess, ess = _dense(group, "hess").reshape(-1), float(group["ess"])

    def sums(shapes: Sequence[Shape]) -> list[Tensor | None]:
        lengths = [math.prod(shape) for shape in shapes]
        if sum(lengths) != hess.numel():
            raise InputError(
                f"is of another model: {hess.numel()} entries in the optimizer, {sum(lengths)} in the model"
            )
        parts = hess.float().mul(ess).split_with_sizes(lengths)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return _Group([None for _ in group["params"]], _group_names(group), sums)


def second_moment(state: Mapping[str, Any] | None, beta: float) -> tuple[Tensor, float] | None:
    """Return exp_avg_sq and 1 / (1 − β₂^step), or None before the first step."""
    steps = float(state.get("step", 0)) if state else 0.0  # PriorAdamW's state has anchors before the first step
    if not state or steps < 1:
        return None
    squares = _dense(state, "exp_avg_sq")
    if not 0 <= beta < 1:
        raise ValueError(f"beta2 is {beta}, not from 0 to 1")
    # expm1 keeps the digits for β₂ close to 1.
    return squares, 1 / -math.expm1(steps * math.log(beta)) if beta > 0 else 1.0


def _dense(state: Mapping[str, Any], key: str) -> Tensor:
    value = state[key]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
        raise TypeError(f"{key} is not a dense tensor of real numbers")
    return value


def _group_names(group: Mapping[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    if not isinstance(names, list) or len(names) != len(group["params"]):
        return None
    return [re.sub(r"^(_orig_mod\.|module\.)+", "", str(name)) for name in names]


def _named_sums(model: nn.Module, groups: Sequence[_Group]) -> dict[str, Tensor]:
    """Return sums over examples, with the names of the model in memory."""
    if all(group.names is not None for group in groups):
        names = [group.names or [] for group in groups]
        for group, group_names in zip(groups, names, strict=True):
            check_names(model, group_names, group.shapes)
        repeated = [name for name, count in Counter(n for part in names for n in part).items() if count > 1]
        if repeated:
            raise InputError(f"the optimizer uses a name for two parameters:\n{listed(repeated, 5)}")
    else:
        names = parameter_names(model, [group.shapes for group in groups])
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    sums: dict[str, Tensor] = {}
    for group, group_names in zip(groups, names, strict=True):
        values = group.sums([shapes[name] for name in group_names])
        sums |= {name: value for name, value in zip(group_names, values, strict=True) if value is not None}
    return sums


def _to_stored(
    folder: Path, model: nn.Module, sums: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Mapping[str, Shape]]:
    """Return sums with the names of the checkpoint's weights, and all names and shapes there."""
    stored, every = stored_tensors(model, sums), stored_shapes(model)
    files = open_files(folder, "model")
    if files is None:
        return stored, every
    on_disk = {name: entry.shape for file in files for name, entry in file.entries.items()}
    close_files(files)
    if other_shapes(stored, on_disk, ", where the file has"):
        loaded: Any = model
        # A model that was loaded from these files knows the names that they use.
        with contextlib.suppress(Exception), quiet_transformers():
            loaded = loaded.from_pretrained(folder, device_map="meta", local_files_only=True)
        stored, every = stored_tensors(loaded, sums), stored_shapes(loaded)
    if wrong := other_shapes(stored, on_disk, ", where the file has"):
        raise InputError(
            f"{folder}: the optimizer's parameters are not those of model.safetensors beside it:\n{listed(wrong, 5)}"
        )
    return stored, every


def _version_note(model: nn.Module) -> list[str]:
    import transformers

    written = getattr(getattr(model, "config", None), "transformers_version", None)
    if not isinstance(written, str) or written.split(".")[0] == transformers.__version__.split(".")[0]:
        return []
    return [
        f"written by transformers {written} and read with {transformers.__version__}: parameters are matched by order "
        "and shape, which may have changed"
    ]


def decay_note(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a note if Adam's gradients include the weight decay."""
    # Old versions of PyTorch do not write the key.
    if any(float(g.get("weight_decay", 0)) > 0 and g.get("decoupled_weight_decay") is False for g in groups):
        return ["the optimizer is Adam with weight decay in the gradient (not AdamW): this curvature includes it"]
    return []


def token_note(model: nn.Module) -> list[str]:
    """Return a note if the loss is a mean over tokens."""
    if not re.search(r"(CausalLM|LMHeadModel|ConditionalGeneration|MaskedLM)$", type(model).__name__):
        return []
    return [
        "the loss of a language model is a mean over tokens: this curvature is smaller than that of `curvature "
        "estimate`, by the squared number of tokens in a sequence"
    ]
