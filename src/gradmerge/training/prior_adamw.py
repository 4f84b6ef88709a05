"""AdamW with a quadratic penalty towards an anchor, weighted by curvature."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from ..curvature import Curvature
from ..errors import InputError
from ..text import listed
from .named_tensors import AnchorTensors, Reduction, match_parameters, open_anchor, open_prior, trainable
from .penalty_record import write_penalty

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Prior = float | Curvature | Mapping[str, Tensor] | str | Path
Coupling = Literal["decoupled", "adam"]

#: The value of a group's `prior` if H_0 is a tensor per parameter.
CURVATURE = "curvature"
#: The keys of a parameter's state that hold the penalty.
PENALTY_KEYS = ("anchor", "prior")
#: Options that all groups share.
_WHOLE_OPTIMIZER = {"prior", "anchor", "reduction", "damping", "coupling", "keep_on", "keep_dtype"}
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
            A prior or anchor that goes by names needs a model or names. Pass the model if its names differ between
            memory and files, as for ViT in transformers.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, fused: As in torch. Weight decay pulls
            towards zero, with 0.01 by default; set it to 0 to use the penalty alone. If you pass neither ``foreach``
            nor ``fused``, and the strength is not 0, the optimizer uses torch's fused implementation where it can.
        prior: H_0: a `Curvature`, a mapping from names to tensors, the path of a curvature folder, a number c for
            c·I, or ``"identity"``.
        strength: Factor of the penalty. Groups may have different strengths, and they may change during training. If
            the strength of a group is 0, anchor and prior may lack its parameters.
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
        keep_on: Device that stores anchor and H_0. ``"cpu"`` saves GPU memory; each step then copies them to the GPU.
            Default: the parameter's device.
        keep_dtype: Type that stores them, such as ``torch.bfloat16``. By default the anchor has the parameter's type
            and H_0 is float32 (float64 for float64 parameters). Arithmetic is float32 either way.

    Attributes:
        param_groups: As in torch, with ``strength``, ``coupling`` and ``prior`` (a number with damping, or
            ``"curvature"``) of each group.
        state: As in torch. The state dict also has ``anchor`` and ``prior`` of each parameter, so that loading it is
            enough to resume. You can also load a state dict of torch's AdamW; then anchor and prior do not change.

    Example:
        >>> optimizer = gm.PriorAdamW(model, lr=2e-5, weight_decay=0.0, prior="base/curvature", strength=1.0)
        >>> model(**batch).loss.backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
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
        keep_on: str | torch.device | None = None,
        keep_dtype: torch.dtype | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if isinstance(params, str) or not isinstance(params, nn.Module | Iterable):
            raise InputError(f"params: pass a model, its parameters, or groups of them, not {type(params).__name__}")
        check_options(anchor, reduction, coupling, keep_on, keep_dtype)
        self._model = unwrap(params) if isinstance(params, nn.Module) else None
        if self._model is not None and not (params := trainable(self._model)):
            raise InputError(f"{type(self._model).__name__}: no parameter requires a gradient")
        # torch's constructor calls `add_param_group`, which needs these.
        self._penalty: dict[Tensor, dict[str, Tensor]] = {}
        self._keep_on, self._keep_dtype = keep_on, keep_dtype
        self._sources: _Sources | None = _Sources(prior, anchor, reduction, damping)
        self._group_options = {"strength": strength, "coupling": coupling, "prior": prior_kind(prior, damping)}
        super().__init__(
            params,  # type: ignore[arg-type]
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )
        self.defaults |= self._group_options
        if isinstance(prior, Mapping) or isinstance(anchor, Mapping):
            self._sources = None  # do not keep large mappings in memory for groups that may be added later
        self._register_hooks()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch. The anchor of new parameters is their current value, unless ``anchor`` has them."""
        super().add_param_group({**self._group_options, **param_group})
        group = self.param_groups[-1]
        try:
            if unknown := sorted(_WHOLE_OPTIMIZER & param_group.keys()):
                raise InputError(f"param_groups: set {unknown[0]!r} for the whole optimizer, not for a group")
            _check_strength(group["strength"])
            self._penalty |= self._find_penalty(group)
        except BaseException:
            self.param_groups.pop()
            raise
        if group["foreach"] is None and group["fused"] is None and group["strength"] != 0:
            group["fused"] = all(map(_can_fuse, group["params"])) or None

    def _find_penalty(self, group: Mapping[str, Any]) -> dict[Tensor, dict[str, Tensor]]:
        """Return anchor and prior of a group's parameters. With strength 0, some may be missing."""
        params: list[Tensor] = group["params"]
        if any(p.is_complex() for p in params):
            raise InputError("PriorAdamW: complex parameters are not supported. Train real and imaginary parts apart.")
        required = group["strength"] != 0
        sources = self._sources
        if sources is None:
            if required:
                raise InputError(
                    "PriorAdamW: cannot add a group later, because prior or anchor is a mapping that is no longer in "
                    "memory. Pass all groups when you create the optimizer, or pass paths."
                )
            return {}
        found: dict[Tensor, dict[str, Tensor]] = {p: {} for p in params}
        if sources.anchor is None:
            for i, p in enumerate(params):
                found[p]["anchor"] = self._stored("anchor", p.detach().clone(), p)
                if required:
                    check_values("anchor", found[p]["anchor"], parameter_name(group, i), "the current parameters")
        else:
            with open_anchor(sources.anchor) as tensors:
                for p, name, value in self._matched(tensors, group, "an anchor"):
                    found[p]["anchor"] = self._stored("anchor", value.clone(), p)
                    check_values("anchor", found[p]["anchor"], name, tensors.label)
        if group["prior"] == CURVATURE:
            assert not isinstance(sources.prior, (int, float))
            with open_prior(sources.prior, sources.reduction) as tensors:
                for p, name, value in self._matched(tensors, group, "a prior"):
                    # Check twice: damping can hide negative values, and a narrow type can overflow.
                    check_values("prior", value, name, tensors.label)
                    value = value.to(torch.promote_types(value.dtype, torch.float32)) + float(sources.damping)
                    found[p]["prior"] = self._stored("prior", value, p)
                    check_values("prior", found[p]["prior"], name, tensors.label)
        return {p: values for p, values in found.items() if values}

    def _matched(self, tensors: Any, group: Mapping[str, Any], what: str) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Yield (parameter, name, tensor) for the parameters of a group."""
        if group.get("param_names") is None:
            raise InputError(
                f"PriorAdamW: {len(group['params'])} parameters without names, but {what} that goes by names. Pass the "
                "model, or model.named_parameters()."
            )
        named = dict(zip(group["param_names"], group["params"], strict=True))
        optional = group["strength"] == 0
        for name, value in match_parameters(tensors, list(named.items()), self._model, optional=optional):
            yield named[name], name, value

    def _stored(self, key: str, value: Tensor, parameter: Tensor) -> Tensor:
        """Convert a value to the device and type that store it, with the parameter's memory layout."""
        usual = parameter.dtype if key == "anchor" or parameter.dtype == torch.float64 else torch.float32
        device = parameter.device if self._keep_on is None else torch.device(self._keep_on)
        stored = torch.empty_like(parameter, dtype=self._keep_dtype or usual, device=device, requires_grad=False)
        if (value.dtype, value.device, value.stride()) == (stored.dtype, stored.device, stored.stride()):
            stored = value
        else:
            stored.copy_(value)
        return stored.pin_memory() if device.type == "cpu" and parameter.device.type == "cuda" else stored

    def _register_hooks(self) -> None:
        self._hooks = (
            self.register_step_pre_hook(PriorAdamW._before_step),
            self.register_step_post_hook(PriorAdamW._pull),
        )

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Check that anchors and priors are there, and make gradients contiguous for the fused implementation."""
        self._check_penalty()
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._make_gradients_contiguous()
            return None

        def closure_and_layout() -> Any:
            loss = closure()
            self._make_gradients_contiguous()
            return loss

        return (self, closure_and_layout), {}

    def _check_penalty(self) -> None:
        missing: list[str] = []
        for group in self.param_groups:
            if group["strength"] != 0:
                needed = PENALTY_KEYS if group["prior"] == CURVATURE else ("anchor",)
                missing += [
                    parameter_name(group, i)
                    for i, p in enumerate(group["params"])
                    if not all(key in self._penalty.get(p, {}) for key in needed)
                ]
        if missing:
            raise InputError(
                f"PriorAdamW: the strength is not 0, but these parameters have no anchor or prior:\n{listed(missing)}\n"
                "They were missing when the optimizer was created with strength 0. Create a new optimizer."
            )

    def _make_gradients_contiguous(self) -> None:
        # torch's fused CPU kernel ignores strides: it would pair gradients with the wrong weights.
        for group in self.param_groups:
            for p in group["params"] if group["fused"] else ():
                if p.grad is not None and p.grad.layout == torch.strided:
                    p.grad = p.grad.contiguous()

    @torch.no_grad()
    def _pull(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Move all parameters that have a gradient towards their anchors."""
        for group in self.param_groups:
            rate = self._rate(group)
            if isinstance(rate, float) and rate == 0:
                continue
            pieces: dict[tuple[torch.device, torch.dtype], list[_Piece]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    pieces[p.device, p.dtype] += self._pieces(group, p)
            for (device, _), same_kind in pieces.items():
                for batch in _batches(same_kind, 1 if device.type == "cpu" else GPU_CHUNK):
                    _pull_batch(batch, rate, group["prior"], float(group["eps"]))

    def _pieces(self, group: Mapping[str, Any], p: Tensor) -> list[_Piece]:
        """Split a parameter on the CPU into pieces that fit into the cache; return others whole."""
        penalty = self._penalty[p]
        tensors: list[Any] = [p.detach(), penalty["anchor"], penalty.get("prior")]
        correction: Any = None
        if group["coupling"] == "adam":
            state = self.state[p]
            tensors.append(state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"])
            correction = _correction(state["step"], group["betas"][1], p.device)
        else:
            tensors.append(None)
        if p.device.type != "cpu" or not all(t.is_contiguous() for t in tensors if t is not None):
            return [_Piece(*[*tensors, correction])]
        threads = torch.get_num_threads()
        # With two threads, waiting for each other at every piece costs more than they gain.
        size = CPU_CHUNK if threads <= 2 else 2 * CPU_CHUNK * threads
        count = max(1, math.ceil(p.numel() / size))
        parts = [[None] * count if t is None else t.view(-1).split(size) for t in tensors]
        return [_Piece(*[*part, correction]) for part in zip(*parts, strict=True)]

    def _rate(self, group: Mapping[str, Any]) -> float | Tensor:
        """Return lr·strength, or 0 if a gradient scaler makes the fused implementation skip the step."""
        lr, strength = group["lr"], float(group["strength"])
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = float(lr)
        rate: float | Tensor = lr * strength
        skipped = getattr(self, "found_inf", None)
        if not isinstance(skipped, Tensor) or strength == 0:
            return rate
        if skipped.device.type == "cpu":
            return 0.0 if skipped.item() else rate
        return skipped.eq(0) * rate

    def record_penalty(self, folder: str | Path, mean_over: float, model: nn.Module | None = None) -> None:
        """Write the penalty that a saved model was trained with beside it, where `gradmerge merge` looks for it.

        Writes `gradmerge_penalty.json`, and a folder `penalty/` with P if P is not a multiple of the identity.

        Args:
            folder: The folder of the saved model.
            mean_over: How many terms the training loss is a mean of: the number of training examples; for a language
                model, the number of labeled tokens; 1 if the loss is a sum. A merge uses the sum.
            model: The model, if the optimizer was created from parameters, or was copied since.

        >>> optimizer.record_penalty("tuned", mean_over=len(data))  # doctest: +SKIP
        """
        if (model := model if model is not None else self._model) is None:
            raise InputError("record_penalty: needs the names of the model's parameters. Pass model=…")
        state = {p: {**self._penalty.get(p, {}), **self.state.get(p, {})} for p in self._params()}
        write_penalty(Path(folder), self.param_groups, state, unwrap(model), mean_over)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state dict, with anchor and prior of each parameter."""
        result: dict[str, Any] = super().state_dict()
        for i, p in enumerate(self._params()):
            if p in self._penalty:
                result["state"][i] = {**result["state"].get(i, {}), **self._penalty[p]}
        return result

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class, or of torch's AdamW, which keeps the current anchor and prior."""
        ours = ("strength", "coupling", "prior")
        groups = [
            {**{key: group[key] for key in ours}, **saved, "fused": saved.get("fused") or group["fused"]}
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False)
        ]
        groups += state_dict["param_groups"][len(groups) :]  # torch reports the difference
        states = state_dict["state"]
        moments = {i: {k: v for k, v in state.items() if k not in PENALTY_KEYS} for i, state in states.items()}
        penalty = {i: {k: v for k, v in state.items() if k in PENALTY_KEYS} for i, state in states.items()}
        numbers = [number for group in groups for number in group["params"]]
        strengths = [group["strength"] for group in groups if "strength" in group for _ in group["params"]]
        for number, p, strength in zip(numbers, self._params(), strengths, strict=False):
            for key, value in penalty.get(number, {}).items():
                if value.shape != p.shape:
                    raise InputError(
                        f"PriorAdamW: the state dict has other parameters: {key} of parameter {number} has shape "
                        f"{tuple(value.shape)}, the parameter {tuple(p.shape)}"
                    )
                if strength != 0:
                    check_values(key, value, f"parameter {number}", "PriorAdamW: the state dict")
        moments = {number: values for number, values in moments.items() if values}
        super().load_state_dict({**state_dict, "state": moments, "param_groups": groups})
        if any(penalty.values()):
            self._penalty = {
                p: {key: self._stored(key, value, p) for key, value in penalty[number].items()}
                for number, p in zip(numbers, self._params(), strict=True)
                if penalty.get(number)
            }

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """Return what pickling and copying keep. The model, which only finds names, is left out."""
        names = ("_penalty", "_keep_on", "_keep_dtype", "_group_options")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in names}, "_model": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if not hasattr(self, "_hooks"):  # after unpickling; torch also calls this when it loads a state dict
            self._sources = None
            self._register_hooks()


