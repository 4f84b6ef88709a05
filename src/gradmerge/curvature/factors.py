"""Kronecker factors of a layer that multiplies with a matrix: A = Σ x̃x̃ᵀ and G = Σ yyᵀ over all tokens of all examples.

x̃ = [x; 1] is what went into the layer, with a 1 for its bias, and y the gradient of the loss with respect to what came
out. G ⊗ A / T, with T tokens, stands for the curvature of [W b]. Padding is left out of all three.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .kernels import OuterGradient, sum_type
from .padding import sees_decoder

#: Products of a matrix with itself are formed in so many stripes, of which only what is left of the diagonal is needed.
STRIPES = 4


class KroneckerSums:
    """A, G and T of one layer, added up over batches."""

    def __init__(self, name: str, weight: Tensor, bias: nn.Parameter | None, turned: bool) -> None:
        self.turned = turned
        """The weight's first axis is the input's, as of GPT-2's Conv1D."""
        self.bias = bias
        """The parameter that the last row and column of A stand for."""
        self._decoder = sees_decoder(name)
        outputs, inputs = weight.shape[0], weight[0].numel()
        if turned:
            outputs, inputs = inputs, outputs
        width = inputs + (bias is not None)
        dtype = sum_type(weight)
        self._inputs = torch.zeros(width, width, dtype=dtype, device=weight.device)
        self._outputs = torch.zeros(outputs, outputs, dtype=dtype, device=weight.device)
        self._tokens = torch.zeros((), dtype=torch.float64, device=weight.device)
        self.begun = False

    def add(self, term: OuterGradient, masks: Mapping[bool, Tensor | None], inputs: bool) -> None:
        """Add a batch; where labels are many, the ``inputs`` count in the first of several backward passes alone."""
        self.begun = True
        x, y = (term.y, term.x) if self.turned else (term.x, term.y)
        mask = masks.get(self._decoder)
        if mask is not None and mask.shape == x.shape[:2]:
            kept = mask[..., None].to(x.dtype)
            x, y = x * kept, y * kept
            tokens = kept.sum(dtype=torch.float64)
        else:
            tokens = torch.tensor(float(x.shape[0] * x.shape[1]), dtype=torch.float64, device=x.device)
        x, y = x.flatten(0, 1), y.flatten(0, 1)
        if inputs:
            width = x.shape[1]
            _add_square(self._inputs[:width, :width], x)
            if self.bias is not None:
                self._inputs[width, :width] += x.sum(0, dtype=self._inputs.dtype)
                self._inputs[width, width] += tokens.to(self._inputs.dtype)
            self._tokens += tokens
        _add_square(self._outputs, y)

    @property
    def inputs(self) -> Tensor:
        """A: (in + 1, in + 1), or (in, in) without a bias."""
        return _mirrored(self._inputs)

    @property
    def outputs(self) -> Tensor:
        """G: (out, out)."""
        return _mirrored(self._outputs)

    @property
    def tokens(self) -> int:
        return int(self._tokens)


def _add_square(total: Tensor, rows: Tensor) -> None:
    """total += rowsᵀ rows, on and left of the diagonal; what is right of it may be anything."""
    rows = rows.to(total.dtype)
    width = rows.shape[1]
    step = -(-width // STRIPES) if width >= 128 else width
    for top in range(0, width, step):
        bottom = min(top + step, width)
        total[top:bottom, :bottom].addmm_(rows[:, top:bottom].T, rows[:, :bottom])


def _mirrored(lower: Tensor) -> Tensor:
    return lower.tril() + lower.tril(-1).T
