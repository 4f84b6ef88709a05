"""The formula of each kind of layer, which computes each example's gradient from one backward pass over a batch.

Throughout, x is the input of the layer and y the gradient of the loss with respect to its output.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import FollowedTensor, InsideFormula, LayerFormula, OutputFormula, ParameterSum, unfollowed, what_is
from .kernels import DirectGradient, ExpertGradient, OuterGradient, RowGradient, sum_type

_PRODUCTS = (Tensor.matmul, Tensor.__matmul__, Tensor.mm, torch.matmul, torch.mm)
_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)
_TRANSPOSES = (torch.transpose, Tensor.transpose, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
_SELECTIONS = (torch.index_select, Tensor.index_select)
_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)


class LinearFormula(OutputFormula):
    """x Wᵀ + b: g_i = Σ_t y_it x_itᵀ. GPT-2's Conv1D holds Wᵀ."""

    def use(self, y: Tensor, x: Tensor) -> None:
        weight, bias = self.sums.get("weight"), self.sums.get("bias")
        if weight is not None and is_conv1d(self.module):
            self.recorder.add_term(weight, OuterGradient(self.per_example(x), self.per_example(y)))
            weight = None
        self.add_product(weight, bias, y, x)


class NormFormula(OutputFormula):
    """x̂ ∘ w + b with normalized input x̂: g_i = Σ_t y_it ∘ x̂_it, over everything but channels."""

    kind = DirectGradient

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.axes = module.weight.dim() if isinstance(module.weight, Tensor) else 1

    def channels_last(self, value: Tensor) -> Tensor:
        return value if isinstance(self.module, nn.LayerNorm | nn.RMSNorm) else value.movedim(1, -1)

    def use(self, y: Tensor, x: Tensor) -> None:
        normal = self.per_example(self.channels_last(_normalized(self.module, x)), self.axes)
        y = self.per_example(self.channels_last(y), self.axes)
        if weight := self.sums.get("weight"):
            product = y * normal
            self.recorder.add_term(weight, DirectGradient(product.sum(1, dtype=sum_type(product))))
        self.add_bias(self.sums.get("bias"), y)


class ConvFormula(OutputFormula):
    """A convolution is a linear layer of patches."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.kind = OuterGradient if module.groups == 1 else DirectGradient

    def channels_last(self, value: Tensor) -> Tensor:
        return value.movedim(1, -1)

    def use(self, y: Tensor, x: Tensor) -> None:
        y, patches = self.per_example(self.channels_last(y)), self.per_example(_patches(self.module, x), 2)
        self.add_bias(self.sums.get("bias"), y)
        if weight := self.sums.get("weight"):
            groups = self.module.groups
            if groups == 1:
                self.recorder.add_term(weight, OuterGradient(y, patches.flatten(2)))
                return
            y = y.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
            patches = patches.unflatten(2, (groups, -1)).flatten(3).permute(0, 2, 1, 3)
            self.recorder.add_term(weight, DirectGradient((y @ patches).reshape(len(y), *weight.parameter.shape)))


class RelativeBiasFormula(InsideFormula):
    """T5's relative positions: a table of biases for every pair of positions, shared by all examples.

    The bias is repeated for each example where the attention layer computes it.
    """

    def __init__(self, module: nn.Module, owner: nn.Module) -> None:
        super().__init__(module)
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
        self.recorder.note_use(self.sums["weight"], DirectGradient)
        return self.tap(repeated, self._use_table, self._ids)

    def _use_table(self, y: Tensor, ids: Tensor) -> None:
        weight = self.sums["weight"]
        y = y.permute(0, 2, 3, 1).flatten(1, 2).to(sum_type(y))
        table = y.new_zeros(len(y), *weight.parameter.shape).index_add_(1, ids.flatten(), y)
        self.recorder.add_term(weight, DirectGradient(table))


class RepeatedFormula(InsideFormula):
    """A parameter that is added or multiplied. It is repeated for every example while its module runs.

    ``shape`` says where the axis of examples goes: it replaces a leading 1 (``leading``), precedes as many axes as the
    input has (``input``), comes first (``front``), or comes first, followed by a 1 (``spaced``).
    """

    SHAPES = ("leading", "input", "front", "spaced")

    def __init__(self, module: nn.Module, shape: str) -> None:
        super().__init__(module)
        self.shape = shape
        self._input: torch.Size | None = None
        """The shape of the module's input."""

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.recorder.listening:
            like = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
            self._input = None if like is None else like.shape
            if like is not None:
                self.note_rows(like)
            self.recorder.changed = self
        return super()._before(module, args, kwargs)

    def replace(self, entry: ParameterSum, value: Tensor) -> Tensor:
        shape = self._repeated_shape(value)
        if shape is None:
            self.unfit()
            return value
        self.recorder.note_use(entry, DirectGradient)
        return self.tap(value.expand(shape), functools.partial(self._use, entry))

    def _repeated_shape(self, value: Tensor) -> tuple[int, ...] | None:
        """Return the shape with the axis of examples, or None if it does not fit."""
        examples, shape = self.recorder.examples, value.shape
        has_examples = self._input is not None and self._input[:1] == (examples,)
        between = len(self._input) - 1 - len(shape) if self._input is not None and has_examples else -1
        if self.shape == "leading":
            return (examples, *shape[1:]) if len(shape) >= 2 and shape[0] == 1 else None
        ones = {"input": between, "front": 0, "spaced": 1}[self.shape]
        return (examples, *[1] * ones, *shape) if ones >= 0 else None

    def _use(self, entry: ParameterSum, y: Tensor) -> None:
        self.recorder.add_term(entry, DirectGradient(y.reshape(len(y), *entry.parameter.shape)))