@dataclass(frozen=True)
class _Sources:
    """What the user passed as prior and anchor."""

    prior: Prior
    anchor: AnchorTensors | None
    reduction: Reduction
    damping: float


@dataclass(frozen=True)
class _Piece:
    """A parameter, or a part of one, with the same part of its anchor, prior and squared-gradient average."""

    values: Tensor
    anchor: Tensor
    prior: Tensor | None
    squares: Tensor | None
    """For Adam's metric."""
    correction: float | Tensor | None
    """1 / √(1 − β₂^step), for Adam's metric."""


def _batches(pieces: Sequence[_Piece], size: int) -> Iterator[list[_Piece]]:
    """Group pieces into batches of at most ``size`` elements; a batch has at least one piece."""
    batch: list[_Piece] = []
    elements = 0
    for piece in pieces:
        if batch and elements + piece.values.numel() > size:
            yield batch
            batch, elements = [], 0
        batch.append(piece)
        elements += piece.values.numel()
    if batch:
        yield batch


def _pull_batch(batch: Sequence[_Piece], rate: Any, prior: float | str, eps: float) -> None:
    """Move pieces of the same device and type towards their anchors: θ ← θ + t ⊙ (a − θ).

    With the rate c = lr·strength and the prior H, the step length is t = cH / (1 + cH), or cH / (D + cH) in Adam's
    metric D = √v̂ + ε. Arithmetic is float32 (float64 for float64 parameters); the result is rounded once. No number is
    read back from a GPU.
    """
    first = batch[0].values
    dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
    targets = [piece.values for piece in batch]
    values = [v.to(dtype) for v in targets]
    anchors = [_to(piece.anchor, first.device, dtype) for piece in batch]
    rate = rate.to(first.device, dtype) if isinstance(rate, Tensor) else rate
    metrics: list[Tensor] | None = None
    if batch[0].squares is not None:
        metrics = list(torch._foreach_sqrt([p.squares.to(dtype) for p in batch if p.squares is not None]))
        torch._foreach_mul_(metrics, [_scalar(p.correction, dtype) for p in batch])
        torch._foreach_add_(metrics, eps)
    if prior == CURVATURE:
        priors = [_to(piece.prior, first.device, dtype) for piece in batch if piece.prior is not None]
        if metrics is None:
            steps = torch._foreach_add(priors, 1 / rate)
            steps = torch._foreach_div(priors, steps)
        else:
            steps = torch._foreach_mul(priors, rate)
            torch._foreach_add_(metrics, steps)
            torch._foreach_div_(steps, metrics)
        torch._foreach_lerp_(values, anchors, steps)
    else:
        assert isinstance(prior, (int, float))
        scaled = rate * prior
        if metrics is not None:
            torch._foreach_add_(metrics, scaled)
            torch._foreach_reciprocal_(metrics)
            torch._foreach_mul_(metrics, scaled)
            torch._foreach_lerp_(values, anchors, metrics)
        else:
            step = scaled / (1 + scaled)
            if isinstance(step, Tensor):
                torch._foreach_lerp_(values, anchors, [step.expand_as(v) for v in values])
            else:
                torch._foreach_lerp_(values, anchors, step)
    if values[0] is not targets[0]:
        torch._foreach_copy_(targets, values)


