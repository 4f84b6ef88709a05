"""The layers that calibration solves: their weights as matrices, and the rows that these multiply.

A layer has one matrix [W b] for each of its groups: one group for a linear layer, several for a grouped convolution,
and one for each expert of a mixture-of-experts layer that keeps the weights of all experts in one tensor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
#: Bytes that the sums of several experts may take together. More experts are solved one part after the other.
EXPERT_BYTES = 2_000_000_000


class LayerInput(NamedTuple):
    """What a layer reads in one batch."""

    values: Tensor
    counted: Tensor | None = None
    """Which positions are not padding; None: all are counted."""
    routing: Tensor | None = None
    """For fused experts, tokens × k: the experts that every token is routed to."""


class Layer(ABC):
    """A layer that calibration solves: a weight and perhaps a bias of a module."""

    def __init__(self, name: str, path: str, module: Any, weight: str = "weight", bias: str = "bias") -> None:
        self.name, self.path, self.module = name, path, module
        """``path`` is that of the module, whose input the layer reads."""
        self.has_bias = getattr(module, bias, None) is not None
        self._weight, self._bias = weight, bias

    @property
    def parameters(self) -> list[str]:
        """The names of the weight and the bias in the model."""
        return [f"{self.path}.{name}" for name in ([self._weight, self._bias] if self.has_bias else [self._weight])]

    @property
    def weight(self) -> Tensor:
        """The parameter with the weight."""
        value: Tensor = getattr(self.module, self._weight)
        return value

    @property
    def bias(self) -> Tensor:
        """The parameter with the bias."""
        value: Tensor = getattr(self.module, self._bias)
        return value

    @abstractmethod
    def weights(self) -> Tensor:
        """W, as a view of the parameter of shape (groups, outputs, inputs)."""

    @abstractmethod
    def rows(self, inputs: LayerInput) -> Iterator[tuple[slice, Tensor]]:
        """What the matrix is multiplied with, without padding: groups, and their (groups, rows, inputs)."""

    def matrix(self) -> Tensor:
        """[W b], of shape (groups, outputs, inputs)."""
        weights = self.weights().detach()
        if not self.has_bias:
            return weights
        return torch.cat([weights, self.bias.detach().reshape(*weights.shape[:2], 1)], -1)

    @torch.no_grad()
    def set_matrix(self, matrix: Tensor) -> None:
        """Write [W b] back into the module."""
        if self.has_bias:
            self.bias.copy_(matrix[..., -1].reshape(self.bias.shape))
            matrix = matrix[..., :-1]
        self.weights().copy_(matrix)

    def with_ones(self, rows: Tensor) -> Tensor:
        """Rows with one more input equal to 1, if the layer has a bias."""
        return torch.cat([rows, rows.new_ones(*rows.shape[:-1], 1)], -1) if self.has_bias else rows


class LinearLayer(Layer):
    """``nn.Linear``, or the ``Conv1D`` of transformers, which stores the transpose."""

    def weights(self) -> Tensor:
        return (self.weight.T if type(self.module).__name__ == "Conv1D" else self.weight)[None]

    def rows(self, inputs: LayerInput) -> Iterator[tuple[slice, Tensor]]:
        values, counted, _ = inputs
        rows = values.reshape(-1, values.shape[-1]) if counted is None else values[counted]
        yield slice(None), self.with_ones(rows[None])


class Convolution(Layer):
    """A convolution, which is linear on patches."""

    def weights(self) -> Tensor:
        groups = self.module.groups
        return self.weight.view(groups, len(self.weight) // groups, -1)

    def rows(self, inputs: LayerInput) -> Iterator[tuple[slice, Tensor]]:
        layer = self.module
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        values = F.pad(inputs.values, layer._reversed_padding_repeated_twice, mode=mode)
        windows = zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        for axis, (size, step, dilation) in enumerate(windows):
            values = values.unfold(2 + axis, dilation * (size - 1) + 1, step)[..., ::dilation]
        batch, channels = values.shape[:2]
        kernel = values.shape[-len(layer.kernel_size) :]
        # (batch, channels, positions…, kernel…) → (groups, batch · positions, channels / groups · kernel)
        values = values.reshape(batch, layer.groups, channels // layer.groups, -1, *kernel)
        values = values.movedim(3, 2).movedim(1, 0)
        yield slice(None), self.with_ones(values.reshape(layer.groups, -1, values[0, 0, 0].numel()))


class ExpertLayer(Layer):
    """The first or the second projection of some of a module's experts, each on the tokens that are routed to it."""

    def __init__(self, path: str, module: Any, weight: str, experts: range) -> None:
        every = range(len(getattr(module, weight)))
        part = "" if experts == every else f"[{experts.start}:{experts.stop}]"
        super().__init__(f"{path}.{weight}{part}", path, module, weight, f"{weight}_bias")
        self.experts = experts

    @property
    def bias(self) -> Tensor:
        return super().bias[self.experts.start : self.experts.stop]

    def weights(self) -> Tensor:
        part = self.weight[self.experts.start : self.experts.stop]
        return part.mT if self.module.is_transposed else part

    def rows(self, inputs: LayerInput) -> Iterator[tuple[slice, Tensor]]:
        assert inputs.routing is not None
        for group, expert in enumerate(self.experts):
            routed = (inputs.routing == expert).any(-1)
            routed = routed if inputs.counted is None else routed & inputs.counted.reshape(-1)
            tokens = inputs.values.flatten(0, -2)[routed]
            if self._weight == "down_proj":
                tokens = self._hidden(tokens, expert)
            yield slice(group, group + 1), self.with_ones(tokens[None])

    def _hidden(self, tokens: Tensor, expert: int) -> Tensor:
        """What an expert's second projection reads."""
        module, first = self.module, first_projection(self.module)
        weight, bias = getattr(module, first)[expert], getattr(module, f"{first}_bias", None)
        result = tokens @ (weight if module.is_transposed else weight.T)
        result = result if bias is None else result + bias[expert]
        hidden: Tensor = module._apply_gate(result) if module.has_gate else module.act_fn(result)
        return hidden


def first_projection(experts: Any) -> str:
    """The name of the first weight of fused experts."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def has_expert_layers(module: Any) -> bool:
    """Whether a module has fused experts in the form that transformers' implementations of experts share."""
    if not hasattr(module, "_apply_gate") or getattr(module, "has_post_expert_norm", False):
        return False
    weights = [getattr(module, name, None) for name in (first_projection(module), "down_proj")]
    return all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)


def layers_of(path: str, module: Any) -> list[Layer]:
    """The layers of one module, in the order in which they run; none for most modules."""
    if isinstance(module, CONVOLUTIONS):
        return [Convolution(path, path, module)]
    if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
        return [LinearLayer(path, path, module)]
    if not has_expert_layers(module):
        return []
    layers: list[Layer] = []
    for weight in (first_projection(module), "down_proj"):
        experts = range(len(getattr(module, weight)))
        _, _, inputs = ExpertLayer(path, module, weight, experts).weights().shape
        size = max(1, EXPERT_BYTES // (16 * inputs**2))  # two sums in float32, one matrix in float64
        parts = [experts[first : first + size] for first in experts[::size]]
        layers += [ExpertLayer(path, module, weight, part) for part in parts]
    return layers


def find_layers(model: nn.Module) -> dict[str, Layer]:
    """Name → layer, of all layers that calibration can solve."""
    return {layer.name: layer for path, module in model.named_modules() for layer in layers_of(path, module)}
