"""Capture the input of each layer and the gradient of its output, in one forward and backward pass over a batch.

A :class:`LayerFormula` does this with hooks:

1. Before its module runs, the parameters are hidden from autograd, which would add up their gradients over examples.
2. The output gets a hook that receives y, the gradient of the output, in the backward pass.
3. That hook makes a term of the gradient (:mod:`.kernels`) from y and the input x, and passes it to the
   :class:`Recorder`.

Everything that can exclude a formula for a batch is known after the forward pass (:meth:`Recorder.check_shapes`), so
nothing has been added by then. Parameters without a formula are differentiated one example at a time
(:func:`for_each_example`).
"""

from __future__ import annotations

import contextlib
import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import kernels
from .batches import batch_rows, examples_in, values_of
from .kernels import DirectGradient, KroneckerSums, OuterGradient, RowGradient, Term, sum_type
from .offload import StoredSum


class ParameterSum:
    """Σ_i g_i² of one parameter over examples, or instead the Kronecker factors of its layer."""

    def __init__(self, parameter: nn.Parameter, accumulate_on: str = "device") -> None:
        self.parameter = parameter
        self.dtype = sum_type(parameter)
        self.factors: KroneckerSums | None = None
        self.weight: ParameterSum | None = None
        """For a bias: its layer's weight, if the factors of that include the bias."""
        self.slow = False
        """No formula fits: autograd computes the gradients, one example at a time."""
        self.uses: list[type[Term]] = []
        """For each use in this forward pass, the kind of term that the backward pass gives."""
        self.ids: list[Tensor] = []
        """For each use as a table in this forward pass, the rows that the examples use."""
        self.terms: list[Term] = []
        """Terms of this backward pass. All uses of a parameter add up before they are squared."""
        self._accumulate_on = accumulate_on
        self._head: tuple[Tensor, Tensor] | None = None

    @functools.cached_property
    def stored(self) -> StoredSum:
        """Σ_i g_i², made when it is first used."""
        return StoredSum(self.parameter.shape, self.dtype, self.parameter.device, self._accumulate_on)

    @property
    def is_tied_table(self) -> bool:
        """Whether it is an embedding that is also the matrix of a linear layer."""
        return self.uses.count(OuterGradient) == 1 and self.uses.count(RowGradient) == len(self.uses) - 1 > 0

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the square of one example's gradient."""
        wide = gradient.to(self.dtype)
        self.stored.add(lambda total: total.addcmul_(wide, wide))

    def add_head(self, term: OuterGradient) -> None:
        """Add the squares of a tied table's head, and keep what the embedding needs of it.

        With the head's gradient A and the embedding's S, (A + S)² = A² + S (2A + S). S has few rows, and only those of
        A are kept: all of A is as large as the logits.
        """
        rows = kernels.unique_rows(torch.cat(self.ids, 1))
        self._head = rows, kernels.outer_at_rows(term, rows, self.dtype)
        self.stored.add(lambda total: kernels.add_outer(total, term))

    def add_terms(self, examples: int) -> None:
        """Add the squares of all terms of this backward pass."""
        terms, self.terms = self.terms, []
        if self._head is None:
            self.stored.add(lambda total: kernels.add_squares(total, terms, examples))
            return
        rows, head = self._head
        table = [term for term in terms if isinstance(term, RowGradient)]
        if len(table) < len(self.ids):  # a use without a gradient
            table += [RowGradient(ids, table[0].y.new_zeros(*ids.shape, head.shape[2])) for ids in self.ids]
        sums = kernels.merge_rows(table, self.dtype).y[:, : rows.shape[1]]
        self.stored.add(lambda total: kernels.add_rows(total, rows, sums * (2 * head + sums)))

    def end_pass(self) -> None:
        """Drop what is left of the backward pass."""
        self.terms, self._head = [], None

    def end_batch(self) -> None:
        """Drop everything of this batch."""
        self.end_pass()
        self.uses, self.ids = [], []


class Recorder(ABC):
    """The state that the formulas of a model share while a batch runs. Each passes its terms to ``add_term``.

    The verifier compares terms with autograd, and the :class:`~gradmerge.curvature.estimate.Accumulator` adds up their
    squares.
    """

    def __init__(self, model: nn.Module, sums: Mapping[nn.Parameter, ParameterSum]) -> None:
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
        trained = (module for module in model.modules() if module.training)
        self.recomputes = any(getattr(module, "gradient_checkpointing", False) is True for module in trained)
        self.anchor = torch.zeros((), device=next(iter(sums)).device, requires_grad=True)
        self._active = self._forward = False

    @abstractmethod
    def add_term(self, entry: ParameterSum, term: Term) -> None:
        """Handle a term of the gradients of this batch's examples, for one parameter."""

    @contextlib.contextmanager
    def attached(self, formulas: Iterable[LayerFormula]) -> Iterator[None]:
        """Register the hooks of formulas with parameters that are not slow; remove them at the end."""
        with contextlib.ExitStack() as hooks:
            for formula in formulas:
                formula.bind(self)
                if formula.sums:
                    for remove in formula.attach():
                        hooks.callback(remove)
            yield

    @property
    def listening(self) -> bool:
        """Whether hooks should capture the forward pass that runs now."""
        return self._active and torch.is_grad_enabled()

    @contextlib.contextmanager
    def recording(self, batch: Any) -> Iterator[None]:
        """Let the hooks capture this batch inside."""
        self._active = self._forward = True
        self.examples, self.tokens = examples_in(batch), _tokens_in(batch)
        self.rows, self.changed, self.failed, self.unfit, self._shapes = {}, None, [], set(), []
        try:
            yield
        finally:
            self._active = False
            for entry in self.sums.values():
                entry.end_batch()

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


