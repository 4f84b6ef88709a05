"""Quantized checkpoints: recognize them, and dequantize fp8 and bitsandbytes block by block.

- fp8: float8 codes times scales, one for the tensor, for each row, or for each block (`NAME_scale_inv`, `NAME_scale`).
- bitsandbytes, 8 bits: int8 codes times the largest absolute entry of their row (`SCB`) over 127.
- bitsandbytes, 4 bits: two codes per byte, each an index into a table of 16 numbers (`quant_map`), times the largest
  absolute entry of the block (`absmax`), which can be an 8-bit code itself (nested quantization).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import FLOATS, TensorInfo
from ..text import first_line
from .checkpoint import Buffers, Checkpoint, View
from .config_diff import DEPTH, parts

#: Config keys that describe how the weights are quantized, also in nested configs.
KEYS = ("quantization_config", "compression_config")
#: Last part of the name of a tensor of codes → the method.
CODES = {"qweight": "gptq or awq", "weight_packed": "compressed-tensors", "W_q": "hqq"}
#: Names of the scales of a tensor of codes. The last is that of int8 codes of bitsandbytes.
SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale_weight", "{module}.SCB")
#: Names of the description of a tensor of 4-bit codes of bitsandbytes.
STATES = ("{name}.quant_state.bitsandbytes__nf4", "{name}.quant_state.bitsandbytes__fp4")
#: Methods that `dequantize=True` can read.
READABLE = {"fp8", "bitsandbytes"}
ORIGINAL = (
    "Use the original, unquantized checkpoint, or dequantize it first: load it with transformers, call "
    "model.dequantize(), and save it with save_pretrained."
)
OR_DEQUANTIZE = "Use the original, unquantized checkpoint, or dequantize while reading: dequantize=True."
#: Scales of activations, which an unquantized model does not have.
ACTIVATION_SCALES = {"input_scale", "input_scale_inv", "activation_scale", "k_scale", "v_scale", "q_scale"}
ACTIVATION_SCALES |= {"output_scale"}
DEFAULT_BLOCK = (128, 128)
DTYPES = {word: code for code, word in FLOATS.items()}


@dataclass
class Quantization:
    """How a checkpoint is quantized, and how it was recognized."""

    method: str
    source: str
    """The config key that names the method, or nothing."""
    tensors: list[str]
    """Codes."""
    readable: bool
    """Whether `dequantize=True` can read them."""

    @property
    def advice(self) -> str:
        return f"Codes and scales cannot be merged. {OR_DEQUANTIZE if self.readable else ORIGINAL}"

    def __str__(self) -> str:
        signs = [self.source] if self.source else []
        if self.tensors:
            signs.append(f"{len(self.tensors)} tensors of codes, such as {self.tensors[0]}")
        return f"quantized with {self.method} ({'; '.join(signs)})"

    def problem(self, label: str) -> str:
        hint = "" if self.tensors else f" If its weights are not quantized after all, remove {self.source}."
        return f"{label}: {self}. {self.advice}{hint}"


def detect_quantization(
    checkpoint: Checkpoint, chosen: Callable[[str], bool] = lambda name: True
) -> Quantization | None:
    """Return how a checkpoint is quantized, or None.

    ``chosen`` selects the tensors that are merged. A checkpoint without codes among them counts as unquantized.
    """
    methods = _methods(checkpoint.tensors)
    tensors = [name for name in methods if chosen(name)]
    if methods and not tensors:
        return None
    readable = bool(tensors) and {methods[name] for name in tensors} <= READABLE
    for key, settings in _settings(checkpoint.config):
        bits = [settings[key] for key in ("load_in_4bit", "load_in_8bit") if key in settings]
        method = settings.get("quant_method") or ("bitsandbytes" if bits else "an unnamed method")
        if not bits or any(bits):  # bitsandbytes leaves settings in configs of models that it does not quantize
            return Quantization(str(method)[:40], f"{key} in config.json", tensors, readable)
    return Quantization(methods[tensors[0]], "", tensors, readable) if tensors else None


def refuse_quantized(base: Checkpoint, adapter: str) -> None:
    """Raise if an adapter would be added to codes."""
    quantization = detect_quantization(base)
    if quantization is not None:
        raise InputError(
            f"{adapter}: its base {quantization.problem(base.label)} Give that model as the base. An adapter that was "
            "trained on a quantized model fits the model that was quantized."
        )


def without_quantization(config: Mapping[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """Return the config of the unquantized model."""
    return {
        key: without_quantization(value, depth - 1) if isinstance(value, dict) and depth else value
        for key, value in config.items()
        if key not in KEYS
    }


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path of the key, settings) for every description of a quantization in a config."""
    for path, section in parts(config):
        for key in KEYS:
            settings = section.get(key)
            if isinstance(settings, dict) and settings:
                yield f"{path}{key}", settings


