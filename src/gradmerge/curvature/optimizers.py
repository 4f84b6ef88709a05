"""Curvature that an optimizer left behind: the second moments of Adam, the Hessian estimate of IVON.

**Adam.** v̂ = exp_avg_sq / (1 − β₂^step) is a running mean, over steps, of squared minibatch gradients. With a loss that
is the mean over a batch of B examples, the gradient of a step is the mean of B per-example gradients, and its square has
the expectation

    E[g²] = (1/B) E[g_i²] + (1 − 1/B) (E[g_i])²

so that N·B·v̂ is the sum over N examples of squared per-example gradients where the mean gradient is small beside their
spread, as it is near the end of fine-tuning, and for B = 1 exactly. Elsewhere it is too large, by at most a factor B. The
running mean covers the last 1/(1 − β₂) steps or so, at the parameters of those steps. It is taken after gradient
clipping.

**IVON.** `hess` estimates the diagonal Hessian of the mean loss under the posterior, without the weight decay, and `ess`
is the number of examples: the sum is ess·hess.
"""

from __future__ import annotations

import math
import re
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..quiet import quiet_transformers
from ..storage.tensorfile import close_files, open_files
from ..text import listed
from .curvature import Curvature
from .parameter_order import Shape, check_names, empty_model, parameter_names
from .stored_names import stored_shapes, stored_tensors
from .trainer_facts import MOST, doubts, examples_and_batch, read_facts

STATE = "optimizer.pt"
#: What the state of a parameter may hold when `exp_avg_sq` means what it does in Adam; the last two are PriorAdamW's.
_ADAM = {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "mu_product", "anchor", "prior"}
#: Other optimizers, by a key of a parameter's state.
_OTHERS = {
    "exp_avg_sq_row": "Adafactor (it keeps sums over rows and columns only)",
    "state1": "an 8-bit optimizer of bitsandbytes",
    "absmax1": "an 8-bit optimizer of bitsandbytes",
    "square_avg": "RMSprop or Adadelta",
    "momentum_buffer": "SGD",
    "exp_inf": "Adamax",
    "sum": "Adagrad",
}


@dataclass
class Group:
    """The parameters that an optimizer treats alike, in its order."""

    shapes: list[Shape | None]
    """None where the optimizer does not tell, or holds nothing."""
    names: list[str] | None
    """If the optimizer was told them."""
    values: Callable[[Sequence[Shape], float], list[Tensor | None]]
    """Sums over examples in these shapes, from the factor N·B (1 for IVON)."""


@dataclass
class OptimizerState:
    kind: str
    """`adam` or `ivon`."""
    groups: list[Group]
    ess: float | None = None
    """IVON's effective number of examples."""
    notes: list[str] = field(default_factory=list)

    @property
    def has_names(self) -> bool:
        return all(group.names is not None for group in self.groups)


@dataclass
class Imported:
    """Curvature from an optimizer, and what should be known about it."""

    curvature: Curvature
    batch_size: int | None
    """Examples in a step; None where it does not matter."""
    missing: list[str]
    """Parameters of the checkpoint that were not trained."""
    notes: list[str]


def import_curvature(
    checkpoint: str | Path,
    examples: int | None = None,
    batch_size: int | None = None,
    *,
    frozen: Sequence[str] = (),
    model: nn.Module | None = None,
) -> Curvature:
    """The diagonal curvature that Adam(W) or IVON left in a checkpoint folder of the Hugging Face Trainer.

    Values are sums over ``examples``: N·B·v̂ for Adam, with N examples and ``batch_size`` B examples in an optimizer step
    (all processes and accumulated batches together); ess·hess for IVON. Both numbers are read from the checkpoint where
    it has them. Names are those of the checkpoint's weights. ``frozen`` are patterns over the names of parameters that
    were not trained, needed only where their shapes leave that open; ``model`` is the trained model, for one that
    `config.json` does not describe. What should be known about the result is warned of.

    N·B·v̂ assumes a loss that is a mean over the batch and, unless B = 1, a mean gradient that is small beside the spread
    of the examples' gradients; the text of this module says more. `optimizer.pt` is read with ``weights_only``, and
    `training_args.bin` is not loaded.
    """
    result = read_optimizer(checkpoint, examples, batch_size, frozen=frozen, model=model)
    for text in result.notes:
        warnings.warn(text, UserWarning, stacklevel=2)
    return result.curvature


