"""The formula of each kind of layer, which computes each example's gradient from one backward pass over a batch.

Throughout, x is the input of the layer and y the gradient of the loss with respect to its output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import FollowedTensor, InsideFormula, LayerFormula, Recorder, unfollowed
from .kernels import DirectGradient, ExpertGradient, OuterGradient, RowGradient, join_experts, sum_type
from .parameter_sum import ParameterSum

_PRODUCTS = (Tensor.matmul, Tensor.__matmul__, Tensor.mm, torch.matmul, torch.mm)
_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)
_TRANSPOSES = (torch.transpose, Tensor.transpose, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
_SELECTIONS = (torch.index_select, Tensor.index_select)
_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)


class LinearFormula(LayerFormula):
    """x Wᵀ + b: g_i = Σ_t y_it x_itᵀ. GPT-2's Conv1D holds Wᵀ."""

    def expect(self, output: Tensor, x: Tensor) -> None:
        self._expect_product(output, x)
        self._note_uses(OuterGradient)

    def use(self, y: Tensor, *seen: Tensor) -> None:
        y, x = self._per_example(y, 1), self._per_example(seen[0], 1)
        if weight := self.sums.get("weight"):
            self.recorder.add_term(weight, OuterGradient(x, y) if is_conv1d(self.module) else OuterGradient(y, x))
        self._take_bias(y)


