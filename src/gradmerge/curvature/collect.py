"""Collecting the squared gradients of every example from one backward pass over a batch, and the slow way for the rest.

Which :mod:`way <gradmerge.curvature.layers>` fits a module is not guessed: on two examples every way's result is held
against the gradients of single examples by autograd (the *trial*). A way that differs, or fails, is replaced by the next;
a parameter that none fits is measured the slow way, one example at a time, and named.

What fitted two examples need not fit all. Autograd tells in every backward pass, before anything is added, whether a
parameter is used anywhere but in its modules; and the trial is repeated on :mod:`some later batches
<gradmerge.curvature.checks>`. What no longer fits goes the slow way. If sums may be wrong by then, all is measured again.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MachineError
from .batches import batch_rows, examples_in
from .checks import Checks, shape_of
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
from .layers import RepeatedWay, ways_for
from .taps import Slot, Unsuited, Way

Objectives = Callable[[Any, int], list[Callable[[], Tensor]]]
"""(batch, index of its first example) → one function for each backward pass, which gives Σ_i of something of example i."""

#: How much a way may differ from autograd in the trial, relative to the sum of a parameter's squares: rounding, but no more.
_ROUNDING = {torch.float64: 1e-4, torch.float32: 2e-2}
_ROUNDING_16_BIT = 0.5
#: Entries of examples' gradients up to which a parameter waits for others, to be added together with them.
_SMALL = 1 << 20


class Distrusted(Exception):
    """A way was used on batches, or on a part of this one, that it may have been wrong for."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.parameters = set(parameters)


class _Strayed(Exception):
    """A parameter is used elsewhere than in its modules."""


@dataclass
class _Done:
    """How far a batch is: whole backward passes, and in the next one the parameters whose squares are already added."""

    passes: int = 0
    slots: set[Slot] = field(default_factory=set)
    heads: set[Slot] = field(default_factory=set)
    """Tied heads whose own squares are added, but not yet the table's."""

    def __or__(self, later: _Done) -> _Done:
        if later.passes > self.passes:
            return later
        return _Done(self.passes, self.slots | later.slots, self.heads | later.heads)


@dataclass
class Trial:
    """What was found out about a model's layers, for further measurements of the same model to begin with.

    A measurement fills it. It stays empty, so that the next one tries the layers out again, after an error, where a
    parameter's gradient was 0 in the trial, which proves nothing, and where a later batch did not go the way that was chosen.
    """

    examples: int = 0
    """How many the layers were tried out on."""
    choices: dict[nn.Module, list[Callable[[Any], Way]]] = field(default_factory=dict)
    kinds: dict[nn.Parameter, list[type]] = field(default_factory=dict)
    slow: set[nn.Parameter] = field(default_factory=set)
    checks: Checks = field(default_factory=Checks)
    told: set[str] = field(default_factory=set)
    """Names of slow parameters that the user knows of. They stay."""

    def forget(self) -> None:
        self.examples, self.choices, self.kinds, self.slow, self.checks = 0, {}, {}, set(), Checks()


