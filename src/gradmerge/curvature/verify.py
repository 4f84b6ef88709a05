"""Choose the formula of each layer, by comparison with autograd on two examples.

The squares of every formula's terms are compared with those of the examples' gradients. A formula that differs, or
fails, is replaced by the next one. A parameter that no formula fits is *slow*: autograd computes its gradients, one
example at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .batches import batch_rows, enough_memory, examples_in, is_out_of_memory, values_of
from .hooks import LayerFormula, Recorder
from .kernels import DirectGradient, ExpertGradient, OuterGradient, RowGradient, Term, add_squares
from .parameter_sum import ParameterSum, for_each_example
from .per_example_gradients import RepeatedFormula, formulas_for

#: How much a formula may differ from autograd by rounding, relative to the mean of a parameter's squares.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-2}
_ROUNDING_16_BIT = 0.5

MakeFormula = Callable[[Recorder], LayerFormula]


@dataclass
class Formulas:
    """The verified formulas of a model's layers."""

    candidates: dict[nn.Module, list[MakeFormula]]
    """Per module, the chosen formula, then those that were not tried. None is left if none fits."""
    kinds: dict[nn.Parameter, list[type]] = field(default_factory=dict)
    """Per parameter, the kinds of terms that one backward pass gives."""
    slow: set[nn.Parameter] = field(default_factory=set)
    shapes: set[Hashable] = field(default_factory=set)
    """Shapes of the batches that the formulas were verified on."""
    conclusive: bool = False
    """Whether a further estimate may reuse them: no gradient was 0, and they fitted all batches so far."""

    def chosen(self, sums: Mapping[nn.Parameter, ParameterSum]) -> list[MakeFormula]:
        """Return the chosen formulas of modules with parameters that are not slow."""
        return [
            candidates[0]
            for module, candidates in self.candidates.items()
            if candidates and any(p in sums and not sums[p].slow for p in module._parameters.values() if p is not None)
        ]

    def modules_of(self, sums: Iterable[ParameterSum]) -> list[nn.Module]:
        """Return the modules that hold any of these parameters."""
        parameters = {one.parameter for one in sums}
        return [m for m in self.candidates if any(p in parameters for p in m._parameters.values() if p is not None)]


def choose_formulas(
    model: nn.Module,
    parameters: Iterable[nn.Parameter],
    batch: Any,
    outputs: Callable[[Any], Tensor],
    slow: Iterable[nn.Parameter] = (),
) -> Formulas:
    """Return the formulas that equal autograd on the first two examples of a batch.

    ``outputs`` runs the model on a batch. ``slow`` are parameters that must not get a formula.
    """
    owners = {child: module for module in model.modules() for child in module.children()}
    parameters = list(parameters)
    known = set(parameters)
    formulas = Formulas(
        {m: formulas_for(m, owners.get(m)) for m in model.modules() if known & {*m._parameters.values()}},
        slow=set(slow),
    )
    with enough_memory("two examples, on which formulas are verified"), _exact_products():
        _Verifier(model, parameters, outputs, formulas).choose(batch_rows(batch, slice(0, 2)))
    formulas.shapes.add(shape_of(batch))
    return formulas


def verify_again(
    formulas: Formulas, model: nn.Module, batch: Any, outputs: Callable[[Any], Tensor]
) -> set[nn.Parameter]:
    """Verify formulas on a batch of another shape. Return the parameters that they do not fit, which become slow."""
    before = set(formulas.slow)
    with enough_memory("two examples, on which formulas are verified"), _exact_products():
        first_and_last = batch_rows(batch, slice(None, None, max(1, examples_in(batch) - 1)))
        _Verifier(model, formulas.kinds, outputs, formulas).check(first_and_last)
    formulas.shapes.add(shape_of(batch))
    return formulas.slow - before


