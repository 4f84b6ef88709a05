"""Estimate curvature: one pass over the data that adds up squared gradients of single examples."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..arguments import check_known
from ..errors import InputError
from ..text import listed
from .accumulate import Accumulator
from .batches import examples_in, indexed, moved
from .checkpoint_names import for_files
from .curvature import Curvature
from .kfac import KroneckerSums
from .kronecker import (
    MAX_KRONECKER_DIM,
    KroneckerCurvature,
    factors_for,
    for_kronecker_files,
    kronecker_of,
    stored_alone,
)
from .losses import ExampleLoss, TokenLoss, check_classes, labels_of, logits_of, loss_named, loss_of
from .offload import reaching
from .parameter_sum import FormulaMismatchError
from .sum_storage import SumStorage
from .verify import Formulas, choose_formulas, shape_of

STRUCTURES = ("diagonal", "kronecker")
LIKELIHOODS = ("empirical", "sampled", "exact")
#: Formulas are verified again on batches of other shapes, up to this number of shapes.
MAX_SHAPES = 4
_log = logging.getLogger(__name__)


class _Keywords(TypedDict, total=False):
    """Options of every structure."""

    output: str | ExampleLoss | None
    seed: int
    device: str | torch.device | None
    each_batch: Callable[[Callable[[], Any]], None] | None
    formulas: Formulas | None
    verify_on: Any
    max_kronecker_dim: int
    storage: SumStorage | None
    allow_empty: bool


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
    each_batch: Callable[[Callable[[], Any]], None] | None = None,
    formulas: Formulas | None = None,
    verify_on: Any = None,
    max_kronecker_dim: int = MAX_KRONECKER_DIM,
    storage: SumStorage | None = None,
    allow_empty: bool = False,
) -> Curvature | KroneckerCurvature:
    """Return Σ_i [∇ℓ_i(θ)]² over the examples of ``batches``; see :func:`gradmerge.estimate_curvature`.

    ``each_batch`` is called after every batch with a function that returns the curvature so far, whose tensors change
    with the next batch. ``formulas`` are those of an earlier estimate of the same model; by default they are verified
    on the first two examples of ``verify_on``, or of the first batch. ``storage`` creates the sums. ``allow_empty``
    returns sums of zeros if there are no examples.
    """
    check_known(f"likelihood {likelihood!r}", likelihood, LIKELIHOODS)
    check_known(f"structure {structure!r}", structure, STRUCTURES)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and p.is_floating_point()}
    if not parameters:
        raise InputError("the model has no parameter with requires_grad=True: there is nothing to estimate")
    target = torch.device(device) if device is not None else next(iter(parameters.values())).device
    objective = Objective(model, likelihood, loss_named(output), seed)
    label = str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
    storage = storage or SumStorage()
    kronecker = structure == "kronecker"
    alone = stored_alone(model) if kronecker else {}
    slow: set[nn.Parameter] = set()

    def one_pass() -> Curvature | KroneckerCurvature:
        nonlocal formulas
        examples, skipped = 0, False
        rows = iter(indexed(batches))
        with prepared(model):
            if formulas is None or not formulas.kinds.keys() >= set(parameters.values()):
                first, rows = _peek(rows) if verify_on is None else (verify_on, rows)
                if first is None:
                    raise InputError("there are no examples to estimate curvature on")
                formulas = choose_formulas(model, parameters.values(), moved(first, target), objective.logits, slow)
                _warn_slow(formulas.slow, parameters)
            wide: list[str] = []
            factors: dict[nn.Parameter, KroneckerSums] = {}
            if kronecker:
                factors, wide = factors_for(model, list(parameters.values()), alone, max_kronecker_dim, storage)
            accumulator = Accumulator(model, formulas, objective.passes, factors, storage)

            def so_far() -> Curvature | KroneckerCurvature:
                objective.check_losses()
                sums = {name: accumulator.sums[p] for name, p in parameters.items()}
                if kronecker:
                    names = for_kronecker_files(model, alone)
                    return kronecker_of(sums, max(1, examples), likelihood, label, wide, names)
                totals = {name: one.total for name, one in sums.items()}
                return Curvature(totals, max(1, examples), likelihood, label, for_files(model))

            with accumulator:
                for first_row, batch in rows:
                    batch = moved(batch, target)
                    if not len(labels_of(batch)):
                        continue
                    known = accumulator.slow
                    shape = shape_of(batch)
                    if shape not in formulas.shapes and len(formulas.shapes) < MAX_SHAPES:
                        accumulator.verify_again(batch, objective.logits, unverified_shapes=skipped)
                    skipped |= shape not in formulas.shapes
                    accumulator.add(batch, first_row)
                    _warn_slow(accumulator.slow - known, parameters)
                    examples += examples_in(batch)
                    if each_batch is not None:
                        each_batch(so_far)
            if not examples and not allow_empty:
                raise InputError("there are no examples to estimate curvature on")
            unused = [name for name, p in parameters.items() if p in factors and not accumulator.sums[p].kinds]
            unused = [name for name in unused if parameters[name] not in accumulator.slow]
            if unused:
                raise InputError(
                    f"no gradient reaches these layers, so they have no Kronecker factors:\n{listed(unused)}\n"
                    "  Freeze them (requires_grad_(False)), or estimate a diagonal."
                )
            return so_far()

    while True:
        try:
            return one_pass()
        except FormulaMismatchError as error:
            names = [name for name, parameter in parameters.items() if parameter in error.parameters]
            message = f"the formula that fitted the first examples does not fit later ones:\n{listed(names)}"
            if isinstance(batches, Iterator):
                raise InputError(
                    f"{message}\nThe batches are a one-shot iterator. Pass a list or a DataLoader: then the estimate "
                    "restarts, with these parameters one example at a time."
                ) from None
            _log.warning("%s\nThe estimate restarts, with these parameters one example at a time.", message)
            slow |= error.parameters
            formulas = None


@reaching
def verify_formulas(model: nn.Module, batch: Any, device: torch.device) -> Formulas:
    """Return formulas that further estimates of the same model can reuse."""
    parameters = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    with prepared(model):
        return choose_formulas(model, parameters, moved(batch, device), lambda inputs: logits_of(model, inputs))


def _peek(rows: Iterator[tuple[int, Any]]) -> tuple[Any, Iterator[tuple[int, Any]]]:
    """Return the first batch with examples, or None, and an iterator over all batches."""
    seen = []
    for index, batch in rows:
        seen.append((index, batch))
        if len(labels_of(moved(batch, torch.device("cpu")))):
            return batch, itertools.chain(seen, rows)
    return None, iter(seen)


def _warn_slow(slow: set[nn.Parameter], parameters: Mapping[str, nn.Parameter]) -> None:
    if names := sorted(name for name, parameter in parameters.items() if parameter in slow):
        _log.warning("no formula gives the exact gradient; one example at a time, which is slow:\n%s", listed(names))


class Objective:
    """The losses of a batch under a likelihood, which backward passes differentiate."""

    def __init__(self, model: nn.Module, likelihood: str, loss: ExampleLoss | None, seed: int) -> None:
        self._model = model
        self._likelihood = likelihood
        self._loss = loss
        self._key = int.from_bytes(hashlib.sha256(f"gradmerge labels {seed}".encode()).digest()[:16], "little")
        self._losses: tuple[int, Tensor] | None = None

    def logits(self, batch: Any) -> Tensor:
        return logits_of(self._model, batch)

    def passes(self, batch: Any, first: int) -> list[Callable[[], Tensor]]:
        """Run the model. Return a function per backward pass, which returns the sum over examples to differentiate."""
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
        """Return random numbers in [0, 1) for one example: its part of one random stream."""
        stream = np.random.PCG64DXSM(self._key)
        stream.advance(example << 32)
        return torch.from_numpy(np.random.Generator(stream).random(count))

    def check_losses(self) -> None:
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
