"""The loss of an example, by what a model's output means; labels drawn from the model, and expectations over them.

The loss ℓ of an example is its negative log-likelihood, up to a constant:

- :class:`ClassLoss`: −log softmax(z)_y, one label of C.
- :class:`LabelsLoss`: Σ_k −log of a Bernoulli with logit z_k, the labels being independent.
- :class:`SquaredLoss`: Σ_k (z_k − y_k)², the likelihood of a Gaussian with variance ½.
- :class:`TokenLoss`: Σ_t −log softmax(z_t)_{y_t} over the tokens that are not masked.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..arguments import check_known
from ..errors import InputError

#: The label of what does not count, in PyTorch and transformers.
MASKED = -100

Uniform = Callable[[int, int], Tensor]
"""(row of the batch, n) → n numbers in [0, 1) that belong to that example."""


class ExampleLoss(ABC):
    """What a model's output means: how logits and labels of a batch give each example's loss."""

    name: str

    @abstractmethod
    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """ℓ_i, one number per example."""

    def terms(self, labels: Tensor) -> int:
        """Return how many terms the losses of a batch sum up. The training loss of transformers is their mean."""
        return labels.numel()

    @abstractmethod
    def draw(self, logits: Tensor, labels: Tensor, uniform: Uniform) -> Tensor:
        """Return labels drawn from the model, at the positions of the data's."""

    @abstractmethod
    def factors(self, logits: Tensor) -> Iterator[Tensor]:
        """Yield vectors s_k(i) with Σ_k s_k s_kᵀ = E_y[∇_z ℓ ∇_z ℓᵀ] for logits z. Each takes a backward pass."""

    @abstractmethod
    def check(self, logits_shape: torch.Size, labels: Tensor) -> None:
        """Raise InputError with the row and the reason if the labels do not fit the logits."""


class ClassLoss(ExampleLoss):
    """One label of C."""

    name = "classes"

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(_wide(logits), labels, reduction="none")

    def draw(self, logits: Tensor, labels: Tensor, uniform: Uniform) -> Tensor:
        numbers = torch.cat([uniform(row, 1) for row in range(len(logits))])
        return _draw(logits, numbers.to(logits.device))

    def factors(self, logits: Tensor) -> Iterator[Tensor]:
        # diag(p) − ppᵀ has rank C−1. Deciding class by class, "is it k, given that it is none before", factors it:
        # s_k = √(p_k q_k⁺/q_k) (e_k − p_j/q_k⁺ for j > k), with q_k = Σ_{j≥k} p_j and q_k⁺ = Σ_{j>k} p_j.
        p = _wide(logits).detach().double().softmax(-1)
        tails = p.flip(-1).cumsum(-1).flip(-1)
        for k in range(p.shape[-1] - 1):
            now, after = tails[:, k : k + 1], tails[:, k + 1 : k + 2]
            factor = torch.zeros_like(p)
            factor[:, k + 1 :] = -p[:, k + 1 :] / after.clamp(min=torch.finfo(p.dtype).tiny)
            factor[:, k] = 1
            scale = (p[:, k : k + 1] * after / now.clamp(min=torch.finfo(p.dtype).tiny)).sqrt()
            yield (factor * scale).to(logits.dtype)

    def check(self, logits_shape: torch.Size, labels: Tensor) -> None:
        if len(logits_shape) != 2 or labels.shape != logits_shape[:1]:
            raise _misfit(labels, logits_shape, "one class per example")
        check_classes(labels, logits_shape[-1], masked=False)


class LabelsLoss(ExampleLoss):
    """Several independent yes-or-no labels."""

    name = "labels"

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = _wide(logits)
        return F.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype), reduction="none").sum(-1)

    def draw(self, logits: Tensor, labels: Tensor, uniform: Uniform) -> Tensor:
        numbers = torch.stack([uniform(row, logits.shape[-1]) for row in range(len(logits))])
        return (numbers.to(logits.device) < _wide(logits).sigmoid()).to(labels.dtype)

    def factors(self, logits: Tensor) -> Iterator[Tensor]:
        p = _wide(logits).detach().sigmoid()
        yield from _columns((p * (1 - p)).sqrt().to(logits.dtype))

    def check(self, logits_shape: torch.Size, labels: Tensor) -> None:
        if labels.shape != logits_shape or len(logits_shape) != 2:
            raise _misfit(labels, logits_shape, "a 0 or 1 for each label")
        wrong = ((labels != 0) & (labels != 1)).any(-1)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise InputError(f"row {row}: labels of a multi-label model are 0 or 1, not {labels[row].tolist()}")


