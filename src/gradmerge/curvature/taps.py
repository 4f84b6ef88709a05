"""Taps: how a layer hands over what it saw and the gradient of its output, in one backward pass over a batch.

A *tap* is an identity put behind a layer's output (or before a parameter's use). In the backward pass it hands over what
the layer saw and the gradient of its output, from which a :mod:`~gradmerge.curvature.kernels` term is made. The layer's
own parameters need no gradient meanwhile, so that the statistic takes the place of the weight gradient.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .kernels import Direct, Outer, Rows, Term


class Slot:
    """One parameter: its total, and what this batch has given for it so far."""

    def __init__(self, parameter: nn.Parameter, total: Tensor) -> None:
        self.parameter = parameter
        self.total = total
        self.slow = False
        """No way fits it."""
        self.kinds: list[type] = []
        """The terms that one backward pass gives, as seen in the trial."""
        self.terms: list[Term] = []
        self.ids: list[Tensor] = []
        """Rows of a table that this batch's examples use, told in the forward pass."""
        self.head: tuple[Tensor, Tensor] | None = None
        self._end: Any = None

    @property
    def reached(self) -> bool:
        """Whether the backward pass that runs now will give the parameter itself a gradient."""
        return bool(torch._C._will_engine_execute_node(self.end))

    @property
    def end(self) -> Any:
        """Where autograd would hand over the parameter's gradient. Asked for while the parameter takes part in autograd."""
        if self._end is None:
            self._end = torch.autograd.graph.get_gradient_edge(self.parameter).node
        return self._end

    @property
    def is_tied_table(self) -> bool:
        """A table of rows that is a linear layer's matrix as well."""
        return self.kinds.count(Outer) == 1 and self.kinds.count(Rows) == len(self.kinds) - 1 > 0


class Collector(Protocol):
    """Who takes the terms, and knows how many examples the batch has."""

    examples: int
    anchor: Tensor
    slots: dict[nn.Parameter, Slot]
    recomputes: bool
    """Activations are not kept but computed again in the backward pass."""
    tokens: set[int]
    """How many tokens, or places, an example has, wherever an axis of examples was seen in this forward pass."""
    rows: dict[Any, set[int]]
    """How many rows went into layers of each shape in this forward pass, where they have no axis of tokens."""
    changed: Way | None
    """The last way that has given its module something else than the parameter, or its rows."""

    @property
    def listening(self) -> bool:
        """Whether the forward pass that runs now is one to take gradients of."""

    def take(self, slot: Slot, term: Term) -> None:
        """Add a term to the gradients of this batch's examples."""

    def failed(self, way: Way) -> None:
        """A way stands where an error came from."""

    def unfit(self, way: Way) -> None:
        """A way could not use what it saw in the backward pass, which goes on without it."""


class Unsuited(Exception):
    """A layer's input does not have the shape that its way of taking gradients needs."""

    way: Way


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, use: Callable[..., None], *seen: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(*seen)
        if 0 in output.stride():
            return output.view_as(output)
        # As if changed in place: a view could not be changed in place by what follows, as `hidden += residual` does.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        seen = ctx.saved_tensors
        ctx.use(gradient, *seen)
        return (gradient, None, None, *(None for _ in seen))


