"""Choose the formula of each layer, by comparison with autograd on two examples.

The squares of every formula's terms are compared with those of the examples' gradients. A formula that differs, or
fails, is replaced by the next one. A parameter that no formula fits is *slow*: autograd computes its gradients, one
example at a time.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..text import listed
from .batches import batch_rows, enough_memory, examples_in, is_out_of_memory
from .hooks import LayerFormula, Recorder
from .kernels import DirectGradient, ExpertGradient, OuterGradient, RowGradient, Term, add_squares
from .parameter_sum import ParameterSum, for_each_example
from .per_example_gradients import formulas_for

#: How much a formula may differ from autograd by rounding, relative to the mean of a parameter's squares.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-2}
_ROUNDING_16_BIT = 0.5
_log = logging.getLogger(__name__)

MakeFormula = Callable[[Recorder], LayerFormula]


@dataclass
class Formulas:
    """The verified formulas of a model's layers."""

    chosen: dict[nn.Module, MakeFormula]
    """Modules without a formula are missing."""
    slow: set[nn.Parameter]
    """Parameters that no formula fits."""
    kinds: dict[nn.Parameter, list[type[Term]]]
    """The kinds of the terms of each parameter that a gradient of the two examples reaches."""

    def attached(self, sums: Mapping[nn.Parameter, ParameterSum]) -> list[MakeFormula]:
        """Return the formulas of modules with parameters that are not slow."""
        return [
            make for module, make in self.chosen.items() if any(not sums[p].slow for p in _parameters_of(module, sums))
        ]


def choose_formulas(
    model: nn.Module, parameters: Iterable[nn.Parameter], batch: Any, outputs: Callable[[Any], Tensor]
) -> Formulas:
    """Return the formulas that equal autograd on the first two examples of a batch. ``outputs`` runs the model.

    A single example is used twice, because formulas must tell examples apart.
    """
    parameters, two = list(parameters), torch.tensor([0, min(1, examples_in(batch) - 1)])
    owners = {child: module for module in model.modules() for child in module.children()}
    known = set(parameters)
    candidates = {m: formulas_for(m, owners.get(m)) for m in model.modules() if known & {*m._parameters.values()}}
    with enough_memory("two examples, on which formulas are verified"), _exact_products():
        formulas = _Verifier(model, parameters, outputs).choose(candidates, batch_rows(batch, two))
    warn_slow(name for name, parameter in model.named_parameters() if parameter in formulas.slow)
    return formulas


def warn_slow(names: Iterable[str]) -> None:
    """Warn about parameters that no formula fits."""
    if slow := sorted(names):
        _log.warning("no formula gives the exact gradient; one example at a time, which is slow:\n%s", listed(slow))


def _parameters_of(module: nn.Module, sums: Mapping[nn.Parameter, ParameterSum]) -> list[nn.Parameter]:
    return [p for p in module._parameters.values() if p is not None and p in sums]


class _Verifier(Recorder):
    """Runs the model with candidate formulas, and compares their terms with autograd."""

    def __init__(self, model: nn.Module, parameters: Iterable[nn.Parameter], outputs: Callable[[Any], Tensor]) -> None:
        super().__init__(model, {p: ParameterSum(p) for p in parameters})
        self._outputs = outputs

    def choose(self, candidates: dict[nn.Module, list[MakeFormula]], batch: Any) -> Formulas:
        """Return the first candidate of every module that equals autograd."""
        while True:
            for module in (module for module, left in candidates.items() if not left):
                for parameter in _parameters_of(module, self.sums):
                    self.sums[parameter].slow = True
            slow = {parameter for parameter, entry in self.sums.items() if entry.slow}
            formulas = Formulas({module: left[0] for module, left in candidates.items() if left}, slow, {})
            if len(slow) == len(self.sums):
                return formulas
            with self:
                wrong = self._wrong_modules(formulas, batch)
            if not wrong:
                return formulas
            for module in wrong:
                candidates[module] = candidates[module][1:]

    def add_term(self, entry: ParameterSum, term: Term) -> None:
        if not entry.slow:
            entry.terms.append(term)

    def _wrong_modules(self, formulas: Formulas, batch: Any) -> set[nn.Module]:
        """Return the modules whose formula fails, or differs from autograd. Fill in the kinds of terms."""
        self.attach(formulas.attached(self.sums))
        try:
            with self.recording(batch):
                objective = _mixed(self._outputs(batch))
                if unfit := self.check_shapes():
                    return {formula.module for formula in unfit}
                if objective.requires_grad:
                    objective.backward()
                wrong = self._differing(batch)
                formulas.kinds = {p: [type(t) for t in entry.terms] for p, entry in self.sums.items() if entry.terms}
                return {module for module in formulas.chosen if wrong & {*_parameters_of(module, self.sums)}}
        except Exception as error:
            # The model runs without formulas, so one of them caused the error.
            formula = self.failed[0] if self.failed else self.changed
            if formula is None or is_out_of_memory(error):
                raise
            # What raises in one module raises in all of its class.
            kind, make = type(formula.module), type(formula)
            return {m for m, other in formulas.chosen.items() if type(m) is kind and type(other(self)) is make}

    def _differing(self, batch: Any) -> set[nn.Parameter]:
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
                add_squares(by_formula, [_of_row(term, row) for term in entry.terms])
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

        return {entry.parameter for entry in fast if differs(entry)}


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


def _of_row(term: Term, row: int) -> Term:
    """Return the term of one example."""
    rows = slice(row, row + 1)
    if isinstance(term, DirectGradient):
        return DirectGradient(term.gradient[rows])
    if isinstance(term, OuterGradient):
        return OuterGradient(term.y[rows], term.x[rows])
    if isinstance(term, ExpertGradient):
        of_row = term.examples == row
        x = None if term.x is None else term.x[of_row]
        return ExpertGradient(term.experts[of_row], term.examples[of_row] - row, term.y[of_row], x)
    return RowGradient(term.ids[rows], term.y[rows])


def _mixed(outputs: Tensor, row: int = 0) -> Tensor:
    """Return outputs weighted by numbers without a pattern from ``row`` on, so that no gradient is 0 by chance."""
    count = outputs[0].numel()
    index = torch.arange(row * count, row * count + outputs.numel(), device=outputs.device, dtype=torch.float64)
    weights = torch.sin(index * index % 1000.0 + 0.7 * index)
    return (outputs * weights.view_as(outputs).to(outputs.dtype)).sum()