class SquaredLoss(ExampleLoss):
    """Numbers, with the squared error as loss."""

    name = "squared"

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = _wide(logits)
        return (logits - labels.to(logits.dtype).reshape(logits.shape)).square().flatten(1).sum(-1)

    def draw(self, logits: Tensor, labels: Tensor, uniform: Uniform) -> Tensor:
        numbers = torch.stack([uniform(row, logits[0].numel()) for row in range(len(logits))])
        # The inverse of the Gaussian's distribution function: one uniform number, one draw.
        normal = math.sqrt(2) * torch.erfinv(numbers.double().clamp(1e-12, 1 - 1e-12) * 2 - 1)
        drawn = _wide(logits) + math.sqrt(0.5) * normal.to(logits.device).reshape(logits.shape)
        return drawn.detach().reshape(labels.shape)

    def factors(self, logits: Tensor) -> Iterator[Tensor]:
        yield from _columns(torch.full_like(logits, math.sqrt(2)).detach())

    def check(self, logits_shape: torch.Size, labels: Tensor) -> None:
        if labels.numel() != math.prod(logits_shape) or len(labels) != logits_shape[0]:
            raise _misfit(labels, logits_shape, "one number for each output", of="outputs")
        if not bool(labels.double().isfinite().all()):
            raise InputError("a label is NaN or infinite")


