"""AdamW with a quadratic penalty towards an anchor, weighted by curvature."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..arguments import check_known
from ..curvature import Curvature
from ..curvature.kernels import sum_type
from ..errors import InputError
from .penalty import (
    AnchorTensors,
    NamedTensors,
    Reduction,
    match_parameters,
    open_anchor,
    open_prior,
    write_penalty,
)

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Prior = float | Curvature | Mapping[str, Tensor] | str | Path
Coupling = Literal["decoupled", "adam"]
Missing = Literal["error", "zero"]

#: The value of a group's `prior` if H_0 is a tensor per parameter.
CURVATURE = "curvature"
#: Keys of `state` with a list per group, which has a tensor or None per parameter.
ANCHORS, PRIORS = "anchors", "priors"
#: Elements that one CPU thread processes at once: the temporaries fit into its cache.
CPU_CHUNK = 1 << 15
#: Elements that a GPU processes at once: this bounds the memory for temporaries.
GPU_CHUNK = 1 << 26


class PriorAdamW(torch.optim.AdamW):
    """AdamW with the penalty ½·strength·‖θ − θ_base‖²_{H_0}. Models trained with it merge as gradient matching assumes.

    Gradient matching assumes that each model is θ_t = argmin ℓ_t(θ) + ½‖θ − θ_base‖²_{H_0}. This optimizer is
    `torch.optim.AdamW` with that penalty. After Adam's step, it moves each parameter towards its anchor θ_base:

        θ ← (θ + lr·strength·H_0 ⊙ θ_base) / (1 + lr·strength·H_0)

    This is an implicit gradient step on the penalty, so it never overshoots, however large H_0 is. Parameters without
    a gradient do not move. With ``strength=0`` the result equals torch's AdamW bit for bit.

    Args:
        params: A model, whose trainable parameters are optimized; ``model.named_parameters()``; tensors; or groups.
            A prior or anchor that goes by names needs a model or names.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, fused: As in torch. Weight decay pulls towards zero,
            with 0.01 by default; set it to 0 to use the penalty alone. If you pass neither ``foreach`` nor ``fused``,
            and the strength is not 0, the optimizer uses torch's fused implementation where it can.
        prior: H_0: a `Curvature`, a mapping from names to tensors, the path of a curvature folder, a number c for
            c·I, or ``"identity"``.
        strength: Factor of the penalty. Groups may have different strengths, and they may change during training. A
            group that starts with 0 needs no prior and no anchor, and keeps 0.
        anchor: θ_base: a state dict or the path of a checkpoint. Default: the parameters when the optimizer is created.
        reduction: How to read a `Curvature` or a curvature folder: ``"mean"`` divides it by its number M of examples,
            ``"sum"`` does not. A plain mapping is used unchanged. A merge uses the **sum** of the losses of N examples;
            a training loss is usually their mean, so the penalty must be divided by N too. With a mean loss, use
            ``"mean"`` and ``strength`` M/N, or ``"sum"`` and 1/N.
        damping: δ ≥ 0, added to H_0.
        coupling: ``"decoupled"`` is the step above, decoupled as AdamW's weight decay is. Adam divides the gradient of
            the loss by D = √v̂ + ε but not that of the penalty: training converges where the *normalized* gradient
            balances the penalty. ``"adam"`` solves the penalty in Adam's metric,
            θ ← (D ⊙ θ + lr·strength·H_0 ⊙ θ_base) / (D + lr·strength·H_0), and converges where the gradients of loss
            and penalty add up to 0: the minimizer that gradient matching assumes.
        missing: If prior or anchor lack a parameter: ``"error"``, or ``"zero"`` for no penalty on it, as for a new
            head.
        keep_on: Device that stores anchor and H_0. ``"cpu"`` saves GPU memory; each step then copies them to the GPU.
            Default: the parameter's device. The anchor has the parameter's type, H_0 is float32 (float64 for float64).
        model: The model, if ``params`` are its parameters. Needed if names differ between memory and files, as for ViT
            in transformers.

    Attributes:
        param_groups: As in torch, with ``strength``, ``coupling``, ``keep_on`` and ``prior`` (a number with damping,
            or ``"curvature"``) of each group.
        state: As in torch, with ``"anchors"`` and ``"priors"``: a list per group. Loading a state dict is enough to
            resume. You can also load a state dict of torch's AdamW; then anchors and priors do not change.

    Example:
        >>> optimizer = gm.PriorAdamW(model, lr=2e-5, weight_decay=0.0, prior="base/curvature", strength=1.0)
        >>> model(**batch).loss.backward()
        >>> optimizer.step()
    """

    _model: nn.Module | None = None

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        prior: Prior = "identity",
        strength: float = 1.0,
        anchor: AnchorTensors | None = None,
        reduction: Reduction = "mean",
        damping: float = 0.0,
        coupling: Coupling = "decoupled",
        missing: Missing = "error",
        keep_on: str | torch.device | None = None,
        model: nn.Module | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
    ) -> None:
        for name, value, known in (
            ("coupling", coupling, Coupling),
            ("reduction", reduction, Reduction),
            ("missing", missing, Missing),
        ):
            check_known(f"{name}={value!r}", value, get_args(known))
        _check_number("damping", damping)
        if isinstance(params, nn.Module):
            model = unwrap(params)
            params = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
            if not params:
                raise InputError(f"{type(model).__name__}: no parameter requires a gradient")
        self._model = model
        self._step_counts: dict[Tensor, int] = {}  # because Adam's own may be on a GPU
        # torch's constructor calls `add_param_group`, which needs these.
        self._group_options = {
            "strength": strength,
            "coupling": coupling,
            "prior": _prior_kind(prior, float(damping)),
            "keep_on": None if keep_on is None else str(keep_on),
        }
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            fused=fused,
        )
        self.defaults |= self._group_options
        state: Any = self.state
        optional = missing == "zero"
        state[ANCHORS] = [self._anchors(group, anchor, optional) for group in self.param_groups]
        state[PRIORS] = [self._priors(g, prior, reduction, float(damping), optional) for g in self.param_groups]
        self._register_hooks()

    def _register_hooks(self) -> None:
        self.register_step_pre_hook(_make_gradients_contiguous)
        self.register_step_post_hook(_pull)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch. A group that is added later has no penalty, and needs ``strength=0``."""
        group = {**self._group_options, **param_group}
        _check_number("strength", group["strength"])
        state: Any = self.state
        if ANCHORS in state and group["strength"] != 0:
            raise InputError(
                "PriorAdamW: a group that is added later has no penalty. Pass all groups when you create the "
                "optimizer, or strength=0."
            )
        super().add_param_group(group)
        params: list[Tensor] = group["params"]
        if any(p.is_complex() for p in params):
            raise InputError("PriorAdamW: complex parameters are not supported. Train real and imaginary parts apart.")
        for key in (ANCHORS, PRIORS) if ANCHORS in state else ():
            state[key].append([None] * len(params))
        if group["foreach"] is None and group["fused"] is None and group["strength"] != 0:
            group["fused"] = all(map(_can_fuse, params)) or None

    def _anchors(self, group: dict[str, Any], anchor: AnchorTensors | None, optional: bool) -> list[Tensor | None]:
        """Return the anchor of each parameter of a group, as it is stored."""
        params: list[Tensor] = group["params"]
        if group["strength"] == 0:
            return [None] * len(params)
        anchors: dict[int, Tensor] = {}
        if anchor is not None:
            with open_anchor(anchor) as tensors:
                anchors = {i: value.clone() for i, value in self._matched(tensors, group, optional)}
        values = (anchors[i] if i in anchors else p.detach().clone() for i, p in enumerate(params))  # one at a time
        return [_stored(value, "anchor", group, i) for i, value in enumerate(values)]

    def _priors(
        self, group: dict[str, Any], prior: Any, reduction: Reduction, damping: float, optional: bool
    ) -> list[Tensor | None]:
        """Return the curvature of each parameter of a group with damping, as it is stored."""
        priors: list[Tensor | None] = [None] * len(group["params"])
        if group["strength"] == 0 or group["prior"] != CURVATURE:
            return priors
        with open_prior(prior, reduction) as tensors:
            for i, value in self._matched(tensors, group, optional):
                _check_values(value, "prior", group, i)  # damping can hide negative values
                value = value.to(torch.promote_types(value.dtype, torch.float32)) + damping
                priors[i] = _stored(value, "prior", group, i)
        return priors

    def _matched(self, tensors: NamedTensors, group: dict[str, Any], optional: bool) -> Iterator[tuple[int, Tensor]]:
        """Yield the tensors of a group's parameters with their positions in the group."""
        if group.get("param_names") is None:
            raise InputError(
                f"PriorAdamW: {len(group['params'])} parameters without names, but a prior or anchor that goes by "
                "names. Pass the model, or model.named_parameters()."
            )
        named = list(zip(group["param_names"], group["params"], strict=True))
        positions = {name: i for i, (name, _) in enumerate(named)}
        for name, value in match_parameters(tensors, named, self._model, optional=optional):
            yield positions[name], value

    def record_penalty(self, folder: str | Path, mean_over: float, model: nn.Module | None = None) -> None:
        """Write the penalty that a saved model was trained with beside it, where `gradmerge merge` looks for it.

        Writes `gradmerge_penalty.json`, and a folder `penalty/` with P if P is not a multiple of the identity.

        Args:
            folder: The folder of the saved model.
            mean_over: How many terms the training loss is a mean of: the number of training examples; for a language
                model, the number of labeled tokens; 1 if the loss is a sum. A merge uses the sum.
            model: The model, if the optimizer was created without it.

        >>> optimizer.record_penalty("tuned", mean_over=len(data))  # doctest: +SKIP
        """
        if (model := model if model is not None else self._model) is None:
            raise InputError("record_penalty: needs the names of the model's parameters. Pass model=…")
        write_penalty(Path(folder), self._penalties(), unwrap(model), mean_over)

    def _penalties(self) -> Iterator[tuple[Tensor, float | Tensor]]:
        """Yield each parameter with its penalty: strength · H_0, and times D = √v̂ + ε if decoupled."""
        state: Any = self.state
        for group, priors in zip(self.param_groups, state[PRIORS], strict=True):
            for p, prior in zip(group["params"], priors, strict=True):
                penalty: float | Tensor = group["strength"]
                if group["prior"] != CURVATURE:
                    penalty *= group["prior"]
                else:
                    penalty *= prior.cpu().double() if prior is not None else 0.0
                if group["coupling"] == "decoupled" and group["strength"] != 0:
                    moments = state.get(p)  # without a step, there is nothing that the penalty balances
                    penalty = penalty * _adam_metric(group, moments) if moments else 0.0
                yield p, penalty

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch's AdamW, which keeps the current anchors and priors."""
        self._step_counts = {}
        before, kept = self.param_groups, {key: self.state[key] for key in (ANCHORS, PRIORS)}  # type: ignore[index]
        super().load_state_dict(state_dict)
        for group, old in zip(self.param_groups, before, strict=True):
            for key in ("strength", "coupling", "prior", "keep_on"):
                group.setdefault(key, old[key])
        state: Any = self.state
        for key, current in kept.items():
            state[key] = [
                [None if value is None else _stored(value, key[:-1], group, i) for i, value in enumerate(values)]
                for group, values in zip(self.param_groups, state.get(key, current), strict=True)
            ]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not hasattr(self, "_group_options"):  # after unpickling; torch also calls this when it loads a state dict
            self._group_options, self._step_counts = {}, {}
            self._register_hooks()


