"""Quantized checkpoints: recognize them, and dequantize fp8 and bitsandbytes block by block.

- fp8: float8 codes times scales, one for the tensor, for each row, or for each block (`NAME_scale_inv`, `NAME_scale`).
- bitsandbytes, 8 bits: int8 codes times the largest absolute entry of their row (`SCB`) over 127.
- bitsandbytes, 4 bits: two codes per byte. Each is an index into a table of 16 numbers (`quant_map`), times the largest
  absolute entry of the block (`absmax`). That number can be an 8-bit code itself (nested quantization).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import FLOATS, TensorInfo
from ..text import counted, first_line
from .checkpoint import Buffers, Checkpoint, View
from .config_diff import DEPTH, parts

#: Config keys that describe how the weights are quantized, also in nested configs.
KEYS = ("quantization_config", "compression_config")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: Types of codes. Matrices of these types are codes, except for a few constants that some models store.
CODE_TYPES = {*FLOAT8, "I8", "U8", "I16", "I32"}
#: Part of the name of the description of a tensor of 4-bit bitsandbytes codes.
STATE = ".quant_state.bitsandbytes__"
#: Scales of activations, which an unquantized model does not have.
ACTIVATION_SCALES = {"input_scale", "output_scale", "q_scale", "k_scale", "v_scale"}
DTYPES = {word: code for code, word in FLOATS.items()}
ADVICE = (
    "Codes and scales cannot be merged. Use the original, unquantized checkpoint. fp8 and bitsandbytes can also be "
    "dequantized while reading: dequantize=True. If the weights are not quantized after all, remove "
    "quantization_config from config.json."
)


@dataclass
class Quantization:
    """How a checkpoint is quantized."""

    method: str
    codes: list[str]
    """Tensors of codes."""
    readable: bool
    """Whether `dequantize=True` can read them."""

    def __str__(self) -> str:
        codes = f" ({counted(self.codes, 'tensor')} of codes, such as {self.codes[0]})" if self.codes else ""
        return f"quantized with {self.method}{codes}"


def detect_quantization(
    checkpoint: Checkpoint, chosen: Callable[[str], bool] = lambda name: True
) -> Quantization | None:
    """Return how a checkpoint is quantized, or None.

    ``chosen`` selects the tensors that are merged. A checkpoint without codes among them counts as unquantized.
    """
    codes = [name for name, info in checkpoint.tensors.items() if _is_code(name, info)]
    merged = [name for name in codes if chosen(name)]
    method = next(_methods(checkpoint.config), None)
    if (codes and not merged) or (method is None and not codes):
        return None
    readable = bool(merged) and all(STATE in name or _scales_of(name, checkpoint.tensors) for name in merged)
    return Quantization(method or "an unnamed method", merged, readable)


def without_quantization(config: dict[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """Return the config of the unquantized model."""
    return {
        key: without_quantization(value, depth - 1) if isinstance(value, dict) and depth else value
        for key, value in config.items()
        if key not in KEYS
    }


def _methods(config: dict[str, Any]) -> Iterator[str]:
    """Yield the methods of all quantizations that a config describes."""
    for settings in _settings(config):
        bits = [settings[key] for key in ("load_in_4bit", "load_in_8bit") if key in settings]
        if not bits or any(bits):  # bitsandbytes leaves settings in configs of models that it does not quantize
            yield str(settings.get("quant_method") or ("bitsandbytes" if bits else "an unnamed method"))[:40]


def _settings(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    sections = (section.get(key) for _, section in parts(config) for key in KEYS)
    return (settings for settings in sections if isinstance(settings, dict) and settings)


def _is_code(name: str, info: TensorInfo) -> bool:
    is_constant = name.endswith(("bias", "mask", "_ids", "_index"))  # GPT-2 stored its causal mask as `bias`
    return (info.dtype in CODE_TYPES and len(info.shape) > 1 and not is_constant) or STATE in name


def _scales_of(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the tensor with the scales of a tensor of codes, or with their description; None if it is unknown."""
    candidates = [f"{name}{STATE}nf4", f"{name}{STATE}fp4"]
    if tensors[name].dtype in FLOAT8:
        candidates += [f"{name}_scale_inv", f"{name}_scale"]
    if tensors[name].dtype == "I8":
        candidates.append(f"{name.rpartition('.')[0]}.SCB")
    return next((candidate for candidate in candidates if candidate in tensors), None)


