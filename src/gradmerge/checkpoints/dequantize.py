"""Quantised checkpoints read as the numbers that their codes stand for, block by block: fp8 and bitsandbytes.

- fp8: float8 codes times scales, one for the tensor, for each row, or for each block (`NAME_scale_inv`, `NAME_scale`);
- bitsandbytes, 8 bits: int8 codes times the largest entry of their row (`SCB`) over 127;
- bitsandbytes, 4 bits: two codes a byte, each the place of a number in a table of 16 (`quant_map`), times the largest
  entry of its block (`absmax`), which may itself be a code of 8 bits (nested).
"""

from __future__ import annotations

import functools
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import FLOATS, TensorInfo
from .checkpoint import Buffers, Checkpoint
from .compat.config_diff import parts
from .quantization import KEYS, quantisation, without_quantisation
from .views import View

#: Last parts of the names of scales of activations, which the plain model does not have.
OF_ACTIVATIONS = {"input_scale", "input_scale_inv", "activation_scale", "k_scale", "v_scale", "q_scale", "output_scale"}
#: Where the scales of float8 codes lie: added to the code's name, or in the place of its last part.
BESIDE = ("{name}_scale_inv", "{name}_scale", "{module}.scale_weight")
USUAL_BLOCK = 128
WIDTHS = {word: code for code, word in FLOATS.items()}


