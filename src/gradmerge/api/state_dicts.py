"""Merge state dicts in memory, with the same rules, checks and arithmetic as on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..arguments import checked
from ..checkpoints.checkpoint import STORED_TYPES, Checkpoint
from ..curvature.curvature import Curvature
from ..engine.executor import LocalExecutor
from ..engine.inputs import CurvatureInput
from ..engine.jobs import MergedBlock, torch_type
from ..engine.plan import inputs_of, make_plan
from ..engine.statistics import compute_mean_curvature, compute_statistics
from ..errors import InputError
from ..recipe import NONE, Recipe, make_recipe, reduction_factor
from ..rules import METHODS, Rule
from .merge import check_device, number_of_threads

CurvatureLike = Mapping[str, Tensor] | float


@checked("base", "tuned", "prior", "curvature", "penalty")
def merge_state_dicts(
    base: Mapping[str, Tensor] | None,
    tuned: Sequence[Mapping[str, Tensor]],
    method: str | Rule = "gradient-matching",
    *,
    prior: CurvatureLike | None = None,
    curvature: Sequence[CurvatureLike] | None = None,
    penalty: CurvatureLike | str | None = None,
    weights: Sequence[float] | None = None,
    base_weight: float | None = None,
    damping: float | str = "auto",
    reduction: str | Mapping[str, float] = "sum",
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    missing: str = "error",
    options: Mapping[str, Any] | None = None,
    threads: int | None = None,
    device: str = "cpu",
    allow_code: bool = False,
    allow_nonfinite: bool = False,
) -> dict[str, Tensor]:
    """Merge state dicts in memory, with the same rules, checks and arithmetic as on disk.

    Curvature is a :class:`Curvature`, a mapping from names to tensors, or a number c for c · I.

    Args:
        base: The base model; None for methods that need none.
        tuned: One state dict per fine-tuned model.
        method: A name (see `gradmerge methods`), a function with ``@rule``, or the path of a Python file with one.
        prior: The curvature of the base.
        curvature: The curvature of each fine-tuned model; for ``regmean``, Gram matrices.
        penalty: P, the penalty matrix used in training, for ``gradient-matching`` and ``removal``; "none" for training
            without a penalty. Default: P = H_0, the prior plus damping.
        weights: One weight per fine-tuned model, by default 1.
        base_weight: The weight of the base, for ``weighted-average``.
        damping: δ, added to the prior, or for methods without a prior to the curvature of every model. "auto": the mean
            over all entries of Σ F_t for ``removal``, and 1e-10 for other methods; in layers with Kronecker curvature a
            fifth of the layer's mean.
        reduction: How to read a :class:`Curvature`: the "sum" over its examples, the "mean", or {"mean_times": N}.
            Tensors and numbers are used unchanged.
        include, exclude: Glob patterns of tensors to merge; others are copied from the base.
        missing: "error", or "zero": a tensor that the curvature lacks is an error, or has curvature 0.
        options: Options of the method.
        threads: Threads, by default one per core and at most 4.
        device: Device of the arithmetic: cpu, cuda, cuda:1, …
        allow_code: Run the Python file that ``method`` names.
        allow_nonfinite: Continue if weights are NaN or infinite.

    Returns:
        The merged model, with the names, types and devices of the base (or of the first model).

    >>> base, a, b = ({"w": torch.tensor([x])} for x in (0.0, 1.0, 2.0))
    >>> merge_state_dicts(base, [a, b], "task-arithmetic", weights=[0.5, 1.0])
    {'w': tensor([2.5000])}
    """
    method = _method_name(method) if isinstance(method, Rule) else method
    _check_state_dicts(base, tuned)
    check_device(device)
    if isinstance(damping, str) and damping != "auto":
        raise InputError(f"damping must be a number or 'auto', not {damping!r}")
    weights = [1.0] * len(tuned) if weights is None else weights
    if len(weights) != len(tuned):
        raise InputError(f"weights: has {len(weights)} numbers for {len(tuned)} fine-tuned models")
    description: dict[str, Any] = {
        "method": method,
        "models": [{"model": f"tuned[{i}]", "weight": w} for i, w in enumerate(weights)],
        "damping": damping,
        "reduction": reduction,
        "include": list(include),
        "exclude": list(exclude),
        "missing": missing,
        "options": dict(options or {}),
    }
    if base is not None:
        if isinstance(penalty, str) and penalty != NONE:
            raise InputError(f"penalty: {penalty!r} is not a curvature; the only valid word is {NONE!r}")
        source = penalty if penalty is None or isinstance(penalty, str) else "penalty"
        description["base"] = {"model": "base", "weight": base_weight, "penalty": source}
    elif base_weight is not None:
        raise InputError("base_weight: applies only with a base")
    recipe = make_recipe(description, where="merge_state_dicts", allow_code=allow_code)
    opened = [Checkpoint(f"tuned[{i}]", memory=_contiguous(state)) for i, state in enumerate(tuned)]
    inputs = inputs_of(recipe, Checkpoint("base", memory=_contiguous(base)) if base is not None else None, opened)
    needs = recipe.rule.needs(inputs.options)
    if "prior" in needs:
        inputs.prior = _in_memory(prior, "prior", recipe, method)
    if penalty is not None:
        matrix = _in_memory(0.0 if isinstance(penalty, str) else penalty, "penalty", recipe, method)
        inputs.penalty = [matrix] * len(tuned)
    if needs & {"curvature", "grams"}:
        if curvature is None or isinstance(curvature, Mapping) or len(curvature) != len(tuned):
            raise InputError(f"curvature: {method} needs one for each of the {len(tuned)} fine-tuned models")
        inputs.curvature = [_in_memory(c, f"curvature[{i}]", recipe, method) for i, c in enumerate(curvature)]
    plan = make_plan(recipe, inputs)
    plan.device, plan.allow_nonfinite = torch.device(device), allow_nonfinite
    infos = {name: info for job in plan.jobs for name, info in job.tensors.items()}
    output = StateDictOutput({name: torch.empty(info.shape, dtype=torch_type(info)) for name, info in infos.items()})
    executor = LocalExecutor(number_of_threads(threads))
    compute_mean_curvature(plan, executor)
    plan.statistics = compute_statistics(plan, executor)
    executor.merge(plan, plan.blocks(), output)
    template = base if base is not None else tuned[0]
    return {name: value.to(template[name].device) for name, value in output.tensors.items()}


@dataclass
class StateDictOutput:
    """Takes merged blocks into tensors of their final size."""

    tensors: dict[str, Tensor]

    def put(self, merged: MergedBlock) -> None:
        for name, values in merged.tensors.items():
            self.tensors[name].view(-1)[merged.start : merged.start + len(values)] = values


def _method_name(rule: Rule) -> str:
    """Return the name of a function with @rule, which is added to the methods if it is new."""
    try:
        return rule.name if METHODS.get(rule.name) is rule else METHODS.add(rule).name
    except (TypeError, ValueError) as error:
        raise InputError(f"method: {error}") from error


def _check_state_dicts(base: Any, tuned: Any) -> None:
    if isinstance(tuned, Mapping) or not isinstance(tuned, Sequence) or not tuned:
        raise InputError("tuned: give a list of state dicts, one per fine-tuned model")
    states = {"base": {} if base is None else base} | {f"tuned[{i}]": state for i, state in enumerate(tuned)}
    for label, state in states.items():
        if not isinstance(state, Mapping):
            raise InputError(
                f"{label}: {type(state).__name__} is not a state dict; give a mapping from names to tensors"
            )
        for name, value in state.items():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            if kind not in STORED_TYPES:
                raise InputError(f"{label}: {name!r} is {kind}, not a tensor that can be merged or copied")


def _contiguous(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().contiguous() for name, value in state.items()}


def _in_memory(value: CurvatureLike | None, label: str, recipe: Recipe, method: str) -> CurvatureInput:
    if value is None:
        raise InputError(
            f"{label}: {method} needs it: a Curvature, a mapping from names to tensors, or a number c for c · I"
        )
    if isinstance(value, Mapping):
        if not isinstance(value, Curvature):
            return CurvatureInput(label, memory=value)
        factor = reduction_factor(recipe.reduction, value.examples)
        return CurvatureInput(
            label, memory=value, factor=factor, tokens=value.tokens, kind=value.kind, transposed=value.transposed
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise InputError(f"{label}: {value} is not a curvature; give a finite number that is not negative")
    return CurvatureInput(label, constant=float(value))