class TokenLoss(ExampleLoss):
    """A label for every token, ``MASKED`` where it does not count. With ``shift``, it is the next token's."""

    def __init__(self, shift: bool) -> None:
        self.shift = shift
        self.name = "next-token" if shift else "tokens"

    def aligned(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits that count, and the label of each."""
        return (logits[:, :-1], labels[:, 1:]) if self.shift else (logits, labels)

    def terms(self, labels: Tensor) -> int:
        return int((labels[:, 1:] if self.shift else labels).ne(MASKED).sum())

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = self.aligned(logits, labels)
        flat = F.cross_entropy(_wide(logits).flatten(0, 1), labels.flatten(), ignore_index=MASKED, reduction="none")
        return flat.view(labels.shape).sum(-1)

    def draw(self, logits: Tensor, labels: Tensor, uniform: Uniform) -> Tensor:
        aligned, targets = self.aligned(logits, labels)
        counts = (targets != MASKED).sum(-1).tolist()
        # The n-th number of an example belongs to its n-th token that counts, wherever padding has put it.
        numbers = torch.cat([uniform(row, count) for row, count in enumerate(counts)]).to(logits.device)
        drawn, places = targets.clone(), targets != MASKED
        drawn[places] = _draw(aligned[places], numbers)
        return torch.cat([labels[:, :1], drawn], 1) if self.shift else drawn

    def factors(self, logits: Tensor) -> Iterator[Tensor]:
        raise InputError(
            "likelihood exact sums over every possible label of an example; the labels of a sequence of tokens are "
            "too many (vocabulary to the power of length). Use likelihood sampled, which draws them from the model."
        )

    def check(self, logits_shape: torch.Size, labels: Tensor) -> None:
        if len(logits_shape) != 3 or labels.shape != logits_shape[:2]:
            raise _misfit(labels, logits_shape, "a label for each token")
        check_classes(labels, logits_shape[-1], masked=True)


LOSSES: Mapping[str, ExampleLoss] = {
    loss.name: loss for loss in (ClassLoss(), LabelsLoss(), SquaredLoss(), TokenLoss(True), TokenLoss(False))
}


def loss_named(output: str | ExampleLoss | None) -> ExampleLoss | None:
    """Return a loss by its name. A loss, or None, is returned unchanged."""
    if isinstance(output, str):
        check_known(f"output {output!r}", output, LOSSES)
    return LOSSES[output] if isinstance(output, str) else output


def loss_of(model: nn.Module, labels: Tensor) -> ExampleLoss:
    """Return the loss that a model of transformers trains with; for other modules, the one that fits the labels."""
    inner = unwrapped(model)
    name, config = type(inner).__name__, getattr(inner, "config", None)
    numbers, rows = labels.is_floating_point(), labels.dim() > 1
    known = {"regression": "squared", "single_label_classification": "classes", "multi_label_classification": "labels"}
    loss = "squared" if numbers else "tokens" if rows else "classes"
    if config is not None:
        if name.endswith(("ForCausalLM", "LMHeadModel")):
            loss = "next-token"
        elif name.endswith(("ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification", "ForSeq2SeqLM")):
            loss = "tokens"
        elif getattr(config, "problem_type", None) in known:
            loss = known[config.problem_type]
        elif "Classification" in name and getattr(config, "num_labels", 2) == 1:
            loss = "squared"
        elif "Classification" in name:
            loss = "labels" if numbers or labels.dim() == 2 else "classes"
    return LOSSES[loss]


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model of transformers inside a PEFT model, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model


def decoder_inputs(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return decoder inputs made of the labels, for an encoder-decoder model whose batch has none."""
    inner = unwrapped(model)
    prepare = getattr(inner, "prepare_decoder_input_ids_from_labels", None)
    has_decoder = getattr(getattr(inner, "config", None), "is_encoder_decoder", False)
    if not has_decoder or prepare is None or "decoder_input_ids" in batch or "labels" not in batch:
        return {}
    return {"decoder_input_ids": prepare(labels=batch["labels"])}


def logits_of(model: nn.Module, batch: Any) -> Tensor:
    """Run the model on a batch (see :mod:`gradmerge.curvature.batches`) without its labels, and return the logits."""
    if isinstance(batch, Mapping):
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        inputs |= decoder_inputs(model, batch)
        config = getattr(unwrapped(model), "config", None)
        if getattr(config, "use_cache", None) is not None:
            inputs.setdefault("use_cache", False)
        result = model(**inputs)
    else:
        result = model(*batch[:-1])
    logits = getattr(result, "logits", result[0] if isinstance(result, tuple) else result)
    if not isinstance(logits, Tensor):
        raise InputError(f"{type(unwrapped(model)).__name__} gives no logits: it is not a model with a head for a task")
    return logits


def labels_of(batch: Any) -> Tensor:
    if isinstance(batch, Mapping) and "labels" not in batch:
        raise InputError("a batch has no 'labels'")
    labels = batch["labels"] if isinstance(batch, Mapping) else batch[-1]
    if not isinstance(labels, Tensor) or labels.dim() == 0:
        raise InputError("the labels of a batch are a tensor with one row per example")
    return labels


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _columns(values: Tensor) -> Iterator[Tensor]:
    flat = values.flatten(1)
    for k in range(flat.shape[1]):
        factor = torch.zeros_like(flat)
        factor[:, k] = flat[:, k]
        yield factor.view(values.shape)


def _draw(logits: Tensor, numbers: Tensor, rows: int = 4096) -> Tensor:
    """Draw a class for each row of logits: the first whose cumulative probability exceeds the number."""
    drawn = []
    for part, number in zip(logits.detach().split(rows), numbers.split(rows), strict=True):
        cumulated = _wide(part).softmax(-1).cumsum(-1)
        whole = cumulated[:, -1:]
        # A number that rounds to 1 would draw the last class, even one of probability 0.
        target = torch.minimum(number.to(whole.dtype)[:, None] * whole, whole.nextafter(torch.zeros_like(whole)))
        drawn.append(torch.searchsorted(cumulated, target, right=True).clamp_(max=part.shape[-1] - 1)[:, 0])
    return torch.cat(drawn) if drawn else numbers.long()


def _misfit(labels: Tensor, shape: torch.Size, needed: str, of: str = "logits") -> InputError:
    shapes = f"labels of shape {list(labels.shape)} do not fit {of} of shape {list(shape)}"
    return InputError(f"{shapes}: {needed} is needed")


def check_classes(labels: Tensor, classes: int, masked: bool) -> None:
    if labels.is_floating_point():
        raise InputError("labels are classes (whole numbers), but the batch holds floating-point numbers")
    wrong = (labels < 0) | (labels >= classes)
    if masked:
        wrong &= labels != MASKED
    if bool(wrong.any()):
        index = wrong.nonzero()[0].tolist()
        label = int(labels[tuple(index)])
        raise InputError(
            f"row {index[0]}: label {label} is not one of the model's {classes} classes (0 to {classes - 1})"
        )


class BatchLosses:
    """The losses of a batch under a likelihood, which backward passes differentiate."""

    def __init__(self, model: nn.Module, likelihood: str, output: str | ExampleLoss | None, seed: int) -> None:
        self._model, self._likelihood, self._loss = model, likelihood, loss_named(output)
        self._key = int.from_bytes(hashlib.sha256(f"gradmerge labels {seed}".encode()).digest()[:16], "little")
        self._unchecked: tuple[int, Tensor] | None = None

    def logits(self, batch: Any) -> Tensor:
        """Run the model."""
        return logits_of(self._model, batch)

    def objectives(self, batch: Any, first: int) -> list[Callable[[], Tensor]]:
        """Run the model. Return one function per backward pass; each returns the sum over examples to differentiate.

        ``first`` is the index of the batch's first example.
        """
        self.check()
        labels = labels_of(batch)
        loss = self._loss or loss_of(self._model, labels)
        try:
            logits = self.logits(batch)
            loss.check(logits.shape, labels)
        except InputError as error:
            raise InputError(f"in the batch that begins with example {first}: {error}") from None
        if self._likelihood == "exact":
            self._unchecked = first, logits.detach().flatten(1).abs().amax(1)  # a sum of masked classes may overflow
            return [lambda s=s: (logits * s).sum() for s in loss.factors(logits)]  # type: ignore[misc]
        if self._likelihood == "sampled":
            labels = loss.draw(logits.detach(), labels, lambda row, n: self._uniform(first + row, n))
        losses = loss.losses(logits, labels)
        self._unchecked = first, losses.detach()
        return [losses.sum]

    def _uniform(self, example: int, count: int) -> Tensor:
        """Return random numbers in [0, 1) for one example: its part of one random stream."""
        stream = np.random.PCG64DXSM(self._key)
        stream.advance(example << 32)
        return torch.from_numpy(np.random.Generator(stream).random(count))

    def check(self) -> None:
        """Raise InputError if a loss of the last batch is not finite. Called late, so that a GPU need not wait."""
        if self._unchecked is None:
            return
        first, losses = self._unchecked
        self._unchecked = None
        finite = losses.isfinite()
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            raise InputError(
                f"example {first + row} (counted from 0): the loss is {float(losses[row])}. Check this example, the "
                "model's weights, and whether dtype is too narrow for the model."
            )