def _to(value: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    # Move first: a copy between devices that also converts is synchronous.
    return value.to(device, non_blocking=device.type != "cpu").to(dtype)


def _scalar(value: float | Tensor | None, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) else value


def _correction(step: Tensor, beta: float | Tensor, device: torch.device) -> float | Tensor:
    """Return 1 / √(1 − β₂^step): a tensor if reading the step count would wait for the GPU."""
    if step.device.type == "cpu" and not isinstance(beta, Tensor):
        return 1 / math.sqrt(1 - beta ** step.item())
    # If a gradient scaler skipped the first step, the count is 0; 1 avoids NaN in a step of length 0.
    wide = step.to(device, torch.float32 if device.type == "mps" else torch.float64).clamp(min=1)
    return (1 - beta**wide).rsqrt()


def _can_fuse(p: Tensor) -> bool:
    return type(p) in (Tensor, nn.Parameter) and p.device.type in ("cpu", "cuda") and p.is_contiguous()


def check_options(anchor: object, reduction: object, coupling: object, keep_on: object, keep_dtype: object) -> None:
    """Raise InputError if an option of the optimizer is invalid."""
    for name, value, known in (("coupling", coupling, Coupling), ("reduction", reduction, Reduction)):
        words = get_args(known)
        if value not in words:
            raise InputError(f'{name}={value!r}: must be "{words[0]}" or "{words[1]}"')
    if keep_dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(
            f"keep_dtype={keep_dtype}: must be torch.bfloat16, torch.float32 or torch.float64 (others lack the range "
            "of curvature)"
        )
    if keep_on is not None:
        try:
            torch.device(keep_on)  # type: ignore[call-overload]
        except (RuntimeError, TypeError) as error:
            raise InputError(f"keep_on={keep_on!r}: not a device of PyTorch") from error
    if not isinstance(anchor, None | Mapping | str | Path):
        raise InputError(
            "anchor: must be None, a mapping from names to tensors or the path of a checkpoint, not "
            f"{type(anchor).__name__}"
        )


def _check_strength(strength: object, name: str = "strength") -> None:
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength < math.inf:
        raise InputError(f"{name}={strength}: must be a finite number, at least 0")


def prior_kind(prior: object, damping: object) -> float | str:
    """Return c + damping for a prior c·I, and `CURVATURE` for tensors. Raise InputError if the prior is invalid."""
    _check_strength(damping, "damping")
    assert isinstance(damping, (int, float))
    if isinstance(prior, str) and prior == "identity":
        return 1.0 + damping
    if isinstance(prior, (int, float)):
        _check_strength(prior, "prior")
        return float(prior) + damping
    if not isinstance(prior, (Mapping, str, Path)):
        raise InputError(
            'prior: must be "identity", a number, a Curvature, a mapping from names to tensors or a path, not '
            f"{type(prior).__name__}"
        )
    return CURVATURE


def check_values(key: str, values: Tensor, name: str, label: str) -> None:
    """Raise InputError unless values are finite, and for a prior not negative: the first step would ruin the model."""
    if values.numel() == 0 or values.is_meta:
        return
    low, high = (float(limit) for limit in torch.aminmax(values.detach()))
    if not (math.isfinite(low) and math.isfinite(high)) or (key == "prior" and low < 0):
        what = "negative or not finite" if key == "prior" else "not finite"
        raise InputError(f"{label}: {name} has values that are {what}; it cannot be the {key}")


def parameter_name(group: Mapping[str, Any], i: int) -> str:
    names = group.get("param_names")
    return str(names[i]) if names else f"parameter {i} of its group"


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of data parallelism and `torch.compile`, which change parameter names."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        inner = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(inner, nn.Module)
        model = inner
    return model
