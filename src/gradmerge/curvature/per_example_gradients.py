"""The formula of each kind of layer: its parameters' gradient per example, from one backward pass over a batch.

Throughout, x is what went into the layer and y the gradient of the loss with respect to what came out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .hooks import InsideFormula, LayerFormula, Recorder, Unsuited
from .kernels import DirectGradient, OuterGradient, RowGradient, sum_type
from .parameter_sum import ParameterSum


class LinearFormula(LayerFormula):
    """x Wᵀ + b: g_i = Σ_t y_it x_itᵀ. GPT-2's Conv1D holds Wᵀ."""

    def use(self, gradient: Tensor, *seen: Tensor) -> None:
        y, x = self._per_example(gradient, 1), self._per_example(seen[0], 1)
        if y.shape[1] != x.shape[1]:
            raise Unsuited(f"an input of shape {list(seen[0].shape)} gives an output of shape {list(gradient.shape)}")
        if weight := self.sums.get("weight"):
            self.recorder.take(weight, OuterGradient(x, y) if is_conv1d(self.module) else OuterGradient(y, x))
        self._take_bias(y)


class FunctionFormula(InsideFormula):
    """F.embedding or F.linear with a parameter, caught where the module calls it, whatever else the module does.

    With ``shared`` the ids are the same for all examples, as those of positions are, and are repeated for each.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, shared: bool = False) -> None:
        super().__init__(recorder, module)
        self.shared = shared

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.recorder.listening:
            for name, one in self.sums.items():
                module.__dict__[name] = _Watched.of(getattr(module, name), one, self)

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a function that one of the parameters takes part in."""
        plain = [a.as_subclass(Tensor) if isinstance(a, _Watched) else a for a in args]
        watched = [a for a in args if isinstance(a, _Watched)]
        second = args[1] if len(args) > 1 and isinstance(args[1], _Watched) else None
        if second is None or len(watched) > 1 or function not in (F.embedding, F.linear):
            # Any other function: its gradient is not seen, and so the trial will refuse this formula.
            named = {k: v.as_subclass(Tensor) if isinstance(v, _Watched) else v for k, v in kwargs.items()}
            return function(*plain, **named)
        one = second.sum_of
        if function is F.linear:
            self._see(plain[0])
            return self._tap(function(*plain, **kwargs), functools.partial(self._use_matrix, one), plain[0])
        padding = kwargs.get("padding_idx", args[2] if len(args) > 2 else None)
        ids = plain[0]
        if self.shared and (ids.dim() == 1 or ids.shape[0] == 1):
            self.recorder.changed = self
            ids = ids.reshape(1, -1).expand(self.recorder.examples, -1)
        self._see(ids[..., None])
        try:
            if self.shared and ids is plain[0]:
                raise Unsuited(f"rows of shape {list(ids.shape)} are not shared by all examples")
            one.ids.append(self._per_example(ids[..., None], 1)[..., 0])
        except Unsuited:
            self.recorder.unfit.append(self)
            return function(*plain, **kwargs)
        rows = function(ids, *plain[1:], **kwargs)
        return self._tap(rows, functools.partial(self._use_rows, one, padding), ids)

    def _use_matrix(self, one: ParameterSum, gradient: Tensor, x: Tensor) -> None:
        self.recorder.take(one, OuterGradient(self._per_example(gradient, 1), self._per_example(x, 1)))

    def _use_rows(self, one: ParameterSum, padding: int | None, gradient: Tensor, ids: Tensor) -> None:
        ids, y = self._per_example(ids[..., None], 1)[..., 0], self._per_example(gradient, 1)
        if padding is not None:
            y = y * (ids != padding)[..., None]
        self.recorder.take(one, RowGradient(ids, y))


class _Watched(Tensor):
    """A parameter that passes every function it is used in to its formula's ``called``."""

    sum_of: ParameterSum
    formula: FunctionFormula

    @classmethod
    def of(cls, value: Tensor, one: ParameterSum, formula: FunctionFormula) -> _Watched:
        watched = value.detach().as_subclass(cls)
        watched.sum_of, watched.formula = one, formula
        return watched

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (a for a in (*args, *(kwargs or {}).values()) if isinstance(a, _Watched) and hasattr(a, "formula"))
        watched = next(given, None)
        if watched is None:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        with torch._C.DisableTorchFunctionSubclass():
            return watched.formula.called(func, args, kwargs or {})


class NormFormula(LayerFormula):
    """x̂ ∘ w + b with normalised input x̂: g_i = Σ_t y_it ∘ x̂_it, over everything but channels."""

    def use(self, gradient: Tensor, *seen: Tensor) -> None:
        module = self.module
        gradient, normal = self._channels_last(gradient), self._channels_last(_normalised(module, seen[0]))
        axes = len(module.weight.shape) if isinstance(module.weight, Tensor) else 1
        y = self._per_example(gradient, axes)
        if weight := self.sums.get("weight"):
            product = y * self._per_example(normal, axes)
            self.recorder.take(weight, DirectGradient(product.sum(1, dtype=sum_type(product))))
        self._take_bias(y)

    def _see(self, value: Tensor) -> None:
        super()._see(self._channels_last(value))

    def _channels_last(self, value: Tensor) -> Tensor:
        return value if isinstance(self.module, nn.LayerNorm | nn.RMSNorm) else value.movedim(1, -1)


