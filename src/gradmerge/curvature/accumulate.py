"""What happens to a batch: Σ_i g_i² of every parameter, from one forward and one backward pass over all its examples.

Example i's gradient of a linear layer's weight is g_i = Σ_t y_it x_itᵀ, where x_it went into the layer at token t,
and y_it is the gradient of the loss with respect to what came out. One backward pass over a batch holds the x and y
of all examples; autograd would only add up all g_i before anyone can square them. So hooks on the layers take x and
y, and instead of the weight's gradient, Σ_i (Σ_t y_it x_itᵀ)² is formed. For one batch:

1. :func:`~gradmerge.curvature.estimate.estimate_curvature` calls :meth:`Accumulator.add`.
2. On the first batch, and on those that are due for a check, the layers' formulas are tried out
   (:mod:`gradmerge.curvature.verify`). The hooks of those that fit are put on the layers.
3. The model runs. Each layer's hooks note x and tap the output (:mod:`gradmerge.curvature.hooks`).
4. The backward pass hands y to the layer's formula (:mod:`gradmerge.curvature.per_example_gradients`), which makes a
   term of the gradient from x and y and hands it to :meth:`Accumulator.take`.
5. A parameter's only term is squared and added to its :class:`~gradmerge.curvature.parameter_sum.ParameterSum` at
   once, by :mod:`gradmerge.curvature.kernels`. Small terms, and several of one parameter, wait for the end of the pass.
   Where Kronecker factors are asked for, a layer's only x and y go into those (:mod:`gradmerge.curvature.kfac`).
6. Parameters that no formula fits follow by plain autograd, one example at a time. These are called slow.

If memory runs out, the batch is done in halves, without what was already added. If a formula turns out not to fit this
batch before anything is added for it, its parameters are slow from here on. If sums may be wrong by then,
:class:`~gradmerge.curvature.parameter_sum.Distrusted` is raised, and all is estimated again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .batches import batch_rows, enough_memory, examples_in, is_out_of_memory
from .hooks import Recorder, Unsuited
from .kernels import DirectGradient, OuterGradient, Term, add_many_direct, add_outer, add_squares
from .kfac import BatchInputs, KroneckerSums
from .padding import masks_of
from .parameter_sum import Distrusted, ParameterSum, differentiable, for_each_example, without_gradients
from .totals import Keeping
from .verify import FormulaChooser, Trial

Objectives = Callable[[Any, int], list[Callable[[], Tensor]]]
"""(batch, index of its first example) → a function per backward pass, which gives the sum to differentiate."""

#: A term with up to this many entries (over all examples of a batch) waits, to be added together with others.
_SMALL = 1 << 20


class _Strayed(Exception):
    """Parameters are used outside their own modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        self.modules = list(modules)


@dataclass
class _BatchProgress:
    """How far a batch is: backward passes that are done, and the sums that already have their squares of the next."""

    passes: int = 0
    added: set[ParameterSum] = field(default_factory=set)
    heads: set[ParameterSum] = field(default_factory=set)
    """Tied tables that have the squares of their head, but not the rest."""

    def __or__(self, later: _BatchProgress) -> _BatchProgress:
        if later.passes > self.passes:
            return later
        return _BatchProgress(self.passes, self.added | later.added, self.heads | later.heads)