class FunctionFormula(InsideFormula):
    """Parameters captured where the module uses them: in F.embedding, F.linear, or expanded to all examples.

    With ``shared`` the ids are the same for all examples, for example positions, and are repeated for each.
    """

    def __init__(self, module: nn.Module, shared: bool = False) -> None:
        super().__init__(module)
        self.shared = shared

    def replace(self, entry: ParameterSum, value: Tensor) -> Tensor:
        return FollowedTensor.of(value, self, entry)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that has one of the parameters as an argument.

        The gradient of a function that is not known here is not captured, so the formula fails verification.
        """
        plain = [unfollowed(value) for value in args]
        named = {name: unfollowed(value) for name, value in kwargs.items()}
        first, second = what_is(args[0] if args else None), what_is(args[1] if len(args) > 1 else None)
        if function is F.embedding and second is not None:
            return self._embedding(second, plain, named)
        result = function(*plain, **named)
        if function is F.linear and second is not None:
            bias = what_is(args[2] if len(args) > 2 else kwargs.get("bias"))
            self.expect(result, plain[0])
            self.recorder.note_use(second, OuterGradient)
            if bias is not None:
                self.recorder.note_use(bias, DirectGradient)
            return self.tap(result, functools.partial(self.add_product, second, bias), plain[0])
        if first is None:
            return result
        reshaped = function in (Tensor.reshape, Tensor.view) and result.shape[:1] == (1,)
        if reshaped or function in (Tensor.to, Tensor.float, Tensor.type):
            return FollowedTensor.of(result, self, first)
        if function is Tensor.expand and len(plain[0]) == 1 and len(result) == self.recorder.examples:
            self.recorder.note_use(first, DirectGradient)
            return self.tap(result, functools.partial(self._use_expanded, first, plain[0].shape))
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
        self.expect(ids[..., None])
        if not self.fits(ids[..., None].shape, 1):
            self.unfit()
            return F.embedding(*args, **kwargs)
        self.recorder.note_use(entry, RowGradient, self.per_example(ids[..., None])[..., 0])
        rows = F.embedding(ids, *args[1:], **kwargs)
        return self.tap(rows, functools.partial(self._use_rows, entry, padding), ids)

    def _use_rows(self, entry: ParameterSum, padding: int | None, y: Tensor, ids: Tensor) -> None:
        rows, y = self.per_example(ids[..., None])[..., 0], self.per_example(y)
        self.recorder.add_term(entry, RowGradient(rows, y if padding is None else y * (rows != padding)[..., None]))

    def _use_expanded(self, entry: ParameterSum, shape: torch.Size, y: Tensor) -> None:
        y = y.sum_to_size(len(y), *shape[1:])
        self.recorder.add_term(entry, DirectGradient(y.reshape(len(y), *entry.parameter.shape)))


@dataclass(frozen=True)
class _Slices:
    """What a followed tensor of :class:`ExpertsFormula` is: a parameter, or its slices for some experts."""

    entry: ParameterSum
    experts: Tensor | None = None
    """The expert of each slice, or of all rows; None for the whole parameter."""
    transposed: bool = False


_TOKENS = object()
"""What a followed tensor is that holds the module's input."""


