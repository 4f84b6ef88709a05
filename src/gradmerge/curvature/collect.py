"""Collecting the squared gradients of every example from one backward pass over a batch, and the slow way for the rest.

Which :mod:`way <gradmerge.curvature.layers>` fits a module is not guessed: on two examples every way's result is held
against the gradients of single examples by autograd (the *trial*). A way that differs, or fails, is replaced by the next;
a parameter that none fits is measured the slow way, one example at a time, and named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from ..errors import MachineError
from .kernels import (
    Direct,
    Outer,
    Rows,
    Term,
    add_many_direct,
    add_outer,
    add_rows,
    add_squares,
    merge_rows,
    outer_at_rows,
    unique_rows,
)
from .layers import RepeatedWay, Way, ways_for

Objectives = Callable[[Any, int], list[Callable[[], Tensor]]]
"""(batch, index of its first example) → one function for each backward pass, which gives Σ_i of something of example i."""

#: How much a way may differ from autograd in the trial, relative to the sum of a parameter's squares: rounding, but no more.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-2}
_ROUNDING_16_BIT = 0.5


@dataclass
class _Done:
    """How far a batch is: whole backward passes, and in the next one the parameters whose squares are already added."""

    passes: int = 0
    parameters: set[nn.Parameter] = field(default_factory=set)
    heads: set[nn.Parameter] = field(default_factory=set)
    """Tied heads whose own squares are added, but not yet the table's."""

    def __or__(self, later: _Done) -> _Done:
        if later.passes > self.passes:
            return later
        return _Done(self.passes, self.parameters | later.parameters, self.heads | later.heads)


