"""The sum of squared gradients of a linear layer in one kernel: no example's gradient is written to memory.

A program holds one (out, in) tile in registers, goes through the examples, multiplies over their tokens, squares, and adds up.
That takes as many multiplications as the weight gradient of a training step, and reads the same numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _short(  # type: ignore[no-untyped-def]
    y, x, out, examples, tokens, width, inputs, y_example, y_token, x_example, x_token, share,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sequences of at most BT tokens: one product an example."""
    tiles = tl.cdiv(inputs, BI)
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    i = (tl.program_id(0) % tiles) * BI + tl.arange(0, BI)
    t = tl.arange(0, BT)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, examples)
    y_place = t[:, None] * y_token + o[None, :]
    x_place = t[:, None] * x_token + i[None, :]
    total = tl.zeros((BO, BI), dtype=tl.float32)
    for e in tl.range(first, last, num_stages=STAGES):
        if WHOLE:
            left = tl.load(y + e.to(tl.int64) * y_example + y_place)
            right = tl.load(x + e.to(tl.int64) * x_example + x_place)
        else:
            left = tl.load(y + e.to(tl.int64) * y_example + y_place, mask=(t[:, None] < tokens) & (o[None, :] < width), other=0.0)
            right = tl.load(x + e.to(tl.int64) * x_example + x_place, mask=(t[:, None] < tokens) & (i[None, :] < inputs), other=0.0)
        gradient = tl.dot(tl.trans(left), right)
        total += gradient * gradient
    _store(out, total, o, i, width, inputs, WHOLE)


@triton.jit
def _long(  # type: ignore[no-untyped-def]
    y, x, out, examples, tokens, width, inputs, y_example, y_token, x_example, x_token, share,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Longer ones: products of BT tokens, in one loop through all examples, so that loading never pauses between them."""
    tiles = tl.cdiv(inputs, BI)
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    i = (tl.program_id(0) % tiles) * BI + tl.arange(0, BI)
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, examples)
    steps = tl.cdiv(tokens, BT)
    gradient = tl.zeros((BO, BI), dtype=tl.float32)
    total = tl.zeros((BO, BI), dtype=tl.float32)
    for step in tl.range(first * steps, last * steps, num_stages=STAGES):
        e = (step // steps).to(tl.int64)
        t = (step % steps) * BT + tl.arange(0, BT)
        left_place = y + e * y_example + t[:, None] * y_token + o[None, :]
        right_place = x + e * x_example + t[:, None] * x_token + i[None, :]
        if WHOLE:
            left = tl.load(left_place)
            right = tl.load(right_place)
        else:
            left = tl.load(left_place, mask=(t[:, None] < tokens) & (o[None, :] < width), other=0.0)
            right = tl.load(right_place, mask=(t[:, None] < tokens) & (i[None, :] < inputs), other=0.0)
        gradient = tl.dot(tl.trans(left), right, gradient)
        if step % steps == steps - 1:
            total += gradient * gradient
            gradient = tl.zeros((BO, BI), dtype=tl.float32)
    _store(out, total, o, i, width, inputs, WHOLE)


@triton.jit
def _store(out, total, o, i, width, inputs, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    place = out + tl.program_id(1).to(tl.int64) * width * inputs + o.to(tl.int64)[:, None] * inputs + i[None, :]
    if WHOLE:
        tl.store(place, total)
    else:
        tl.store(place, total, mask=(o[:, None] < width) & (i[None, :] < inputs))


def add_outer_fused(y: Tensor, x: Tensor, total: Tensor) -> None:
    """total (out, in) += Σ_i (Σ_t y_it x_itᵀ)², for 16-bit y (examples, tokens, out) and x (examples, tokens, in)."""
    y, x = _rows(y), _rows(x)
    (examples, tokens, width), inputs = y.shape, x.shape[2]
    short = tokens <= 128
    bt = max(16, triton.next_power_of_2(tokens)) if short else 64
    bo, bi = 128, 128
    tiles = triton.cdiv(width, bo) * triton.cdiv(inputs, bi)
    processors = torch.cuda.get_device_properties(y.device).multi_processor_count
    parts = max(1, min(examples, processors // tiles))
    share = triton.cdiv(examples, parts)
    parts = triton.cdiv(examples, share)
    whole = tokens % bt == 0 and width % bo == 0 and inputs % bi == 0
    out = torch.empty(parts, width, inputs, device=y.device, dtype=torch.float32)
    kernel = _short if short else _long
    with torch.cuda.device(y.device):
        kernel[(tiles, parts)](
            y, x, out, examples, tokens, width, inputs, y.stride(0), y.stride(1), x.stride(0), x.stride(1), share,
            BO=bo, BI=bi, BT=bt, WHOLE=whole, STAGES=3, num_warps=8,
        )  # fmt: skip
    total += out[0] if parts == 1 else out.sum(0)


def _rows(value: Tensor) -> Tensor:
    return value if value.stride(2) == 1 else value.contiguous()
