"""Estimate curvature: one pass over the data that adds up squared gradients of single examples."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..arguments import check_known
from ..errors import InputError
from ..text import listed
from .accumulate import Accumulator, GramAccumulator
from .batches import examples_in, indexed, moved
from .curvature import Curvature
from .format import KINDS
from .kfac import MAX_KRONECKER_DIM
from .losses import ExampleLoss, TokenLoss, check_classes, labels_of, logits_of, loss_named, loss_of
from .offload import input_device, reachable
from .parameter_sum import gradient_handlers
from .per_example_gradients import has_fused_experts
from .verify import choose_formulas

LIKELIHOODS = ("empirical", "sampled", "exact")


def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str = "empirical",
    *,
    kind: str = "diagonal",
    output: str | ExampleLoss | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    each_batch: Callable[[Callable[[], Curvature]], None] | None = None,
    verify_on: Any = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    accumulate_on: str = "device",
) -> Curvature:
    """Return Σ_i [∇ℓ_i(θ)]² over the examples of ``batches``; see :func:`gradmerge.estimate_curvature`.

    ``each_batch`` is called after every batch with a function that returns the curvature so far, whose tensors change
    with the next batch. Formulas are verified on the first two examples of ``verify_on``, or else of the first batch.
    With ``verify_on``, no batches give sums of zeros.
    """
    check_known(f"likelihood {likelihood!r}", likelihood, LIKELIHOODS)
    check_known(f"kind {kind!r}", kind, KINDS)
    with reachable(model):
        parameters = {} if kind == "gram" else trainable(model)
        device = torch.device(device) if device is not None else input_device(model)
        losses, examples = Losses(model, likelihood, loss_named(output), seed), 0
        count = examples_in if kind == "gram" else lambda batch: len(labels_of(batch))
        rows = ((row, batch) for row, batch in _moved(batches, device) if count(batch))
        if verify_on is None:
            first = next(rows, None)
            if first is None:
                raise InputError("there are no examples to estimate curvature on")
            verify_on, rows = first[1], itertools.chain([first], rows)  # type: ignore[assignment]
        with prepared(model):
            accumulator: Accumulator | GramAccumulator
            if kind == "gram":
                accumulator = GramAccumulator(model, accumulate_on)
            else:
                formulas = choose_formulas(model, parameters.values(), moved(verify_on, device), losses.logits)
                max_dim = max_kronecker_dim if kind == "kronecker" else None
                accumulator = Accumulator(model, parameters, formulas, losses.objectives, accumulate_on, max_dim)

            def so_far() -> Curvature:
                losses.check()
                return accumulator.curvature(max(1, examples), likelihood)

            with accumulator:
                for first_row, batch in rows:
                    accumulator.add(batch, first_row)
                    examples += count(batch)
                    if each_batch is not None:
                        each_batch(so_far)
            return so_far()


def estimate_gradient(
    model: nn.Module, batches: Iterable[Any], *, output: str | ExampleLoss | None = None
) -> dict[str, Tensor]:
    """Return Σ_i ∇ℓ_i(θ) over the examples of ``batches``, by parameter name.

    ℓ_i is the negative log-likelihood of example i with the data's label; for a sequence it is the sum over its tokens.
    Sums are float32, or float64 if the model is float64.
    """
    parameters = trainable(model)
    losses, examples = Losses(model, "empirical", loss_named(output), 0), 0
    sums = {
        name: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False)
        for name, p in parameters.items()
    }
    with prepared(model), gradient_handlers({p: sums[name].add_ for name, p in parameters.items()}):
        for row, batch in _moved(batches, input_device(model)):
            if not len(labels_of(batch)):
                continue
            examples += len(labels_of(batch))
            total = losses.objectives(batch, row)[0]()
            if total.requires_grad:
                total.backward()
            losses.check()
    if not examples:
        raise InputError("there are no examples to estimate a gradient on")
    for name, value in sums.items():
        if not bool(torch.isfinite(value).all()):
            raise InputError(f"the gradient of {name} has values that are not finite. Check the model's weights")
    if not any(bool(value.any()) for value in sums.values()):
        raise InputError(
            "the gradient of every parameter is 0: the loss does not depend on the model's weights, or no example has "
            "a label that counts"
        )
    return sums


def _moved(batches: Iterable[Any], device: torch.device) -> Iterator[tuple[int, Any]]:
    """Yield the index of each batch's first example, and the batch on the device."""
    return ((row, moved(batch, device)) for row, batch in indexed(batches))


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        raise InputError("the model has no parameter with requires_grad=True: there is nothing to estimate")
    return parameters


