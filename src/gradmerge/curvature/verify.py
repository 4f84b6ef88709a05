"""The trial: which formula fits a layer is decided by comparison with autograd on a few examples.

On the first two examples, the squares of every formula's terms are compared with those of single examples' gradients.
A formula that differs, or fails, is replaced by the next; a parameter that none fits is *slow*: estimated by
autograd, one example at a time, and named in a warning.

What fitted two examples need not fit all: a weight may be used elsewhere too when a text is long, or axes may be
mixed up without effect while one of them is 1. So the comparison is repeated: for the first few
shapes of batches, for later ones as far as that costs next to nothing, and whatever the shape, for a batch now and
then.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .batches import batch_rows, enough_memory, examples_in, is_out_of_memory, values_of
from .hooks import LayerFormula, Recorder
from .kernels import DirectGradient, OuterGradient, RowGradient, Term, add_squares
from .parameter_sum import Distrusted, ParameterSum, Sums, for_each_example
from .per_example_gradients import RepeatedFormula, formulas_for

#: The first shapes of batches, up to this many, are checked as they come.
SHAPES = 4
#: Later ones too, as long as there is at most one check per this many batches.
BATCHES = 256
#: Whatever its shape, a batch is checked when its number is this one, four times it, sixteen times, …
FIRST = 16

#: How much a formula may differ from autograd by rounding, relative to the mean of a parameter's squares.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-2}
_ROUNDING_16_BIT = 0.5


@dataclass
class Trial:
    """What was found out about a model's layers, for further estimates of the same model to begin with.

    An estimate fills it. It stays empty, so that the next one tries the layers out again, after an error, where a
    parameter's gradient was 0 in the trial, which proves nothing, and where a later batch did not fit a chosen formula.
    """

    examples: int = 0
    """Number of examples that the layers were tried out on."""
    formulas: dict[nn.Module, list[Callable[[Recorder], LayerFormula]]] = field(default_factory=dict)
    """Per module, the chosen formula and then those not tried yet."""
    kinds: dict[nn.Parameter, list[type]] = field(default_factory=dict)
    slow: set[nn.Parameter] = field(default_factory=set)
    told: set[str] = field(default_factory=set)
    """Names of slow parameters that the user was warned of; :meth:`forget` keeps them."""
    shapes: set[Hashable] = field(default_factory=set)
    """Shapes of batches that the formulas were right for."""
    batches: int = 0
    again: int = field(default_factory=lambda: FIRST)
    """The number of the next batch that is checked whatever its shape."""
    checks: int = 0
    skipped: bool = False
    """A batch was added although its shape had not been checked."""

    def due(self, shape: Hashable) -> bool:
        """Whether the next batch, which has this shape, is to be checked before it is added."""
        self.batches += 1
        if self.batches == self.again:
            self.again *= 4
            return True
        return shape not in self.shapes and (len(self.shapes) < SHAPES or self.checks * BATCHES < self.batches)

    def passed(self, shape: Hashable) -> None:
        self.shapes.add(shape)
        self.checks += 1

    def forget(self) -> None:
        vars(self).update(vars(Trial(told=self.told)))


class FormulaChooser(Recorder):
    """Tries formulas out, on the first batch and again on some later ones, and keeps the choice per module."""

    def __init__(
        self,
        model: nn.Module,
        sums: Sums,
        outputs: Callable[[Any], Tensor],
        trial: Trial,
        slow: Iterable[nn.Parameter],
        hooks: contextlib.ExitStack,
    ) -> None:
        super().__init__(model, sums, hooks)
        self._outputs, self._trial, self._forced = outputs, trial, set(slow)
        self._settled, self._felt = True, [True]
        self._model = model
        owners = {child: module for module in model.modules() for child in module.children()}
        formulas = {m: formulas_for(m, owners.get(m)) for m in model.modules() if self.own(m)}
        if trial.examples and trial.kinds.keys() == sums.keys() and trial.formulas.keys() == formulas.keys():
            for parameter, one in sums.items():
                one.kinds, one.slow = trial.kinds[parameter], parameter in trial.slow
        else:
            trial.forget()
            trial.formulas = formulas

    @property
    def chosen(self) -> list[Callable[[Recorder], LayerFormula]]:
        return [formulas[0] for formulas in self._trial.formulas.values() if formulas]

    def own(self, module: nn.Module) -> set[ParameterSum]:
        return {self.sums[p] for p in module._parameters.values() if p is not None and p in self.sums}

    def modules_of(self, sums: set[ParameterSum]) -> list[nn.Module]:
        return [module for module in self._trial.formulas if sums & self.own(module)]

    @property
    def some_fast(self) -> bool:
        return any(not one.slow for one in self.sums.values())

    def try_out(self, batch: Any) -> bool:
        """Choose formulas on the first two examples, and check them on the first and the last of some later batches.

        True if either was done: the hooks are then those of the trial.
        """
        shape, trial, examples = _shape_of(batch), self._trial, examples_in(batch)
        known, due = shape in trial.shapes or trial.skipped, trial.due(shape)
        first = trial.examples < min(examples, 2)
        if first:
            with enough_memory("two examples, which the layers are tried out on"), _exact_products():
                self._choose(batch_rows(batch, slice(0, 2)))
            trial.passed(shape)
        elif due := due and self.some_fast:
            try:
                with _exact_products():
                    wrong = self._check(batch_rows(batch, slice(None, None, max(1, examples - 1))))
                if wrong and known:
                    raise Distrusted(one.parameter for module in wrong for one in self.own(module))
                trial.passed(shape)
            except RuntimeError as error:
                if not is_out_of_memory(error):  # otherwise the batch itself may fit, in halves
                    raise
        trial.skipped |= shape not in trial.shapes
        return first or due

    def _choose(self, batch: Any) -> None:
        formulas = self._trial.formulas
        self.give_up(module for module in formulas if not formulas[module])
        for parameter in self._forced:
            self.sums[parameter].slow = True
        while self.some_fast and (wrong := self._try(batch)):
            for module in wrong:
                formulas[module] = formulas[module][1:]
            self.give_up(module for module in wrong if not formulas[module])
        self._settled = all(self._felt)
        self._trial.examples = examples_in(batch)

    def _check(self, batch: Any) -> set[nn.Module]:
        """The modules whose chosen formula does not fit these examples. They are given up."""
        kinds = {one: one.kinds for one in self.sums.values()}
        wrong: set[nn.Module] = set()
        try:
            while self.some_fast and (more := self._try(batch)):
                wrong |= more
                self.give_up(more)
        finally:
            for one, before in kinds.items():
                one.kinds = max(before, one.kinds, key=len)
        return wrong

    def _try(self, batch: Any) -> set[nn.Module]:
        """The modules whose formula fails, or gives something else than autograd."""
        for one in self.sums.values():
            one.kinds = []
        self.attach(self.chosen)
        try:
            with self.recording(batch):
                objective = _mixed(self._outputs(batch))
                if objective.requires_grad:
                    objective.backward()
                if self.unfit:
                    return set().union(*(self._alike(formula.module) for formula in self.unfit))
                return self._differing(batch)
        except Exception as error:
            # The model runs without formulas: one of them is to blame.
            formula = self.failed[0] if self.failed else self.changed
            if formula is None or is_out_of_memory(error):
                raise
            return self._alike(formula.module)

    def take(self, one: ParameterSum, term: Term) -> None:
        if not one.slow:
            one.kinds.append(type(term))
            one.terms.append(term)

    def _differing(self, batch: Any) -> set[nn.Module]:
        """Hold the terms' squares against those of autograd's gradients, one example and one parameter at a time."""
        fast, row = [one for one in self.sums.values() if not one.slow], 0
        squares: dict[ParameterSum, Tensor] = {}
        missing = {(one, number): None for one in fast for number in range(examples_in(batch)) if one.terms}
        errors: dict[ParameterSum, Any] = dict.fromkeys(fast, 0.0)
        self._active = False  # what follows is the model as it is

        def objectives(example: Any, number: int) -> list[Callable[[], Tensor]]:
            nonlocal row
            row = number
            return [lambda: _mixed(self._outputs(example), number)]

        def compare(one: ParameterSum, gradient: Tensor) -> None:
            square = gradient.to(one.dtype).square_() if gradient.dtype != one.dtype else gradient.square()
            squares[one] = square.mean() + squares[one] if one in squares else square.mean()
            if one.terms:
                missing.pop((one, row), None)
                found = torch.zeros_like(square, memory_format=torch.contiguous_format)
                add_squares(found, [_of_row(term, row) for term in one.terms])
                square = found.sub_(square)
            errors[one] = errors[one] + square.abs_().mean()

        for_each_example(batch, objectives, fast, compare)
        for one, number in missing:  # no gradient came, although the formula says that there is one
            found = torch.zeros(one.parameter.shape, dtype=one.dtype, device=one.parameter.device)
            add_squares(found, [_of_row(term, number) for term in one.terms])
            errors[one] = errors[one] + found.mean()
        self._felt = [bool(square > 0) for square in squares.values()]
        means = {one: float(squares.get(one, 0.0)) for one in fast}
        largest = max(means.values(), default=0.0)
        wrong: set[ParameterSum] = set()
        for one in fast:
            # A gradient that is 0 but for rounding is compared with the largest.
            dtype = one.parameter.dtype
            noise = (4 * torch.finfo(dtype).eps) ** 2 * largest
            if not float(errors[one]) <= _ROUNDING.get(dtype, _ROUNDING_16_BIT) * means[one] + noise:
                wrong.add(one)
        return {module for module in self.modules_of(wrong) if self._trial.formulas[module]}

    def _alike(self, module: nn.Module) -> set[nn.Module]:
        """The module, and for a ``RepeatedFormula`` all of its class: what fails for one of them fails for all."""
        formulas = self._trial.formulas
        if not isinstance(formulas[module][0](self), RepeatedFormula):
            return {module}
        left = len(formulas[module])
        return {m for m, others in formulas.items() if type(m) is type(module) and len(others) == left}

    def give_up(self, modules: Iterable[nn.Module]) -> None:
        """Make the parameters of these modules slow; the next estimate tries the layers out again."""
        self._settled = False
        for module in modules:
            for one in self.own(module):
                one.slow = True

    def close(self, failed: bool) -> None:
        """Keep what was found out, unless it is in doubt."""
        self._trial.kinds = {parameter: one.kinds for parameter, one in self.sums.items()}
        self._trial.slow = {parameter for parameter, one in self.sums.items() if one.slow}
        if failed or not self._settled:
            self._trial.forget()


@contextlib.contextmanager
def _exact_products() -> Iterator[None]:
    """Products of float32 in full: in fewer bits, as many set it, formula and autograd differ by their rounding."""
    have: Any = torch.backends
    exact: str | bool
    if hasattr(have.cuda.matmul, "fp32_precision"):
        name, exact = "fp32_precision", "ieee"
        places = [have.cuda.matmul, have.cudnn.conv, have.cudnn.rnn, have.mkldnn.matmul, have.mkldnn.conv]
    else:  # before PyTorch 2.9
        name, exact, places = "allow_tf32", False, [have.cuda.matmul, have.cudnn]
    # What all have in common is not a setting of each: it may be changed later.
    common = getattr(have, name, None)
    before = ["none" if value == common else value for value in (getattr(place, name) for place in places)]
    try:
        for place in places:
            setattr(place, name, exact)
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            setattr(place, name, value)


def _of_row(term: Term, row: int) -> Term:
    """A term of one example alone."""
    rows = slice(row, row + 1)
    if isinstance(term, DirectGradient):
        return DirectGradient(term.gradient[rows])
    if isinstance(term, OuterGradient):
        return OuterGradient(term.y[rows], term.x[rows])
    return RowGradient(term.ids[rows], term.y[rows])


def _mixed(outputs: Tensor, row: int = 0) -> Tensor:
    """Outputs weighted by numbers without a pattern, so that no gradient is 0 by chance; they begin at ``row``."""
    count = outputs[0].numel()
    places = torch.arange(row * count, row * count + outputs.numel(), device=outputs.device, dtype=torch.float64)
    weights = torch.sin(places * places % 1000.0 + 0.7 * places)
    return (outputs * weights.view_as(outputs).to(outputs.dtype)).sum()


def _shape_of(batch: Any) -> Hashable:
    """The shapes of a batch's tensors; of the number of examples, only whether it is 1."""
    examples = examples_in(batch)
    shapes = [tuple(value.shape) for value in values_of(batch) if isinstance(value, Tensor)]
    return examples > 1, *(shape[1:] if shape[:1] == (examples,) else ("all", *shape) for shape in shapes)
