"""Kronecker factors of a layer that multiplies with a matrix: A = Σ x̃x̃ᵀ and G = Σ yyᵀ over all tokens of all examples.

x̃ = [x; 1] is the layer's input, with a 1 for its bias, and y the gradient of its output. G ⊗ A / T, with T tokens,
represents the curvature of [W b]. Padding does not count.

Only the lower triangles are computed; they are mirrored at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from .batches import sees_decoder
from .curvature import KroneckerFactors
from .kernels import OuterGradient, sum_type
from .offload import StoredSum

#: Layers with more inputs or outputs get a diagonal: their factors would be of a gigabyte or more each.
MAX_KRONECKER_DIM = 16384

#: A product of a matrix with itself is computed in stripes that end at the diagonal: (most stripes, least width).
STRIPES_CPU, STRIPES_CUDA = (8, 48), (4, 256)


class BatchInputs:
    """What the layers of one batch share: the padding mask, and x̃x̃ᵀ of layers with the same input."""

    def __init__(self, masks: Mapping[bool, Tensor | None]) -> None:
        self._masks: dict[bool, Tensor] = {}
        """(examples, tokens): the tokens that count, unless all do. On a GPU, checking that would wait."""
        self._counts: dict[bool, int | Tensor] = {}
        for side, mask in masks.items():
            if mask is not None and (_waits(mask) or not bool(mask.all())):
                self._masks[side] = mask != 0
                self._counts[side] = self._masks[side].sum() if _waits(mask) else int(self._masks[side].sum())
        self._last: tuple[bool, Tensor, Tensor] | None = None

    def tokens(self, value: Tensor, side: bool) -> int | Tensor:
        """Return how many tokens of (examples, tokens, width) are not padding."""
        return value.shape[0] * value.shape[1] if self._mask(value, side) is None else self._counts[side]

    def rows(self, value: Tensor, side: bool, dtype: torch.dtype) -> Tensor:
        """Return (tokens, width) without padding, in a type that can be multiplied into a sum of ``dtype``.

        On a GPU, padding becomes 0 instead, because selecting rows would wait.
        """
        mask, flat = self._mask(value, side), value.flatten(0, 1)
        if mask is not None:
            flat = flat * mask.reshape(-1, 1) if _waits(mask) else flat[mask.flatten()]
        return flat if dtype == torch.float32 and _adds_wide(flat.device, flat.dtype) else flat.to(dtype)

    def _mask(self, value: Tensor, side: bool) -> Tensor | None:
        mask = self._masks.get(side)
        return mask.to(value.device) if mask is not None and mask.shape == value.shape[:2] else None

    def add_inputs(self, sums: KroneckerSums, total: Tensor, x: Tensor) -> None:
        """Add Σ x̃x̃ᵀ except its last entry, T. Queries, keys and values share an input, which is multiplied once."""
        if self._last is not None:
            decoder, seen, product = self._last
            # The input is kept alive here, so no other tensor can have its address.
            alike = seen.data_ptr() == x.data_ptr() and seen.shape == x.shape and seen.stride() == x.stride()
            if alike and product.shape == total.shape and decoder == sums.decoder:
                total += product
                return
        product = torch.zeros_like(total)
        _add_inputs(product, self.rows(x, sums.decoder, total.dtype))
        total += product
        self._last = sums.decoder, x, product


class KroneckerSums:
    """A, G and T of one layer, added up over batches."""

    def __init__(
        self, name: str, weight: Tensor, bias: nn.Parameter | None, transposed: bool, accumulate_on: str = "device"
    ) -> None:
        self.transposed = transposed
        """The weight's first axis is the input's, as in GPT-2's Conv1D."""
        self.bias = bias
        """The parameter that the last row and column of A represent."""
        self.decoder = sees_decoder(name)
        outputs, inputs = weight.shape[0], weight.shape[1:].numel()
        if transposed:
            outputs, inputs = inputs, outputs
        width, dtype = inputs + (bias is not None), sum_type(weight)
        self._inputs = StoredSum((width, width), dtype, weight.device, accumulate_on)
        self._outputs = StoredSum((outputs, outputs), dtype, weight.device, accumulate_on)
        self._tokens: int | Tensor = 0

    def add(self, term: OuterGradient, batch: BatchInputs, inputs: bool) -> None:
        """Add a batch; ``inputs``: also add its inputs, which only the first of several backward passes does."""
        x, y = (term.y, term.x) if self.transposed else (term.x, term.y)
        rows = batch.rows(y, self.decoder, self._outputs.value.dtype)
        if inputs:
            self._inputs.add(lambda total: batch.add_inputs(self, total, x))
            self._tokens = self._tokens + batch.tokens(x, self.decoder)
        self._outputs.add(lambda total: _add_square(total, rows))

    def result(self) -> KroneckerFactors:
        """Return A, G and T."""
        inputs, outputs, tokens = self._inputs.value, self._outputs.value, int(self._tokens)
        _mirror(inputs)
        _mirror(outputs)
        if self.bias is not None:
            inputs[-1, -1] = tokens
        return KroneckerFactors(inputs, outputs, tokens, self.transposed)


def _add_inputs(total: Tensor, x: Tensor) -> None:
    width = x.shape[1]
    ones = x.sum(0, dtype=total.dtype) if len(total) > width else None
    _add_square(total[:width, :width], x)
    if ones is not None:
        total[width, :width] += ones


def _add_square(total: Tensor, rows: Tensor) -> None:
    """total += rowsᵀ rows, on and left of the diagonal; what is right of it may be anything."""
    width = rows.shape[1]
    most, thinnest = STRIPES_CUDA if rows.is_cuda else STRIPES_CPU
    step = max(thinnest, -(-width // most))
    for top in range(0, width, step):
        bottom = min(top + step, width)
        part, left, right = total[top:bottom, :bottom], rows[:, top:bottom].T, rows[:, :bottom]
        if rows.dtype == total.dtype:
            part.addmm_(left, right)
        else:
            torch.addmm(part, left, right, out_dtype=torch.float32, out=part)


@functools.cache
def _adds_wide(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the device multiplies 16-bit matrices into a float32 sum, as tensor cores can."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    ones, total = torch.ones(32, 32, dtype=dtype, device=device), torch.ones(32, 64, device=device)[:, :32]
    try:
        torch.addmm(total, ones.T, ones, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # an older PyTorch
        return False
    return bool((total == 33).all())


def _waits(value: Tensor) -> bool:
    """Return whether reading the value would wait for a device."""
    return value.device.type != "cpu"


def _mirror(lower: Tensor, step: int = 1024) -> None:
    """Copy what is left of the diagonal to the right of it, in place: the device may have no room for a copy."""
    for top in range(0, len(lower), step):
        bottom = top + step
        square = lower[top:bottom, top:bottom]
        square.copy_(square.tril() + square.tril(-1).T)
        lower[top:bottom, bottom:] = lower[bottom:, top:bottom].T