class Collector:
    """Adds Σ_i g_i² of a model's parameters to their totals, batch by batch."""

    def __init__(
        self,
        model: nn.Module,
        totals: Mapping[nn.Parameter, Tensor],
        objectives: Objectives,
        outputs: Callable[[Any], Tensor],
        trial: Trial | None = None,
        slow: Iterable[nn.Parameter] = (),
    ) -> None:
        self.examples = 0
        self.tokens: set[int] = set()
        self.rows: dict[Any, set[int]] = {}
        self.changed: Way | None = None
        self.recomputes = any(
            getattr(m, "gradient_checkpointing", False) is True and m.training for m in model.modules()
        )
        self.anchor = torch.zeros((), device=next(iter(totals)).device, requires_grad=True)
        self.slots = {parameter: Slot(parameter, total) for parameter, total in totals.items()}
        self._objectives, self._outputs = objectives, outputs
        owners = {child: module for module in model.modules() for child in module.children()}
        self._choices = {m: ways_for(m, owners.get(m)) for m in model.modules() if self._own(m)}
        self._hooks = contextlib.ExitStack()
        self._proved = 0
        self._settled = True
        self._kept = trial if trial is not None else Trial()
        self._checks = self._kept.checks
        self._forced = set(slow)
        self._trial = self._active = False
        self._failed: list[Way] = []
        self._unfit: list[Way] = []
        self._before, self._now = _Done(), _Done()
        self._waiting: list[Slot] = []
        self._watched: list[Slot] = []
        self._looked = True

    def __enter__(self) -> Collector:
        kept = self._kept
        if kept.examples and kept.kinds.keys() == self.slots.keys() and kept.choices.keys() == self._choices.keys():
            self._proved, self._choices = kept.examples, dict(kept.choices)
            for parameter, slot in self.slots.items():
                slot.kinds, slot.slow = kept.kinds[parameter], parameter in kept.slow
            self._attach()
        else:
            self._checks = kept.checks = Checks()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._hooks.close()
        if kind is not None or not self._settled:
            self._kept.forget()
            return
        self._kept.examples, self._kept.choices, self._kept.slow = self._proved, self._choices, self.slow
        self._kept.kinds = {parameter: slot.kinds for parameter, slot in self.slots.items()}

    @property
    def slow(self) -> set[nn.Parameter]:
        """Parameters that no way fits."""
        return {parameter for parameter, slot in self.slots.items() if slot.slow}

    def add(self, batch: Any, first: int) -> None:
        """Add the squares of every example of a batch, whose first is number ``first`` of the data."""
        shape = shape_of(batch)
        due = self._checks.due(shape)
        if self._proved < min(examples_in(batch), 2):
            with _enough_memory("two examples, which the layers are tried out on"):
                self._choose_ways(batch_rows(batch, slice(0, 2)))
            self._checks.passed(shape)
        elif due and self._some_fast():
            self._check_again(batch, shape)
        self._checks.skipped |= shape not in self._checks.shapes
        self._add(batch, first, _Done())

    def _some_fast(self) -> bool:
        return any(not slot.slow for slot in self.slots.values())

    def _own(self, module: nn.Module) -> list[Slot]:
        return [self.slots[p] for p in module._parameters.values() if p is not None and p in self.slots]

    # What the ways call

    @property
    def listening(self) -> bool:
        return self._active and torch.is_grad_enabled()

    def failed(self, way: Way) -> None:
        self._failed.append(way)

    def unfit(self, way: Way) -> None:
        self._unfit.append(way)

    def take(self, slot: Slot, term: Term) -> None:
        if slot.slow or slot in self._before.slots:
            return
        if not self._looked:
            self._look_for_strays()
        if self._trial:
            slot.kinds.append(type(term))
        elif not slot.kinds:
            raise Unsuited("the parameter was not used in the trial")
        elif len(slot.kinds) == 1 and not _is_small(term):
            if slot in self._now.slots:
                raise Distrusted([slot.parameter])
            add_squares(slot.total, [term])
            self._now.slots.add(slot)
            return
        elif isinstance(term, Outer) and slot.is_tied_table:
            self._take_head(slot, term)
            return
        if not slot.terms:
            self._waiting.append(slot)
        slot.terms.append(term)

    def _take_head(self, slot: Slot, term: Outer) -> None:
        """A head tied to an embedding: (A + S)² = A² + S (2A + S), where S has few rows. A² and those rows of A now, S later.

        The head's gradient is as large as the logits; it need not be kept until the embedding's comes.
        """
        if slot.head is not None:
            raise Distrusted([slot.parameter])
        rows = unique_rows(torch.cat(slot.ids, 1))
        if slot not in self._before.heads:
            add_outer(slot.total, term)
        self._now.heads.add(slot)
        slot.head = rows, outer_at_rows(term, rows, slot.total.dtype)

    def _finish(self) -> None:
        """Add the squares of small parameters, and of those that are used several times, now that all uses have been seen."""
        if self._unfit and not self._trial:
            self._leave_to_slow()
        small = [slot for slot in self._waiting if all(_is_small(term) for term in slot.terms)]
        for group in _by_type(small):
            add_many_direct([slot.total for slot in group], [slot.terms for slot in group])  # type: ignore[misc]
            self._now.slots.update(group)
        for slot in self._waiting:
            if slot in self._now.slots:
                continue
            if slot.head is not None:
                self._add_table(slot, *slot.head)
            else:
                add_squares(slot.total, slot.terms)
            self._now.slots.add(slot)
        self._forget()

    def _add_table(self, slot: Slot, rows: Tensor, head: Tensor) -> None:
        if len(slot.terms) != len(slot.kinds) - 1:
            raise Distrusted([slot.parameter])
        table = merge_rows([term for term in slot.terms if isinstance(term, Rows)], slot.total.dtype).y
        # Rows that were asked for twice, as where activations are computed again, are the same ones with more left over.
        count = min(rows.shape[1], table.shape[1])
        rows, head, table = rows[:, :count], head[:, :count], table[:, :count]
        add_rows(slot.total, rows, table * (2 * head + table))

    def _leave_to_slow(self) -> None:
        """Modules that saw something else than in the batches before: what they gave is dropped."""
        self._settled = False
        self._give_up({way.module for way in self._unfit})
        unfit = {slot for way in self._unfit for slot in way.slots.values()}
        if unfit & (self._now.slots | self._now.heads):
            raise Distrusted(slot.parameter for slot in unfit)
        self._waiting = [slot for slot in self._waiting if slot not in unfit]
        for slot in unfit:
            slot.terms = []
        self._unfit.clear()

    def _forget(self) -> None:
        for slot in self._waiting:
            slot.terms = []
        self._waiting = []
        for slot in self.slots.values():
            slot.head = None

    # One batch

    def _add(self, batch: Any, first: int, before: _Done) -> None:
        """What of a batch is not done before; in halves if memory runs out."""
        try:
            if self._some_fast():
                self._add_at_once(batch, first, before)
        except (Unsuited, _Strayed) as error:  # what a module sees is not as it was for the batches before
            self._settled = False
            if isinstance(error, Unsuited):
                self._give_up([error.way.module])
            self._attach()
            self._add(batch, first, before)
            return
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if examples_in(batch) == 1:
                raise _no_memory("a single example") from None
        else:
            slow = [slot for slot in self.slots.values() if slot.slow and slot not in before.slots]
            if slow:
                with _enough_memory("a single example"):
                    self._add_slowly(slow, batch, first)
            return
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        done, half = before | self._now, examples_in(batch) // 2
        self._add(batch_rows(batch, slice(0, half)), first, done)
        self._add(batch_rows(batch, slice(half, None)), first + half, done)

    def _add_at_once(self, batch: Any, first: int, before: _Done) -> None:
        self._before, self._now = before, _Done(before.passes)
        with self._listening(batch), self._watching():
            objectives = self._objectives(batch, first)
            for number in range(before.passes, len(objectives)):
                objective = objectives[number]()
                self._looked = False
                if objective.requires_grad:  # or else no parameter that has a way is used
                    objective.backward(retain_graph=number + 1 < len(objectives))
                if not self._looked:  # no module has given anything
                    self._drop_strays([slot for slot in self._watched if slot.parameter.grad is not None])
                self._finish()
                self._before, self._now = _Done(number + 1), _Done(number + 1)

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        """Parameters that have a way take part in autograd. Their modules do not see that, so any gradient is of another use."""
        self._watched = [slot for slot in self.slots.values() if not slot.slow]
        parameters = [slot.parameter for slot in self._watched]
        kept = [(parameter, parameter.grad) for parameter in parameters if parameter.grad is not None]
        for parameter, _ in kept:
            parameter.grad = None
        try:
            with _differentiable(parameters):
                for slot in self._watched:
                    slot.end  # noqa: B018
                yield
        finally:
            self._looked = True
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = None
            for parameter, gradient in kept:
                parameter.grad = gradient

    def _look_for_strays(self) -> None:
        """As a backward pass hands over its first term, before that is added."""
        self._looked = True
        self._drop_strays([slot for slot in self._watched if slot.reached])

    def _drop_strays(self, strays: list[Slot]) -> None:
        if strays:
            self._give_up([module for module in self._choices if set(self._own(module)) & set(strays)])
            raise _Strayed

    def _add_slowly(self, slots: list[Slot], batch: Any, first: int) -> None:
        parameters = [slot.parameter for slot in slots]
        with _differentiable(parameters):
            for row in range(examples_in(batch)):
                objectives = self._objectives(batch_rows(batch, slice(row, row + 1)), first + row)
                for number, objective in enumerate(objectives):
                    gradients = _gradients(objective(), parameters, number + 1 < len(objectives))
                    for slot, gradient in zip(slots, gradients, strict=True):
                        if gradient is not None:
                            wide = gradient.to(slot.total.dtype)
                            slot.total.addcmul_(wide, wide)

    @contextlib.contextmanager
    def _listening(self, batch: Any) -> Iterator[None]:
        self._active = True
        self.examples = examples_in(batch)
        self.tokens = _tokens_in(batch)
        self.rows.clear()
        self.changed = None
        self._failed.clear()
        self._unfit.clear()
        try:
            yield
        finally:
            self._active = False
            self._forget()
            for slot in self.slots.values():
                slot.ids.clear()

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
        self._settled = all(any(bool(g.any()) for g in gradients) for gradients in expected.values() if gradients)
        kept = [(slot, slot.total.clone()) for slot in self.slots.values()] if self._proved else []
        self._reset()
        self._give_up([module for module, choices in self._choices.items() if not choices])
        for parameter in self._forced:
            self.slots[parameter].slow = True
        while self._some_fast() and (wrong := self._try(batch, expected)):
            for module in wrong:
                self._choices[module] = self._choices[module][1:]
            self._give_up([module for module in wrong if not self._choices[module]])
        self._proved = examples_in(batch)
        for slot, total in kept:
            slot.total.copy_(total)

    def _check_again(self, batch: Any, shape: Any) -> None:
        """The trial once more, with the ways that were chosen, on the first and the last example of a batch."""
        some = batch_rows(batch, slice(None, None, max(1, examples_in(batch) - 1)))
        kept = {slot: (slot.total, slot.kinds) for slot in self.slots.values()}
        wrong: set[nn.Module] = set()
        try:
            for slot, (total, _) in kept.items():
                slot.total = total.new_zeros(()) if slot.slow else torch.zeros_like(total)
            expected = self._by_autograd(some)
            while self._some_fast() and (more := self._try(some, expected)):
                wrong |= more
                self._give_up(more)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return  # the batch itself may fit, in halves
        finally:
            for slot, (total, kinds) in kept.items():
                slot.total, slot.kinds = total, max(kinds, slot.kinds, key=len)
            self._attach()
        if wrong:
            self._settled = False
            if shape in self._checks.shapes or self._checks.skipped:
                raise Distrusted(slot.parameter for module in wrong for slot in self._own(module))
        self._checks.passed(shape)

    def _reset(self) -> None:
        for slot in self.slots.values():
            slot.total.zero_()

    def _give_up(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            for slot in self._own(module):
                slot.slow = True

    def _try(self, batch: Any, expected: Mapping[Slot, list[Tensor]]) -> set[nn.Module]:
        """The modules whose way fails or gives something else than expected."""
        for slot in self.slots.values():
            slot.kinds = []
        self._before, self._now = _Done(), _Done()
        self._trial = True
        self._attach()
        try:
            with self._listening(batch):
                objective = _mixed(self._outputs(batch))
                if objective.requires_grad:
                    objective.backward()
                if self._unfit:
                    return set().union(*(self._alike(way.module) for way in self._unfit))
                self._finish()
        except Exception as error:
            # The model runs without ways: one of them is to blame.
            way = self._failed[0] if self._failed else self.changed
            if way is None or is_out_of_memory(error):
                raise
            return self._alike(way.module)
        else:
            return self._differing(expected)
        finally:
            self._trial = False
            self._reset()

    def _alike(self, module: nn.Module) -> set[nn.Module]:
        """The module, and those that are surely no better: of the same class, where a class decides about the way."""
        way = self._choices[module][0](self)
        if not isinstance(way, RepeatedWay):
            return {module}
        left = len(self._choices[module])
        return {m for m, choices in self._choices.items() if type(m) is type(module) and len(choices) == left}

    def _differing(self, expected: Mapping[Slot, list[Tensor]]) -> set[nn.Module]:
        means = {slot: float(sum(g.float().square().mean() for g in gradients)) for slot, gradients in expected.items()}
        largest = max(means.values(), default=0.0)
        wrong: set[Slot] = set()
        for slot, gradients in expected.items():
            if slot.slow:
                continue
            squares = torch.zeros_like(slot.total)
            for gradient in gradients:
                wide = gradient.to(squares.dtype)
                squares.addcmul_(wide, wide)
            error = float((slot.total - squares).abs().mean())
            # A gradient that is 0 but for rounding is held against the largest.
            dtype = slot.parameter.dtype
            noise = (4 * torch.finfo(dtype).eps) ** 2 * largest
            if not error <= _ROUNDING.get(dtype, _ROUNDING_16_BIT) * means[slot] + noise:
                wrong.add(slot)
        return {module for module, choices in self._choices.items() if choices and wrong & set(self._own(module))}

    def _by_autograd(self, batch: Any) -> dict[Slot, list[Tensor]]:
        """Each example's gradient of the trial's objective, by parameter; none where it is not used."""
        found: dict[Slot, list[Tensor]] = {slot: [] for slot in self.slots.values() if not slot.slow}
        parameters = [slot.parameter for slot in found]
        with _differentiable(parameters):
            for row in range(examples_in(batch)):
                value = _mixed(self._outputs(batch_rows(batch, slice(row, row + 1))), row)
                gradients = _gradients(value, parameters)
                for slot, gradient in zip(found, gradients, strict=True):
                    if gradient is not None:
                        found[slot].append(gradient)
        return found


def _is_small(term: Term) -> bool:
    return isinstance(term, Direct) and term.gradient.numel() <= _SMALL


def _by_type(slots: Iterable[Slot]) -> list[list[Slot]]:
    groups: dict[Any, list[Slot]] = {}
    for slot in slots:
        groups.setdefault((slot.total.dtype, slot.total.device), []).append(slot)
    return list(groups.values())


def _mixed(outputs: Tensor, row: int = 0) -> Tensor:
    """Outputs weighted by numbers without a pattern, so that no gradient is 0 by chance; ``row`` is the first's in its batch."""
    count = outputs[0].numel()
    places = torch.arange(row * count, row * count + outputs.numel(), device=outputs.device, dtype=torch.float64)
    weights = torch.sin(places * places % 1000.0 + 0.7 * places)
    return (outputs * weights.view_as(outputs).to(outputs.dtype)).sum()


def _gradients(value: Tensor, parameters: list[nn.Parameter], retain: bool = False) -> Sequence[Tensor | None]:
    """None where a parameter is not used. An embedding may give only the rows it used: they are filled up."""
    if not value.requires_grad:
        return [None] * len(parameters)
    found = torch.autograd.grad(value, parameters, retain_graph=retain, allow_unused=True)
    return [g.to_dense() if g is not None and g.layout != torch.strided else g for g in found]


def _tokens_in(batch: Any) -> set[int]:
    """How many numbers, or vectors, the tensors of a batch have for each example."""
    values = batch.values() if isinstance(batch, Mapping) else batch
    examples = examples_in(batch)
    shapes = [value.shape for value in values if isinstance(value, Tensor) and value.dim() and len(value) == examples]
    return {math.prod(shape[1:]) for shape in shapes} | {math.prod(shape[1:-1]) for shape in shapes}


@contextlib.contextmanager
def _differentiable(parameters: list[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(False)


def _no_memory(examples: str) -> MachineError:
    return MachineError(
        f"out of memory with {examples}. Use shorter examples (--max-length), --dtype bfloat16, or a larger device."
    )


@contextlib.contextmanager
def _enough_memory(examples: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise _no_memory(examples) from None


def is_out_of_memory(error: BaseException) -> bool:
    return (
        isinstance(error, torch.OutOfMemoryError) or "not enough memory" in str(error) or "out of memory" in str(error)
    )