class Way:
    """One way to take the gradients of a module's own parameters."""

    def __init__(self, collector: Collector, module: nn.Module) -> None:
        self.collector = collector
        self.module = module
        own = [(name, collector.slots.get(p)) for name, p in module._parameters.items() if p is not None]
        self.slots = {name: slot for name, slot in own if slot is not None and not slot.slow}

    def attach(self) -> Iterator[Any]:
        """Put the hooks in place, and give what removes them."""
        yield self.module.register_forward_pre_hook(self._hide)
        yield self.module.register_forward_hook(self._behind, always_call=True)
        yield Undo(self._restore)

    def _hide(self, module: nn.Module, inputs: Any) -> None:
        """While the module runs it sees its parameters outside autograd: a gradient that reaches them is of another use."""
        if self.collector.listening:
            for name, slot in self.slots.items():
                module.__dict__[name] = slot.parameter.detach()

    def _behind(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        self._restore()
        if output is None or not self.collector.listening:  # None where the module's forward has raised
            return output
        with self._answerable():
            if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
                raise Unsuited("the module does not take a tensor and give one")
        self._see(inputs[0])
        return self._tap(output, self.use, inputs[0])

    def _see(self, value: Tensor) -> None:
        if value.dim() == 2:
            self.collector.rows.setdefault(self._shapes(), set()).add(value.shape[0])
        if value.dim() > 1 and value.shape[0] == self.collector.examples:
            self.collector.tokens.add(math.prod(value.shape[1:-1]))

    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(p.shape for p in self.module._parameters.values() if p is not None)

    def _by_example(self, value: Tensor, keep: int) -> Tensor:
        """(examples, everything between, *the last ``keep`` axes).

        Leading rows that fold an example's tokens are unfolded. They must be all of its tokens: rows that were chosen, as
        for an expert, need not be equally many of every example. Where they are as many as examples by chance, layers of
        the same shape have others.
        """
        examples, rows = self.collector.examples, value.shape[0]
        if rows == examples and value.dim() == keep + 2:
            return value
        if value.dim() <= keep or rows % examples:
            raise Unsuited(f"an input of shape {list(value.shape)} has no axis of {examples} examples")
        unfolded = value.reshape(examples, -1, *value.shape[value.dim() - keep :])
        tokens = set() if rows == examples else {examples * unfolded.shape[1]}
        if value.dim() == 2:
            tokens |= self.collector.rows.get(self._shapes(), set())
        if examples > 1 and not all(map(self._are_whole, tokens)):
            raise Unsuited(f"an input of shape {list(value.shape)} is not known to hold {examples} examples one by one")
        return unfolded

    def _are_whole(self, tokens: int) -> bool:
        """Whether so many can be all tokens of all examples."""
        examples = self.collector.examples
        return tokens == examples or (tokens % examples == 0 and tokens // examples in self.collector.tokens)

    def _tap(self, output: Tensor, use: Callable[..., None], *seen: Tensor) -> Tensor:
        """The output unchanged; ``use(gradient of it, *seen)`` is called in the backward pass."""

        def guarded(*values: Tensor) -> None:
            try:
                use(*values)
            except Unsuited:
                self.collector.unfit(self)

        seen = tuple(value.detach() for value in seen)
        if output.requires_grad and not self.collector.recomputes:
            versions = [value._version for value in seen]

            def hook(gradient: Tensor) -> None:
                if [value._version for value in seen] != versions:
                    raise RuntimeError("a layer's input was changed in place before the backward pass")
                guarded(gradient, *seen)

            output.register_hook(hook)
            return output
        # The anchor makes the output part of the graph although no parameter asks for a gradient. What is saved through
        # autograd is computed again where activations are.
        return _Tap.apply(output, self.collector.anchor, guarded, *seen)  # type: ignore[no-any-return,no-untyped-call]

    @contextlib.contextmanager
    def _answerable(self) -> Iterator[None]:
        try:
            yield
        except Unsuited as error:
            error.way = self
            self.collector.failed(self)
            raise

    def use(self, gradient: Tensor, *seen: Tensor) -> None:
        raise NotImplementedError

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._restore()
        if output is None:  # it is called like this when the module's forward has raised
            self.collector.failed(self)

    def _restore(self) -> None:
        """Take away what stands in front of the parameters: an attribute of the object is found before they are."""
        for name in self.module._parameters:
            self.module.__dict__.pop(name, None)

    def _take_bias(self, gradient: Tensor) -> None:
        """``gradient`` is (examples, tokens, width)."""
        bias = self.slots.get("bias")
        if bias is not None:
            self.collector.take(bias, Direct(gradient.sum(1, dtype=sum_type(gradient))))


class Undo:
    """What a hook's handle is: something to remove."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self.remove = action


def sum_type(value: Tensor) -> torch.dtype:
    return torch.float64 if value.dtype == torch.float64 else torch.float32
