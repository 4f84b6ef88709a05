"""Estimating curvature: a pass over data that adds up squared gradients of single examples."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..arguments import check_known
from ..errors import InputError
from ..text import listed
from .accumulate import Accumulator
from .batches import examples_in, moved, with_places
from .checkpoint_names import for_files
from .curvature import Curvature
from .kfac import KroneckerSums
from .kronecker import (
    MAX_KRONECKER_DIM,
    KroneckerCurvature,
    factors_for,
    for_kronecker_files,
    go_on,
    kronecker_of,
    stored_alone,
)
from .losses import ExampleLoss, TokenLoss, check_classes, labels_of, logits_of, loss_named, loss_of
from .offload import reaching
from .parameter_sum import Distrusted
from .together import Together
from .totals import Keeping
from .verify import Trial

STRUCTURES = ("diagonal", "kronecker")
LIKELIHOODS = ("empirical", "sampled", "exact")
_log = logging.getLogger(__name__)


class _Keywords(TypedDict, total=False):
    """Options whatever the structure."""

    output: str | ExampleLoss | None
    seed: int
    device: str | torch.device | None
    start: Curvature | KroneckerCurvature | None
    each_batch: Callable[[Callable[[], Any]], None] | None
    trial: Trial | None
    max_kronecker_dim: int
    keeping: Keeping | None
    together: Together | None


@overload
def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str = ...,
    *,
    structure: Literal["kronecker"],
    **options: Unpack[_Keywords],
) -> KroneckerCurvature: ...
@overload
def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str = ...,
    *,
    structure: Literal["diagonal"] = ...,
    **options: Unpack[_Keywords],
) -> Curvature: ...
@overload
def estimate_curvature(
    model: nn.Module, batches: Iterable[Any], likelihood: str = ..., *, structure: str, **options: Unpack[_Keywords]
) -> Curvature | KroneckerCurvature: ...
@reaching
def estimate_curvature(
    model: nn.Module,
    batches: Iterable[Any],
    likelihood: str = "empirical",
    *,
    structure: str = "diagonal",
    output: str | ExampleLoss | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    start: Curvature | KroneckerCurvature | None = None,
    each_batch: Callable[[Callable[[], Any]], None] | None = None,
    trial: Trial | None = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    keeping: Keeping | None = None,
    together: Together | None = None,
) -> Curvature | KroneckerCurvature:
    """Σ_i [∇ℓ_i(θ)]² over the examples of ``batches``; :func:`gradmerge.estimate_curvature` explains the arguments.

    How the sums come about: :mod:`gradmerge.curvature.accumulate`. ``device`` is where batches are moved to,
    by default where the model is. Of many calls with one ``trial``, only the first tries out on two examples which
    formula fits each layer; the others check that now and then. ``keeping`` says where the sums are kept; those so far
    that ``each_batch`` is given are then the sums themselves, and change with the next batch. ``together`` are the
    processes that estimate it, each on batches of its own; all of them get the sums of all.
    """
    check_known(f"likelihood {likelihood!r}", likelihood, LIKELIHOODS)
    check_known(f"structure {structure!r}", structure, STRUCTURES)
    loss = loss_named(output)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        raise InputError("the model has no parameter with requires_grad=True: there is nothing to estimate")
    place = torch.device(device) if device is not None else next(iter(parameters.values())).device
    objective = Objective(model, likelihood, loss, seed)
    begun = start.examples if start is not None else 0
    kronecker, keeping, together = structure == "kronecker", keeping or Keeping(), together or Together()
    alone = stored_alone(model) if kronecker else {}

    def so_far(copy: bool = True) -> Curvature | KroneckerCurvature:
        objective.check_losses()
        label = _label_of(model)
        found = {name: accumulator.sums[p] for name, p in parameters.items()}
        # Sums that are kept elsewhere are many: they are copied only where those of processes are added to the copy.
        copy &= keeping.plain or together.processes.count > 1
        copied = keeping.copied if copy else (lambda total: total)
        if kronecker:
            stored = for_kronecker_files(model, alone)
            return kronecker_of(found, max(1, examples), likelihood, label, wide, stored, copied)
        sums = {name: copied(one.total) for name, one in found.items()}
        return Curvature(sums, max(1, examples), likelihood, label, for_files(model))

    trial = trial if trial is not None else Trial()
    tried, slow = trial.examples > 0, set[nn.Parameter]()
    every, passes = list(parameters.values()), objective.passes
    while True:
        examples = begun
        try:
            factors, wide = factors_for(model, every, alone, max_kronecker_dim, keeping) if kronecker else ({}, [])
            if start is not None:
                _check_start(start, structure, likelihood, parameters, factors)
            factors = together.same_factors(factors, parameters) if kronecker else factors
            accumulator = Accumulator(model, every, passes, objective.logits, trial, slow, factors, keeping)
            for name, value in _diagonal_of(start).items():
                if bool(value.any()):
                    accumulator.sums[parameters[name]].add(functools.partial(_add_to, value))
            together.begin({name: accumulator.sums[p] for name, p in parameters.items()})
            with prepared(model), accumulator:
                for first, batch in with_places(batches, begun):
                    batch = moved(batch, place)
                    if not len(labels_of(batch)):
                        continue
                    accumulator.add(batch, first)
                    examples += examples_in(batch)
                    _name_slow(accumulator.slow, parameters, trial.told)
                    if each_batch is not None:
                        each_batch(so_far)
                    together.after_batch(so_far, examples)
                together.at_end(so_far, examples)
            break
        except Distrusted as error:
            doubted = together.distrusted(error, parameters)
            names = [name for name, parameter in parameters.items() if parameter in doubted]
            _check_repeatable(batches, start, names, examples)
            if tried:
                warning = "earlier estimates with this trial may be wrong for these parameters:\n%s"
                _log.warning(warning, listed(names))
            slow |= doubted
    if not any(together.processes.gather(examples)):
        raise InputError("there are no examples to estimate curvature on")
    unused = [name for name, p in parameters.items() if p in factors and not accumulator.sums[p].used]
    if unused:
        what = "no gradient has reached these layers on any example, so that they have no Kronecker factors"
        raise InputError(
            f"{what}:\n{listed(unused)}\n  Freeze what is not trained (requires_grad_(False)), or estimate a diagonal."
        )
    return together.added(so_far(copy=False), examples)


def _diagonal_of(start: Curvature | KroneckerCurvature | None) -> Mapping[str, Tensor]:
    """The sums of squares to begin with; factors begin with their own."""
    if isinstance(start, KroneckerCurvature):
        return start.diagonal
    return start or {}


def _add_to(value: Tensor, total: Tensor) -> None:
    total += value.to(total)


def _label_of(model: nn.Module) -> str:
    return str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)


def _check_start(
    start: Curvature | KroneckerCurvature,
    structure: str,
    likelihood: str,
    parameters: Mapping[str, nn.Parameter],
    factors: dict[nn.Parameter, KroneckerSums],
) -> None:
    """Raise unless it is of such a model; Kronecker factors begin with those of ``start``."""
    if isinstance(start, KroneckerCurvature) is not (structure == "kronecker"):
        raise InputError(f"structure {structure}: a {type(start).__name__} cannot be gone on from")
    if isinstance(start, KroneckerCurvature):
        fits = go_on(start, parameters, factors)
    else:
        fits = {n: value.shape for n, value in start.items()} == {n: p.shape for n, p in parameters.items()}
    if start.likelihood != likelihood or not fits:
        raise InputError("the curvature to go on from is of another model, or of another likelihood")


def _check_repeatable(
    batches: Iterable[Any], start: Curvature | KroneckerCurvature | None, names: Collection[str], examples: int
) -> None:
    """Say that the sums so far may be wrong, and raise unless the estimate can begin again."""
    found = (
        f"the formula that fitted the first examples does not fit those from {examples} on (counted from 0), "
        f"and may not have fitted some before:\n{listed(names)}"
    )
    if isinstance(batches, Iterator):
        raise InputError(
            f"{found}\nThe batches can be gone through only once. Give a list or a DataLoader, and these parameters "
            "are estimated from the beginning, one example at a time."
        )
    if start is not None and any(bool(value.any()) for value in start.values()):
        again = "The sums to go on from have them too: estimate from the beginning, without --resume."
        raise InputError(f"{found}\n{again}")
    _log.warning("%s\nAll is estimated again from the beginning, these one example at a time.", found)


class Objective:
    """What is differentiated: the losses of a batch, under a likelihood."""

    def __init__(self, model: nn.Module, likelihood: str, loss: ExampleLoss | None, seed: int) -> None:
        self._model = model
        self._likelihood = likelihood
        self._loss = loss
        self._key = int.from_bytes(hashlib.sha256(f"gradmerge labels {seed}".encode()).digest()[:16], "little")
        self._losses: tuple[int, Tensor] | None = None

    def logits(self, batch: Any) -> Tensor:
        return logits_of(self._model, batch)

    def passes(self, batch: Any, first: int) -> list[Callable[[], Tensor]]:
        """Run the model; per backward pass, a function that gives the sum over examples to differentiate."""
        self.check_losses()
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
        """Numbers in [0, 1) that belong to one example of the data: a stretch of one stream of random numbers."""
        stream = np.random.PCG64DXSM(self._key)
        stream.advance(example << 32)
        return torch.from_numpy(np.random.Generator(stream).random(count))

    def check_losses(self) -> None:
        """Raise if a loss of the last batch was not finite. Looked at late, so that a GPU need not wait."""
        if self._losses is None:
            return
        first, losses = self._losses
        self._losses = None
        finite = losses.isfinite()
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise InputError(
                f"example {first + row} (counted from 0): the loss is {float(losses[row])}. Look at this example, "
                "at the model's weights, and whether --dtype is too narrow for the model."
            )


@contextlib.contextmanager
def prepared(model: nn.Module) -> Iterator[None]:
    """The model without dropout, with no parameter asking for a gradient; everything as before at the end."""
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
    """Let a layer of transformers recompute its activations, which it does in training mode only, with dropout off.

    Its caller sees the layer in training mode, the layer itself does not. Reentrant checkpoints do not give gradients
    of single parameters, which slow parameters need.
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
            "batch normalisation takes its mean from the batch, so that no example has a gradient of its own:\n"
            f"{listed(mixing)}\n  Call model.eval() first, so that the running statistics are used."
        )


def _name_slow(slow: set[nn.Parameter], parameters: Mapping[str, nn.Parameter], told: set[str]) -> None:
    names = {name for name, parameter in parameters.items() if parameter in slow} if slow else set()
    if names - told:
        _log.warning(
            "estimated one example at a time, which is slow, because no formula gives the exact gradient:\n%s",
            listed(sorted(names - told)),
        )
    told |= names
