"""Choose the formula of each layer, by comparison with autograd on two examples.

The squares of every formula's terms are compared with those of the examples' gradients. A formula that differs, or
fails, is replaced by the next one. A parameter that no formula fits is *slow*: autograd computes its gradients, one
example at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..text import listed
from .batches import batch_rows, enough_memory, examples_in, is_out_of_memory
from .hooks import LayerFormula, ParameterSum, Recorder, for_each_example
from .kernels import Term, add_squares
from .per_example_gradients import formulas_for

#: How much a formula may differ from autograd by rounding, relative to the mean of a parameter's squares.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-2}
_ROUNDING_16_BIT = 0.5
_log = logging.getLogger(__name__)


@dataclass
class Formulas:
    """The verified formulas of a model's layers."""

    chosen: list[LayerFormula]
    slow: set[nn.Parameter]
    """Parameters that no formula fits."""
    kinds: dict[nn.Parameter, list[type[Term]]]
    """The kinds of the terms of each parameter that a gradient of the two examples reaches."""


def choose_formulas(
    model: nn.Module, parameters: Iterable[nn.Parameter], batch: Any, outputs: Callable[[Any], Tensor]
) -> Formulas:
    """Return the formulas that equal autograd on the first two examples of a batch. ``outputs`` runs the model.

    A single example is used twice, because formulas must tell examples apart.
    """
    two = batch_rows(batch, torch.tensor([0, min(1, examples_in(batch) - 1)]))
    with enough_memory("two examples, on which formulas are verified"), _exact_products():
        formulas = _Verifier(model, parameters, outputs).choose(two)
    warn_slow(name for name, parameter in model.named_parameters() if parameter in formulas.slow)
    return formulas


def warn_slow(names: Iterable[str]) -> None:
    """Warn about parameters that no formula fits."""
    if slow := sorted(names):
        _log.warning("no formula gives the exact gradient; one example at a time, which is slow:\n%s", listed(slow))


class _Verifier(Recorder):
    """Runs the model with candidate formulas, and compares their terms with autograd."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], outputs: Callable[[Any], Tensor]) -> None:
        super().__init__(model, {p: ParameterSum(p) for p in parameters})
        self._outputs = outputs
        owners = {child: module for module in model.modules() for child in module.children()}
        self._candidates = {
            module: formulas_for(module, owners.get(module)) for module in model.modules() if self._entries(module)
        }

    def _entries(self, module: nn.Module) -> set[ParameterSum]:
        return {self.sums[p] for p in module._parameters.values() if p is not None and p in self.sums}

    def choose(self, batch: Any) -> Formulas:
        """Return the first candidate of every module that equals autograd."""
        while True:
            for module, left in self._candidates.items():
                for entry in self._entries(module) if not left else ():
                    entry.slow = True
            slow = {parameter for parameter, entry in self.sums.items() if entry.slow}
            formulas = Formulas([left[0] for left in self._candidates.values() if left], slow, {})
            wrong = self._wrong_modules(formulas, batch) if len(slow) < len(self.sums) else set()
            if not wrong:
                return formulas
            for module in wrong:
                del self._candidates[module][0]

    def add_term(self, entry: ParameterSum, term: Term) -> None:
        if not entry.slow:
            entry.terms.append(term)

    def _wrong_modules(self, formulas: Formulas, batch: Any) -> set[nn.Module]:
        """Return the modules whose formula fails, or differs from autograd. Fill in the kinds of terms."""
        try:
            with self.attached(formulas.chosen), self.recording(batch):
                objective = _mixed(self._outputs(batch))
                if unfit := self.check_shapes():
                    return {formula.module for formula in unfit}
                if objective.requires_grad:
                    objective.backward()
                wrong = self._differing(batch)
                formulas.kinds = {p: [type(t) for t in entry.terms] for p, entry in self.sums.items() if entry.terms}
                return {formula.module for formula in formulas.chosen if wrong & self._entries(formula.module)}
        except Exception as error:
            # The model runs without formulas, so one of them caused the error.
            cause = self.failed[0] if self.failed else self.changed
            if cause is None or is_out_of_memory(error):
                raise
            # What raises in one module raises in all of its class.
            alike = (type(cause), type(cause.module))
            return {other.module for other in formulas.chosen if (type(other), type(other.module)) == alike}

    def _differing(self, batch: Any) -> set[ParameterSum]:
        """Compare the terms' squares with those of autograd's gradients, one example and one parameter at a time."""
        fast, row = [entry for entry in self.sums.values() if not entry.slow], 0
        squares, errors = dict.fromkeys(fast, 0.0), dict.fromkeys(fast, 0.0)
        compared = dict.fromkeys(fast, 0)
        self._active = False  # autograd runs the model without formulas

        def objectives(example: Any, number: int) -> list[Callable[[], Tensor]]:
            nonlocal row
            row = number
            return [lambda: _mixed(self._outputs(example), number)]

        def compare(entry: ParameterSum, gradient: Tensor) -> None:
            square = gradient.to(entry.dtype).square()
            by_formula = torch.zeros_like(square, memory_format=torch.contiguous_format)
            if entry.terms:
                add_squares(by_formula, [term.of_examples(row, row + 1) for term in entry.terms], 1)
            compared[entry] += 1
            squares[entry] += float(square.mean())
            errors[entry] += float(by_formula.sub_(square).abs_().mean())

        for_each_example(batch, objectives, fast, compare)
        largest = max(squares.values(), default=0.0)

        def differs(entry: ParameterSum) -> bool:
            # A gradient that is 0 but for rounding is compared with the largest.
            dtype = entry.parameter.dtype
            noise = (4 * torch.finfo(dtype).eps) ** 2 * largest
            unused = bool(entry.terms) and compared[entry] < examples_in(batch)
            return unused or not errors[entry] <= _ROUNDING.get(dtype, _ROUNDING_16_BIT) * squares[entry] + noise

        return {entry for entry in fast if differs(entry)}


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Multiply float32 matrices in full precision. With TF32, formula and autograd would differ by rounding."""
    backends: Any = torch.backends
    exact: str | bool
    if hasattr(backends.cuda.matmul, "fp32_precision"):
        name, exact = "fp32_precision", "ieee"
        settings = [backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul]
        settings += [backends.mkldnn.conv]
    else:  # before PyTorch 2.9
        name, exact, settings = "allow_tf32", False, [backends.cuda.matmul, backends.cudnn]
    # A value inherited from the common setting must stay inherited.
    common = getattr(backends, name, None)
    before = ["none" if value == common else value for value in (getattr(entry, name) for entry in settings)]
    try:
        for entry in settings:
            setattr(entry, name, exact)
        yield
    finally:
        for entry, value in zip(settings, before, strict=True):
            setattr(entry, name, value)


def _mixed(outputs: Tensor, row: int = 0) -> Tensor:
    """Return outputs weighted by numbers without a pattern from ``row`` on, so that no gradient is 0 by chance."""
    count = outputs[0].numel()
    index = torch.arange(row * count, row * count + outputs.numel(), device=outputs.device, dtype=torch.float64)
    weights = torch.sin(index * index % 1000.0 + 0.7 * index)
    return (outputs * weights.view_as(outputs).to(outputs.dtype)).sum()