class ExpertsFormula(InsideFormula):
    """Fused experts: one tensor (experts, …) holds the weights of all experts, which get the tokens routed to them.

    The gradient of expert e for example i is Σ_t y_t x_tᵀ over the tokens t of example i that are routed to e. So the
    formula must know the example and the expert of each row that is multiplied. It follows the module's input and its
    parameters through the module: `hidden[index]` selects tokens, `weight[expert]` selects an expert, a product
    combines both. It covers the implementations `eager` and `grouped_mm` of transformers with both layouts of the
    weights, biases, and layers that send all tokens to all experts (Llama 4).
    """

    _examples: Tensor | None = None
    """The example of each row that was last selected from the module's input."""

    def replace(self, entry: ParameterSum, value: Tensor) -> Tensor:
        return FollowedTensor.of(value, self, _Slices(entry))

    def change_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._examples = None
        values = (*args, *kwargs.values())
        hidden = next((v for v in values if isinstance(v, Tensor) and v.is_floating_point()), None)
        if hidden is None:
            return None
        tokens = FollowedTensor.of(hidden, self, _TOKENS)
        return (
            tuple(tokens if value is hidden else value for value in args),
            {name: tokens if value is hidden else value for name, value in kwargs.items()},
        )

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function that has the module's input or a parameter as an argument.

        The gradient of a function that is not known here is not captured, so the formula fails verification.
        """
        plain = [unfollowed(value) for value in args]
        result = function(*plain, **{name: unfollowed(value) for name, value in kwargs.items()})
        first, weight = what_is(args[0] if args else None), what_is(args[1] if len(args) > 1 else None)
        if first is _TOKENS and not isinstance(weight, _Slices):
            return self._select_tokens(function, plain, result)
        if isinstance(first, _Slices):
            return self._select_experts(first, function, plain, result)
        if not isinstance(weight, _Slices):
            return result
        x = plain[0]
        if function is F.linear:
            result = self._multiply(weight, x, result, linear=True)
            bias = what_is(args[2] if len(args) > 2 else kwargs.get("bias"))
            return result if bias is None else self._add(bias, result)
        if function in _SUMS:
            return self._add(weight, result)
        if function in _PRODUCTS:
            return self._multiply(weight, x, result)
        if function is torch.bmm:
            return self._multiply_all(weight, x, result)
        if "grouped_mm" in str(getattr(function, "__name__", "")) and isinstance(kwargs.get("offs"), Tensor):
            rows = torch.arange(len(x), device=x.device, dtype=kwargs["offs"].dtype)
            experts = torch.searchsorted(kwargs["offs"], rows, right=True)
            return self._multiply(replace(weight, experts=experts), x, result)
        return result

    def _select_tokens(self, function: Any, args: list[Any], result: Any) -> Any:
        """Follow the module's input through reshapes, and note which rows are selected."""
        tokens: Tensor = args[0]
        if function in _RESHAPES and result.dim() == 2 and result.shape[1] == tokens.shape[-1]:
            return FollowedTensor.of(result, self, _TOKENS)
        selects = function in _SELECTIONS or (function is Tensor.__getitem__ and isinstance(args[1], Tensor))
        if selects and tokens.dim() == result.dim() == 2:
            examples = self._examples_of(tokens)
            self._examples = None if examples is None else function(examples, *args[1:])
        return result

    def _examples_of(self, rows: Tensor) -> Tensor | None:
        """Return the example of each row of (rows, width), if these are all tokens of all examples."""
        self.note_rows(rows)
        if not self.fits(rows.shape, 1):
            self.unfit()
            return None
        examples = self.recorder.examples
        return torch.arange(examples, device=rows.device).repeat_interleave(len(rows) // examples)

    def _select_experts(self, weight: _Slices, function: Any, args: list[Any], result: Any) -> Any:
        """Follow a parameter to its slices and transposes."""
        if function is Tensor.__getitem__ and weight.experts is None and _is_index(args[1]):
            experts = torch.as_tensor(args[1], device=result.device)
            return FollowedTensor.of(result, self, replace(weight, experts=experts))
        if function in _TRANSPOSES and result.dim() >= 2 and result.shape == args[0].mT.shape:
            return FollowedTensor.of(result, self, replace(weight, transposed=not weight.transposed))
        return result

    def _multiply(self, weight: _Slices, x: Tensor, result: Tensor, linear: bool = False) -> Tensor:
        """Capture rows times the weights of their experts; ``linear`` multiplies with the transpose."""
        if weight.experts is None or self._examples is None or not len(x) == len(result) == len(self._examples):
            return result
        return self._capture(weight, linear != weight.transposed, result, weight.experts, self._examples, x)

    def _multiply_all(self, weight: _Slices, x: Tensor, result: Tensor) -> Tensor:
        """Capture (experts, tokens, width) times all weights."""
        examples = self._examples_of(x[0]) if weight.experts is None and x.dim() == 3 else None
        if examples is None:
            return result
        experts = torch.arange(len(x), device=x.device).repeat_interleave(x.shape[1])
        return self._capture(weight, weight.transposed, result, experts, examples.repeat(len(x)), x)

    def _add(self, weight: _Slices, result: Tensor) -> Tensor:
        """Capture a bias that was added to rows."""
        if weight.experts is None or self._examples is None or len(result) != len(self._examples):
            return result
        return self._capture(weight, True, result, weight.experts, self._examples)

    def _capture(
        self, weight: _Slices, y_first: bool, result: Tensor, experts: Tensor, examples: Tensor, *x: Tensor
    ) -> Tensor:
        """Capture a result of the weights; ``y_first``: their axes are those of y and x, in this order."""
        self.recorder.note_use(weight.entry, ExpertGradient)
        use = functools.partial(self._use, weight.entry, y_first)
        return self.tap(result, use, experts.expand(len(examples)), examples, *x)

    def _use(
        self, entry: ParameterSum, y_first: bool, y: Tensor, experts: Tensor, examples: Tensor, x: Tensor | None = None
    ) -> None:
        y = y.flatten(0, -2)
        if x is not None:
            x = x.flatten(0, -2)
            y, x = (y, x) if y_first else (x, y)
        self.recorder.add_term(entry, ExpertGradient(experts, examples, y, x))


def _is_index(value: Any) -> bool:
    """Return whether a value selects an expert, or an expert for each row, by number."""
    if isinstance(value, Tensor):
        return value.dim() < 2 and not value.is_floating_point() and value.dtype != torch.bool
    return type(value) is int


def formulas_for(module: nn.Module, owner: nn.Module | None) -> list[LayerFormula]:
    """Return the formulas that may fit a module with parameters of its own, the likeliest first."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return [LinearFormula(module), FunctionFormula(module)]
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None or module.scale_grad_by_freq:
            return []
        if owner is not None and hasattr(owner, "compute_bias"):
            return [RelativeBiasFormula(module, owner)]
        return [FunctionFormula(module), FunctionFormula(module, shared=True)]
    if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm | nn.modules.batchnorm._BatchNorm):
        return [NormFormula(module)]
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return [ConvFormula(module)]
    if has_fused_experts(module):
        return [ExpertsFormula(module), FunctionFormula(module)]
    repeated = [RepeatedFormula(module, shape) for shape in RepeatedFormula.SHAPES]
    matrix = any(p is not None and p.dim() == 2 for p in module._parameters.values())
    return [FunctionFormula(module), *repeated] if matrix else [*repeated, FunctionFormula(module)]


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