def _methods(tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Return the tensors that can only be codes, with the method of each."""
    methods = {}
    for name, info in tensors.items():
        last = name.rpartition(".")[2]
        if _beside(name, STATES, tensors):  # also where the codes are stored as floats
            methods[name] = "bitsandbytes"
        elif info.is_float:
            continue
        elif last in CODES:
            methods[name] = CODES[last]
        elif last.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            methods[name] = "mxfp4"
        elif scales := _beside(name, SCALES, tensors):
            integers = "bitsandbytes" if scales.endswith(".SCB") else "compressed-tensors"
            methods[name] = "fp8" if info.dtype.startswith("F8") else integers
    return methods


def _beside(name: str, forms: Sequence[str], tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the first tensor that stands beside another under one of some names."""
    module = name.rpartition(".")[0]
    return next((other for form in forms if (other := form.format(name=name, module=module)) in tensors), None)


# Dequantization


def dequantized(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view with dequantized weights, or the checkpoint itself if it is not quantized."""
    if detect_quantization(checkpoint) is None and not any(map(_is_float8, checkpoint.tensors.values())):
        return checkpoint
    return DequantizedCheckpoint(checkpoint)


class DequantizedCheckpoint(View):
    """A quantized checkpoint whose codes are read as float32 numbers."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        quantization = detect_quantization(inner)
        decoders = {name: _four_bits(inner, name) or _scaled(inner, name, quantization) for name in inner.tensors}
        self._decoders = {name: decoder for name, decoder in decoders.items() if decoder is not None}
        hidden = {name for decoder in self._decoders.values() for name in decoder.hidden}
        hidden |= {name for name in inner.tensors if name.rpartition(".")[2] in ACTIVATION_SCALES}
        dtype = _original_dtype(inner.config)
        self.tensors = {
            name: TensorInfo(dtype, self._decoders[name].shape) if name in self._decoders else info
            for name, info in inner.tensors.items()
            if name not in hidden
        }
        self.config = without_quantization(inner.config)
        left = _methods(self.tensors)
        if left or not self._decoders:
            example = next(iter(left), "no tensor of codes")
            method = left.get(example, quantization.method if quantization else "float8")
            raise InputError(
                f"{inner.label}: cannot dequantize {method} ({example}). dequantize reads fp8 with scales, and "
                f"bitsandbytes with 4 or 8 bits. {ORIGINAL}"
            )
        method = quantization.method if quantization is not None else "float8 without scales"
        number = f"{len(self._decoders)} tensor{'s' if len(self._decoders) > 1 else ''}"
        self.notes = [*inner.notes, f"{inner.label}: {number} dequantized ({method}) and treated as {FLOATS[dtype]}"]

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        decoder = self._decoders.get(name)
        if decoder is None:
            return self.inner.read(name, start, stop, buffers, slot)
        return decoder.read(self.inner, start, stop, buffers, slot) if stop > start else torch.empty(0)


def _original_dtype(config: Mapping[str, Any]) -> str:
    """Return the dtype in the config, or bfloat16, which most quantized models were made from."""
    words = (section.get(key) for _, section in parts(config) for key in ("dtype", "torch_dtype"))
    names = (str(word).removeprefix("torch.") for word in words)
    return next((DTYPES[name] for name in names if name in DTYPES), "BF16")


@dataclass(frozen=True)
class ScaledCodes:
    """float8 or int8 codes times scales, each for a block of rows and columns. Leading axes are rows, too."""

    codes: str
    shape: tuple[int, ...]
    hidden: tuple[str, ...] = ()
    """Other tensors of the file that belong to it."""
    scales: str | None = None
    """The tensor of scales; None for codes that are the numbers themselves."""
    factor: float = 1.0
    """Multiplies all scales."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of the codes that share a scale."""

    def read(self, inner: Checkpoint, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        if self.scales is None:
            return _to_float32(inner.read(self.codes, start, stop, buffers, slot))
        columns, (high, wide) = self.shape[-1] if self.shape else 1, self.block
        first, last = start // columns, -(-stop // columns)
        rows = _to_float32(inner.read(self.codes, first * columns, last * columns, buffers, slot))
        low, end, across = first // high, (last - 1) // high + 1, -(-columns // wide)
        scales = inner.read(self.scales, low * across, end * across, buffers, f"{slot} scales").float() * self.factor
        scales = scales.reshape(-1, across)[torch.arange(first, last) // high - low]
        if columns % wide == 0:
            rows.view(last - first, -1, wide).mul_(scales.unsqueeze(-1))
        else:
            rows.view(last - first, columns).mul_(scales.repeat_interleave(wide, 1)[:, :columns])
        return rows[start - first * columns : stop - first * columns]


def _to_float32(codes: Tensor) -> Tensor:
    """Convert codes to float32. A table is six times as fast for float8 as PyTorch's conversion."""
    if codes.element_size() != 1 or not codes.is_floating_point():
        return codes.float()
    return _float8_table(codes.dtype).index_select(0, codes.view(torch.uint8).int())


@functools.cache
def _float8_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _is_float8(info: TensorInfo) -> bool:
    return info.dtype.startswith(("F8_E4", "F8_E5"))


def _scaled(inner: Checkpoint, name: str, quantization: Quantization | None) -> ScaledCodes | None:
    """Return the decoder of a tensor of float8 or int8 codes; None for other tensors."""
    info, module = inner.tensors[name], name.rpartition(".")[0]
    scales = _beside(name, SCALES, inner.tensors)
    if not _is_float8(info) and not (info.dtype == "I8" and scales == f"{module}.SCB"):
        return None
    if scales is None:
        beside = {other.rpartition(".")[2] for other in inner.tensors if other.rpartition(".")[0] == module}
        if quantization is not None or any("scale" in last for last in beside - ACTIVATION_SCALES):
            raise _broken(inner, name, "float8 codes without known scales")
        return ScaledCodes(name, info.shape)
    block = _block_of(info.shape, inner.tensors[scales].shape, inner.config)
    if block is None:
        raise _broken(
            inner,
            name,
            f"its scales {scales} {list(inner.tensors[scales].shape)} do not fit its shape {list(info.shape)}. For "
            "scales of blocks, the config needs quantization_config.weight_block_size.",
        )
    hidden = (scales, *({f"{name}_format"} & inner.tensors.keys()))
    return ScaledCodes(name, info.shape, hidden, scales, 1 / 127 if info.dtype == "I8" else 1.0, block)


def _broken(inner: Checkpoint, name: str, why: str) -> InputError:
    return InputError(f"{inner.label}: cannot dequantize {name}: {why}")


def _block_of(shape: tuple[int, ...], scales: tuple[int, ...], config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale; None if the shapes do not fit."""
    rows, columns, number = math.prod(shape[:-1]), shape[-1] if shape else 1, math.prod(scales)
    if 0 in shape or number == 1:
        return max(1, rows), max(1, columns)
    if number in (rows, shape[0]):  # one scale for each row, or for each of several matrices
        return rows // number, columns
    sizes = [settings.get("weight_block_size") for _, settings in _settings(config)]
    high, wide = next((size for size in sizes if isinstance(size, list) and len(size) == 2), DEFAULT_BLOCK)
    if not (isinstance(high, int) and isinstance(wide, int) and min(high, wide) > 0):
        return None
    fits = number == -(-rows // high) * -(-columns // wide) and (len(shape) == 2 or shape[-2] % high == 0)
    return (high, wide) if fits else None


@dataclass(frozen=True)
class TableCodes:
    """4-bit codes: indices into a table, times the largest absolute entry of the block."""

    codes: str
    shape: tuple[int, ...]
    hidden: tuple[str, ...]
    table: Tensor
    block: int
    absmax: str
    nested: tuple[Tensor, Tensor, int, float] | None
    """If ``absmax`` holds codes: their table, their largest entries, their block size and an offset."""

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


def _four_bits(inner: Checkpoint, name: str) -> TableCodes | None:
    """Return the decoder of a 4-bit bitsandbytes weight, from the JSON stored beside it; None for other tensors."""
    mark = _beside(name, STATES, inner.tensors)
    if mark is None:
        return None
    try:
        state = json.loads(bytes(inner.read_whole(mark).view(torch.uint8).tolist()))
        shape, block = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        nested_block, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0))
        if min((*shape, block), default=0) < 1 or nested_block < 0 or not math.isfinite(offset):
            raise ValueError("sizes below 1")
        blocks = math.ceil(math.prod(shape) / block)
        sizes = {"absmax": blocks, "quant_map": 16}
        if nested_block:
            sizes |= {"nested_absmax": math.ceil(blocks / nested_block), "nested_quant_map": 256}
        wrong = [part for part, size in sizes.items() if inner.tensors[f"{name}.{part}"].numel != size]
        is_nested = inner.tensors[f"{name}.absmax"].dtype == "U8"
        if wrong or is_nested != bool(nested_block) or inner.tensors[name].nbytes < math.ceil(math.prod(shape) / 2):
            raise ValueError(f"other sizes than for a tensor {list(shape)}")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise _broken(inner, name, f"{mark} does not describe it ({first_line(error)}). Save it again.") from error
    values = {part: inner.read_whole(f"{name}.{part}").float() for part in sizes if part != "absmax"}
    nested = (values["nested_quant_map"], values["nested_absmax"], nested_block, offset) if nested_block else None
    hidden = (mark, *(f"{name}.{part}" for part in sizes))
    return TableCodes(name, shape, hidden, values["quant_map"], block, f"{name}.absmax", nested)