# Dequantization


class Decoder(NamedTuple):
    """Reads one tensor of codes as numbers."""

    shape: tuple[int, ...]
    parts: list[str]
    """Tensors with its scales and the like, which the dequantized checkpoint does not have."""
    read: Callable[[int, int, Buffers, str], Tensor]
    """Returns a range of the flattened tensor in float32, from the range, buffers and a slot in them."""


class DequantizedCheckpoint(View):
    """A quantized checkpoint whose codes are read as float32 numbers."""

    def __init__(self, inner: Checkpoint) -> None:
        super().__init__(inner)
        self._decoders = {name: decoder for name in inner.tensors if (decoder := _decoder_of(inner, name))}
        hidden = {name for name in inner.tensors if name.rpartition(".")[2] in ACTIVATION_SCALES}
        hidden |= {part for found in self._decoders.values() for part in found.parts}
        read = self._decoders.keys() | hidden
        unknown = [name for name, info in inner.tensors.items() if _is_code(name, info) and name not in read]
        if unknown:
            raise InputError(
                f"{inner.label}: cannot dequantize {unknown[0]}. dequantize reads fp8 with scales, and bitsandbytes "
                "with 4 or 8 bits. Use the original, unquantized checkpoint, or dequantize it first: load it with "
                "transformers, call model.dequantize(), and save it with save_pretrained."
            )
        dtype = _original_dtype(inner.config)
        self.tensors = {
            name: TensorInfo(dtype, self._decoders[name].shape) if name in self._decoders else info
            for name, info in inner.tensors.items()
            if name not in hidden
        }
        self.config = without_quantization(inner.config)
        if self._decoders:
            number = counted(list(self._decoders), "tensor")
            self.notes = [*inner.notes, f"{inner.label}: {number} dequantized and treated as {FLOATS[dtype]}"]

    def read(self, name: str, start: int, stop: int, buffers: Buffers, slot: str = "tensor") -> Tensor:
        decoder = self._decoders.get(name)
        if decoder is None:
            return self.inner.read(name, start, stop, buffers, slot)
        return decoder.read(start, stop, buffers, slot) if stop > start else torch.empty(0)


def _original_dtype(config: dict[str, Any]) -> str:
    """Return the dtype in the config, or bfloat16, which most quantized models were made from."""
    words = (section.get(key) for _, section in parts(config) for key in ("dtype", "torch_dtype"))
    names = (str(word).removeprefix("torch.") for word in words)
    return next((DTYPES[name] for name in names if name in DTYPES), "BF16")


def _decoder_of(inner: Checkpoint, name: str) -> Decoder | None:
    """Return the decoder of a tensor of codes; None for other tensors."""
    scales = _scales_of(name, inner.tensors)
    if scales is None:
        return None
    return _table_decoder(inner, name, scales) if STATE in scales else _scale_decoder(inner, name, scales)


def _broken(inner: Checkpoint, name: str, why: str) -> InputError:
    return InputError(f"{inner.label}: cannot dequantize {name}: {why}")


def _to_float32(codes: Tensor) -> Tensor:
    """Convert codes to float32. A table is six times as fast for float8 as PyTorch's conversion."""
    if not codes.is_floating_point():
        return codes.float()
    return _float8_table(codes.dtype).index_select(0, codes.view(torch.uint8).int())