class FunctionFormula(InsideFormula):
    """Parameters captured where the module uses them: in F.embedding, F.linear, or expanded to all examples.

    With ``shared`` the ids are the same for all examples, for example positions, and are repeated for each.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, shared: bool = False) -> None:
        super().__init__(recorder, module)
        self.shared = shared

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder.listening:
            for name, entry in self.sums.items():
                module.__dict__[name] = FollowedTensor.of(getattr(module, name).detach(), self, sum_of=entry)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that has one of the parameters as an argument.

        The gradient of a function that is not known here is not captured, so the formula fails verification.
        """
        plain = [unfollowed(value) for value in args]
        named = {name: unfollowed(value) for name, value in kwargs.items()}
        sums = [value.sum_of if isinstance(value, FollowedTensor) else None for value in (*args, None, None)]  # type: ignore[attr-defined]
        if function is F.embedding and sums[1] is not None:
            return self._embedding(sums[1], plain, named)
        result = function(*plain, **named)
        if function is F.linear and sums[1] is not None:
            self._expect_product(result, plain[0])
            self.recorder.note_use(sums[1], OuterGradient)
            result = self._tap(result, functools.partial(self._use_matrix, sums[1]), plain[0])
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if not isinstance(bias, FollowedTensor):
                return result
            self.recorder.note_use(bias.sum_of, DirectGradient)  # type: ignore[attr-defined]
            return self._tap(result, functools.partial(self._use_bias, bias.sum_of))  # type: ignore[attr-defined]
        if function in (Tensor.to, Tensor.float, Tensor.type) and sums[0] is not None:
            return FollowedTensor.of(result, self, sum_of=sums[0])
        if function in (Tensor.reshape, Tensor.view) and sums[0] is not None and result.shape[:1] == (1,):
            return FollowedTensor.of(result, self, sum_of=sums[0])
        if (
            function is Tensor.expand
            and sums[0] is not None
            and len(plain[0]) == 1
            and len(result) == self.recorder.examples
        ):
            self.recorder.note_use(sums[0], DirectGradient)
            return self._tap(result, functools.partial(self._use_expanded, sums[0], plain[0].shape))
        return result

    def _embedding(self, entry: ParameterSum, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
        padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
        ids: Tensor = args[0]
        if self.shared and (ids.dim() == 1 or ids.shape[0] == 1):
            self.recorder.changed = self
            ids = ids.reshape(1, -1).expand(self.recorder.examples, -1)
        elif self.shared:
            self.unfit()  # the examples have different rows
            return F.embedding(*args, **kwargs)
        shape = ids[..., None].shape
        self._note_rows(ids[..., None])
        if not self.fits(shape, 1):
            self.unfit()
            return F.embedding(*args, **kwargs)
        self.recorder.expect_shape(self, shape, 1)
        self.recorder.note_use(entry, RowGradient, self._per_example(ids[..., None], 1)[..., 0])
        rows = F.embedding(ids, *args[1:], **kwargs)
        return self._tap(rows, functools.partial(self._use_rows, entry, padding), ids)

    def _use_matrix(self, entry: ParameterSum, y: Tensor, x: Tensor) -> None:
        self.recorder.add_term(entry, OuterGradient(self._per_example(y, 1), self._per_example(x, 1)))

    def _use_bias(self, entry: ParameterSum, y: Tensor) -> None:
        if self.recorder.needs_term(entry):
            self.recorder.add_term(entry, DirectGradient(self._per_example(y, 1).sum(1, dtype=sum_type(y))))

    def _use_expanded(self, entry: ParameterSum, shape: torch.Size, y: Tensor) -> None:
        y = y.sum_to_size(len(y), *shape[1:])
        self.recorder.add_term(entry, DirectGradient(y.reshape(len(y), *entry.parameter.shape)))

    def _use_rows(self, entry: ParameterSum, padding: int | None, y: Tensor, ids: Tensor) -> None:
        rows, y = self._per_example(ids[..., None], 1)[..., 0], self._per_example(y, 1)
        self.recorder.add_term(entry, RowGradient(rows, y if padding is None else y * (rows != padding)[..., None]))


class NormFormula(LayerFormula):
    """x̂ ∘ w + b with normalized input x̂: g_i = Σ_t y_it ∘ x̂_it, over everything but channels."""

    def expect(self, output: Tensor, x: Tensor) -> None:
        for value in (output, x):
            value = self._channels_last(value)
            self._note_rows(value)
            self.recorder.expect_shape(self, value.shape, self._axes)
        self._note_uses(DirectGradient)

    def use(self, y: Tensor, *seen: Tensor) -> None:
        normal = self._channels_last(_normalized(self.module, seen[0]))
        y, x = self._per_example(self._channels_last(y), self._axes), self._per_example(normal, self._axes)
        if weight := self.sums.get("weight"):
            product = y * x
            self.recorder.add_term(weight, DirectGradient(product.sum(1, dtype=sum_type(product))))
        self._take_bias(y)

    @property
    def _axes(self) -> int:
        """The number of axes of the weight."""
        return self.module.weight.dim() if isinstance(self.module.weight, Tensor) else 1

    def _channels_last(self, value: Tensor) -> Tensor:
        return value if isinstance(self.module, nn.LayerNorm | nn.RMSNorm) else value.movedim(1, -1)


class ConvFormula(LayerFormula):
    """A convolution is a linear layer of patches."""

    def expect(self, output: Tensor, x: Tensor) -> None:
        self._note_rows(x.movedim(1, -1))
        if len(output) != self.recorder.examples:
            self.unfit()
        self._note_uses(OuterGradient if self.module.groups == 1 else DirectGradient)

    def use(self, y: Tensor, *seen: Tensor) -> None:
        module: Any = self.module
        y = y.flatten(2).transpose(1, 2)
        self._take_bias(y)
        if weight := self.sums.get("weight"):
            x, groups = _patches(module, seen[0]), module.groups
            if groups == 1:
                self.recorder.add_term(weight, OuterGradient(y, x.flatten(2)))
                return
            y = y.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
            x = x.unflatten(2, (groups, -1)).flatten(3).permute(0, 2, 1, 3)
            self.recorder.add_term(weight, DirectGradient((y @ x).reshape(len(y), *weight.parameter.shape)))


class RelativeBiasFormula(LayerFormula):
    """T5's relative positions: a table of biases for every pair of positions, shared by all examples.

    The bias is repeated for each example where the attention layer computes it.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, owner: nn.Module) -> None:
        super().__init__(recorder, module)
        self.owner = owner
        self._ids: Tensor | None = None

    def attach(self) -> Iterator[Callable[[], Any]]:
        yield self.module.register_forward_hook(self._after).remove
        compute = self.owner.compute_bias
        self.owner.__dict__["compute_bias"] = functools.partial(self._compute, compute)
        yield lambda: self.owner.__dict__.pop("compute_bias", None)

    def _after(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        self._ids = inputs[0]
        return output

    def _compute(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        bias = compute(*args, **kwargs)
        if not self.recorder.listening or self._ids is None:
            return bias
        repeated = bias.detach().expand(self.recorder.examples, *bias.shape[1:])
        self._note_uses(DirectGradient)
        return self._tap(repeated, self.use, self._ids)

    def use(self, y: Tensor, *seen: Tensor) -> None:
        if weight := self.sums.get("weight"):
            y = y.permute(0, 2, 3, 1).flatten(1, 2).to(sum_type(y))
            table = y.new_zeros(len(y), *weight.parameter.shape).index_add_(1, seen[0].flatten(), y)
            self.recorder.add_term(weight, DirectGradient(table))


class RepeatedFormula(InsideFormula):
    """A parameter that is added or multiplied. It is repeated for every example while its module runs.

    ``shape`` says where the axis of examples goes: it replaces a leading 1 (``leading``), precedes as many axes as the
    input has (``input``), comes first (``front``), or comes first, followed by a 1 (``spaced``).
    """

    SHAPES = ("leading", "input", "front", "spaced")

    def __init__(self, recorder: Recorder, module: nn.Module, shape: str) -> None:
        super().__init__(recorder, module)
        self.shape = shape

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recorder.listening:
            return
        like = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if like is not None:
            self._note_rows(like)
        self.recorder.changed = self
        for name, entry in self.sums.items():
            value = getattr(module, name).detach()
            shape = self._repeated_shape(value, like)
            if shape is None:
                self.unfit()
                module.__dict__[name] = value
            else:
                self.recorder.note_use(entry, DirectGradient)
                module.__dict__[name] = self._tap(value.expand(shape), functools.partial(self._use, entry))

    def _repeated_shape(self, value: Tensor, like: Tensor | None) -> tuple[int, ...] | None:
        """Return the shape with the axis of examples, or None if it does not fit."""
        examples, shape = self.recorder.examples, value.shape
        between = -1 if like is None or like.shape[:1] != (examples,) else like.dim() - 1 - value.dim()
        if self.shape == "leading":
            return (examples, *shape[1:]) if value.dim() >= 2 and shape[0] == 1 else None
        ones = {"input": between, "front": 0, "spaced": 1}[self.shape]
        return (examples, *[1] * ones, *shape) if ones >= 0 else None

    def _use(self, entry: ParameterSum, y: Tensor) -> None:
        self.recorder.add_term(entry, DirectGradient(y.reshape(len(y), *entry.parameter.shape)))


class ExpertsFormula(InsideFormula):
    """Fused experts: one tensor (experts, …) holds the weights of all experts, which get the tokens routed to them.

    The gradient of expert e for example i is Σ_t y_t x_tᵀ over the tokens t of example i that are routed to e. So the
    formula must know the example and the expert of each row that is multiplied. It follows the module's input and its
    parameters through the module: `hidden[index]` selects tokens, `weight[expert]` selects an expert, a product
    combines both. It covers the implementations `eager` and `grouped_mm` of transformers with both layouts of the
    weights, biases, and layers that send all tokens to all experts (Llama 4).
    """

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recorder.listening:
            return None
        call = _Call(self)
        for name, entry in self.sums.items():
            self.recorder.note_use(entry, ExpertGradient)
            module.__dict__[name] = FollowedTensor.of(getattr(module, name).detach(), call, weight=_Weight(entry))
        values = (*args, *kwargs.values())
        hidden = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
        if hidden is None:
            return None
        inside: Tensor = _Entry.apply(hidden, self.recorder.anchor, call.pass_on_terms)  # type: ignore[no-untyped-call]
        tokens = FollowedTensor.of(inside, call, weight=None)
        return (
            tuple(tokens if value is hidden else value for value in args),
            {name: tokens if value is hidden else value for name, value in kwargs.items()},
        )

    def examples_of(self, rows: Tensor) -> Tensor | None:
        """Return the example of each row of (rows, width), if these are all tokens of all examples."""
        self._note_rows(rows)
        if not self.fits(rows.shape, 1):
            self.unfit()
            return None
        examples = self.recorder.examples
        return torch.arange(examples, device=rows.device).repeat_interleave(len(rows) // examples)


class _Weight:
    """What a followed tensor is: a parameter, or its slices for some experts."""

    def __init__(self, entry: ParameterSum, experts: Tensor | None = None, transposed: bool = False) -> None:
        self.sum, self.experts, self.transposed = entry, experts, transposed
        """``experts``: the expert of each slice, or of all rows; None for the whole parameter."""


class _Call:
    """One forward pass of a module with fused experts, and the backward pass through it."""

    def __init__(self, formula: ExpertsFormula) -> None:
        self._formula = formula
        self._examples: Tensor | None = None
        """The example of each row that was last selected from the module's input."""
        self._terms: dict[ParameterSum, list[ExpertGradient]] = {}

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that has the module's input or a parameter as an argument.

        The gradient of a function that is not known here is not captured, so the formula fails verification.
        """
        plain = [unfollowed(value) for value in args]
        result = function(*plain, **{name: unfollowed(value) for name, value in kwargs.items()})
        if isinstance(args[0], FollowedTensor):
            weight = args[0].weight  # type: ignore[attr-defined]
            return (
                self._of_tokens(function, plain, result)
                if weight is None
                else self._of(weight, function, plain, result)
            )
        weights = [getattr(value, "weight", None) if isinstance(value, FollowedTensor) else None for value in args]
        weight = weights[1] if len(weights) > 1 else None
        if weight is None:
            return result
        x = plain[0]
        if function is F.linear:
            result = self._multiply(weight, x, result, linear=True)
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            return self._add(bias.weight, result) if isinstance(bias, FollowedTensor) else result  # type: ignore[attr-defined]
        if function in _SUMS:
            return self._add(weight, result)
        if function in _PRODUCTS:
            return self._multiply(weight, x, result)
        if function is torch.bmm:
            return self._multiply_all(weight, x, result)
        if "grouped_mm" in str(getattr(function, "__name__", "")) and isinstance(kwargs.get("offs"), Tensor):
            rows = torch.arange(len(x), device=x.device, dtype=kwargs["offs"].dtype)
            weight = _Weight(weight.sum, torch.searchsorted(kwargs["offs"], rows, right=True), weight.transposed)
            return self._multiply(weight, x, result)
        return result

    def _of_tokens(self, function: Any, args: list[Any], result: Any) -> Any:
        """Follow the module's input through reshapes, and note which rows are selected."""
        tokens: Tensor = args[0]
        if function in _RESHAPES and result.dim() == 2 and result.shape[1] == tokens.shape[-1]:
            return FollowedTensor.of(result, self, weight=None)
        selects = function in _SELECTIONS or (function is Tensor.__getitem__ and isinstance(args[1], Tensor))
        if selects and tokens.dim() == result.dim() == 2:
            examples = self._formula.examples_of(tokens)
            self._examples = None if examples is None else function(examples, *args[1:])
        return result

    def _of(self, weight: _Weight, function: Any, args: list[Any], result: Any) -> Any:
        """Follow a parameter to its slices and transposes."""
        if function is Tensor.__getitem__ and weight.experts is None and _is_index(args[1]):
            experts = torch.as_tensor(args[1], device=result.device)
            return FollowedTensor.of(result, self, weight=_Weight(weight.sum, experts, weight.transposed))
        if function in _TRANSPOSES and result.dim() >= 2 and result.shape == args[0].mT.shape:
            return FollowedTensor.of(result, self, weight=_Weight(weight.sum, weight.experts, not weight.transposed))
        return result

    def _multiply(self, weight: _Weight, x: Tensor, result: Tensor, linear: bool = False) -> Tensor:
        """Capture rows times the weights of their experts; ``linear`` multiplies with the transpose."""
        if weight.experts is None or self._examples is None or not len(x) == len(result) == len(self._examples):
            return result
        use = functools.partial(self._add_term, weight.sum, linear != weight.transposed)
        return self._formula._tap(result, use, weight.experts.expand(len(x)), self._examples, x)

    def _multiply_all(self, weight: _Weight, x: Tensor, result: Tensor) -> Tensor:
        """Capture (experts, tokens, width) times all weights."""
        examples = self._formula.examples_of(x[0]) if weight.experts is None and x.dim() == 3 else None
        if examples is None:
            return result
        experts = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])
        use = functools.partial(self._add_term, weight.sum, weight.transposed)
        return self._formula._tap(result, use, experts, examples.repeat(len(x)), x)

    def _add(self, weight: _Weight, result: Tensor) -> Tensor:
        """Capture a bias that was added to rows."""
        if weight.experts is None or self._examples is None or len(result) != len(self._examples):
            return result
        use = functools.partial(self._add_term, weight.sum, True)
        return self._formula._tap(result, use, weight.experts.expand(len(result)), self._examples)

    def _add_term(
        self, entry: ParameterSum, y_first: bool, y: Tensor, experts: Tensor, examples: Tensor, x: Tensor | None = None
    ) -> None:
        y = y.flatten(0, -2)
        if x is not None:
            x = x.flatten(0, -2)
            y, x = (y, x) if y_first else (x, y)
        self._terms.setdefault(entry, []).append(ExpertGradient(experts, examples, y, x))

    def pass_on_terms(self) -> None:
        """Pass a term of each parameter to the recorder, when the backward pass has gone through the module."""
        terms, self._terms = self._terms, {}
        for entry, parts in terms.items():
            self._formula.recorder.add_term(entry, join_experts(parts))


