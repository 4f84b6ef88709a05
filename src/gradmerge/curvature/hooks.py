"""Capture the input of each layer and the gradient of its output, in one forward and backward pass over a batch.

The hooks of a :class:`LayerFormula` work as follows:

1. Before the layer runs, its parameters are hidden from autograd, which would add up their gradients over examples.
2. After it ran, its output gets a hook that receives y, the gradient of the output, in the backward pass.
3. That hook passes y and the layer's input x to ``LayerFormula.use``, which makes a term (:mod:`.kernels`) of them and
   passes it to ``Recorder.add_term``.

Everything that can exclude a formula for a batch is known after the forward pass (:meth:`Recorder.check_shapes`), so
nothing has been added by then.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .batches import examples_in, values_of
from .kernels import DirectGradient, Term, sum_type
from .parameter_sum import ParameterSum, Sums


class Recorder:
    """The state that the formulas of a model share while a batch runs. Each passes its terms to ``add_term``.

    Subclasses differ in ``add_term``: the verifier compares terms with autograd, and the
    :class:`~gradmerge.curvature.accumulate.Accumulator` adds up their squares.
    """

    def __init__(self, model: nn.Module, sums: Sums) -> None:
        self.sums = sums
        self.examples = 0
        self.tokens: set[int] = set()
        """Numbers of tokens (or positions) per example in this forward pass, from inputs with an axis of examples."""
        self.rows: dict[Any, set[int]] = {}
        """Shapes of a layer's parameters → numbers of rows of its two-dimensional inputs in this forward pass."""
        self.changed: LayerFormula | None = None
        """The last formula that replaced a parameter or the ids of its module."""
        self.failed: list[LayerFormula] = []
        """Formulas whose module raised an error."""
        self.unfit: set[LayerFormula] = set()
        """Formulas that do not fit the shapes of this batch."""
        self._shapes: list[tuple[LayerFormula, torch.Size, int]] = []
        """Shapes to check after the forward pass: formula, shape, and number of last axes of one token."""
        self._hooks = contextlib.ExitStack()
        trained = (module for module in model.modules() if module.training)
        self.recomputes = any(getattr(module, "gradient_checkpointing", False) is True for module in trained)
        self.anchor = torch.zeros((), device=next(iter(sums)).device, requires_grad=True)
        self._active = self._forward = False

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()

    def needs_term(self, entry: ParameterSum) -> bool:
        """Return whether a bias needs separate terms."""
        return True

    def add_term(self, entry: ParameterSum, term: Term) -> None:
        """Handle a term of the gradients of this batch's examples, for one parameter."""
        raise NotImplementedError

    def attach(self, formulas: Iterable[Callable[[Recorder], LayerFormula]]) -> None:
        """Register the hooks of these formulas, and remove those of earlier ones."""
        self._hooks.close()
        for make in formulas:
            for remove in make(self).attach():
                self._hooks.callback(remove)

    @property
    def listening(self) -> bool:
        """Whether hooks should capture the forward pass that runs now."""
        return self._active and torch.is_grad_enabled()

    @contextlib.contextmanager
    def recording(self, batch: Any) -> Iterator[None]:
        """Let the hooks capture this batch inside."""
        self._active = self._forward = True
        self.examples = examples_in(batch)
        self.tokens = _tokens_in(batch)
        self.rows.clear()
        self.changed = None
        self.failed.clear()
        self.unfit.clear()
        self._shapes.clear()
        try:
            yield
        finally:
            self._active = False
            for entry in self.sums.values():
                entry.forget()

    def expect_shape(self, formula: LayerFormula, shape: torch.Size, keep: int) -> None:
        """Note a shape to check after the forward pass: (examples, everything between, *``keep`` axes of one token)."""
        if self._forward:
            self._shapes.append((formula, shape, keep))

    def note_use(self, entry: ParameterSum, kind: type[Term], ids: Tensor | None = None) -> None:
        """Note that the forward pass uses a parameter, which kind of term this gives, and which rows of a table."""
        if self._forward:
            entry.uses.append(kind)
            entry.ids += [] if ids is None else [ids]

    def check_shapes(self) -> set[LayerFormula]:
        """Return the formulas that do not fit this batch. Called after its forward pass."""
        self._forward = False
        self.unfit |= {formula for formula, shape, keep in self._shapes if not formula.fits(shape, keep)}
        return self.unfit