class Accumulator(Recorder):
    """Adds up Σ_i g_i² of a model's parameters, or the factors of its layers, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        objectives: Objectives,
        outputs: Callable[[Any], Tensor],
        trial: Trial,
        slow: Iterable[nn.Parameter] = (),
        factors: Mapping[nn.Parameter, KroneckerSums] = MappingProxyType({}),
        keeping: Keeping | None = None,
    ) -> None:
        self._keeping = keeping or Keeping()
        super().__init__(model, {p: ParameterSum(p, factors.get(p), self._keeping) for p in parameters})
        for one in list(self.sums.values()):
            if one.factors is not None and one.factors.bias is not None:
                self.sums[one.factors.bias].weight = one
        self._model, self._factors = model, bool(factors)
        self._inputs = BatchInputs({})
        self._objectives = objectives
        self._chooser = FormulaChooser(model, self.sums, outputs, trial, slow, self.hooks)
        self._before, self._now = _BatchProgress(), _BatchProgress()
        self._watched: list[ParameterSum] = []
        self._looked = True

    def __enter__(self) -> Accumulator:
        self.attach(self._chooser.chosen)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.hooks.close()
        self._chooser.close(failed=kind is not None)

    @property
    def slow(self) -> set[nn.Parameter]:
        """Parameters that no formula fits."""
        return {parameter for parameter, one in self.sums.items() if one.slow}

    def add(self, batch: Any, first: int) -> None:
        """Add the squares of every example of a batch, whose first is number ``first`` of the data."""
        if self._chooser.try_out(batch):
            self.attach(self._chooser.chosen)
            self._check_factors()
        with enough_memory("a single example"):
            self._add(batch, first, _BatchProgress())

    def _add(self, batch: Any, first: int, before: _BatchProgress) -> None:
        """Add what ``before`` has not added of a batch; in halves if memory runs out."""
        try:
            if self._chooser.some_fast:
                self._add_at_once(batch, first, before)
        except _Strayed as error:
            self._chooser.give_up(error.modules)
            self.attach(self._chooser.chosen)
            self._add(batch, first, before)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error) or examples_in(batch) == 1:
                raise
        else:
            if slow := [one for one in self.sums.values() if one.slow and one not in before.added]:
                self._check_factors()
                self._add_slowly(slow, batch, first)
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        done, half = before | self._now, examples_in(batch) // 2
        self._add(batch_rows(batch, slice(0, half)), first, done)
        self._add(batch_rows(batch, slice(half, None)), first + half, done)

    def _check_factors(self) -> None:
        """A layer whose factors were begun, and that can have none after all, begins anew with a diagonal."""
        if late := [p for p, one in self.sums.items() if one.factors and one.factors.begun and not one.has_factors]:
            raise Distrusted(late)

    def _add_at_once(self, batch: Any, first: int, before: _BatchProgress) -> None:
        """The forward pass and every backward pass over the batch; the hooks call :meth:`take`."""
        self._before, self._now = before, _BatchProgress(before.passes)
        self._inputs = BatchInputs(masks_of(self._model, batch) if self._factors else {})
        with self.recording(batch), self._watching(), contextlib.closing(self._inputs):
            objectives = self._objectives(batch, first)
            for number in range(before.passes, len(objectives)):
                objective = objectives[number]()
                self._looked = False
                if objective.requires_grad:  # otherwise no parameter that has a formula is used
                    objective.backward(retain_graph=number + 1 < len(objectives))
                if not self._looked:  # no module has given a term
                    self._drop_strays(one for one in self._watched if one.parameter.grad is not None)
                self._finish()
                self._before, self._now = _BatchProgress(number + 1), _BatchProgress(number + 1)

    def wants(self, one: ParameterSum) -> bool:
        return one.weight is None or not one.weight.has_factors

    def take(self, one: ParameterSum, term: Term) -> None:
        if one.slow or one in self._before.added:
            return
        if not self._looked:  # the first term of a backward pass: none of it is added yet
            self._looked = True
            self._drop_strays(w for w in self._watched if torch._C._will_engine_execute_node(w.end))
        if not one.kinds:
            raise Unsuited("the parameter was not used in the trial")
        if len(one.kinds) == 1 and not _is_small(term):
            if one in self._now.added:
                raise Distrusted([one.parameter])
            if one.factors is not None and isinstance(term, OuterGradient):
                one.factors.add(term, self._inputs, inputs=self._now.passes == 0)
            else:
                one.add(lambda total: add_squares(total, [term]))
            self._now.added.add(one)
        elif isinstance(term, OuterGradient) and one.is_tied_table:
            if one not in self._before.heads:
                one.add(lambda total: add_outer(total, term))
            self._now.heads.add(one)
            one.keep_head(term)
        else:
            one.terms.append(term)

    def _finish(self) -> None:
        """Add the squares of the terms that have waited for the end of a backward pass."""
        if self.unfit:
            self._leave_to_slow()
        waiting = [one for one in self.sums.values() if one.terms]
        small: dict[Any, list[ParameterSum]] = {}
        for one in waiting:
            if self._keeping.plain and all(_is_small(term) for term in one.terms):
                small.setdefault((one.dtype, one.total.device), []).append(one)
        for group in small.values():
            add_many_direct([one.total for one in group], [one.terms for one in group])  # type: ignore[misc]
            self._now.added.update(group)
        for one in waiting:
            if one not in self._now.added:
                one.add_terms()
                self._now.added.add(one)
        for one in self.sums.values():
            one.forget()

    def _leave_to_slow(self) -> None:
        """Drop the terms of formulas that do not fit this batch; their parameters are slow from here on."""
        self._chooser.give_up({formula.module for formula in self.unfit})
        unfit = {one for formula in self.unfit for one in formula.sums.values()}
        if unfit & (self._now.added | self._now.heads):
            raise Distrusted(one.parameter for one in unfit)
        for one in unfit:
            one.forget()
        self.unfit.clear()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Let parameters that have a formula require a gradient: one that arrives comes from outside their module."""
        self._watched = [one for one in self.sums.values() if not one.slow]
        parameters = [one.parameter for one in self._watched]
        try:
            with without_gradients(parameters), differentiable(parameters):
                for one in self._watched:
                    one.end  # noqa: B018
                yield
        finally:
            self._looked = True

    def _drop_strays(self, strays: Iterable[ParameterSum]) -> None:
        if found := set(strays):
            raise _Strayed(self._chooser.modules_of(found))

    def _add_slowly(self, sums: list[ParameterSum], batch: Any, first: int) -> None:
        def add(one: ParameterSum, gradient: Tensor) -> None:
            wide = gradient.to(one.dtype)
            one.add(lambda total: total.addcmul_(wide, wide))

        objectives = lambda example, row: self._objectives(example, first + row)  # noqa: E731
        for_each_example(batch, objectives, sums, add)


def _is_small(term: Term) -> bool:
    return isinstance(term, DirectGradient) and term.gradient.numel() <= _SMALL