def read_optimizer(
    checkpoint: str | Path,
    examples: int | None = None,
    batch_size: int | None = None,
    *,
    frozen: Sequence[str] = (),
    model: nn.Module | None = None,
) -> Imported:
    """``import_curvature``, with its notes in the result."""
    for flag, number in (("--examples", examples), ("--batch-size", batch_size)):
        if number is not None and not 1 <= number <= MOST:
            raise InputError(f"{flag} {number}: at least 1" if number < 1 else f"{flag}: at most {MOST}")
    folder = Path(checkpoint)
    _check_folder(folder)
    state = _read_state(folder / STATE)
    notes = list(state.notes)
    facts = read_facts(folder)
    if state.kind == "ivon":
        n, b, factor = _ivon_examples(folder, state, examples, notes), None, 1.0
        if batch_size is not None:
            notes.append("--batch-size is not used: IVON's estimate does not depend on it")
    else:
        n, b = examples_and_batch(folder, facts, examples, batch_size, notes)
        if max(n, b) > MOST:
            raise InputError(
                f"{folder}: by what its files say, it was trained on {n} examples in steps of {b}. Pass --examples and --batch-size."
            )
        factor = float(n) * b
        notes += doubts(facts)
    if model is None:
        model = empty_model(folder)
        notes += _version_note(model)
    if state.kind == "adam":
        notes += token_note(model)
    if frozen and state.has_names:
        notes.append("--frozen is not used: the optimizer names its parameters")
    try:
        sums = _named_sums(model, state, factor, frozen)
    except InputError as error:
        raise InputError(f"{folder / STATE}: {error}") from error
    stored, whole = _as_stored(folder, model, sums)
    missing = [name for name in whole if name not in stored]
    if missing:
        notes.append(
            f"{len(missing)} of {len(whole)} parameters were not trained and have no curvature. A recipe that reads this "
            f"curvature needs `missing: zero`, or `exclude` for them:\n{listed(missing, 4)}"
        )
    return Imported(Curvature(stored, n, state.kind, str(checkpoint)), b, missing, notes)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "no such folder"
        raise InputError(f"{folder}: {what}. Name a checkpoint folder of the Trainer, such as checkpoint-500.")
    here = {path.name for path in folder.iterdir()}
    if "adapter_config.json" in here and STATE in here:
        raise InputError(
            f"{folder}: the checkpoint of an adapter (PEFT). Its optimizer saw gradients of the adapter's factors, and they do "
            "not give the curvature of the weights that a merge needs. Measure it: gradmerge curvature estimate."
        )
    if STATE in here:
        return
    sharded = [n for n in here if re.fullmatch(r"global_step\d+|optimizer_\d+|rank\d+-of-\d+-optimizer\.pt", n)]
    if sharded or "optimizer.bin" in here:
        raise InputError(
            f"{folder}: {min(sharded) if sharded else 'optimizer.bin'} is the optimizer of DeepSpeed, FSDP or XLA, in parts or "
            f"in a form of its own. Only {STATE} is read: one process's, or that of data-parallel training."
        )
    inside = sorted(path.parent for path in folder.glob(f"*/{STATE}"))
    hint = f" Did you mean {inside[-1]}?" if inside else ""
    raise InputError(
        f"{folder}: no {STATE}. The Trainer writes it beside the weights unless save_only_model is set.{hint}"
    )