def _tokens_in(batch: Any) -> set[int]:
    """Return how many numbers, or vectors, the tensors of a batch have per example."""
    examples, tensors = examples_in(batch), [value for value in values_of(batch) if isinstance(value, Tensor)]
    shapes = [tensor.shape for tensor in tensors if tensor.dim() and len(tensor) == examples]
    return {math.prod(shape[1:]) for shape in shapes} | {math.prod(shape[1:-1]) for shape in shapes}


class LayerFormula:
    """Computes each example's gradient of a module's own parameters, from its input and the gradient of its output."""

    def __init__(self, recorder: Recorder, module: nn.Module) -> None:
        self.recorder = recorder
        self.module = module
        named = [(name, recorder.sums.get(p)) for name, p in module._parameters.items() if p is not None]
        self.sums = {name: entry for name, entry in named if entry is not None and not entry.slow}

    def expect(self, output: Tensor, x: Tensor) -> None:
        """Note the shapes that the formula needs in this call, and the kind of term that each parameter gets."""
        raise NotImplementedError

    def use(self, y: Tensor, *seen: Tensor) -> None:
        """Make terms of the gradient of the output and of the inputs, and pass them to the recorder."""
        raise NotImplementedError

    def attach(self) -> Iterator[Callable[[], Any]]:
        """Register the hooks, and yield functions that remove them."""
        yield self.module.register_forward_pre_hook(self._before, with_kwargs=True).remove
        yield self.module.register_forward_hook(self._after, always_call=True).remove
        yield self._restore

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Hide the parameters from autograd while the module runs. A gradient that reaches them comes from elsewhere.

        An entry of ``module.__dict__`` takes precedence over a parameter of the same name. Returns changed arguments,
        or None.
        """
        if self.recorder.listening:
            for name in self.sums:
                module.__dict__[name] = getattr(module, name).detach()
        return None

    def _restore(self) -> None:
        for name in self.module._parameters:
            self.module.__dict__.pop(name, None)

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        self._restore()
        if output is None or not self.recorder.listening:  # None if the module's forward raised
            return output
        if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            self.unfit()  # the module does not map a tensor to a tensor
            return output
        seen = inputs[0] if inputs[0].device == output.device else inputs[0].to(output.device)
        self.expect(output, seen)
        return self._tap(output, self.use, seen)

    def unfit(self) -> None:
        """Report that the formula does not fit the shapes of this batch."""
        self.recorder.unfit.add(self)

    def _expect_product(self, output: Tensor, x: Tensor) -> None:
        """Note a product with a matrix: the output has as many rows as the input."""
        self._note_rows(x)
        if output.shape[:-1].numel() != x.shape[:-1].numel():
            self.unfit()
        self.recorder.expect_shape(self, output.shape, 1)
        self.recorder.expect_shape(self, x.shape, 1)

    def _note_uses(self, kind: type[Term]) -> None:
        """Note that the weight and the bias are used. The weight gets a term of this kind."""
        for name, entry in self.sums.items():
            self.recorder.note_use(entry, kind if name == "weight" else DirectGradient)

    def _note_rows(self, value: Tensor) -> None:
        """Note the numbers of rows and tokens of an input, by which `fits` recognizes whole examples."""
        if value.dim() == 2:
            self.recorder.rows.setdefault(self._shapes(), set()).add(value.shape[0])
        if value.dim() > 1 and value.shape[0] == self.recorder.examples:
            self.recorder.tokens.add(math.prod(value.shape[1:-1]))

    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(p.shape for p in self.module._parameters.values() if p is not None)

    def _tap(self, output: Tensor, use: Callable[..., None], *seen: Tensor) -> Tensor:
        """Return the output unchanged; the backward pass calls ``use(y, *seen)`` with its gradient y."""
        seen = tuple(value.detach() for value in seen)
        if output.requires_grad and not self.recorder.recomputes:
            versions = [value._version for value in seen]

            def hook(y: Tensor) -> None:
                if [value._version for value in seen] != versions:
                    raise RuntimeError("a layer's input was changed in place before the backward pass")
                self._use_if_fit(use, y, *seen)

            output.register_hook(hook)
            return output
        # The anchor makes the output part of the graph although no parameter requires a gradient. Saved by autograd,
        # ``seen`` is recomputed under gradient checkpointing, as activations are.
        use = functools.partial(self._use_if_fit, use)
        return _Tap.apply(output, self.recorder.anchor, use, *seen)  # type: ignore[no-any-return,no-untyped-call]

    def _use_if_fit(self, use: Callable[..., None], *values: Tensor) -> None:
        if self not in self.recorder.unfit:
            use(*values)

    def fits(self, shape: torch.Size, keep: int) -> bool:
        """Return whether a tensor has all tokens of every example: its last ``keep`` axes are those of one token.

        Rows may be the tokens of all examples in one axis. They are split by example if each example has all of its
        tokens there. Rows that the model selected, for example for an expert, may be as many as there are examples by
        chance. So the rows of other layers of the same shape must be whole examples too.
        """
        examples = self.recorder.examples
        if shape[:1] == (examples,) and len(shape) == keep + 2:
            return True
        if len(shape) <= keep or shape[0] % examples:
            return False
        counts = set() if shape[0] == examples else {math.prod(shape[: len(shape) - keep])}
        if len(shape) == 2:
            counts |= self.recorder.rows.get(self._shapes(), set())
        return examples == 1 or all(map(self._are_whole, counts))

    def _are_whole(self, rows: int) -> bool:
        """Whether this many rows can be one per example, or all tokens of every example."""
        examples = self.recorder.examples
        return rows == examples or (rows % examples == 0 and rows // examples in self.recorder.tokens)

    def _per_example(self, value: Tensor, keep: int) -> Tensor:
        """Return ``value`` as (examples, everything between, *the last ``keep`` axes)."""
        if value.dim() == keep + 2 and value.shape[0] == self.recorder.examples:
            return value
        return value.reshape(self.recorder.examples, -1, *value.shape[value.dim() - keep :])

    def _take_bias(self, y: Tensor) -> None:
        """Pass on the term of the bias; ``y`` is (examples, tokens, width)."""
        bias = self.sums.get("bias")
        if bias is not None and self.recorder.needs_term(bias):
            self.recorder.add_term(bias, DirectGradient(y.sum(1, dtype=sum_type(y))))


class InsideFormula(LayerFormula):
    """A formula that captures a parameter inside its module, where it is used."""

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._restore()
        if output is None:  # the module's forward raised
            self.recorder.failed.append(self)
        return output


class FollowedTensor(Tensor):
    """A tensor that passes every function that it is used in to the ``called`` of ``follower``."""

    follower: Any

    @classmethod
    def of(cls, value: Tensor, follower: Any, **attributes: Any) -> FollowedTensor:
        followed = value.as_subclass(cls)
        followed.follower = follower
        followed.__dict__.update(attributes)
        return followed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        followed = next((v for v in values if isinstance(v, FollowedTensor) and hasattr(v, "follower")), None)
        if followed is None:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return followed.follower.called(func, args, kwargs or {})


def unfollowed(value: Any) -> Any:
    """Return a plain tensor for a followed one, and anything else unchanged."""
    return value.as_subclass(Tensor) if isinstance(value, FollowedTensor) else value


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, use: Callable[..., None], *seen: Tensor) -> Tensor:
        ctx.use = use
        ctx.save_for_backward(*seen)
        if 0 in output.stride():
            return output.view_as(output)
        # Not a view, which autograd would not let a later `hidden += residual` change in place.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Any, ...]:
        seen = ctx.saved_tensors
        ctx.use(y, *seen)
        return (y, None, None, *(None for _ in seen))