def _is_index(value: Any) -> bool:
    """Return whether a value selects an expert, or an expert for each row, by number."""
    if isinstance(value, Tensor):
        return value.dim() < 2 and not value.is_floating_point() and value.dtype != torch.bool
    return type(value) is int


def formulas_for(module: nn.Module, owner: nn.Module | None) -> list[Callable[[Recorder], LayerFormula]]:
    """Return the formulas that may fit a module with parameters of its own, the likeliest first."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return [lambda r: LinearFormula(r, module), lambda r: FunctionFormula(r, module)]
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq:
            return []
        if owner is not None and hasattr(owner, "compute_bias"):
            return [lambda r: RelativeBiasFormula(r, module, owner)]
        return [lambda r: FunctionFormula(r, module), lambda r: FunctionFormula(r, module, shared=True)]
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
        return [lambda r: NormFormula(r, module)]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return [lambda r: ConvFormula(r, module)]
    function = functools.partial(FunctionFormula, module=module)
    if has_fused_experts(module):
        return [functools.partial(ExpertsFormula, module=module), function]
    repeated = [functools.partial(RepeatedFormula, module=module, shape=shape) for shape in RepeatedFormula.SHAPES]
    matrix = any(p is not None and p.dim() == 2 for p in module._parameters.values())
    return [function, *repeated] if matrix else [*repeated, function]


def has_fused_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of several experts, (experts, …), in one tensor."""
    parameters = [p for p in module._parameters.values() if p is not None]
    counts = {p.shape[0] if p.dim() else 1 for p in parameters}
    return any(p.dim() == 3 and min(p.shape) > 1 for p in parameters) and len(counts) == 1


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _normalized(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, tuple(module.normalized_shape), eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def _patches(module: Any, x: Tensor) -> Tensor:
    """Return what a convolution multiplies with its kernel: (examples, positions, channels, kernel entries)."""
    if module.padding_mode != "zeros":
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    elif isinstance(module.padding, str) or any(module.padding):
        x = F.pad(x, module._reversed_padding_repeated_twice)
    axes = len(module.kernel_size)
    sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(sizes):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    positions, kernel = math.prod(x.shape[2 : 2 + axes]), math.prod(module.kernel_size)
    return x.movedim(1, 1 + axes).reshape(len(x), positions, -1, kernel)


class _Entry(torch.autograd.Function):
    """The input of a module. The backward pass reaches it after all that the module computes from it."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, anchor: Tensor, use: Any) -> Tensor:
        ctx.use = use
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, y: Tensor) -> tuple[Any, ...]:
        ctx.use()
        return y, None, None
