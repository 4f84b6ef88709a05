"""The formula of fused experts: mixture-of-experts layers that keep the weights of all experts in one tensor.

The gradient of expert e for example i is Σ_t y_t x_tᵀ over the tokens t of example i that are routed to e. So the
formula must know the example and the expert of each row that is multiplied. It follows the module's input and its
parameters through the module: `hidden[index]` selects tokens, `weight[expert]` selects an expert, a product combines
both. It covers the implementations `eager` and `grouped_mm` of transformers with both layouts of the weights, biases,
and layers that send all tokens to all experts (Llama 4).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..text import listed
from .curvature import Curvature
from .hooks import FollowedTensor, InsideFormula, unfollowed
from .kernels import ExpertGradient, join_experts
from .parameter_sum import ParameterSum

_PRODUCTS = (Tensor.matmul, Tensor.__matmul__, Tensor.mm, torch.matmul, torch.mm)
_SUMS = (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)
_TRANSPOSES = (torch.transpose, Tensor.transpose, Tensor.t, Tensor.T.__get__, Tensor.mT.__get__)  # type: ignore[attr-defined]
_SELECTIONS = (torch.index_select, Tensor.index_select)
_RESHAPES = (Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten)


def has_fused_experts(module: nn.Module) -> bool:
    """Return whether a module holds the weights of several experts, (experts, …), in one tensor."""
    parameters = [p for p in module._parameters.values() if p is not None]
    counts = {p.shape[0] if p.dim() else 1 for p in parameters}
    return any(p.dim() == 3 and min(p.shape) > 1 for p in parameters) and len(counts) == 1


def expert_notes(model: nn.Module, curvature: Curvature) -> list[str]:
    """Return notes on the experts of a model: those without tokens, and weights without Kronecker factors."""
    weights, experts, idle = [], 0, 0
    for path, module in model.named_modules():
        names = [f"{path}.{name}".lstrip(".") for name, p in module._parameters.items() if p is not None]
        sums = [curvature.diagonal[name] for name in names if "expert" in name and name in curvature.diagonal]
        if sums and has_fused_experts(module):
            weights += names
            experts += len(sums[0])
            idle += int((torch.stack([value.reshape(len(value), -1).amax(1) for value in sums]).amax(0) == 0).sum())
    notes = [f"{idle} of {experts} experts received no token and have zero curvature"] if idle else []
    if weights and curvature.kind == "kronecker":
        notes.append(f"fused weights of experts have a diagonal, not Kronecker factors:\n{listed(weights)}")
    return notes


class ExpertsFormula(InsideFormula):
    """Weights (experts, …): each token is multiplied with the weights of the experts that it is routed to."""

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