def _read_state(path: Path) -> OptimizerState:
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0][:200]
        raise InputError(
            f"{path}: cannot be read as the state of an optimizer ({reason}). It is damaged, or holds more than tensors and "
            "numbers (it is opened with weights_only)."
        ) from error
    if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list) or "state" not in saved:
        raise InputError(f"{path}: not the state of an optimizer: it has no `state` and `param_groups`")
    groups, states = saved["param_groups"], saved["state"]
    if not isinstance(states, dict) or not all(
        isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups
    ):
        raise InputError(f"{path}: not the state of an optimizer of PyTorch")
    try:
        if any("hess" in group and "ess" in group for group in groups):
            return _ivon(groups)
        return _adam(path, groups, states)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = str(error).partition("\n")[0][:200]
        raise InputError(f"{path}: not a state that Adam or IVON saves ({type(error).__name__}: {reason})") from error


def _adam(path: Path, groups: list[dict[str, Any]], states: Mapping[Any, Any]) -> OptimizerState:
    held = [states[i] for group in groups for i in group["params"] if states.get(i)]
    if not held:
        raise InputError(f"{path}: the optimizer holds nothing for any parameter. Was it saved before the first step?")
    keys = {key for state in held for key in state}
    if not {"step", "exp_avg_sq"} <= keys <= _ADAM or not all("betas" in group for group in groups):
        known = next((name for key, name in _OTHERS.items() if key in keys), None)
        raise InputError(
            f"{path}: {'the state of ' + known if known else 'an optimizer that keeps ' + ', '.join(sorted(map(str, keys)))}. "
            "Only Adam, AdamW (PyTorch's) and IVON are known to leave a diagonal curvature. Measure it: gradmerge "
            "curvature estimate."
        )
    return OptimizerState("adam", [_adam_group(group, states) for group in groups], notes=decay_note(groups))