def _make_gradients_contiguous(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    # torch's fused CPU kernel ignores strides: it would pair gradients with the wrong weights.
    for group in optimizer.param_groups:
        for p in group["params"] if group["fused"] else ():
            if p.grad is not None and p.grad.layout == torch.strided:
                p.grad = p.grad.contiguous()


@torch.no_grad()
def _pull(optimizer: PriorAdamW, args: Any, kwargs: Any) -> None:
    """Move all parameters that have a gradient towards their anchors, after Adam's step."""
    overflow = getattr(optimizer, "found_inf", None)
    if isinstance(overflow, Tensor) and overflow.item():
        return  # a gradient scaler made the fused implementation skip this step
    state: Any = optimizer.state
    for group, anchors, priors in zip(optimizer.param_groups, state[ANCHORS], state[PRIORS], strict=True):
        rate = float(group["lr"]) * group["strength"]
        if rate == 0:
            optimizer._step_counts.clear()
            continue
        if any(anchor is None for anchor in anchors):
            raise InputError("PriorAdamW: a group that starts with strength 0 has no anchor. Create a new optimizer.")
        batch: list[_Piece] = []
        elements = 0
        for piece in _pieces(optimizer, group, anchors, priors, rate):
            if batch and elements + piece[0].numel() > _chunk_size(piece[0]):
                _pull_batch(batch, group, rate)
                batch, elements = [], 0
            batch.append(piece)
            elements += piece[0].numel()
        if batch:
            _pull_batch(batch, group, rate)


_Piece = tuple[Tensor, Tensor, Tensor | None, Tensor | None, float]
"""A part of a parameter, of its anchor, its prior and Adam's v, and the factor of √v in D/c."""


def _pieces(
    optimizer: PriorAdamW, group: Mapping[str, Any], anchors: Any, priors: Any, rate: float
) -> Iterator[_Piece]:
    """Split the parameters that have a gradient and a penalty."""
    for p, anchor, prior in zip(group["params"], anchors, priors, strict=True):
        if p.grad is None or (prior is None and group["prior"] == CURVATURE):
            continue
        squares, factor = None, 1 / rate
        if group["coupling"] == "adam":
            state, counts = optimizer.state[p], optimizer._step_counts
            squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            counts[p] = counts[p] + 1 if p in counts else int(state["step"].item())
            factor /= math.sqrt(1 - group["betas"][1] ** counts[p])
        tensors = (p.detach(), anchor, prior, squares)
        if all(t is None or t.is_contiguous() for t in tensors):
            parts: Any = [itertools.repeat(None) if t is None else t.view(-1).split(_chunk_size(p)) for t in tensors]
            yield from ((*part, factor) for part in zip(*parts, strict=False))
        else:
            yield *tensors, factor


def _chunk_size(p: Tensor) -> int:
    if p.device.type != "cpu":
        return GPU_CHUNK
    threads = torch.get_num_threads()
    # With two threads, waiting for each other at every piece costs more than they gain.
    return CPU_CHUNK if threads <= 2 else 2 * CPU_CHUNK * threads


def _pull_batch(batch: Sequence[_Piece], group: Mapping[str, Any], rate: float) -> None:
    """Move pieces towards their anchors: θ ← θ + t ⊙ (a − θ) with t = H / (H + D/c) and the rate c = lr·strength.

    D is 1, or √v̂ + ε in Adam's metric. Arithmetic is float32 (float64 for float64 parameters); the result is rounded
    once.
    """
    targets, anchors, priors, squares, factors = map(list, zip(*batch, strict=True))
    device, dtype = targets[0].device, sum_type(targets[0])

    def convert(tensors: Sequence[Any]) -> list[Tensor]:
        # Move first: a copy between devices that also converts is synchronous.
        return [t.to(device, non_blocking=device.type != "cpu").to(dtype) for t in tensors]

    metric: Any = 1 / rate  # D/c
    if squares[0] is not None:
        metric = torch._foreach_sqrt([t.to(dtype) for t in squares])
        torch._foreach_mul_(metric, factors)
        torch._foreach_add_(metric, group["eps"] / rate)
    steps: Any
    if group["prior"] == CURVATURE:
        curvatures = convert(priors)
        steps = torch._foreach_div(curvatures, torch._foreach_add(curvatures, metric))
    elif squares[0] is None:
        steps = group["prior"] / (group["prior"] + metric)
    else:
        torch._foreach_add_(metric, group["prior"])
        torch._foreach_reciprocal_(metric)
        steps = metric
        torch._foreach_mul_(steps, group["prior"])
    values = [t.to(dtype) for t in targets]
    torch._foreach_lerp_(values, convert(anchors), steps)
    if values[0] is not targets[0]:
        torch._foreach_copy_(targets, values)


def _adam_metric(group: Mapping[str, Any], moments: Mapping[str, Any]) -> Tensor:
    """Return D = √v̂ + ε."""
    squares: Tensor = moments["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    correction = 1 - float(group["betas"][1]) ** float(moments["step"])
    metric: Tensor = (squares.detach().cpu().double() / correction).sqrt() + group["eps"]
    return metric


def _stored(value: Tensor, key: str, group: Mapping[str, Any], i: int) -> Tensor:
    """Convert an anchor or prior to the device and type that store it, with the parameter's memory layout."""
    parameter = group["params"][i]
    if value.shape != parameter.shape:
        raise InputError(
            f"PriorAdamW: the {key} of {_name(group, i)} has shape {tuple(value.shape)}, the parameter "
            f"{tuple(parameter.shape)}"
        )
    dtype = parameter.dtype if key == "anchor" or parameter.dtype == torch.float64 else torch.float32
    device = parameter.device if group["keep_on"] is None else torch.device(group["keep_on"])
    stored = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if (value.dtype, value.device, value.stride()) == (stored.dtype, stored.device, stored.stride()):
        stored = value
    else:
        stored.copy_(value)
    _check_values(stored, key, group, i)
    return stored.pin_memory() if device.type == "cpu" and parameter.device.type == "cuda" else stored


def _check_values(values: Tensor, key: str, group: Mapping[str, Any], i: int) -> None:
    """Raise InputError unless values are finite, and for a prior not negative: the first step would ruin the model."""
    if values.numel() == 0 or values.is_meta:
        return
    low, high = (float(limit) for limit in torch.aminmax(values.detach()))
    if not (math.isfinite(low) and math.isfinite(high)) or (key == "prior" and low < 0):
        what = "negative or not finite" if key == "prior" else "not finite"
        raise InputError(f"{key}: {_name(group, i)} has values that are {what}")


def _name(group: Mapping[str, Any], i: int) -> str:
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i} of its group"


def _can_fuse(p: Tensor) -> bool:
    return type(p) in (Tensor, nn.Parameter) and p.device.type in ("cpu", "cuda") and p.is_contiguous()


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InputError(f"{name}={value}: must be a finite number, at least 0")


def _prior_kind(prior: Prior, damping: float) -> float | str:
    """Return c + damping for a prior c·I, and `CURVATURE` for tensors."""
    if isinstance(prior, str) and prior == "identity":
        return 1.0 + damping
    if isinstance(prior, (int, float)):
        _check_number("prior", prior)
        return float(prior) + damping
    return CURVATURE


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of data parallelism and `torch.compile`, which change parameter names."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        inner = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model
