"""AdamW with a quadratic penalty towards an anchor, weighted by curvature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..text import listed
from . import prior_options as prior_inputs
from .named_tensors import AnchorTensors, Reduction, trainable
from .penalty_record import write_penalty
from .prior_kernels import Moments, Pull, pull
from .prior_options import CURVATURE, KEPT, Coupling, Gone, Prior, placed

Params = nn.Module | Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


class PriorAdamW(torch.optim.AdamW):
    """AdamW with the penalty ½·strength·‖θ − θ_base‖²_{H_0}, under which fine-tuned models merge as the method assumes.

    Gradient matching takes every model to be θ_t = argmin ℓ_t(θ) + ½‖θ − θ_base‖²_{H_0}. This is `torch.optim.AdamW`
    with that penalty. After Adam's step, and apart from its moments, each parameter goes towards its anchor θ_base:

        θ ← (θ + lr·strength·H_0 ⊙ θ_base) / (1 + lr·strength·H_0)

    This is an implicit step of gradient descent on the penalty: it never overshoots, however large H_0 is. Parameters
    without a gradient are left alone, as by weight decay. With ``strength=0`` it is torch's AdamW to the last bit.

    Args:
        params: A model, whose parameters that require a gradient are trained; ``model.named_parameters()``; tensors;
            or groups of them. For a prior or anchor that goes by names, give the model, or names. Only the model will
            do if its names differ between memory and files, as those of ViT in transformers do.
        lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, differentiable, fused: As in torch. Weight
            decay pulls towards zero, by default with 0.01; set it to 0 for the penalty alone. If neither ``foreach``
            nor ``fused`` is given and the strength is not 0, torch's fused implementation is used wherever it can be.
        prior: H_0: a `Curvature`, a mapping from names to tensors, the path of a curvature folder, a number c for c·I,
            or ``"identity"``. ``None`` is AdamW's own decay, around the anchor: θ ← θ − lr·strength·(θ − θ_base),
            explicit and before Adam's step.
        strength: Factor of the penalty; an option of groups, which may change during training.
        anchor: θ_base: a state dict or the path of a checkpoint. By default the parameters as they are now.
        reduction: How a `Curvature` or a curvature folder is read: ``"mean"`` divides it by the number M of examples
            that it was estimated on, ``"sum"`` does not. A plain mapping is used as it is. A recipe's default is
            `sum`, because a merge deals with the **sum** of the losses of N examples; a training loss is usually their
            mean, and then the penalty must be divided by N too. With a mean loss,
            ``"mean"`` and ``strength`` M/N, or ``"sum"`` and 1/N, give the penalty of the method.
        damping: δ ≥ 0, added to H_0.
        coupling: ``"decoupled"`` is the step above, decoupled as AdamW's weight decay is. Adam divides the gradient of
            the loss by D = √v̂ + ε, and not that of the penalty: training comes to rest where the *normalised* gradient
            balances the penalty, and strength is in units of Adam's steps. ``"adam"`` solves the penalty in Adam's
            metric, θ ← (D ⊙ θ + lr·strength·H_0 ⊙ θ_base) / (D + lr·strength·H_0), and comes to rest where the
            gradients of loss and penalty add up to 0: at the minimiser that the method speaks of.
        keep_on: Device where anchor and H_0 are kept. ``"cpu"`` saves memory of a GPU, to which they are then sent in
            every step. By default the parameter's.
        keep_dtype: Type in which they are kept, such as ``torch.bfloat16``. By default the anchor has the parameter's,
            and H_0 is float32 (float64 for float64 parameters). Arithmetic is float32 either way.

    Groups may have ``strength``, ``coupling``, ``prior``, ``anchor``, ``reduction``, ``damping``, ``keep_on`` and
    ``keep_dtype`` of their own. If the strength of a group is 0 when it is made, anchor and prior may lack parameters.

    Attributes:
        param_groups: As in torch, with the group's options. ``"prior"`` says which kind there is: None, a number
            (damping included), or ``"curvature"``.
        state: As in torch. Anchor and H_0 are in the state dict (``anchor`` and ``prior`` of a parameter), which is all
            that resuming needs: loading it restores them, whatever the parameters were when the optimizer was made.
            A state dict of torch's AdamW can be loaded too; then anchor and prior stay as they were made.

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
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        # torch's constructor calls `add_param_group`, which needs these.
        self._kept: dict[Tensor, dict[str, Tensor]] = {}
        # Options of a group beside torch's, and where its anchor and prior come from, which the group does not keep.
        self._options = {"strength": strength, "coupling": coupling, "keep_on": keep_on, "keep_dtype": keep_dtype}
        self._given: dict[str, Any] = {"prior": prior, "anchor": anchor, "reduction": reduction, "damping": damping}
        self._model = _unwrapped(params) if isinstance(params, nn.Module) else None
        if isinstance(params, str) or not isinstance(params, nn.Module | Iterable):
            raise InputError(f"params: a model, its parameters, or groups of them, not {type(params).__name__}")
        if self._model is not None and not (params := trainable(self._model)):
            raise InputError(f"{type(self._model).__name__}: no parameter of it requires a gradient")
        flags: dict[str, Any] = {"maximize": maximize, "foreach": foreach, "fused": fused}
        flags |= {"capturable": capturable, "differentiable": differentiable}
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **flags)  # type: ignore[arg-type]
        self.defaults |= self._options
        # A large mapping should not stay in memory for groups that may never come.
        self._given |= {k: Gone() for k in ("prior", "anchor") if isinstance(self._given[k], Mapping)}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the anchor is by default what the parameters are now."""
        group = {**self._options, **param_group}
        given = {key: group.pop(key, usual) for key, usual in self._given.items()}
        group["prior"] = prior_inputs.check_options({**group, **given})
        group["keep_on"] = None if group["keep_on"] is None else str(group["keep_on"])
        super().add_param_group(group)
        try:
            self._kept |= prior_inputs.kept_tensors(self.param_groups[-1], given, self._model)
        except BaseException:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Adam's step, then the pull towards the anchor."""
        chosen = [(group, group["fused"]) for group in self.param_groups]
        # Not `super().step`: torch may have put hooks around it, which would run a second time.
        adams: Any = torch.optim.AdamW.step
        while getattr(adams, "hooked", False):
            adams = adams.__wrapped__
        try:
            loss = adams(self, closure)
        finally:
            for group, fused in chosen:
                group["fused"] = fused
        for group in self.param_groups:
            if group["prior"] is not None:
                self._pull(group)
        return loss

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """torch calls it between the closure and the step of a group. It makes state, and decays explicitly."""
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
        """Refuse a step without the anchor or prior that the penalty needs, before anything is changed."""
        if group["strength"] == 0:
            return
        needed = KEPT if group["prior"] == CURVATURE else ("anchor",)
        bare = [
            prior_inputs.parameter_name(group, i)
            for i, p in enumerate(group["params"])
            if p.grad is not None and not all(key in self.state[p] for key in needed)
        ]
        if bare:
            raise InputError(
                f"PriorAdamW: strength {group['strength']:g}, but these have no {' or no '.join(needed)}:\n"
                f"{listed(bare)}\nThey were missing when the optimizer was made with strength 0, or the optimizer's "
                "state has been cleared. Make a new optimizer."
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
            and all(v.is_contiguous() for k, v in self.state.get(p, {}).items() if k not in ("step", *KEPT))
            for p in params
        )

    def _move_steps(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> None:
        """The fused implementation wants step counts on the device, in float32; others are quicker with the CPU's."""
        for p in params:
            state = self.state.get(p, {})
            if "step" in state and group["fused"]:
                state["step"] = state["step"].to(p.device, torch.float32)
            elif "step" in state and not group["capturable"]:
                state["step"] = state["step"].cpu()

    def _pull(self, group: Mapping[str, Any]) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        if group["strength"] == 0 or not params:
            return
        rate = self._rate(group)
        if isinstance(rate, float) and rate == 0:
            return
        pulls = []
        for p in params:
            state, moments = self.state[p], None
            if group["coupling"] == "adam":
                squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
                moments = Moments(squares, state["step"], group["betas"][1], group["eps"])
            prior = state["prior"] if group["prior"] == CURVATURE else group["prior"]
            pulls.append(Pull(p, state["anchor"], prior, moments))
        with torch.set_grad_enabled(bool(group["differentiable"])):
            pull(pulls, rate, foreach=group["foreach"], plain=bool(group["differentiable"]))

    def _rate(self, group: Mapping[str, Any]) -> float | Tensor:
        """lr·strength, or 0 where a gradient scaler had the fused implementation skip the step."""
        lr, strength = group["lr"], float(group["strength"])
        skipped = getattr(self, "found_inf", None)
        if isinstance(lr, Tensor) and lr.device.type == "cpu" and not group["differentiable"]:
            lr = float(lr)
        rate: float | Tensor = lr * strength
        if not isinstance(skipped, Tensor):
            return rate
        if skipped.device.type == "cpu":
            return 0.0 if skipped.item() else rate
        return skipped.eq(0) * (rate.to(skipped.device) if isinstance(rate, Tensor) else rate)

    def record_penalty(self, folder: str | Path, mean_over: float, model: nn.Module | None = None) -> None:
        """Record beside a saved model what it was tuned under, where merges look for it.

        Writes `gradmerge_penalty.json`, and where P is no multiple of the identity a folder `penalty/` with it.

        Args:
            folder: Where the model was saved.
            mean_over: How many terms the training loss is a mean of: the number of training examples, for a language
                model that of the tokens with a label; 1 if it is a sum. A merge deals with the sum.
            model: The model, if the optimizer was made with parameters, or has been copied since.

        >>> optimizer.record_penalty("tuned", mean_over=len(data))  # doctest: +SKIP
        """
        if (model := model if model is not None else self._model) is None:
            raise InputError("record_penalty: names of parameters are those of the model: pass model=…")
        kept = {p: {**self._kept.get(p, {}), **self.state.get(p, {})} for p in self._params()}
        write_penalty(Path(folder), self.param_groups, kept, _unwrapped(model), mean_over)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with anchors and priors, before the first step too."""
        result: dict[str, Any] = super().state_dict()
        for i, p in enumerate(self._params()):
            if p in self._kept:
                result["state"][i] = {**result["state"].get(i, {}), **self._kept[p]}
        return result

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, with anchors and priors where they are in it. They keep their own place and type."""
        groups = list(state_dict["param_groups"])
        for i, mine in enumerate(self.param_groups[: len(groups)]):
            groups[i] = {**{key: mine[key] for key in (*self._options, "prior")}, **groups[i]}
        states = state_dict["state"].items()
        loaded = {number: _kept_of(state) for number, state in states}
        rest = {number: {key: v for key, v in state.items() if key not in KEPT} for number, state in states}
        moments = {number: values for number, values in rest.items() if values}
        own = {p: self._kept.get(p) or _kept_of(self.state.get(p, {})) for p in self._params()}
        numbers = [number for group in groups for number in group["params"]]
        pairs = list(zip(numbers, own, strict=False))
        wrong = [
            f"parameter {number}: {key} {tuple(value.shape)}, where the parameter has {tuple(p.shape)}"
            for number, p in pairs
            for key, value in loaded.get(number, {}).items()
            if value.shape != p.shape
        ]
        if wrong:
            raise InputError(f"PriorAdamW: the state dict is of other parameters:\n{listed(wrong)}")
        for number in (number for group in groups if group["strength"] != 0 for number in group["params"]):
            for key, value in loaded.get(number, {}).items():
                prior_inputs.refuse_unusable(key, value, f"parameter {number}", "PriorAdamW: the state dict")
        super().load_state_dict({**state_dict, "state": moments, "param_groups": groups})
        if any(loaded.values()):
            own = {p: loaded.get(number, {}) for number, p in pairs}
        self._kept = {}
        for group in self.param_groups:
            for p in group["params"]:
                values = {key: placed(key, value, p, group) for key, value in own[p].items()}
                if self.state.get(p):
                    self.state[p].update(values)
                elif values:
                    self._kept[p] = values

    def _params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def __getstate__(self) -> dict[str, Any]:
        """For pickling and copying; the model, needed only to find names for further groups, stays behind."""
        own = {"_kept": self._kept, "_options": self._options, "_given": self._given, "_model": None}
        return {**super().__getstate__(), **own}


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without what data parallelism and `torch.compile` put around a model, and into the names of its parameters."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) or hasattr(model, "_orig_mod"):
        inside = model._orig_mod if hasattr(model, "_orig_mod") else model.module
        assert isinstance(inside, nn.Module)
        model = inside
    return model


def _kept_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: state[key] for key in KEPT if key in state}
