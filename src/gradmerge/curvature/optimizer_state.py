"""What an optimizer of PyTorch saved of itself in `optimizer.pt`, as far as curvature is in it.

**Adam.** v̂ = exp_avg_sq / (1 − β₂^step) is a running mean, over steps, of squared minibatch gradients. If the loss is
the mean over a batch of B examples, the gradient of a step is the mean of B per-example gradients, and its square has
the expectation

    E[g²] = (1/B) E[g_i²] + (1 − 1/B) (E[g_i])²

so that N·B·v̂ is the sum over N examples of squared per-example gradients where the mean gradient is small beside their
spread, as it is near the end of fine-tuning, and for B = 1 exactly. Elsewhere it is too large, by at most a factor B.
The running mean covers about the last 1/(1 − β₂) steps, each at its own parameters and after gradient clipping.

**IVON.** `hess` estimates the diagonal Hessian of the mean loss under the posterior, without the weight decay. `ess` is
the number of examples: the sum is ess·hess.
"""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..text import first_line
from .match_parameters import Shape

#: The keys of a parameter's state where `exp_avg_sq` means what it does in Adam; the last two are PriorAdamW's.
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
class ParameterGroup:
    """The parameters that an optimizer treats alike, in its order."""

    shapes: list[Shape | None]
    """None where the optimizer has no state that shows it."""
    names: list[str] | None
    """Names of the parameters, if the optimizer was given them."""
    values: Callable[[Sequence[Shape], float], list[Tensor | None]]
    """Sums over examples in these shapes, from the factor N·B (1 for IVON)."""


@dataclass
class OptimizerState:
    kind: str
    """`adam` or `ivon`."""
    groups: list[ParameterGroup]
    ess: float | None = None
    """IVON's effective number of examples."""
    notes: list[str] = field(default_factory=list)

    @property
    def has_names(self) -> bool:
        return all(group.names is not None for group in self.groups)


def read_state(path: Path) -> OptimizerState:
    """The state in `optimizer.pt`, loaded with ``weights_only``."""
    try:
        saved = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise InputError(
            f"{path}: cannot be read as the state of an optimizer ({first_line(error)}). It is damaged, or holds more "
            "than tensors and numbers (it is opened with weights_only)."
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
            sizes = {float(group["ess"]) for group in groups}
            ess = sizes.pop() if len(sizes) == 1 else None
            return OptimizerState("ivon", [_ivon_group(group) for group in groups], ess)
        _check_adam(path, groups, states)
        return OptimizerState("adam", [_adam_group(group, states) for group in groups], notes=decay_note(groups))
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise InputError(f"{path}: not a state that Adam or IVON saves ({reason})") from error


def _check_adam(path: Path, groups: list[dict[str, Any]], states: Mapping[Any, Any]) -> None:
    keys = {key for group in groups for i in group["params"] for key in states.get(i) or ()}
    if not keys:
        raise InputError(f"{path}: the optimizer holds nothing for any parameter. Was it saved before the first step?")
    if not {"step", "exp_avg_sq"} <= keys <= _ADAM or not all("betas" in group for group in groups):
        known = next((f"the state of {name}" for key, name in _OTHERS.items() if key in keys), None)
        raise InputError(
            f"{path}: {known or 'an optimizer that keeps ' + ', '.join(sorted(map(str, keys)))}. Only Adam, AdamW "
            "(PyTorch's) and IVON are known to leave a diagonal curvature. Estimate it: gradmerge curvature estimate."
        )


def _adam_group(group: Mapping[str, Any], states: Mapping[Any, Any]) -> ParameterGroup:
    moments = [second_moment(states.get(number), float(group["betas"][1])) for number in group["params"]]

    def values(_: Sequence[Shape], factor: float) -> list[Tensor | None]:
        return [None if m is None else m[0].float().mul(m[1] * factor) for m in moments]

    return ParameterGroup([None if m is None else tuple(m[0].shape) for m in moments], _told_names(group), values)


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


def _ivon_group(group: Mapping[str, Any]) -> ParameterGroup:
    """IVON keeps the parameters of a group behind one another in one vector."""
    hess = _real_numbers(group, "hess").reshape(-1)
    ess = float(group["ess"])

    def values(shapes: Sequence[Shape], factor: float) -> list[Tensor | None]:
        lengths = [math.prod(shape) for shape in shapes]
        if sum(lengths) != hess.numel():
            raise InputError(
                f"the optimizer's state is of another model: {hess.numel()} entries in the optimizer, {sum(lengths)} "
                "in the model's parameters"
            )
        parts = hess.float().mul(ess * factor).split_with_sizes(lengths)
        return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]

    return ParameterGroup([None for _ in group["params"]], _told_names(group), values)


def _told_names(group: Mapping[str, Any]) -> list[str] | None:
    names = group.get("param_names")
    if not isinstance(names, list) or len(names) != len(group["params"]):
        return None
    return [re.sub(r"^(_orig_mod\.|module\.)+", "", str(name)) for name in names]


def decay_note(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Whether the weight decay is part of the gradients that Adam saw."""
    # Without the key, the state is of a PyTorch that did not write which of the two it was.
    if any(float(g.get("weight_decay", 0)) > 0 and g.get("decoupled_weight_decay") is False for g in groups):
        return [
            "the optimizer is Adam with weight decay in the gradient (not AdamW): its second moments, and so this "
            "curvature, hold the weight decay too"
        ]
    return []


def token_note(model: nn.Module) -> list[str]:
    """What the mean over tokens in the loss of a language model does to Adam's second moments."""
    if not re.search(r"(CausalLM|LMHeadModel|ConditionalGeneration|MaskedLM)$", type(model).__name__):
        return []
    return [
        "the loss of a language model is a mean over tokens. These are sums over sequences all the same, of squared "
        "gradients of a sequence's mean loss: smaller than what `curvature estimate` gives, by the square of the "
        "number of tokens in a sequence"
    ]