class LayerFormula(ABC):
    """Computes each example's gradient of a module's own parameters, from one backward pass over a batch."""

    recorder: Recorder
    sums: dict[str, ParameterSum]
    """The sums of the module's parameters that are not slow, by name."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def bind(self, recorder: Recorder) -> None:
        """Set where the terms go."""
        self.recorder = recorder
        named = [(name, recorder.sums.get(p)) for name, p in self.module._parameters.items() if p is not None]
        self.sums = {name: entry for name, entry in named if entry is not None and not entry.slow}

    def attach(self) -> Iterator[Callable[[], Any]]:
        """Register the hooks, and yield functions that remove them."""
        yield self.module.register_forward_pre_hook(self._before, with_kwargs=True).remove
        yield self.module.register_forward_hook(self._after, always_call=True).remove
        yield self._restore

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace the parameters while the module runs. A gradient that reaches them comes from elsewhere.

        An entry of ``module.__dict__`` takes precedence over a parameter of the same name. Returns changed arguments,
        or None.
        """
        if not self.recorder.listening:
            return None
        for name, entry in self.sums.items():
            module.__dict__[name] = self.replace(entry, getattr(module, name).detach())
        return self.change_input(args, kwargs)

    def replace(self, entry: ParameterSum, value: Tensor) -> Tensor:
        """Return what the module sees instead of a parameter, whose value this is."""
        return value

    def change_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return changed arguments of the module, or None."""
        return None

    @abstractmethod
    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        """Restore the parameters and return the output, which is None if the module raised an error."""

    def _restore(self) -> None:
        for name in self.module._parameters:
            self.module.__dict__.pop(name, None)

    def unfit(self) -> None:
        """Report that the formula does not fit the shapes of this batch."""
        self.recorder.unfit.add(self)

    def expect(self, *values: Tensor, axes: int = 1) -> None:
        """Note tensors that must have all tokens of every example; the last ``axes`` are those of one token."""
        for value in values:
            self.note_rows(value)
            self.recorder.expect_shape(self, value.shape, axes)

    def note_rows(self, value: Tensor) -> None:
        """Note the numbers of rows and tokens of an input, by which `fits` recognizes whole examples."""
        if value.dim() == 2:
            self.recorder.rows.setdefault(self._shapes(), set()).add(value.shape[0])
        if value.dim() > 1 and value.shape[0] == self.recorder.examples:
            self.recorder.tokens.add(math.prod(value.shape[1:-1]))

    def _shapes(self) -> tuple[torch.Size, ...]:
        return tuple(p.shape for p in self.module._parameters.values() if p is not None)

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
        """Return whether this many rows can be one per example, or all tokens of every example."""
        examples = self.recorder.examples
        return rows == examples or (rows % examples == 0 and rows // examples in self.recorder.tokens)

    def per_example(self, value: Tensor, keep: int = 1) -> Tensor:
        """Return ``value`` as (examples, everything between, *the last ``keep`` axes)."""
        if value.dim() == keep + 2 and value.shape[0] == self.recorder.examples:
            return value
        return value.reshape(self.recorder.examples, -1, *value.shape[value.dim() - keep :])

    def add_product(self, weight: ParameterSum | None, bias: ParameterSum | None, y: Tensor, x: Tensor) -> None:
        """Pass on the terms of x Wᵀ + b: g_i = Σ_t y_it x_itᵀ for W, and Σ_t y_it for b."""
        y, x = self.per_example(y), self.per_example(x)
        if weight is not None:
            self.recorder.add_term(weight, OuterGradient(y, x))
        self.add_bias(bias, y)

    def add_bias(self, bias: ParameterSum | None, y: Tensor) -> None:
        """Pass on the term of a bias, unless Kronecker factors include it; ``y`` is (examples, tokens, width)."""
        if bias is not None and bias.weight is None:
            self.recorder.add_term(bias, DirectGradient(y.sum(1, dtype=sum_type(y))))

    def tap(self, output: Tensor, use: Callable[..., None], *seen: Tensor) -> Tensor:
        """Return the output unchanged; the backward pass calls ``use(y, *seen)`` with its gradient y."""
        seen = tuple(value.detach() for value in seen)

        def use_if_fit(y: Tensor, *values: Tensor) -> None:
            if self not in self.recorder.unfit:
                use(y, *values)

        if output.requires_grad and not self.recorder.recomputes:
            versions = [value._version for value in seen]

            def hook(y: Tensor) -> None:
                if [value._version for value in seen] != versions:
                    raise RuntimeError("a layer's input was changed in place before the backward pass")
                use_if_fit(y, *seen)

            output.register_hook(hook)
            return output
        # The anchor makes the output part of the graph although no parameter requires a gradient. Saved by autograd,
        # ``seen`` is recomputed under gradient checkpointing, as activations are.
        return _Tap.apply(output, self.recorder.anchor, use_if_fit, *seen)  # type: ignore[no-any-return,no-untyped-call]


class OutputFormula(LayerFormula):
    """A formula of the module's input x and the gradient y of its output."""

    kind: type[Term] = OuterGradient
    """What the weight's term is."""
    axes = 1
    """How many last axes of :meth:`channels_last` are those of one token."""

    def channels_last(self, value: Tensor) -> Tensor:
        """Return an input or output with the axes of one token at the end."""
        return value

    @abstractmethod
    def use(self, y: Tensor, x: Tensor) -> None:
        """Make terms of the gradient of the output and of the input, and pass them to the recorder."""

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        self._restore()
        if output is None or not self.recorder.listening:
            return output
        if not inputs or not isinstance(inputs[0], Tensor) or not isinstance(output, Tensor):
            self.unfit()  # the module does not map a tensor to a tensor
            return output
        x = inputs[0].to(output.device)
        self.expect(self.channels_last(output), self.channels_last(x), axes=self.axes)
        for name, entry in self.sums.items():
            self.recorder.note_use(entry, self.kind if name == "weight" else DirectGradient)
        return self.tap(output, self.use, x)