def expert_notes(model: nn.Module, curvature: Curvature) -> list[str]:
    """Return notes on the experts of a model: those without tokens, and weights without Kronecker factors."""
    weights, experts, idle = [], 0, 0
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, p in module._parameters.items() if p is not None]
        sums = [curvature.diagonal[name] for name in names if "expert" in name and name in curvature.diagonal]
        if sums and has_fused_experts(module):
            weights += names
            experts += len(sums[0])
            idle += int((torch.stack([value.reshape(len(value), -1).amax(1) for value in sums]).amax(0) == 0).sum())
    notes = [f"{idle} of {experts} experts received no token and have zero curvature"] if idle else []
    if weights and curvature.kind == "kronecker":
        notes.append(f"fused weights of experts have a diagonal, not Kronecker factors:\n{listed(weights)}")
    return notes


class Losses:
    """The losses of a batch under a likelihood, which backward passes differentiate."""

    def __init__(self, model: nn.Module, likelihood: str, loss: ExampleLoss | None, seed: int) -> None:
        self._model = model
        self._likelihood = likelihood
        self._loss = loss
        self._key = int.from_bytes(hashlib.sha256(f"gradmerge labels {seed}".encode()).digest()[:16], "little")
        self._losses: tuple[int, Tensor] | None = None

    def logits(self, batch: Any) -> Tensor:
        return logits_of(self._model, batch)

    def objectives(self, batch: Any, first: int) -> list[Callable[[], Tensor]]:
        """Run the model. Return one function per backward pass; each returns the sum over examples to differentiate."""
        self.check()
        labels = labels_of(batch)
        loss = self._loss or loss_of(self._model, labels)
        try:
            config = getattr(self._model, "config", None)
            words = getattr(config, "vocab_size", None) if getattr(config, "is_encoder_decoder", False) else None
            if isinstance(loss, TokenLoss) and isinstance(batch, Mapping) and isinstance(words, int):
                check_classes(labels, words, masked=True)  # labels may be the decoder's inputs
            logits = self.logits(batch)
            loss.check(logits.shape, labels)
        except InputError as error:
            raise InputError(f"in the batch that begins with example {first}: {error}") from None
        if self._likelihood == "exact":
            self._losses = first, logits.detach().flatten(1).abs().amax(1)  # a sum of masked classes may overflow
            return [lambda s=s: (logits * s).sum() for s in loss.factors(logits)]  # type: ignore[misc]
        if self._likelihood == "sampled":
            labels = loss.draw(logits.detach(), labels, lambda row, n: self._uniform(first + row, n))
        losses = loss.losses(logits, labels)
        self._losses = first, losses.detach()
        return [losses.sum]

    def _uniform(self, example: int, count: int) -> Tensor:
        """Return random numbers in [0, 1) for one example: its part of one random stream."""
        stream = np.random.PCG64DXSM(self._key)
        stream.advance(example << 32)
        return torch.from_numpy(np.random.Generator(stream).random(count))

    def check(self) -> None:
        """Raise InputError if a loss of the last batch is not finite. Called late, so that a GPU need not wait."""
        if self._losses is None:
            return
        first, losses = self._losses
        self._losses = None
        finite = losses.isfinite()
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise InputError(
                f"example {first + row} (counted from 0): the loss is {float(losses[row])}. Check this example, the "
                "model's weights, and whether dtype is too narrow for the model."
            )


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, with no parameter that requires a gradient; restore everything at the end."""
    _check_batch_norm(model)
    with contextlib.ExitStack() as stack, torch.enable_grad():
        modes = [(module, module.training) for module in model.modules()]
        for module, training in modes:
            stack.callback(setattr, module, "training", training)
        model.eval()
        for module, _ in modes:
            if getattr(module, "gradient_checkpointing", False):
                _keep_checkpointing(module, stack)
            if getattr(module, "inplace", False) is True:
                stack.callback(setattr, module, "inplace", True)
                module.inplace = False  # type: ignore[assignment]
        for parameter in model.parameters():
            stack.callback(parameter.requires_grad_, parameter.requires_grad)
            parameter.requires_grad_(False)
        yield


def _keep_checkpointing(module: nn.Module, stack: contextlib.ExitStack) -> None:
    """Keep gradient checkpointing, which transformers does in training mode only, without dropout.

    The caller of the layer sees it in training mode; inside, it is in eval mode. Reentrant checkpoints do not give
    gradients of single parameters, which slow parameters need.
    """
    if hasattr(module, "_gradient_checkpointing_func"):
        stack.callback(setattr, module, "_gradient_checkpointing_func", module._gradient_checkpointing_func)
        function: Any = functools.partial(checkpoint, use_reentrant=False)
        module._gradient_checkpointing_func = function
    module.training = True
    inside = module.register_forward_pre_hook(lambda *_: setattr(module, "training", False))
    outside = module.register_forward_hook(lambda *_: setattr(module, "training", True), always_call=True)
    stack.callback(inside.remove)
    stack.callback(outside.remove)


def _check_batch_norm(model: nn.Module) -> None:
    mixing = [
        name or type(module).__name__
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
    ]
    if mixing:
        raise InputError(
            "batch normalization uses the mean of the batch, so no example has its own gradient:\n"
            f"{listed(mixing)}\n  Call model.eval() first, which uses the running statistics."
        )
