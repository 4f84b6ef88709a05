"""Add up Σ_i g_i² of every parameter, from one forward and one backward pass per batch.

The gradient of a linear layer's weight for example i is g_i = Σ_t y_it x_itᵀ, with the layer's input x_it at token t
and the gradient y_it of its output. One backward pass over a batch computes x and y of all examples, but autograd
would add up all g_i before anyone can square them. So hooks on the layers capture x and y, and kernels compute
Σ_i (Σ_t y_it x_itᵀ)² from them. One batch passes through these files:

1. `estimate.py` calls :meth:`Accumulator.add`.
2. The model runs. The hooks of each layer (`hooks.py`) capture x.
3. The backward pass passes y to the layer's formula (`per_example_gradients.py`), which computes a term of the gradient
   and calls :meth:`Accumulator.take`.
4. A parameter's only term is squared and added at once (`kernels.py`), or added to Kronecker factors (`kfac.py`). Small
   terms, and several terms of one parameter, wait for the end of the pass.
5. Parameters that no formula fits follow by autograd, one example at a time ("slow" parameters).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .batches import enough_memory
from .hooks import Recorder
from .kernels import DirectGradient, OuterGradient, Term, add_many_direct, add_outer, add_squares
from .kfac import BatchInputs, KroneckerSums
from .padding import masks_of
from .parameter_sum import FormulaMismatchError, ParameterSum, differentiable, for_each_example, without_gradients
from .sum_storage import SumStorage
from .verify import Formulas, verify_again

Objectives = Callable[[Any, int], list[Callable[[], Tensor]]]
"""(batch, index of its first example) → one function per backward pass, which returns the sum to differentiate."""

#: A term with at most this many elements, over all examples of a batch, waits to be added together with others.
_SMALL = 1 << 20


class Accumulator(Recorder):
    """Adds up Σ_i g_i² of a model's parameters, or the factors of its layers, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        formulas: Formulas,
        objectives: Objectives,
        factors: Mapping[nn.Parameter, KroneckerSums] = MappingProxyType({}),
        storage: SumStorage | None = None,
    ) -> None:
        self._storage = storage or SumStorage()
        super().__init__(model, {p: ParameterSum(p, factors.get(p), self._storage) for p in formulas.kinds})
        for parameter, one in self.sums.items():
            one.kinds, one.slow = formulas.kinds[parameter], parameter in formulas.slow
            if one.factors is not None and one.factors.bias is not None:
                self.sums[one.factors.bias].weight = one
        self._model, self._objectives = model, objectives
        self._formulas = formulas
        self._inputs = BatchInputs({})
        self._has_factors = bool(factors)
        self._added: set[ParameterSum] = set()
        """Sums that have their squares of this backward pass."""
        self._unverified: set[ParameterSum] = set()
        """Parameters that were not used when formulas were verified."""
        self._first_pass = True
        self._watched: list[ParameterSum] = []
        self._checked_strays = True

    def __enter__(self) -> Accumulator:
        self.attach(self._formulas.chosen(self.sums))
        return self

    def __exit__(self, *_: object) -> None:
        self.hooks.close()

    @property
    def slow(self) -> set[nn.Parameter]:
        """Parameters that no formula fits."""
        return {parameter for parameter, one in self.sums.items() if one.slow}

    def add(self, batch: Any, first: int) -> None:
        """Add the squares of every example of a batch; ``first`` is the index of its first example."""
        with enough_memory():
            already_slow = [one for one in self.sums.values() if one.slow]
            if len(already_slow) < len(self.sums):
                self._add_by_formulas(batch, first)
            self._check_factors()
            if slow := [one for one in self.sums.values() if one.slow]:
                self._add_by_autograd(slow, batch, first)

    def verify_again(self, batch: Any, outputs: Callable[[Any], Tensor], *, unverified_shapes: bool) -> None:
        """Verify the formulas on a batch of another shape; parameters that they do not fit become slow.

        ``unverified_shapes``: batches of unverified shapes were added before, so their sums may be wrong.
        """
        self.hooks.close()
        wrong = verify_again(self._formulas, self._model, batch, outputs)
        if wrong and unverified_shapes:
            raise FormulaMismatchError(wrong)
        for parameter, one in self.sums.items():
            one.kinds, one.slow = self._formulas.kinds[parameter], one.slow or parameter in wrong
        self._check_factors()
        self.attach(self._formulas.chosen(self.sums))

    def _check_factors(self) -> None:
        """Raise if a layer has factors of earlier batches, but cannot have factors of this one."""
        with_factors = [one for one in self.sums.values() if one.factors is not None and one.factors.has_examples]
        if changed := [one.parameter for one in with_factors if not one.has_factors]:
            raise FormulaMismatchError(changed)

    def _add_by_formulas(self, batch: Any, first: int) -> None:
        """Run the model, and each backward pass; the hooks call :meth:`take`."""
        self._inputs = BatchInputs(masks_of(self._model, batch) if self._has_factors else {})
        with self.recording(batch), self._watching(), contextlib.closing(self._inputs):
            objectives = self._objectives(batch, first)
            for number, make_objective in enumerate(objectives):
                objective = make_objective()
                self._added, self._first_pass, self._checked_strays = set(), number == 0, False
                if objective.requires_grad:  # otherwise no parameter with a formula is used
                    objective.backward(retain_graph=number + 1 < len(objectives))
                if not self._checked_strays:  # no layer called `take`
                    self._give_up(one for one in self._watched if one.parameter.grad is not None)
                self._finish_pass()

    def wants(self, one: ParameterSum) -> bool:
        return one.weight is None or not one.weight.has_factors

    def take(self, one: ParameterSum, term: Term) -> None:
        if not self._checked_strays:  # the first term of a backward pass, before anything is added
            self._checked_strays = True
            self._give_up(w for w in self._watched if torch._C._will_engine_execute_node(w.accumulation_node))
        if one.slow:
            return
        if not one.kinds:
            self._unverified.add(one)
        elif len(one.kinds) == 1 and not _is_small(term):
            if one in self._added:
                raise FormulaMismatchError([one.parameter])
            if one.factors is not None and isinstance(term, OuterGradient):
                one.factors.add(term, self._inputs, inputs=self._first_pass)
            else:
                one.add(lambda total: add_squares(total, [term]))
            self._added.add(one)
        elif isinstance(term, OuterGradient) and one.is_tied_table:
            one.keep_head(term)
            one.add(lambda total: add_outer(total, term))
            self._added.add(one)
        else:
            one.terms.append(term)

    def _finish_pass(self) -> None:
        """Add the squares of the terms that waited for the end of a backward pass."""
        self._give_up(self._unverified.union(*(formula.sums.values() for formula in self.unfit)))
        self._unverified.clear()
        self.unfit.clear()
        waiting = [one for one in self.sums.values() if one.terms and not one.slow]
        small: dict[Any, list[ParameterSum]] = {}
        for one in waiting:
            if self._storage.on_device and all(_is_small(term) for term in one.terms):
                small.setdefault((one.dtype, one.total.device), []).append(one)
            else:
                one.add_terms()
        for group in small.values():
            add_many_direct([one.total for one in group], [one.terms for one in group])  # type: ignore[misc]
        for one in self.sums.values():
            one.forget()

    def _give_up(self, sums: Iterable[ParameterSum]) -> None:
        """Make parameters slow, and all others of their modules, from this batch on."""
        unfit = set(sums)
        unfit |= {other for module in self._formulas.modules_of(unfit) for other in self.own(module)}
        if not unfit:
            return
        self._formulas.conclusive = False
        if unfit & self._added or not self._first_pass:
            raise FormulaMismatchError(one.parameter for one in unfit)
        for one in unfit:
            one.slow = True
            one.forget()

    def own(self, module: nn.Module) -> set[ParameterSum]:
        return {self.sums[p] for p in module._parameters.values() if p is not None and p in self.sums}

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Let parameters with a formula require a gradient: one that arrives comes from outside their module."""
        self._watched = [one for one in self.sums.values() if not one.slow]
        parameters = [one.parameter for one in self._watched]
        try:
            with without_gradients(parameters), differentiable(parameters):
                for one in self._watched:
                    one.accumulation_node  # noqa: B018
                yield
        finally:
            self._checked_strays = True

    def _add_by_autograd(self, sums: list[ParameterSum], batch: Any, first: int) -> None:
        def add(one: ParameterSum, gradient: Tensor) -> None:
            wide = gradient.to(one.dtype)
            one.add(lambda total: total.addcmul_(wide, wide))

        objectives = lambda example, row: self._objectives(example, first + row)  # noqa: E731
        for_each_example(batch, objectives, sums, add)


def _is_small(term: Term) -> bool:
    return isinstance(term, DirectGradient) and term.gradient.numel() <= _SMALL
