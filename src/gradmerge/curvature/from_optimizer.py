"""Curvature that an optimizer left behind in a checkpoint of the Trainer; `optimizer_state` says what it is."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ..arguments import checked
from ..errors import InputError
from ..io.reader import close_files, open_files
from ..quiet import quiet_transformers
from ..text import listed
from .checkpoint_names import other_shapes, stored_shapes, stored_tensors
from .curvature import Curvature
from .match_parameters import Shape, check_names, empty_model, parameter_names
from .optimizer_state import OptimizerState, read_state, token_note

STATE = "optimizer.pt"
#: No training run has more examples.
MOST = 10**15


@dataclass
class Imported:
    """Curvature from an optimizer, and what should be known about it."""

    curvature: Curvature
    missing: list[str]
    """Parameters of the checkpoint that were not trained."""
    notes: list[str]


@checked()
def import_curvature(
    checkpoint: str | Path, dataset_size: int, batch_size: int, *, model: nn.Module | None = None
) -> Curvature:
    """The diagonal curvature that Adam(W) or IVON left in a checkpoint folder of the Hugging Face Trainer.

    Values are sums over the N examples of the training set: N·B·v̂ for Adam, whose second moments are v̂ and whose steps
    had B examples; ess·hess for IVON. N·B·v̂ assumes a loss that is a mean over the batch and, unless B = 1, a mean
    gradient that is small compared with the spread of the examples' gradients. Doubts about the result are warnings.

    Args:
        checkpoint: The folder. Of its pickles, only `optimizer.pt` is read, with ``weights_only``.
        dataset_size: N, the number of training examples.
        batch_size: B, the examples in an optimizer step: batch size per device × devices × accumulated batches.
        model: The trained model, if `config.json` does not describe it.

    Returns:
        Sums over the examples, by the names of the checkpoint's weights.

    Example:
        >>> curvature = gm.import_curvature("out/checkpoint-500", dataset_size=25_000, batch_size=32)
        >>> curvature.save("out/checkpoint-500/curvature")
    """
    result = read_optimizer(checkpoint, dataset_size, batch_size, model)
    for text in result.notes:
        warnings.warn(text, UserWarning, stacklevel=3)
    return result.curvature


def read_optimizer(checkpoint: str | Path, dataset_size: int, batch_size: int, model: Any = None) -> Imported:
    """``import_curvature``, with its notes in the result."""
    for name, number in (("dataset_size", dataset_size), ("batch_size", batch_size)):
        if not 1 <= number <= MOST:
            raise InputError(f"{name} is {number}, but must be from 1 to {MOST}")
    folder = Path(checkpoint)
    _check_folder(folder)
    state = read_state(folder / STATE)
    notes = list(state.notes)
    if state.kind == "ivon" and state.ess != dataset_size:
        ess = "not the same for all parameters" if state.ess is None else f"{state.ess:g}"
        notes.append(f"IVON's ess is {ess}: the sums are ess·hess, and their mean is over {dataset_size} examples")
    if model is None:
        model = empty_model(folder)
        notes += _version_note(model)
    if state.kind == "adam":
        notes += token_note(model)
    try:
        sums = _named_sums(model, state, float(dataset_size) * batch_size if state.kind == "adam" else 1.0)
    except InputError as error:
        raise InputError(f"{folder / STATE}: {error}") from error
    stored, whole = _as_stored(folder, model, sums)
    missing = [name for name in whole if name not in stored]
    if missing:
        notes.append(
            f"{len(missing)} of {len(whole)} parameters were not trained and have no curvature. A recipe that reads "
            f"this curvature needs `missing: zero`, or `exclude` for them:\n{listed(missing, 4)}"
        )
    return Imported(Curvature(stored, dataset_size, state.kind, str(checkpoint)), missing, notes)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise InputError(f"{folder}: {what}. Name a checkpoint folder of the Trainer, such as checkpoint-500.")
    here = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in here and STATE in here:
        raise InputError(
            f"{folder}: the checkpoint of an adapter (PEFT). Its optimizer saw gradients of the adapter's factors, and "
            "they do not give the curvature of the weights that a merge needs. Estimate it: gradmerge curvature "
            "estimate."
        )
    if STATE in here:
        return
    sharded = [n for n in here if re.fullmatch(r"global_step\d+|optimizer_\d+|rank\d+-of-\d+-optimizer\.pt", n)]
    if sharded or "optimizer.bin" in here:
        raise InputError(
            f"{folder}: {min(sharded, default='optimizer.bin')} is the optimizer of DeepSpeed, FSDP or XLA, in parts "
            f"or in a form of its own. Only {STATE} is read: one process's, or that of data-parallel training."
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{STATE}"))
    hint = f" Did you mean {inside[-1]}?" if inside else ""
    raise InputError(
        f"{folder}: no {STATE}. The Trainer writes it beside the weights unless save_only_model is set.{hint}"
    )


def _named_sums(model: nn.Module, state: OptimizerState, factor: float) -> dict[str, Tensor]:
    """Sums over examples, by the names of the model in memory."""
    if state.has_names:
        names = [group.names or [] for group in state.groups]
        for group, own in zip(state.groups, names, strict=True):
            check_names(model, own, group.shapes)
        repeated = [name for name, times in Counter(name for own in names for name in own).items() if times > 1]
        if repeated:
            raise InputError(f"the optimizer gives two of its parameters one name:\n{listed(repeated, 5)}")
    else:
        names = parameter_names(model, [group.shapes for group in state.groups])
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    sums: dict[str, Tensor] = {}
    for group, own in zip(state.groups, names, strict=True):
        values = group.values([shapes[name] for name in own], factor)
        sums |= {name: value for name, value in zip(own, values, strict=True) if value is not None}
    return sums


def _as_stored(
    folder: Path, model: nn.Module, sums: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], Mapping[str, Shape]]:
    """Sums by the names of the checkpoint's weights, and all names and shapes there."""
    stored, whole = stored_tensors(model, sums), stored_shapes(model)
    files = open_files(folder, "model")
    if files is None:
        return stored, whole
    on_disk = {name: entry.shape for file in files for name, entry in file.entries.items()}
    close_files(files)
    if other_shapes(stored, on_disk, ", where the file has"):
        loaded: Any = model
        # Once loaded, a model knows how its own files name the weights, and saves them so.
        with contextlib.suppress(Exception), quiet_transformers():
            loaded = loaded.from_pretrained(folder, device_map="meta", local_files_only=True)
        stored, whole = stored_tensors(loaded, sums), stored_shapes(loaded)
    if wrong := other_shapes(stored, on_disk, ", where the file has"):
        raise InputError(
            f"{folder}: the optimizer's parameters are not those of model.safetensors beside it:\n{listed(wrong, 5)}"
        )
    return stored, whole


def _version_note(model: nn.Module) -> list[str]:
    import transformers

    written = getattr(getattr(model, "config", None), "transformers_version", None)
    if not isinstance(written, str) or written.split(".")[0] == transformers.__version__.split(".")[0]:
        return []
    return [
        f"written by transformers {written}, named by {transformers.__version__}: parameters are told apart by order "
        "and shape, which may have changed in between"
    ]
