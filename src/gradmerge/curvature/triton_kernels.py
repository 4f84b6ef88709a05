"""The sum of squared gradients of a linear layer in one kernel: no example's gradient is written to memory.

A program holds one (out, in) tile in registers, goes through the examples, multiplies over their tokens, squares, and
adds up. That takes as many multiplications as the weight gradient of a training step, and reads the same numbers.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # an older Triton
    TensorDescriptor = None

#: Tile of a program, and tokens that it multiplies at a time. Found by trying on an H200.
OUT, IN, TOKENS, SHORT = 128, 128, 64, 128


@triton.jit
def _share_of(inputs, examples, share, BO: tl.constexpr, BI: tl.constexpr):
    """The rows and columns of a program's tile, and the first and last of its examples."""
    tiles, first = tl.cdiv(inputs, BI), tl.program_id(1) * share
    o = (tl.program_id(0) // tiles) * BO + tl.arange(0, BO)
    i = (tl.program_id(0) % tiles) * BI + tl.arange(0, BI)
    return o, i, first, tl.minimum(first + share, examples)


@triton.jit
def _short(
    y, x, out, examples, tokens, width, inputs, y_example, y_token, x_example, x_token, share,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Sequences of at most BT tokens: one product per example."""
    o, i, first, last = _share_of(inputs, examples, share, BO, BI)
    t = tl.arange(0, BT)
    y_place = t[:, None] * y_token + o[None, :]
    x_place = t[:, None] * x_token + i[None, :]
    total = tl.zeros((BO, BI), dtype=tl.float32)
    for e in tl.range(first, last, num_stages=3):
        y_here, x_here = y + e.to(tl.int64) * y_example + y_place, x + e.to(tl.int64) * x_example + x_place
        if WHOLE:
            left, right = tl.load(y_here), tl.load(x_here)
        else:
            left = tl.load(y_here, mask=(t[:, None] < tokens) & (o[None, :] < width), other=0.0)
            right = tl.load(x_here, mask=(t[:, None] < tokens) & (i[None, :] < inputs), other=0.0)
        gradient = tl.dot(tl.trans(left), right)
        total += gradient * gradient
    _store(out, total, o, i, width, inputs, WHOLE, ADD)


@triton.jit
def _long(
    y, x, out, examples, tokens, width, inputs, y_example, y_token, x_example, x_token, share,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Longer ones: products of BT tokens."""
    o, i, first, last = _share_of(inputs, examples, share, BO, BI)
    total = tl.zeros((BO, BI), dtype=tl.float32)
    for e in tl.range(first, last):
        y_here = y + e.to(tl.int64) * y_example + o[None, :]
        x_here = x + e.to(tl.int64) * x_example + i[None, :]
        gradient = tl.zeros((BO, BI), dtype=tl.float32)
        for begin in tl.range(0, tokens, BT, num_stages=3):
            t = (begin + tl.arange(0, BT))[:, None]
            if WHOLE:
                left, right = tl.load(y_here + t * y_token), tl.load(x_here + t * x_token)
            else:
                left = tl.load(y_here + t * y_token, mask=(t < tokens) & (o[None, :] < width), other=0.0)
                right = tl.load(x_here + t * x_token, mask=(t < tokens) & (i[None, :] < inputs), other=0.0)
            gradient = tl.dot(tl.trans(left), right, gradient)
        total += gradient * gradient
    _store(out, total, o, i, width, inputs, WHOLE, ADD)


@triton.jit
def _long_described(
    y, x, out, examples, tokens, width, inputs, share,
    BO: tl.constexpr, BI: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, ADD: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same through Hopper's copy engine, which also fills what is out of range with zeros."""
    # Neighboring programs take neighboring tiles, so that they find each other's numbers in the cache.
    across, down = tl.cdiv(inputs, BI), tl.cdiv(width, BO)
    top = (tl.program_id(0) // (GROUP * across)) * GROUP
    height = tl.minimum(down - top, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    o, i = (top + within % height) * BO, (within // height) * BI
    first = tl.program_id(1) * share
    last = tl.minimum(first + share, examples)
    total = tl.zeros((BO, BI), dtype=tl.float32)
    for e in tl.range(first, last):
        gradient = tl.zeros((BO, BI), dtype=tl.float32)
        for begin in tl.range(0, tokens, BT, num_stages=3):
            left = y.load([e, begin, o]).reshape(BT, BO)
            right = x.load([e, begin, i]).reshape(BT, BI)
            gradient = tl.dot(tl.trans(left), right, gradient)
        total += gradient * gradient
    _store(out, total, o + tl.arange(0, BO), i + tl.arange(0, BI), width, inputs, WHOLE, ADD)


@triton.jit
def _store(out, total, o, i, width, inputs, WHOLE: tl.constexpr, ADD: tl.constexpr):
    place = out + tl.program_id(1).to(tl.int64) * width * inputs + o.to(tl.int64)[:, None] * inputs + i[None, :]
    if WHOLE:
        if ADD:
            total += tl.load(place)
        tl.store(place, total)
    else:
        inside = (o[:, None] < width) & (i[None, :] < inputs)
        if ADD:
            total += tl.load(place, mask=inside)
        tl.store(place, total, mask=inside)


@dataclass(frozen=True)
class _Launch:
    """How a layer of one shape is worked on. Kept, since working it out takes as long as a small layer does."""

    short: bool
    tiles: int
    parts: int
    share: int
    constants: dict[str, Any]


def add_outer_fused(y: Tensor, x: Tensor, total: Tensor) -> None:
    """total (out, in) += Σ_i (Σ_t y_it x_itᵀ)², for 16-bit y (examples, tokens, out) and x (examples, tokens, in)."""
    y, x = _rows(y), _rows(x)
    (examples, tokens, width), inputs = y.shape, x.shape[2]
    launch = _launch(examples, tokens, width, inputs, y.device.index)
    out = total if launch.parts == 1 else torch.empty(launch.parts, width, inputs, device=y.device, dtype=torch.float32)
    grid = (launch.tiles, launch.parts)
    sizes = (examples, tokens, width, inputs)
    with contextlib.nullcontext() if y.device.index == torch.cuda.current_device() else torch.cuda.device(y.device):
        if not launch.short and _can_describe(y) and _can_describe(x):
            boxes = [
                TensorDescriptor(v, list(v.shape), list(v.stride()), [1, TOKENS, side])
                for v, side in ((y, OUT), (x, IN))
            ]
            _long_described[grid](*boxes, out, *sizes, launch.share, GROUP=8, num_warps=4, **launch.constants)
        else:
            kernel = _short if launch.short else _long
            (a, b, _), (c, d, _) = y.stride(), x.stride()
            kernel[grid](y, x, out, *sizes, a, b, c, d, launch.share, num_warps=8, **launch.constants)
    if launch.parts > 1:
        total += out.sum(0)


@functools.lru_cache(maxsize=4096)
def _launch(examples: int, tokens: int, width: int, inputs: int, device: int) -> _Launch:
    short = tokens <= SHORT
    block = max(16, triton.next_power_of_2(tokens)) if short else TOKENS
    tiles = triton.cdiv(width, OUT) * triton.cdiv(inputs, IN)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    parts = _parts(examples, tokens, width * inputs, tiles, processors)
    share = triton.cdiv(examples, parts)
    parts = triton.cdiv(examples, share)
    whole = tokens % block == 0 and width % OUT == 0 and inputs % IN == 0
    return _Launch(short, tiles, parts, share, {"BO": OUT, "BI": IN, "BT": block, "WHOLE": whole, "ADD": parts == 1})


def _parts(examples: int, tokens: int, entries: int, tiles: int, processors: int) -> int:
    """Into how many parts the examples are split, each with its own sum: idle processors against more additions."""
    multiply = 2 * examples * tokens * entries / 7e14
    move, start = entries * 8 / 3e12, 5e-5

    def seconds(parts: int) -> float:
        rounds = -(-tiles * parts // processors) / parts / (tiles / processors)
        return multiply * rounds + (move * (parts + 1) + start if parts > 1 else 0.0)

    return min(range(1, min(examples, 32) + 1), key=seconds)


def _can_describe(value: Tensor) -> bool:
    """Whether the copy engine takes it: rows that begin at multiples of 16 bytes, on a GPU that has one."""
    aligned = value.data_ptr() % 16 == 0 and all(s * value.element_size() % 16 == 0 for s in value.stride()[:2])
    return TensorDescriptor is not None and aligned and _has_copy_engine(value.device.index)


@functools.cache
def _has_copy_engine(device: int) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def _rows(value: Tensor) -> Tensor:
    return value if value.stride(2) == 1 else value.contiguous()