class InsideFormula(LayerFormula):
    """A formula that captures a parameter inside its module, where it is used."""

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        self._restore()
        if output is None:
            self.recorder.failed.append(self)
        return output


class FollowedTensor(Tensor):
    """A tensor that passes every function that it is used in to the ``called`` of a formula.

    ``what`` says what it is to the formula.
    """

    formula: Any
    what: Any

    @classmethod
    def of(cls, value: Tensor, formula: Any, what: Any) -> FollowedTensor:
        followed = value.as_subclass(cls)
        followed.formula, followed.what = formula, what
        return followed

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = (*args, *(kwargs or {}).values())
        followed = next((v for v in values if isinstance(v, FollowedTensor) and hasattr(v, "formula")), None)
        if followed is None:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return followed.formula.called(func, args, kwargs or {})


def unfollowed(value: Any) -> Any:
    """Return a plain tensor for a followed one, and anything else unchanged."""
    return value.as_subclass(Tensor) if isinstance(value, FollowedTensor) else value


def what_is(value: Any) -> Any:
    """Return the ``what`` of a followed tensor, and None for anything else."""
    return getattr(value, "what", None) if isinstance(value, FollowedTensor) else None


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


def for_each_example(
    batch: Any,
    objectives: Callable[[Any, int], Sequence[Callable[[], Tensor]]],
    sums: Iterable[ParameterSum],
    use: Callable[[ParameterSum, Tensor], None],
) -> None:
    """Call ``use`` with each example's gradient of each parameter that is used, by plain autograd.

    This is right for every model, and takes a forward and backward pass per example. ``objectives(example, row)``
    returns a function for each backward pass over one example, as a batch of one.
    """
    with gradient_handlers({entry.parameter: functools.partial(use, entry) for entry in sums}):
        for row in range(examples_in(batch)):
            passes = objectives(batch_rows(batch, slice(row, row + 1)), row)
            for number, objective in enumerate(passes):
                value = objective()
                if value.requires_grad:
                    value.backward(retain_graph=number + 1 < len(passes))


@contextlib.contextmanager
def gradient_handlers(handlers: Mapping[nn.Parameter, Callable[[Tensor], Any]]) -> Iterator[None]:
    """Pass each parameter's gradient to its handler as soon as it is complete, and do not keep it."""

    def accumulated(parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # the gradient of an embedding may be sparse
            handlers[parameter](gradient.to_dense())  # type: ignore[index]

    with contextlib.ExitStack() as stack, differentiable(list(handlers)):
        for parameter in handlers:
            stack.callback(parameter.register_post_accumulate_grad_hook(accumulated).remove)
        yield


@contextlib.contextmanager
def differentiable(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Let the parameters require a gradient inside, with ``grad`` None. Restore their ``grad`` at the end."""
    saved = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, saved, strict=True):
            parameter.requires_grad_(False)
            parameter.grad = gradient