def decay_note(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the weight decay is part of the gradients that Adam saw."""
    # Without the key, the state is of a PyTorch that did not write which of the two it was.
    if any(float(g.get("weight_decay", 0)) > 0 and g.get("decoupled_weight_decay") is False for g in groups):
        return [
            "the optimizer is Adam with weight decay in the gradient (not AdamW): its second moments, and so this "
            "curvature, hold the weight decay too"
        ]
    return []


def _adam_group(group: Mapping[str, Any], states: Mapping[Any, Any]) -> Group:
    moments = [second_moment(states.get(number), float(group["betas"][1])) for number in group["params"]]

    def values(_: Sequence[Shape], factor: float) -> list[Tensor | None]:
        return [None if m is None else m[0].float().mul(m[1] * factor) for m in moments]

    return Group([None if m is None else tuple(m[0].shape) for m in moments], _told_names(group), values)


def second_moment(state: Mapping[str, Any] | None, beta: float) -> tuple[Tensor, float] | None:
    """exp_avg_sq, and 1 / (1 − β₂^step)."""
    steps = float(state.get("step", 0)) if state else 0.0  # PriorAdamW holds anchors before the first step
    if not state or steps < 1:
        return None
    squares = _real_numbers(state, "exp_avg_sq")
    if not 0 <= beta < 1:
        raise ValueError(f"beta2 is {beta}, not from 0 to 1")
    # expm1 keeps the digits where β₂ is close to 1.
    return squares, 1 / -math.expm1(steps * math.log(beta)) if beta > 0 else 1.0


def _real_numbers(state: Mapping[str, Any], key: str) -> Tensor:
    """A tensor that holds what it says: dense, and not on the meta device, which has shapes only."""
    value = state[key]
    if not isinstance(value, Tensor) or not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
        raise TypeError(f"{key} is not a tensor of real numbers")
    return value


def _ivon(groups: list[dict[str, Any]]) -> OptimizerState:
    sizes = {float(group["ess"]) for group in groups}
    return OptimizerState("ivon", [_ivon_group(g) for g in groups], ess=sizes.pop() if len(sizes) == 1 else None)


def _ivon_group(group: Mapping[str, Any]) -> Group:
    """IVON keeps the parameters of a group behind one another in one vector."""
    hess = _real_numbers(group, "hess").reshape(-1)
    ess = float(group["ess"])

    def values(shapes: Sequence[Shape], factor: float) -> list[Tensor | None]:
        lengths = [math.prod(shape) for shape in shapes]
        if sum(lengths) != hess.numel():
            raise InputError(
                f"the optimizer's state is of another model: {hess.numel()} entries in the optimizer, {sum(lengths)} in the "
                "model's parameters"
            )
        parts = hess.float().mul(ess * factor).split_with_sizes(lengths)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return Group([None for _ in group["params"]], _told_names(group), values)


def _told_names(group: Mapping[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    if not isinstance(names, list) or len(names) != len(group["params"]):
        return None
    return [re.sub(r"^(_orig_mod\.|module\.)+", "", str(name)) for name in names]


def _named_sums(model: nn.Module, state: OptimizerState, factor: float, frozen: Sequence[str]) -> dict[str, Tensor]:
    """Sums over examples, by the names of the model in memory."""
    if state.has_names:
        names = [group.names or [] for group in state.groups]
        for group, own in zip(state.groups, names, strict=True):
            check_names(model, own, group.shapes)
        repeated = [name for name, times in Counter(name for own in names for name in own).items() if times > 1]
        if repeated:
            raise InputError(f"the optimizer gives two of its parameters one name:\n{listed(repeated, 5)}")
    else:
        names = parameter_names(model, [group.shapes for group in state.groups], frozen)
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
    if _misfits(stored, on_disk) and (loaded := _loaded(folder, model)) is not None:
        stored, whole = stored_tensors(loaded, sums), stored_shapes(loaded)
    if wrong := _misfits(stored, on_disk):
        raise InputError(
            f"{folder}: the optimizer's parameters are not those of model.safetensors beside it:\n{listed(wrong, 5)}"
        )
    return stored, whole


def _misfits(stored: Mapping[str, Tensor], on_disk: Mapping[str, Shape]) -> list[str]:
    return [
        f"{name}: {tuple(value.shape)}, where the file has {on_disk.get(name, 'nothing')}"
        for name, value in stored.items()
        if tuple(value.shape) != on_disk.get(name)
    ]


def _loaded(folder: Path, model: nn.Module) -> nn.Module | None:
    """The model as it is after loading: it then knows how its own files name the weights, and saves them like that."""
    from_pretrained: Any = getattr(type(model), "from_pretrained", None)
    if from_pretrained is None:
        return None
    try:
        with quiet_transformers():
            loaded: nn.Module = from_pretrained(folder, device_map="meta", local_files_only=True)
    except Exception:
        return None
    return loaded


def _ivon_examples(folder: Path, state: OptimizerState, examples: int | None, notes: list[str]) -> int:
    ess = state.ess
    if examples is None:
        if ess is None or not 1 <= ess <= MOST or ess != int(ess):
            raise InputError(
                f"{folder}: the number of examples is not known: IVON's ess is {ess or 'not the same for all parameters'}. "
                "Pass --examples."
            )
        return int(ess)
    if ess != examples:
        notes.append(
            f"--examples {examples}, but IVON's ess is {ess or 'not the same for all parameters'}: sums stay ess·hess, and "
            "means divide by --examples"
        )
    return examples


def token_note(model: nn.Module) -> list[str]:
    """What the mean over tokens in the loss of a language model does to Adam's second moments."""
    if not re.search(r"(CausalLM|LMHeadModel|ConditionalGeneration|MaskedLM)$", type(model).__name__):
        return []
    return [
        "the loss of a language model is a mean over tokens. These are sums over sequences all the same, of squared "
        "gradients of a sequence's mean loss: smaller than what `curvature estimate` measures by the square of the number "
        "of tokens in a sequence"
    ]


def _version_note(model: nn.Module) -> list[str]:
    import transformers

    written = getattr(getattr(model, "config", None), "transformers_version", None)
    if not isinstance(written, str) or written.split(".")[0] == transformers.__version__.split(".")[0]:
        return []
    return [
        f"written by transformers {written}, named by {transformers.__version__}: parameters are told apart by order and "
        "shape, which may have changed in between"
    ]