@functools.cache
def _float8_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _scale_decoder(inner: Checkpoint, name: str, scales_name: str) -> Decoder:
    """Return the decoder of a matrix of float8 or int8 codes times scales, each for a block of rows and columns."""
    info, of_scales = inner.tensors[name], inner.tensors[scales_name]
    if len(info.shape) != 2 or not info.numel:
        raise _broken(inner, name, f"only matrices can be dequantized, and its shape is {list(info.shape)}")
    rows, columns = info.shape
    block: Any = next((s["weight_block_size"] for s in _settings(inner.config) if "weight_block_size" in s), None)
    if of_scales.numel == 1:
        block = [rows, columns]
    elif of_scales.numel == rows:
        block = [1, columns]
    is_block = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
    if not is_block or of_scales.numel != -(-rows // block[0]) * -(-columns // block[1]) or not of_scales.is_float:
        raise _broken(
            inner,
            name,
            f"its scales {scales_name} {list(of_scales.shape)} do not fit its shape {list(info.shape)}. For scales of "
            "blocks, the config needs quantization_config.weight_block_size.",
        )
    height, width = block
    across, factor = -(-columns // width), 1 / 127 if info.dtype == "I8" else 1.0

    def read(start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        first, last = start // columns, -(-stop // columns)
        values = _to_float32(inner.read(name, first * columns, last * columns, buffers, slot)).view(-1, columns)
        low, high = first // height, -(-last // height)
        scales = inner.read(scales_name, low * across, high * across, buffers, f"{slot} scales").float() * factor
        scales = scales.view(-1, across)[torch.arange(first, last) // height - low]
        values *= scales.repeat_interleave(width, 1)[:, :columns] if across > 1 else scales
        return values.view(-1)[start - first * columns : stop - first * columns]

    return Decoder(info.shape, [scales_name, f"{name}_format"], read)


def _table_decoder(inner: Checkpoint, name: str, state_name: str) -> Decoder:
    """Return the decoder of a 4-bit bitsandbytes weight, from the JSON stored beside it."""
    absmax, quant_map = f"{name}.absmax", f"{name}.quant_map"
    nested_absmax, nested_quant_map = f"{name}.nested_absmax", f"{name}.nested_quant_map"
    try:
        state = json.loads(bytes(inner.read_whole(state_name).view(torch.uint8).tolist()))
        shape, block = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        nested_block, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0))
        if min((*shape, block), default=0) < 1 or nested_block < 0 or not math.isfinite(offset):
            raise ValueError("sizes below 1")
        blocks = math.ceil(math.prod(shape) / block)
        expected = {
            name: ("U8", math.ceil(math.prod(shape) / 2)),
            absmax: ("U8" if nested_block else "F32", blocks),
            quant_map: ("F32", 16),
        }
        if nested_block:
            expected |= {nested_absmax: ("F32", math.ceil(blocks / nested_block)), nested_quant_map: ("F32", 256)}
        stored = {part: (inner.tensors[part].dtype, inner.tensors[part].numel) for part in expected}
        if stored != expected:
            raise ValueError(f"other types or sizes than for a tensor {list(shape)}")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        why = f"{state_name} does not describe it ({first_line(error)}). Save it again."
        raise _broken(inner, name, why) from error
    table = inner.read_whole(quant_map)
    nested = [inner.read_whole(part) for part in (nested_quant_map, nested_absmax)] if nested_block else []

    def read(start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        codes = inner.read(name, start // 2, (stop + 1) // 2, buffers, slot)
        pairs = torch.stack((codes >> 4, codes & 15), -1).reshape(-1)  # the first of two is in the upper half
        values = table.index_select(0, pairs[start % 2 : start % 2 + stop - start].int())
        low, high = start // block, (stop - 1) // block + 1
        largest = inner.read(absmax, low, high, buffers, f"{slot} absmax")
        if nested:
            largest = nested[0][largest.int()] * nested[1][torch.arange(low, high) // nested_block] + offset
        return values.mul_(largest.repeat_interleave(block)[start - low * block :][: stop - start])

    return Decoder(shape, [state_name, *(part for part in expected if part != name)], read)
