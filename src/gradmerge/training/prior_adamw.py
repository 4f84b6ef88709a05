"""AdamW with a quadratic penalty towards an anchor, weighted by curvature."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..curvature import Curvature
from ..errors import InputError
from ..text import listed
from .anchors import AnchorSource, Reduction, find, open_anchor, open_prior, trainable
from .prior_kernels import Moments, Pull, pull

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]
Prior = None | float | Curvature | Mapping[str, Tensor] | str | Path
Coupling = Literal["decoupled", "adam"]

#: What a parameter's state holds beside Adam's moments.
_KEPT = ("anchor", "prior")
#: Options of a group that torch's AdamW does not have.
_OPTIONS = ("strength", "coupling", "prior", "keep_on", "keep_dtype")
#: Where anchor and prior of a group come from. Not kept in the group.
_SOURCES = ("prior", "anchor", "reduction", "damping")
#: What a group's `prior` says when H_0 is in the state of its parameters.
_CURVATURE = "curvature"


class PriorAdamW(torch.optim.AdamW):
    r"""AdamW with the penalty ½·strength·‖θ − θ_base‖²_{H_0}, under which fine-tuned models merge as the method assumes.

    Gradient matching takes every model to be θ_t = argmin ℓ_t(θ) + ½‖θ − θ_base‖²_{H_0}. This is `torch.optim.AdamW` with
    that penalty: after Adam's step, and apart from its moments, each parameter goes towards its anchor θ_base,

        θ ← (θ + lr·strength·H_0 ⊙ θ_base) / (1 + lr·strength·H_0)

    which is an implicit step of gradient descent on the penalty: it never overshoots, however large H_0 is. Parameters
    without a gradient are left alone, as they are by weight decay. With ``strength=0`` this is torch's AdamW to the last bit.

        optimizer = gm.PriorAdamW(model, lr=2e-5, weight_decay=0.0, prior="base/curvature", strength=1.0)

    Args:
        params: A model, of which the parameters that require a gradient are trained; ``model.named_parameters()``; tensors;
            or groups of them. A prior or anchor that goes by names needs the model, or names. Only with the model are
            names found that differ between memory and files, as those of ViT in transformers do.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: As in torch. Weight decay
            pulls towards zero, with torch's default of 0.01; set it to 0 for the penalty alone. When neither ``foreach`` nor
            ``fused`` is given and the strength is not 0, torch's fused implementation is used wherever it can be.
        prior: H_0. ``"identity"``, or a number c for c·I: weight decay around the anchor. A `Curvature`, a mapping from
            names to tensors, or the path of a curvature folder. ``None``: no H_0 and no implicit step, but AdamW's own
            decay around the anchor, θ ← θ − lr·strength·(θ − θ_base) before Adam's step: AdamW in the coordinates θ − θ_base.
        strength: Factor of the penalty; an option of groups, which may change during training.
        anchor: θ_base: a state dict or the path of a checkpoint. By default the parameters as they are now.
        reduction: How a `Curvature` or a curvature folder is read. The method's penalty belongs to the **sum** of the losses
            of N examples. A training loss is usually their mean, the sum divided by N, and the penalty must be divided too:
            H_0/N. ``"mean"`` divides the curvature by the number of examples that *it* was measured on, M. With a mean
            loss, ``strength`` M/N and ``"mean"`` (or 1/N and ``"sum"``) is the penalty of H_0 = the sum; with as many
            examples in both, that is strength 1. A plain mapping is used as it is.
        damping: δ ≥ 0, added to H_0.
        coupling: ``"decoupled"`` is the step above, as AdamW's weight decay is one. Adam divides the gradient of the loss by
            D = √v̂ + ε but the penalty's is not divided, so training comes to rest where the *normalised* gradient balances
            the penalty: strength is then in units of Adam's steps, and the best value differs from the one in the formula
            of the penalty. ``"adam"`` solves the penalty in Adam's metric,

                θ ← (D ⊙ θ + lr·strength·H_0 ⊙ θ_base) / (D + lr·strength·H_0)

            and comes to rest where the gradients of loss and penalty add up to 0: the minimiser that the method speaks of.
        keep_on: Device where anchor and H_0 are kept, such as ``"cpu"`` to save memory of a GPU, to which they are sent in
            every step. By default the parameter's.
        keep_dtype: Type in which they are kept, such as ``torch.bfloat16``. By default the anchor has the parameter's, and
            H_0 is float32 (float64 for float64 parameters). Arithmetic is float32 either way.

    Groups may have ``strength``, ``coupling``, ``prior``, ``anchor``, ``reduction``, ``damping``, ``keep_on`` and
    ``keep_dtype`` of their own. In a group whose strength is 0 when it is made, parameters may be missing in anchor and prior.

    Anchor and H_0 are in the state dict (``anchor`` and ``prior`` of a parameter), which is all that resuming needs: loading
    it restores them, whatever the parameters were when the optimizer was made. A state dict of torch's AdamW can be
    loaded too; then anchor and prior stay as they were made. ``param_groups[i]["prior"]`` says which kind there is: None,
    a number (damping included), or ``"curvature"``.
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
        anchor: AnchorSource | None = None,
        reduction: Reduction = "mean",
        damping: float = 0.0,
        coupling: Coupling = "decoupled",
        keep_on: str | torch.device | None = None,
        keep_dtype: torch.dtype | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        # torch's constructor calls `add_param_group`, which needs these.
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        self._options: dict[str, Any] = {
            "strength": strength, "coupling": coupling, "keep_on": keep_on, "keep_dtype": keep_dtype,
        }  # fmt: skip
        self._sources: dict[str, Any] = {
            "prior": prior, "anchor": anchor, "reduction": reduction, "damping": damping,
        }  # fmt: skip
        self._model = _unwrapped(params) if isinstance(params, nn.Module) else None
        super().__init__(
            _trained(params) if isinstance(params, nn.Module) else params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        self.defaults |= self._options
        # A large mapping should not stay in memory for groups that may never come.
        self._sources |= {k: _Gone() for k in ("prior", "anchor") if isinstance(self._sources[k], Mapping)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the anchor is by default what the parameters are now."""
        group = dict(param_group)
        source = {key: group.pop(key, self._sources[key]) for key in _SOURCES}
        group = {**self._options, **group}
        _check(group, source)
        group["keep_on"] = None if group["keep_on"] is None else str(group["keep_on"])
        group["prior"] = _kind_of(source["prior"], float(source["damping"]))
        super().add_param_group(group)
        try:
            self._keep(self.param_groups[-1], source)
        except BaseException:
            self.param_groups.pop()
            raise

    def _keep(self, group: dict[str, Any], source: Mapping[str, Any]) -> None:
        """Take anchor and prior of a new group's parameters."""
        params: list[Tensor] = group["params"]
        _refuse_complex(params)
        optional = group["strength"] == 0
        kept: list[dict[str, Tensor]] = [{} for _ in params]
        if source["anchor"] is None:
            for i, (p, values) in enumerate(zip(params, kept, strict=True)):
                values["anchor"] = _placed("anchor", p.detach().clone(), p, group)
                if not optional:
                    _refuse_unusable("anchor", values["anchor"], _name(group, i), "the parameters as they are")
        else:
            named = _named(group, "an anchor")
            place = {name: i for i, (name, _) in enumerate(named)}
            with open_anchor(source["anchor"]) as tensors:
                for name, value in find(tensors, named, self._model, optional=optional):
                    i = place[name]
                    kept[i]["anchor"] = _placed("anchor", value.clone(), params[i], group)
                    _refuse_unusable("anchor", kept[i]["anchor"], name, tensors.label)
        if group["prior"] == _CURVATURE:
            named = _named(group, "a prior")
            place = {name: i for i, (name, _) in enumerate(named)}
            with open_prior(source["prior"], source["reduction"]) as tensors:
                for name, value in find(tensors, named, self._model, optional=optional):
                    i = place[name]
                    _refuse_unusable("prior", value, name, tensors.label)
                    wide = value.to(torch.promote_types(value.dtype, torch.float32))
                    kept[i]["prior"] = _placed("prior", wide + float(source["damping"]), params[i], group)
                    _refuse_unusable("prior", kept[i]["prior"], name, tensors.label)
        self._kept |= {p: values for p, values in zip(params, kept, strict=True) if values}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adam's step, then the pull towards the anchor."""
        chosen = [(group, group["fused"]) for group in self.param_groups]
        try:
            # Not `super().step`: torch may have put hooks around it, which would run a second time.
            loss = _unhooked(torch.optim.AdamW.step)(self, closure)
        finally:
            for group, fused in chosen:
                group["fused"] = fused
        for group in self.param_groups:
            if group["prior"] is not None:
                self._pull(group)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Called by torch between the closure and the step of a group: state is made, and the explicit decay goes first."""
        params = [p for p in group["params"] if p.grad is not None]
        if group["foreach"] is None and group["fused"] is None:
            group["fused"] = True if group["strength"] != 0 and self._can_fuse(group, params) else None
            self._move_steps(group, params)
        result = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for p in params:
            if p in self._kept:
                self.state[p].update(self._kept.pop(p))
        self._require(group)
        if group["prior"] is None:
            self._pull(group)
        return result

    def _require(self, group: Mapping[str, Any]) -> None:
        """Refuse a step of which the penalty has nothing to go by, before anything is changed."""
        if group["strength"] == 0:
            return
        needed = _KEPT if group["prior"] == _CURVATURE else ("anchor",)
        bare = [
            i
            for i, p in enumerate(group["params"])
            if p.grad is not None and not all(k in self.state[p] for k in needed)
        ]
        if bare:
            raise InputError(
                f"PriorAdamW: strength {group['strength']:g}, but these have no {' or no '.join(needed)}:\n"
                f"{listed(_name(group, i) for i in bare)}\nThey were missing when the optimizer was made with strength 0, or the "
                "optimizer's state has been cleared. Make a new optimizer."
            )

    def _can_fuse(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> bool:
        if group["differentiable"] or torch.compiler.is_compiling():
            return False
        # torch's fused kernels do not look at strides: on a CPU they silently mix up entries that lie in another order.
        return all(
            type(p) in (Tensor, nn.Parameter)
            and p.device.type in ("cpu", "cuda")
            and p.grad is not None
            and p.grad.layout == torch.strided
            and p.grad.dtype == p.dtype
            and p.is_contiguous()
            and p.grad.is_contiguous()
            and all(v.is_contiguous() for k, v in self.state.get(p, {}).items() if k not in ("step", *_KEPT))
            for p in params
        )

    def _move_steps(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """The fused implementation wants its steps on the device, in float32; the others are quicker with them on the CPU."""
        for p in params:
            step = self.state[p].get("step") if p in self.state else None
            if step is None:
                continue
            if group["fused"]:
                self.state[p]["step"] = step.to(p.device, torch.float32)
            elif not group["capturable"]:
                self.state[p]["step"] = step.cpu()

    def _pull(self, group: Mapping[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if group["strength"] == 0 or not params:
            return
        rate = self._rate(group)
        if isinstance(rate, float) and rate == 0:
            return
        with torch.set_grad_enabled(bool(group["differentiable"])):
            pulls = [self._one(p, group) for p in params]
            pull(pulls, rate, foreach=group["foreach"], plain=bool(group["differentiable"]))

    def _one(self, p: Tensor, group: Mapping[str, Any]) -> Pull:
        state = self.state[p]
        prior = state["prior"] if group["prior"] == _CURVATURE else group["prior"]
        if group["coupling"] != "adam":
            return Pull(p, state["anchor"], prior)
        squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
        return Pull(p, state["anchor"], prior, Moments(squares, state["step"], group["betas"][1], group["eps"]))

    def _rate(self, group: Mapping[str, Any]) -> float | Tensor:
        """lr·strength, or 0 where a gradient scaler had the fused implementation skip the step."""
        lr: float | Tensor = group["lr"]
        strength = float(group["strength"])
        found = getattr(self, "found_inf", None)
        if isinstance(found, Tensor) and found.device.type == "cpu":
            if found.item():
                return 0.0
            found = None
        if isinstance(lr, Tensor) and lr.device.type == "cpu" and not group["differentiable"]:
            lr = float(lr)
        if isinstance(found, Tensor):
            return found.eq(0) * (lr.to(found.device) if isinstance(lr, Tensor) else lr) * strength
        return lr * strength

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with anchors and priors, before the first step too."""
        result: dict[str, Any] = super().state_dict()
        for i, p in enumerate(self._params()):
            if p in self._kept:
                result["state"][i] = {**result["state"].get(i, {}), **self._kept[p]}
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, with anchors and priors where they are in it. They keep their own place and type."""
        groups = [
            {**{key: mine[key] for key in _OPTIONS}, **theirs}
            for mine, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False)
        ]
        groups += state_dict["param_groups"][len(groups) :]
        loaded: dict[Any, dict[str, Tensor]] = {}
        moments: dict[Any, Any] = {}
        for i, state in state_dict["state"].items():
            loaded[i] = {key: state[key] for key in _KEPT if key in state}
            if rest := {key: value for key, value in state.items() if key not in _KEPT}:
                moments[i] = rest
        own = {p: self._kept.get(p) or {k: v for k in _KEPT if (v := self.state.get(p, {}).get(k)) is not None}
               for p in self._params()}  # fmt: skip
        numbers = [i for group in groups for i in group["params"]]
        pairs = list(zip(numbers, own, strict=False))
        wrong = [
            f"parameter {i}: {key} {tuple(value.shape)}, where the parameter has {tuple(p.shape)}"
            for i, p in pairs
            for key, value in loaded.get(i, {}).items()
            if value.shape != p.shape
        ]
        if wrong:
            raise InputError(f"PriorAdamW: the state dict is of other parameters:\n{listed(wrong)}")
        for i in (i for group in groups if group["strength"] != 0 for i in group["params"]):
            for key, value in loaded.get(i, {}).items():
                _refuse_unusable(key, value, f"parameter {i}", "PriorAdamW: the state dict")
        super().load_state_dict({**state_dict, "state": moments, "param_groups": groups})
        plain = not any(loaded.values())
        self._kept = {}
        group_of = {p: group for group in self.param_groups for p in group["params"]}
        for i, p in pairs:
            values = own[p] if plain else loaded.get(i, {})
            placed = {key: _placed(key, value, p, group_of[p]) for key, value in values.items()}
            if self.state.get(p):
                self.state[p].update(placed)
            elif placed:
                self._kept[p] = placed

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying; the model, needed only to find names for further groups, stays behind."""
        own = {"_kept": self._kept, "_options": self._options, "_sources": self._sources, "_model": None}
        return {**super().__getstate__(), **own}


class _Gone:
    """A mapping that was used when the optimizer was made, and let go of."""


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without what data parallelism and `torch.compile` put around a model, and into the names of its parameters."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        inside = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(inside, nn.Module)
        model = inside
    return model


def _trained(model: nn.Module) -> list[tuple[str, Tensor]]:
    named = trainable(_unwrapped(model))
    if not named:
        raise InputError(f"{type(model).__name__}: no parameter of it requires a gradient")
    return named


def _kind_of(prior: Any, damping: float) -> float | str | None:
    """What a group says of its prior: None, a number, or that it is in the state."""
    if prior is None:
        if damping:
            raise InputError(f"damping={damping:g} is added to the prior, but prior=None. Leave one of them out.")
        return None
    if isinstance(prior, str) and prior == "identity":
        prior = 1.0
    if isinstance(prior, (int, float)):
        if not (0 <= prior < math.inf):
            raise InputError(f"prior={prior}: as a number, it is at least 0 and finite")
        return float(prior) + damping
    if isinstance(prior, _Gone):
        raise InputError(
            'a further group needs a "prior" of its own (a mapping, a Curvature, a path or a number): the mapping that the '
            "optimizer was made with is not kept"
        )
    if not isinstance(prior, (Mapping, str, Path)):
        raise InputError(
            f'prior: None, "identity", a number, a Curvature, a mapping from names to tensors or a path, not {type(prior).__name__}'
        )
    return _CURVATURE


def _check(group: Mapping[str, Any], source: Mapping[str, Any]) -> None:
    for name, number in (("strength", group["strength"]), ("damping", source["damping"])):
        if not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise InputError(f"{name}={number}: a number, at least 0 and finite")
    if group["coupling"] not in ("decoupled", "adam"):
        raise InputError(f'coupling={group["coupling"]!r}: "decoupled" or "adam"')
    if group["coupling"] == "adam" and source["prior"] is None:
        raise InputError('coupling="adam" solves a penalty with an H_0, but prior=None. Use prior="identity".')
    if source["reduction"] not in ("mean", "sum"):
        raise InputError(f'reduction={source["reduction"]!r}: "mean" or "sum"')
    if group["keep_dtype"] not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise InputError(
            f"keep_dtype={group['keep_dtype']}: torch.bfloat16, torch.float32 or torch.float64 (others lack the range of curvature)"
        )
    if isinstance(source["anchor"], _Gone):
        raise InputError(
            'a further group needs an "anchor" of its own (a mapping or a path, or None for the parameters as they are now): '
            "the mapping that the optimizer was made with is not kept"
        )
    if group["keep_on"] is not None:
        try:
            torch.device(group["keep_on"])
        except (RuntimeError, TypeError) as error:
            raise InputError(f"keep_on={group['keep_on']!r}: not a device of PyTorch") from error


def _refuse_complex(params: Sequence[Tensor]) -> None:
    if any(p.is_complex() for p in params):
        raise InputError(
            "PriorAdamW: complex parameters are not supported. Train their real and imaginary parts apart."
        )


def _named(group: Mapping[str, Any], what: str) -> list[tuple[str, Tensor]]:
    names = group.get("param_names")
    if names is None:
        raise InputError(
            f"PriorAdamW: {len(group['params'])} parameters without names, but {what} that goes by names. Give the model, or "
            "model.named_parameters()."
        )
    return list(zip(names, group["params"], strict=True))


def _name(group: Mapping[str, Any], i: int) -> str:
    return (group.get("param_names") or {i: f"parameter {i} of its group"})[i]  # type: ignore[no-any-return]


def _refuse_unusable(key: str, value: Tensor, name: str, label: str) -> None:
    """Anchors are finite, and curvature is not negative either: anything else would reach every weight in the first step."""
    if value.numel() == 0 or value.is_meta:
        return
    low, high = (float(limit) for limit in torch.aminmax(value.detach()))
    if not (math.isfinite(low) and math.isfinite(high)) or (key == "prior" and low < 0):
        what = "negative or not finite" if key == "prior" else "not finite"
        raise InputError(f"{label}: {name} has values that are {what}; PriorAdamW cannot take it as {key}")


def _placed(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Tensor:
    """Where and as the group says it is kept, laid out as the parameter is."""
    usual = parameter.dtype if key == "anchor" or parameter.dtype == torch.float64 else torch.float32
    dtype = group["keep_dtype"] or usual
    device = parameter.device if group["keep_on"] is None else torch.device(group["keep_on"])
    kept = torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if (value.dtype, value.device, value.stride()) == (dtype, kept.device, kept.stride()):
        kept = value
    else:
        kept.copy_(value)
    return kept.pin_memory() if kept.device.type == "cpu" and parameter.device.type == "cuda" else kept


def _unhooked(step: Any) -> Any:
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