class ConvFormula(LayerFormula):
    """A convolution is a linear layer of patches."""

    def _see(self, value: Tensor) -> None:
        super()._see(value.movedim(1, -1))

    def use(self, gradient: Tensor, *seen: Tensor) -> None:
        module: Any = self.module
        if len(gradient) != self.recorder.examples:
            raise Unsuited(f"an input of shape {list(seen[0].shape)} has no axis of examples")
        y = gradient.flatten(2).transpose(1, 2)
        self._take_bias(y)
        if weight := self.sums.get("weight"):
            x, groups = _patches(module, seen[0]), module.groups
            if groups == 1:
                self.recorder.take(weight, OuterGradient(y, x.flatten(2)))
                return
            y = y.unflatten(2, (groups, -1)).permute(0, 2, 3, 1)
            x = x.unflatten(2, (groups, -1)).flatten(3).permute(0, 2, 1, 3)
            self.recorder.take(weight, DirectGradient((y @ x).reshape(len(y), *weight.parameter.shape)))


class RelativeBiasFormula(LayerFormula):
    """T5's relative positions: one table of biases for every pair of places, the same for all examples.

    The bias is repeated for each example where the attention layer computes it.
    """

    def __init__(self, recorder: Recorder, module: nn.Module, owner: nn.Module) -> None:
        super().__init__(recorder, module)
        self.owner = owner
        self._ids: Tensor | None = None

    def attach(self) -> Iterator[Callable[[], Any]]:
        yield self.module.register_forward_hook(self._behind).remove
        compute = self.owner.compute_bias
        self.owner.__dict__["compute_bias"] = functools.partial(self._compute, compute)
        yield lambda: self.owner.__dict__.pop("compute_bias", None)

    def _behind(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        self._ids = inputs[0]
        return output

    def _compute(self, compute: Any, *args: Any, **kwargs: Any) -> Any:
        bias = compute(*args, **kwargs)
        if not self.recorder.listening or self._ids is None:
            return bias
        repeated = bias.detach().expand(self.recorder.examples, *bias.shape[1:])
        return self._tap(repeated, self.use, self._ids)

    def use(self, gradient: Tensor, *seen: Tensor) -> None:
        if weight := self.sums.get("weight"):
            y = gradient.permute(0, 2, 3, 1).flatten(1, 2).to(sum_type(gradient))
            table = y.new_zeros(len(y), *weight.parameter.shape).index_add_(1, seen[0].flatten(), y)
            self.recorder.take(weight, DirectGradient(table))


class RepeatedFormula(InsideFormula):
    """A parameter that is added or multiplied: it is repeated for every example while its module runs.

    ``shape`` says where the axis of examples goes: in the place of a leading 1 (``leading``), in front of as many
    axes as the input has (``input``), in front (``front``), or in front with a 1 between (``spaced``).
    """

    SHAPES = ("leading", "input", "front", "spaced")

    def __init__(self, recorder: Recorder, module: nn.Module, shape: str) -> None:
        super().__init__(recorder, module)
        self.shape = shape

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self.recorder.listening:
            return
        like = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if like is not None:
            self._see(like)
        self.recorder.changed = self
        for name, one in self.sums.items():
            value = getattr(module, name).detach()
            try:
                module.__dict__[name] = self._tap(self._repeat(value, like), functools.partial(self._use, one))
            except Unsuited:
                self.recorder.unfit.append(self)
                module.__dict__[name] = value

    def _repeat(self, value: Tensor, like: Tensor | None) -> Tensor:
        examples, shape = self.recorder.examples, value.shape
        between = -1 if like is None or like.shape[:1] != (examples,) else like.dim() - 1 - value.dim()
        if self.shape == "input" and between < 0:
            raise Unsuited("the module's input has no axis of examples")
        if self.shape == "leading" and (value.dim() < 2 or shape[0] != 1):
            raise Unsuited("the parameter has no leading axis of 1")
        if self.shape == "leading":
            return value.expand(examples, *shape[1:])
        ones = {"input": between, "front": 0, "spaced": 1}[self.shape]
        return value.expand(examples, *[1] * ones, *shape)

    def _use(self, one: ParameterSum, gradient: Tensor) -> None:
        self.recorder.take(one, DirectGradient(gradient.reshape(len(gradient), *one.parameter.shape)))


def formulas_for(module: nn.Module, owner: nn.Module | None) -> list[Callable[[Recorder], LayerFormula]]:
    """The formulas that may fit a module with parameters of its own, the likeliest first."""
    if isinstance(module, nn.Linear) or is_conv1d(module):
        return [lambda r: LinearFormula(r, module)]
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
    repeated = [functools.partial(RepeatedFormula, module=module, shape=shape) for shape in RepeatedFormula.SHAPES]
    matrix = any(p is not None and p.dim() == 2 for p in module._parameters.values())
    return [lambda r: FunctionFormula(r, module), *repeated] if matrix else [*repeated]


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is GPT-2's linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _normalised(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return F.rms_norm(x, tuple(module.normalized_shape), eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return F.group_norm(x, module.num_groups, eps=module.eps)
    assert isinstance(module, nn.modules.batchnorm._BatchNorm)
    return F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)


def _patches(module: Any, x: Tensor) -> Tensor:
    """(examples, places, channels, kernel entries): what the kernel of a convolution sees at every place."""
    if module.padding_mode != "zeros":
        x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    elif isinstance(module.padding, str) or any(module.padding):
        x = F.pad(x, module._reversed_padding_repeated_twice)
    axes = len(module.kernel_size)
    sizes = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for axis, (size, stride, dilation) in enumerate(sizes):
        x = x.unfold(2 + axis, dilation * (size - 1) + 1, stride)[..., ::dilation]
    places, kernel = math.prod(x.shape[2 : 2 + axes]), math.prod(module.kernel_size)
    return x.movedim(1, 1 + axes).reshape(len(x), places, -1, kernel)