class Collector:
    """Adds Σ_i g_i² of a model's parameters to their totals, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        totals: Mapping[nn.Parameter, Tensor],
        objectives: Objectives,
        outputs: Callable[[Any], Tensor],
    ) -> None:
        self.examples = 0
        self.slow: set[nn.Parameter] = set()
        """Parameters that no way fits."""
        self.anchor = torch.zeros((), device=next(iter(totals)).device, requires_grad=True)
        self._totals, self._objectives, self._outputs = totals, objectives, outputs
        owners = {child: module for module in model.modules() for child in module.children()}
        modules = [m for m in model.modules() if any(p in totals for p in m._parameters.values() if p is not None)]
        self._choices = {module: ways_for(module, owners.get(module)) for module in modules}
        self._kinds: dict[nn.Parameter, list[type]] = {}
        self._hooks = contextlib.ExitStack()
        self._proved = 0
        self._trial = self._active = False
        self._failed: list[Way] = []
        self._before, self._now = _Done(), _Done()
        self._pending: dict[nn.Parameter, list[Term]] = {}
        self._heads: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._ids: dict[nn.Parameter, dict[nn.Module, Tensor]] = {}

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def add(self, batch: Any, first: int) -> None:
        """Add the squares of every example of a batch, whose first is number ``first`` of the data."""
        if self._proved < min(examples_in(batch), 2):
            self._choose_ways(batch_rows(batch, slice(0, 2)))
        if len(self.slow) < len(self._totals):
            self._add(batch, first, _Done())
        if self.slow:
            self._add_slowly(batch, first)

    # What the ways call

    @property
    def listening(self) -> bool:
        return self._active and torch.is_grad_enabled()

    def wanted(self, parameter: nn.Parameter | None) -> bool:
        return parameter is not None and parameter in self._totals and parameter not in self.slow

    def failed(self, way: Way) -> None:
        self._failed.append(way)

    def see_ids(self, parameter: nn.Parameter, user: nn.Module, ids: Tensor) -> None:
        self._ids.setdefault(parameter, {})[user] = ids

    def take(self, parameter: nn.Parameter, term: Term) -> None:
        if parameter in self._before.parameters:
            return
        if self._trial:
            self._kinds.setdefault(parameter, []).append(type(term))
        kinds = self._kinds.get(parameter, [])
        if not self._trial and len(kinds) == 1 and not _is_small(term):
            if parameter in self._now.parameters:
                raise RuntimeError(
                    "a parameter is used once for some batches and several times for others; "
                    "its curvature cannot be measured batch by batch"
                )
            add_squares(self._totals[parameter], [term])
            self._now.parameters.add(parameter)
        elif (
            not self._trial
            and isinstance(term, Outer)
            and kinds.count(Outer) == 1
            and kinds.count(Rows) == len(kinds) - 1
        ):
            self._take_head(parameter, term)
        else:
            self._pending.setdefault(parameter, []).append(term)

    def _take_head(self, parameter: nn.Parameter, term: Outer) -> None:
        """A head tied to an embedding: (A + S)² = A² + S (2A + S), where S has few rows. A² and those rows of A now, S later.

        The head's gradient is as large as the logits; it need not be kept until the embedding's comes.
        """
        rows = unique_rows(torch.cat(list(self._ids[parameter].values()), 1))
        total = self._totals[parameter]
        if parameter not in self._before.heads:
            add_outer(total, term)
        self._now.heads.add(parameter)
        self._heads[parameter] = rows, outer_at_rows(term, rows, total.dtype)

    def _finish(self) -> None:
        """Add the squares of small parameters, and of those that are used several times, now that all uses have been seen."""
        small = {
            p: direct for p, terms in self._pending.items() if (direct := [t for t in terms if _is_small(t)]) == terms
        }
        for group in _by_type(small, self._totals):
            add_many_direct([self._totals[p] for p in group], [small[p] for p in group])
        for parameter, terms in self._pending.items():
            total = self._totals[parameter]
            if parameter in small:
                continue
            if parameter in self._heads:
                rows, head = self._heads[parameter]
                table = merge_rows([term for term in terms if isinstance(term, Rows)], total.dtype).y
                add_rows(total, rows, table * (2 * head + table))
            else:
                add_squares(total, terms)
            self._now.parameters.add(parameter)
        self._now.parameters |= small.keys()
        self._forget()

    def _add(self, batch: Any, first: int, before: _Done) -> None:
        """What of a batch is not done before; in halves if memory runs out."""
        examples = examples_in(batch)
        try:
            self._add_at_once(batch, first, before)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if examples == 1:
                raise MachineError(
                    "out of memory with a single example. Use shorter examples (--max-length), --dtype bfloat16, or a larger device."
                ) from None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        done, half = before | self._now, examples // 2
        self._add(batch_rows(batch, slice(0, half)), first, done)
        self._add(batch_rows(batch, slice(half, examples)), first + half, done)

    def _add_at_once(self, batch: Any, first: int, before: _Done) -> None:
        self.examples = examples_in(batch)
        self._before, self._now = before, _Done(before.passes)
        with self._listening():
            objectives = self._objectives(batch, first)
            for number in range(before.passes, len(objectives)):
                objectives[number]().backward(retain_graph=number + 1 < len(objectives))
                self._finish()
                self._before = self._now = _Done(number + 1)

    def _forget(self) -> None:
        self._pending.clear()
        self._heads.clear()

    def _add_slowly(self, batch: Any, first: int) -> None:
        parameters = list(self.slow)
        with _differentiable(parameters):
            for row in range(examples_in(batch)):
                objectives = self._objectives(batch_rows(batch, slice(row, row + 1)), first + row)
                for number, objective in enumerate(objectives):
                    gradients = torch.autograd.grad(
                        objective(), parameters, retain_graph=number + 1 < len(objectives), allow_unused=True
                    )
                    for parameter, gradient in zip(parameters, gradients, strict=True):
                        if gradient is not None:
                            wide = gradient.to(self._totals[parameter].dtype)
                            self._totals[parameter].addcmul_(wide, wide)

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        self._active = True
        try:
            yield
        finally:
            self._active = False
            self._forget()
            self._ids.clear()

    def _attach(self) -> None:
        self._hooks.close()
        for choices in self._choices.values():
            if choices:
                for handle in choices[0](self).attach():
                    self._hooks.callback(handle.remove)

    # The trial

    def _choose_ways(self, batch: Any) -> None:
        """Settle on a way for every module, by holding each against autograd on these examples."""
        expected = self._by_autograd(batch)
        kept = {parameter: total.clone() for parameter, total in self._totals.items()} if self._proved else {}
        self.slow |= {p for module, choices in self._choices.items() if not choices for p in self._own(module)}
        while len(self.slow) < len(self._totals) and (wrong := self._try(batch, expected)):
            for module in wrong:
                self._choices[module] = self._choices[module][1:]
                if not self._choices[module]:
                    self.slow |= set(self._own(module))
        self._proved = examples_in(batch)
        for parameter, total in kept.items():
            self._totals[parameter].copy_(total)

    def _own(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for p in module._parameters.values() if p is not None and p in self._totals]

    def _try(self, batch: Any, expected: Mapping[nn.Parameter, list[Tensor]]) -> set[nn.Module]:
        """The modules whose way fails or gives something else than expected."""
        self._failed.clear()
        self._kinds.clear()
        self.examples = examples_in(batch)
        self._before, self._now = _Done(), _Done()
        self._trial = True
        self._attach()
        try:
            with self._listening():
                _mixed(self._outputs(batch)).backward()
                self._finish()
        except Exception as error:
            if not self._failed or is_out_of_memory(error):
                raise
            return self._alike(self._failed[0].module)
        else:
            return self._differing(expected)
        finally:
            self._trial = False
            for total in self._totals.values():
                total.zero_()

    def _alike(self, module: nn.Module) -> set[nn.Module]:
        """The module, and those that are surely no better: of the same class, where a class decides about the way."""
        way = self._choices[module][0](self)
        if not isinstance(way, RepeatedWay):
            return {module}
        left = len(self._choices[module])
        return {m for m, choices in self._choices.items() if type(m) is type(module) and len(choices) == left}

    def _differing(self, expected: Mapping[nn.Parameter, list[Tensor]]) -> set[nn.Module]:
        means = {p: float(sum(g.float().square().mean() for g in gradients)) for p, gradients in expected.items()}
        largest = max(means.values(), default=0.0)
        wrong: set[nn.Parameter] = set()
        for parameter, gradients in expected.items():
            if parameter in self.slow:
                continue
            total = self._totals[parameter]
            squares = torch.zeros_like(total)
            for gradient in gradients:
                squares += gradient.to(total.dtype).square()
            error, size = float((total - squares).abs().mean()), means[parameter]
            # A gradient that is 0 but for rounding is held against the largest.
            noise = (4 * torch.finfo(parameter.dtype).eps) ** 2 * largest
            if not error <= _ROUNDING.get(parameter.dtype, _ROUNDING_16_BIT) * size + noise:
                wrong.add(parameter)
        return {module for module, choices in self._choices.items() if choices and wrong & set(self._own(module))}

    def _by_autograd(self, batch: Any) -> dict[nn.Parameter, list[Tensor]]:
        """Each example's gradient of the trial's objective, by parameter; none where it is not used."""
        parameters = list(self._totals)
        found: dict[nn.Parameter, list[Tensor]] = {parameter: [] for parameter in parameters}
        with _differentiable(parameters):
            for row in range(examples_in(batch)):
                value = _mixed(self._outputs(batch_rows(batch, slice(row, row + 1))), row)
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(value, parameters, allow_unused=True), strict=True
                ):
                    if gradient is not None:
                        found[parameter].append(gradient)
        return found


def _is_small(term: Term) -> TypeGuard[Direct]:
    return isinstance(term, Direct) and term.gradient.numel() <= 1 << 20


def _by_type(parameters: Iterable[nn.Parameter], totals: Mapping[nn.Parameter, Tensor]) -> list[list[nn.Parameter]]:
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((totals[parameter].dtype, parameter.device), []).append(parameter)
    return list(groups.values())


def _mixed(outputs: Tensor, row: int = 0) -> Tensor:
    """Outputs weighted by numbers without a pattern, so that no gradient is 0 by chance; ``row`` is the first's in its batch."""
    count = outputs[0].numel()
    places = torch.arange(row * count, row * count + outputs.numel(), device=outputs.device, dtype=torch.float64)
    weights = torch.sin(places * places % 1000.0 + 0.7 * places)
    return (outputs * weights.view_as(outputs).to(outputs.dtype)).sum()


@contextlib.contextmanager
def _differentiable(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def examples_in(batch: Any) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    labels = batch.get("labels") if isinstance(batch, Mapping) else batch[-1]
    if not isinstance(labels, Tensor):
        labels = next(value for value in values if isinstance(value, Tensor))
    return len(labels)


def batch_rows(batch: Any, rows: slice) -> Any:
    """Some examples of a batch; what has no axis of examples stays as it is."""
    examples = examples_in(batch)

    def cut(value: Any) -> Any:
        return value[rows] if isinstance(value, Tensor) and value.dim() and len(value) == examples else value

    if isinstance(batch, Mapping):
        return {name: cut(value) for name, value in batch.items()}
    return tuple(cut(value) for value in batch)


def is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error) or "out of memory" in str(error)
    )
