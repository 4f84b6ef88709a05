"""The gradient of a model's loss on a dataset: Σ_i ∇ℓ_i over the examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..text import listed
from .batches import indexed, moved
from .estimate import Objective, prepared
from .losses import ExampleLoss, labels_of, logits_of, loss_named
from .parameter_sum import gradient_handlers

#: How far a parameter without a gradient is moved to see whether the output depends on it, relative to its size.
NUDGE = 2**-6


def estimate_gradient(
    model: nn.Module, batches: Iterable[Any], *, output: str | ExampleLoss | None = None
) -> dict[str, Tensor]:
    """Return Σ_i ∇ℓ_i(θ) over the examples of ``batches``, by parameter name.

    ℓ_i is the negative log-likelihood of example i with the data's label; for a sequence it is the sum over its tokens.
    The model is in eval mode during the estimate. Sums are float32, or float64 if the model is float64. Raises
    InputError if a parameter gets no gradient although the model's output depends on it.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        raise InputError("the model has no parameter with requires_grad=True: there is no gradient to estimate")
    device = next(iter(parameters.values())).device
    objective = Objective(model, "empirical", loss_named(output), 0)
    dtypes = {name: torch.promote_types(p.dtype, torch.float32) for name, p in parameters.items()}
    sums = {name: torch.zeros_like(p, dtype=dtypes[name], requires_grad=False) for name, p in parameters.items()}
    unreached = set(parameters)

    def handler(name: str) -> Callable[[Tensor], None]:
        def add(gradient: Tensor) -> None:
            sums[name] += gradient
            unreached.discard(name)

        return add

    first = None
    with prepared(model), gradient_handlers({p: handler(name) for name, p in parameters.items()}):
        for row, batch in indexed(batches):
            batch = moved(batch, device)
            if not len(labels_of(batch)):
                continue
            first = batch if first is None else first
            total = objective.passes(batch, row)[0]()
            if total.requires_grad:
                total.backward()
            objective.check_losses()
        if first is None:
            raise InputError("there are no examples to estimate a gradient on")
        if unreached:
            _check_unused(model, {name: parameters[name] for name in parameters if name in unreached}, first)
    for name, value in sums.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"the gradient of {name} has values that are not finite. Check the model's weights")
    if not any(bool(value.any()) for value in sums.values()):
        raise InputError(
            "the gradient of every parameter is 0: the loss does not depend on the model's weights, or no example has "
            "a label that counts"
        )
    return sums


def _check_unused(model: nn.Module, parameters: Mapping[str, nn.Parameter], batch: Any) -> None:
    """Raise if the output depends on parameters that got no gradient, for example because of a ``detach``."""
    with torch.no_grad():
        before = logits_of(model, batch)
        tolerance = 1e-3 * NUDGE * float(before.abs().max())

        def changes_output(names: Iterable[str]) -> bool:
            saved = {name: parameters[name].detach().clone() for name in names}
            try:
                for name, value in saved.items():
                    parameters[name].add_(NUDGE * (value.abs() + value.abs().mean().nan_to_num() + NUDGE))
                change = (logits_of(model, batch) - before).abs().max()
                return not bool(change <= tolerance)
            finally:
                for name, value in saved.items():
                    parameters[name].copy_(value)

        if changes_output(parameters):
            cut = [name for name in parameters if changes_output([name])]
            raise InputError(
                "these parameters get no gradient, although the model's output depends on them:\n"
                f"{listed(cut or parameters)}\nSomething between them and the loss stops the gradient (detach, "
                "no_grad, rounding). Fix that, or leave them out with requires_grad=False."
            )