class _Verifier(Recorder):
    """Runs the model with candidate formulas, and compares their terms with autograd."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        outputs: Callable[[Any], Tensor],
        formulas: Formulas,
    ) -> None:
        super().__init__(model, {p: ParameterSum(p) for p in parameters})
        self._outputs, self.formulas = outputs, formulas
        for parameter in formulas.slow:
            self.sums[parameter].slow = True
        self._nonzero: list[bool] = []

    def choose(self, batch: Any) -> None:
        """Choose the first candidate of every module that equals autograd."""
        candidates = self.formulas.candidates
        self._make_slow(module for module in candidates if not candidates[module])
        with self.hooks:
            while self._some_fast and (wrong := self._wrong_modules(batch)):
                for module in wrong:
                    candidates[module] = candidates[module][1:]
                self._make_slow(module for module in wrong if not candidates[module])
        self.formulas.kinds = {parameter: one.kinds for parameter, one in self.sums.items()}
        self.formulas.slow = {parameter for parameter, one in self.sums.items() if one.slow}
        self.formulas.conclusive = all(self._nonzero)

    def check(self, batch: Any) -> None:
        """Give up the chosen formulas that differ from autograd on this batch."""
        with self.hooks:
            while self._some_fast and (wrong := self._wrong_modules(batch)):
                self._make_slow(wrong)
                self.formulas.conclusive = False
        kinds = self.formulas.kinds
        self.formulas.kinds = {p: max(kinds[p], one.kinds, key=len) for p, one in self.sums.items()}
        self.formulas.slow = {parameter for parameter, one in self.sums.items() if one.slow}

    @property
    def _some_fast(self) -> bool:
        return any(not one.slow for one in self.sums.values())

    def _sums_of(self, module: nn.Module) -> set[ParameterSum]:
        return {self.sums[p] for p in module._parameters.values() if p is not None and p in self.sums}

    def _make_slow(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for one in self._sums_of(module):
                one.slow = True

    def _wrong_modules(self, batch: Any) -> set[nn.Module]:
        """Return the modules whose formula fails, or differs from autograd."""
        for one in self.sums.values():
            one.kinds = []
        self.attach(self.formulas.chosen(self.sums))
        try:
            with self.recording(batch):
                objective = _mixed(self._outputs(batch))
                if objective.requires_grad:
                    objective.backward()
                if self.unfit:
                    return set().union(*(self._alike(formula.module) for formula in self.unfit))
                return self._differing(batch)
        except Exception as error:
            # The model runs without formulas, so one of them caused the error.
            formula = self.failed[0] if self.failed else self.changed
            if formula is None or is_out_of_memory(error):
                raise
            return self._alike(formula.module)

    def take(self, one: ParameterSum, term: Term) -> None:
        if not one.slow:
            one.kinds.append(type(term))
            one.terms.append(term)

    def _differing(self, batch: Any) -> set[nn.Module]:
        """Compare the terms' squares with those of autograd's gradients, one example and one parameter at a time."""
        fast, row = [one for one in self.sums.values() if not one.slow], 0
        squares: dict[ParameterSum, Tensor] = {}
        missing = {(one, number): None for one in fast for number in range(examples_in(batch)) if one.terms}
        errors: dict[ParameterSum, Any] = dict.fromkeys(fast, 0.0)
        self._active = False  # autograd runs the model without formulas

        def objectives(example: Any, number: int) -> list[Callable[[], Tensor]]:
            nonlocal row
            row = number
            return [lambda: _mixed(self._outputs(example), number)]

        def compare(one: ParameterSum, gradient: Tensor) -> None:
            square = gradient.to(one.dtype).square_() if gradient.dtype != one.dtype else gradient.square()
            squares[one] = square.mean() + squares[one] if one in squares else square.mean()
            if one.terms:
                missing.pop((one, row), None)
                by_formula = torch.zeros_like(square, memory_format=torch.contiguous_format)
                add_squares(by_formula, [_of_row(term, row) for term in one.terms])
                square = by_formula.sub_(square)
            errors[one] = errors[one] + square.abs_().mean()

        for_each_example(batch, objectives, fast, compare)
        for one, number in missing:  # autograd has no gradient, but the formula has
            by_formula = torch.zeros(one.parameter.shape, dtype=one.dtype, device=one.parameter.device)
            add_squares(by_formula, [_of_row(term, number) for term in one.terms])
            errors[one] = errors[one] + by_formula.mean()
        self._nonzero = [bool(square > 0) for square in squares.values()]
        means = {one: float(squares.get(one, 0.0)) for one in fast}
        largest = max(means.values(), default=0.0)
        wrong: set[ParameterSum] = set()
        for one in fast:
            # A gradient that is 0 but for rounding is compared with the largest.
            dtype = one.parameter.dtype
            noise = (4 * torch.finfo(dtype).eps) ** 2 * largest
            if not float(errors[one]) <= _ROUNDING.get(dtype, _ROUNDING_16_BIT) * means[one] + noise:
                wrong.add(one)
        return {module for module in self.formulas.modules_of(wrong) if self.formulas.candidates[module]}

    def _alike(self, module: nn.Module) -> set[nn.Module]:
        """Return the module; for a ``RepeatedFormula`` all of its class, because what fails for one fails for all."""
        candidates = self.formulas.candidates
        if not isinstance(candidates[module][0](self), RepeatedFormula):
            return {module}
        left = len(candidates[module])
        return {m for m, others in candidates.items() if type(m) is type(module) and len(others) == left}


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
    before = ["none" if value == common else value for value in (getattr(one, name) for one in settings)]
    try:
        for one in settings:
            setattr(one, name, exact)
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            setattr(one, name, value)


def shape_of(batch: Any) -> Hashable:
    """Return the shapes of a batch's tensors, without the number of examples except whether it is 1."""
    examples = examples_in(batch)
    shapes = [tuple(value.shape) for value in values_of(batch) if isinstance(value, Tensor)]
    return examples > 1, *(shape[1:] if shape[:1] == (examples,) else ("all", *shape) for shape in shapes)


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