class Decoder(ABC):
    """How one tensor is made of its codes."""

    shape: tuple[int, ...]
    hidden: tuple[str, ...]
    """What else lies in the files for it."""

    @abstractmethod
    def read(self, inner: Checkpoint, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        """Elements ``start`` to ``stop`` of the flattened tensor, in float32."""


def dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with plain numbers; itself, if it has nothing else."""
    if quantisation(checkpoint) is None and not any(_is_float8(info) for info in checkpoint.tensors.values()):
        return checkpoint
    return DequantisedCheckpoint(checkpoint)


class DequantisedCheckpoint(View):
    """A quantised checkpoint as the plain one that it stands for."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        found = quantisation(inner)
        decoders = _decoders(inner)
        hidden = {name for decoder in decoders.values() for name in decoder.hidden}
        hidden |= {name for name in inner.tensors if name.rpartition(".")[2] in OF_ACTIVATIONS}
        self._decoders = decoders
        dtype = _dtype_of(inner.config)
        self.tensors = {
            name: TensorInfo(dtype, decoders[name].shape) if name in decoders else info
            for name, info in inner.tensors.items()
            if name not in hidden
        }
        self.config = without_quantisation(inner.config)
        left = _still_codes(self)
        if left is not None or not decoders:
            unread = str(left or found)
            raise InputError(
                f"{inner.label}: {unread}. --dequantize reads fp8 with scales, and bitsandbytes with 4 or 8 bits. Take "
                "the original, unquantised checkpoint, or load it with transformers, call model.dequantize(), and save "
                "it with save_pretrained."
            )
        counted, whose = (f"{len(decoders)} tensors are", "their") if len(decoders) > 1 else ("1 tensor is", "its")
        method = found.method if found is not None else "float8 without scales"
        self.notes = [
            *inner.notes,
            f"{inner.label}: {counted} dequantised ({method}); {whose} type counts as {FLOATS[dtype]}",
        ]

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        decoder = self._decoders.get(name)
        if decoder is None or stop <= start:
            return self.inner.read(name, start, stop, buffers, slot) if decoder is None else torch.empty(0)
        return decoder.read(self.inner, start, stop, buffers, slot)


def _still_codes(checkpoint: DequantisedCheckpoint) -> Any:
    plain = Checkpoint(checkpoint.label, config=checkpoint.config)
    plain.tensors = checkpoint.tensors
    return quantisation(plain)


def _dtype_of(config: Mapping[str, Any]) -> str:
    """The type that the config states, or bfloat16: what quantised models were usually made from."""
    stated = (section.get(key) for _, section in parts(config) for key in ("dtype", "torch_dtype"))
    words = (str(word).removeprefix("torch.") for word in stated)
    return next((WIDTHS[word] for word in words if word in WIDTHS), "BF16")


def _is_float8(info: TensorInfo) -> bool:
    return info.dtype.startswith("F8_E4") or info.dtype.startswith("F8_E5")


def _decoders(inner: Checkpoint) -> dict[str, Decoder]:
    found: dict[str, Decoder] = {}
    for name, info in inner.tensors.items():
        state = _quant_state(inner, name)
        if state is not None:
            found[name] = state
        elif _is_float8(info):
            found[name] = _float8(inner, name, info)
        elif info.dtype == "I8" and name.endswith(".weight"):
            rows = name.removesuffix("weight") + "SCB"
            if rows in inner.tensors:
                found[name] = _int8(inner, name, rows)
    return found


@dataclass(frozen=True)
class ScaledCodes(Decoder):
    """Codes times scales, of which each counts for a block of entries along every axis."""

    codes: str
    shape: tuple[int, ...]
    hidden: tuple[str, ...]
    block: tuple[int, ...]
    scale: str | None = None
    """None: the codes are the numbers."""
    factor: float = 1.0
    """What the scales are multiplied by."""

    def read(self, inner: Checkpoint, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        codes = inner.read(self.codes, start, stop, buffers, slot)
        if self.scale is None:
            return _wide(codes)
        columns = self.shape[-1] if self.shape else 1
        first, last = start // columns, -(-stop // columns)
        rows = torch.zeros((last - first) * columns)
        inside = slice(start - first * columns, stop - first * columns)
        rows[inside] = _wide(codes)
        step = self.block[-1] if self.shape else 1
        across = -(-columns // step)
        places = self._scale_rows(first, last)
        low, high = int(places.min()), int(places.max()) + 1
        scales = inner.read(self.scale, low * across, high * across, buffers, f"{slot} scales").float() * self.factor
        scales = scales.reshape(-1, across)[places - low]
        if columns % step == 0:
            rows.view(last - first, -1, step).mul_(scales.unsqueeze(-1))
        else:
            rows.view(last - first, columns).mul_(scales.repeat_interleave(step, 1)[:, :columns])
        return rows[inside]

    def _scale_rows(self, first: int, last: int) -> Tensor:
        """Which row of the scales counts for each row of the codes, both without their last axis."""
        rest, places, stride = torch.arange(first, last), torch.zeros(last - first, dtype=torch.long), 1
        for size, step in zip(reversed(self.shape[:-1]), reversed(self.block[:-1]), strict=True):
            places += rest.remainder(size).div_(step, rounding_mode="floor").mul_(stride)
            rest = rest.div(size, rounding_mode="floor")
            stride *= -(-size // step)
        return places


def _wide(codes: Tensor) -> Tensor:
    """Codes in float32: of float8 by a table, since converting them takes six times as long."""
    if codes.element_size() != 1 or not codes.is_floating_point():
        return codes.float()
    return _table(codes.dtype).index_select(0, codes.view(torch.uint8).int())


@functools.cache
def _table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _float8(inner: Checkpoint, name: str, info: TensorInfo) -> ScaledCodes:
    module = name.rpartition(".")[0]
    scale = next((s for form in BESIDE if (s := form.format(name=name, module=module)) in inner.tensors), None)
    if scale is None:
        near = [other for other in inner.tensors if other.rpartition(".")[0] == module and "scale" in other]
        near = [other for other in near if other.rpartition(".")[2] not in OF_ACTIVATIONS]
        if near or quantisation(inner) is not None:
            what = f"and the scales beside it, {near[0]}, are of no known form" if near else "without scales"
            raise InputError(f"{inner.label}: {name} holds float8 codes, {what}; it cannot be dequantised")
        return ScaledCodes(name, info.shape, (), info.shape)
    shape = inner.tensors[scale].shape
    block = _block(info.shape, shape, _stated_block(inner.config))
    if block is None:
        raise InputError(
            f"{inner.label}: the scales {scale} {list(shape)} do not fit {name} {list(info.shape)}; it cannot be "
            "dequantised. If they are for blocks, the config's quantization_config has to say how large these are "
            "(weight_block_size)."
        )
    return ScaledCodes(name, info.shape, (scale,), block, scale)


def _stated_block(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Rows and columns of a block that has one scale, as the config gives them."""
    for _, section in parts(config):
        for stated in (section.get(key) for key in KEYS):
            if not isinstance(stated, dict):
                continue
            groups = stated.get("config_groups")
            every = groups.values() if isinstance(groups, dict) else ()
            inner = [group.get("weights") for group in every if isinstance(group, dict)]
            blocks = [part.get("block_structure") for part in inner if isinstance(part, dict)]
            for block in (stated.get("weight_block_size"), *blocks):
                if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
                    return tuple(block)
    return None


def _block(shape: Sequence[int], scales: tuple[int, ...], stated: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """How many entries along each axis share a scale; None where the shapes do not fit."""
    if math.prod(scales) == 1:
        return tuple(max(1, size) for size in shape)
    if len(scales) == 1 and len(shape) > 1:
        scales = (*scales, *[1] * (len(shape) - 1))
    if len(scales) != len(shape):
        return None
    block = []
    for axis, (size, count) in enumerate(zip(shape, scales, strict=True)):
        from_end = axis - len(shape) + 2
        step = stated[from_end] if stated is not None and from_end >= 0 else USUAL_BLOCK
        if count == size:
            step = 1
        elif count == 1:
            step = size
        elif math.ceil(size / step) != count:
            if stated is not None or count == 0 or size % count:
                return None
            step = size // count
        block.append(step)
    return tuple(block)


def _int8(inner: Checkpoint, name: str, rows: str) -> ScaledCodes:
    shape, layout = inner.tensors[name].shape, name + "_format"
    hidden = [rows, *([layout] if layout in inner.tensors else [])]
    if layout in inner.tensors and bool(_whole(inner, layout).any()):
        raise InputError(f"{inner.label}: {name} is stored in the order of a GPU's tiles, not by rows. Save it again.")
    if not shape or inner.tensors[rows].numel != shape[0]:
        raise InputError(f"{inner.label}: {rows} does not have a number for each row of {name} {list(shape)}")
    return ScaledCodes(name, shape, tuple(hidden), (1, *shape[1:]), rows, 1 / 127)


@dataclass(frozen=True)
class TableCodes(Decoder):
    """Codes of 4 bits: places in a table, times the largest entry of the block."""

    codes: str
    shape: tuple[int, ...]
    hidden: tuple[str, ...]
    table: Tensor
    block: int
    absmax: str
    nested: tuple[Tensor, Tensor, int, float] | None
    """Where the largest entries are codes as well: table, largest entries, block and offset of these."""

    def read(self, inner: Checkpoint, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        size = inner.tensors[self.codes].nbytes // max(1, inner.tensors[self.codes].numel)
        first, last = start // 2, (stop + 1) // 2
        stored = inner.read(self.codes, first // size, -(-last // size), buffers, slot).view(torch.uint8)
        stored = stored[first % size : first % size + last - first]
        pairs = torch.stack((stored >> 4, stored & 15), -1).reshape(-1)  # the first of two is in the upper half
        values = self.table.index_select(0, pairs[start % 2 : start % 2 + stop - start].int())
        low = start // self.block
        largest = self._largest(inner, low, (stop - 1) // self.block + 1, buffers, slot)
        return values.mul_(largest.repeat_interleave(self.block)[start - low * self.block :][: stop - start])

    def _largest(self, inner: Checkpoint, low: int, high: int, buffers: Buffers, slot: str) -> Tensor:
        stored = inner.read(self.absmax, low, high, buffers, f"{slot} absmax")
        if self.nested is None:
            return stored.float()
        table, largest, block, offset = self.nested
        return table[stored.int()] * largest[torch.arange(low, high) // block] + offset


def _quant_state(inner: Checkpoint, name: str) -> TableCodes | None:
    """A weight of bitsandbytes with 4 bits, by the JSON that lies beside it; None for any other tensor."""
    marks = (f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    mark = next((mark for mark in marks if mark in inner.tensors), None)
    if mark is None:
        return None

    def broken(why: str) -> InputError:
        return InputError(f"{inner.label}: {name} cannot be dequantised: {why}. Save the model again.")

    try:
        state = json.loads(bytes(_whole(inner, mark).view(torch.uint8).tolist()))
        shape, block = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        inside = int(state["nested_blocksize"]) if "nested_blocksize" in state else None
        offset = float(state.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise broken(f"{mark} is no description of a quantised tensor") from error
    side = {part: f"{name}.{part}" for part in ("absmax", "quant_map", "nested_absmax", "nested_quant_map")}
    sizes = {part: inner.tensors[place].numel for part, place in side.items() if place in inner.tensors}
    if min((*shape, block, inside or 1), default=0) < 1 or not math.isfinite(offset):
        raise broken(f"{mark} states sizes below 1")
    numel = math.prod(shape)
    wanted = {"absmax": math.ceil(numel / block), "quant_map": 16}
    if inside is not None:
        wanted |= {"nested_absmax": math.ceil(wanted["absmax"] / inside), "nested_quant_map": 256}
    wrong = [part for part, count in wanted.items() if sizes.get(part) != count]
    if wrong or inner.tensors[name].nbytes < math.ceil(numel / 2):
        raise broken(f"{side[wrong[0]] if wrong else name} is missing, or not as large as a tensor {list(shape)} needs")
    coded = inner.tensors[side["absmax"]].dtype == "U8"
    if coded != (inside is not None):
        raise broken(f"{side['absmax']} and {mark} do not agree whether the largest entries are codes")
    values = {part: _whole(inner, side[part]).float() for part in wanted if part != "absmax"}
    nested = (values["nested_quant_map"], values["nested_absmax"], inside, offset) if inside is not None else None
    hidden = (mark, *(place for place in side.values() if place in inner.tensors))
    return TableCodes(name, shape, hidden, values["quant_map"], block, side["absmax"], nested)


def _whole(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    return checkpoint.read(name, 0, info.numel, Buffers()).reshape(info.shape)
