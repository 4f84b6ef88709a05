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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import InputError
from ..io.reader import FLOATS, TensorInfo
from ..io.small_files import read_json
from .checkpoint import Buffers, Checkpoint, View
from .compat.config_diff import DEPTH, parts

#: Config keys that describe how the weights are quantized, also in nested configs.
KEYS = ("quantization_config", "compression_config")
#: Files with the same content, and the method if they do not name it.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
#: Last part of the name of an integer tensor of codes → the method that writes it.
CODES = {
    "qweight": "gptq or awq",
    "qzeros": "gptq or awq",
    "g_idx": "gptq or awq",
    "weight_packed": "compressed-tensors",
    "W_q": "hqq",
    "weight_format": "bitsandbytes",
}
#: Last part of the name of scales beside a weight of codes → the method.
SCALES = {
    "weight_scale": "fp8 or compressed-tensors",
    "weight_scale_inv": "fp8",
    "SCB": "bitsandbytes",
    "weight.absmax": "bitsandbytes",
    "weight.quant_map": "bitsandbytes",
    "scales": "gptq or awq",
}
#: Methods that `dequantize=True` can read.
READABLE = {"fp8", "bitsandbytes"}
ORIGINAL = (
    "Use the original, unquantized checkpoint, or dequantize it first: load it with transformers, call "
    "model.dequantize(), and save it with save_pretrained."
)
OR_DEQUANTIZE = "Use the original, unquantized checkpoint, or dequantize while reading: dequantize=True (--dequantize)."
#: Scales of activations, which an unquantized model does not have.
ACTIVATION_SCALES = {"input_scale", "input_scale_inv", "activation_scale", "k_scale", "v_scale", "q_scale"}
ACTIVATION_SCALES |= {"output_scale"}
#: Names of the scales of float8 codes.
FLOAT8_SCALES = ("{name}_scale_inv", "{name}_scale", "{module}.scale_weight")
DEFAULT_BLOCK = 128
DTYPES = {word: code for code, word in FLOATS.items()}


@dataclass
class Quantization:
    """How a checkpoint is quantized, and how it was recognized."""

    method: str
    source: str
    """The file and key that name the method, or nothing."""
    tensors: list[str] = field(default_factory=list)
    """Codes and scales."""
    readable: bool = False
    """Whether `dequantize=True` can read them."""

    @property
    def advice(self) -> str:
        return f"Codes and scales cannot be merged. {OR_DEQUANTIZE if self.readable else ORIGINAL}"

    def __str__(self) -> str:
        signs = [self.source] if self.source else []
        if self.tensors:
            signs.append(f"{len(self.tensors)} tensors of codes and scales, such as {self.tensors[0]}")
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
    methods = dict(_codes(checkpoint.tensors))
    tensors = [name for name in methods if chosen(name)]
    if methods and not tensors:
        return None
    described = next(_descriptions(checkpoint), (methods[tensors[0]], "") if tensors else None)
    readable = bool(tensors) and {methods[name] for name in tensors} <= READABLE
    return Quantization(*described, tensors, readable) if described else None


def refuse_quantized(base: Checkpoint, adapter: str) -> None:
    """Raise if an adapter would be added to codes."""
    found = detect_quantization(base)
    if found is not None:
        raise InputError(
            f"{adapter}: its base {found.problem(base.label)} Give that model as the base. An adapter that was trained "
            "on a quantized model fits the model that was quantized."
        )


def without_quantization(config: Mapping[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """Return the config of the unquantized model."""
    return {
        key: without_quantization(value, depth - 1) if isinstance(value, dict) and depth else value
        for key, value in config.items()
        if key not in KEYS
    }


def _descriptions(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yield (method, source) for each description in the config or in a file beside it."""
    for path, config in parts(checkpoint.config):
        for key in KEYS:
            settings = config.get(key)
            if isinstance(settings, dict) and settings and _is_active(settings):
                yield _method(settings, "an unnamed method"), f"{path}{key} in config.json"
    for name, method in FILES.items():
        if checkpoint.folder is not None and (checkpoint.folder / name).is_file():
            yield _method(read_json(checkpoint.folder / name), method), name


def _is_active(settings: Mapping[str, Any]) -> bool:
    """Return False for settings that bitsandbytes leaves in configs of models that it does not quantize."""
    bits = [settings[key] for key in ("load_in_4bit", "load_in_8bit") if key in settings]
    return not bits or any(bits)


def _method(settings: Mapping[str, Any], default: str) -> str:
    nested = settings.get("quantization")
    nested_method = nested.get("quant_algo") if isinstance(nested, dict) else None
    name = settings.get("quant_method") or settings.get("quant_algo") or nested_method
    if not isinstance(name, str):
        name = "bitsandbytes" if "load_in_4bit" in settings or "load_in_8bit" in settings else default
    bits = 4 if settings.get("load_in_4bit") else 8 if settings.get("load_in_8bit") else None
    bits = bits or settings.get("bits") or settings.get("w_bit")
    return f"{name[:40]}, {bits} bits" if isinstance(bits, int) else name[:40]


def _codes(tensors: Mapping[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Yield (tensor, method) for tensors that can only be codes or their scales."""
    for name, info in tensors.items():
        module, dot, last = name.rpartition(".")
        if info.is_float:
            continue
        if last in CODES:
            yield name, CODES[last]
        elif ".quant_state." in name:
            yield name, "bitsandbytes"
        elif last.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            yield name, "mxfp4"
        elif last == "weight":
            scales = next((scales for scales in SCALES if f"{module}{dot}{scales}" in tensors), None)
            if scales is not None:
                method = "fp8" if info.dtype.startswith("F8") else SCALES[scales]
                yield name, method
                yield f"{module}{dot}{scales}", method
        elif info.dtype.startswith("F8") and (f"{name}_scale_inv" in tensors or f"{name}_scale" in tensors):
            yield name, "fp8"


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
        found = detect_quantization(inner)
        self._decoders = _decoders(inner)
        hidden = {name for decoder in self._decoders.values() for name in decoder.hidden}
        hidden |= {name for name in inner.tensors if name.rpartition(".")[2] in ACTIVATION_SCALES}
        dtype = _original_dtype(inner.config)
        self.tensors = {
            name: TensorInfo(dtype, self._decoders[name].shape) if name in self._decoders else info
            for name, info in inner.tensors.items()
            if name not in hidden
        }
        self.config = without_quantization(inner.config)
        left = list(_codes(self.tensors))
        if left or not self._decoders:
            method, example = left[0][::-1] if left else (found.method if found else "float8", "no tensor of codes")
            raise InputError(
                f"{inner.label}: cannot dequantize {method} ({example}). dequantize reads fp8 with scales, and "
                f"bitsandbytes with 4 or 8 bits. {ORIGINAL}"
            )
        method = found.method if found is not None else "float8 without scales"
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


def _is_float8(info: TensorInfo) -> bool:
    return info.dtype.startswith("F8_E4") or info.dtype.startswith("F8_E5")


class Decoder(ABC):
    """How to compute one tensor from its codes."""

    shape: tuple[int, ...]
    hidden: tuple[str, ...]
    """Other tensors of the file that belong to it, such as scales."""

    @abstractmethod
    def read(self, inner: Checkpoint, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        """Return elements ``start`` to ``stop`` of the flattened tensor, in float32."""


def _decoders(inner: Checkpoint) -> dict[str, Decoder]:
    decoders: dict[str, Decoder] = {}
    for name, info in inner.tensors.items():
        four_bits = _four_bits(inner, name)
        if four_bits is not None:
            decoders[name] = four_bits
        elif _is_float8(info):
            decoders[name] = _float8(inner, name, info)
        elif info.dtype == "I8" and name.endswith(".weight") and (scales := _rows_of(name)) in inner.tensors:
            decoders[name] = _int8(inner, name, scales)
    return decoders


@dataclass(frozen=True)
class ScaledCodes(Decoder):
    """Codes times scales. Each scale belongs to a block of entries along every axis."""

    codes: str
    shape: tuple[int, ...]
    hidden: tuple[str, ...]
    block: tuple[int, ...]
    scale: str | None = None
    """The tensor of scales, or None if there are none."""
    factor: float = 1.0
    """Multiplies all scales."""

    def read(self, inner: Checkpoint, start: int, stop: int, buffers: Buffers, slot: str) -> Tensor:
        codes = inner.read(self.codes, start, stop, buffers, slot)
        if self.scale is None:
            return _to_float32(codes)
        columns = self.shape[-1] if self.shape else 1
        first, last = start // columns, -(-stop // columns)
        rows = torch.zeros((last - first) * columns)  # whole rows, of which the block is a part
        inside = slice(start - first * columns, stop - first * columns)
        rows[inside] = _to_float32(codes)
        step = self.block[-1] if self.shape else 1
        scales_per_row = -(-columns // step)
        scale_rows = self._scale_rows(first, last)
        low, high = int(scale_rows.min()), int(scale_rows.max()) + 1
        scales = inner.read(self.scale, low * scales_per_row, high * scales_per_row, buffers, f"{slot} scales")
        scales = (scales.float() * self.factor).reshape(-1, scales_per_row)[scale_rows - low]
        if columns % step == 0:
            rows.view(last - first, -1, step).mul_(scales.unsqueeze(-1))
        else:
            rows.view(last - first, columns).mul_(scales.repeat_interleave(step, 1)[:, :columns])
        return rows[inside]

    def _scale_rows(self, first: int, last: int) -> Tensor:
        """Return the row of the scales for each row of the codes. Rows number all axes but the last."""
        rest, rows, stride = torch.arange(first, last), torch.zeros(last - first, dtype=torch.long), 1
        for size, step in zip(reversed(self.shape[:-1]), reversed(self.block[:-1]), strict=True):
            rows += rest.remainder(size).div_(step, rounding_mode="floor").mul_(stride)
            rest = rest.div(size, rounding_mode="floor")
            stride *= -(-size // step)
        return rows


def _to_float32(codes: Tensor) -> Tensor:
    """Convert codes to float32. A table is six times as fast for float8 as PyTorch's conversion."""
    if codes.element_size() != 1 or not codes.is_floating_point():
        return codes.float()
    return _float8_table(codes.dtype).index_select(0, codes.view(torch.uint8).int())


@functools.cache
def _float8_table(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype).float()


def _float8(inner: Checkpoint, name: str, info: TensorInfo) -> ScaledCodes:
    module = name.rpartition(".")[0]
    names = (form.format(name=name, module=module) for form in FLOAT8_SCALES)
    scale = next((name for name in names if name in inner.tensors), None)
    if scale is None:
        similar = [other for other in inner.tensors if other.rpartition(".")[0] == module and "scale" in other]
        similar = [other for other in similar if other.rpartition(".")[2] not in ACTIVATION_SCALES]
        if similar or detect_quantization(inner) is not None:
            what = f"with scales of an unknown form ({similar[0]})" if similar else "without scales"
            raise InputError(f"{inner.label}: cannot dequantize {name}: float8 codes {what}")
        return ScaledCodes(name, info.shape, (), info.shape)
    shape = inner.tensors[scale].shape
    block = _block(info.shape, shape, _configured_block(inner.config))
    if block is None:
        raise InputError(
            f"{inner.label}: cannot dequantize {name}: its scales {scale} {list(shape)} do not fit its shape "
            f"{list(info.shape)}. For scales of blocks, the config needs quantization_config.weight_block_size."
        )
    return ScaledCodes(name, info.shape, (scale,), block, scale)


def _configured_block(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the rows and columns of a block with one scale, if the config says so."""
    for _, section in parts(config):
        for settings in (section.get(key) for key in KEYS):
            if not isinstance(settings, dict):
                continue
            groups = settings.get("config_groups")
            weights = [
                g.get("weights") for g in (groups.values() if isinstance(groups, dict) else ()) if isinstance(g, dict)
            ]
            blocks = [part.get("block_structure") for part in weights if isinstance(part, dict)]
            for block in (settings.get("weight_block_size"), *blocks):
                if isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block):
                    return tuple(block)
    return None


def _block(shape: Sequence[int], scales: tuple[int, ...], configured: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return how many entries along each axis share a scale, or None if the shapes do not fit."""
    if math.prod(scales) == 1:
        return tuple(max(1, size) for size in shape)
    if len(scales) == 1 and len(shape) > 1:
        scales = (*scales, *[1] * (len(shape) - 1))
    if len(scales) != len(shape):
        return None
    block = []
    for axis, (size, number) in enumerate(zip(shape, scales, strict=True)):
        from_end = axis - len(shape) + 2
        step = configured[from_end] if configured is not None and from_end >= 0 else DEFAULT_BLOCK
        if number == size:
            step = 1
        elif number == 1:
            step = size
        elif math.ceil(size / step) != number:
            if configured is not None or number == 0 or size % number:
                return None
            step = size // number
        block.append(step)
    return tuple(block)


def _rows_of(name: str) -> str:
    return name.removesuffix("weight") + "SCB"


def _int8(inner: Checkpoint, name: str, scales: str) -> ScaledCodes:
    shape, layout = inner.tensors[name].shape, f"{name}_format"
    hidden = [scales, *([layout] if layout in inner.tensors else [])]
    if layout in inner.tensors and bool(_whole(inner, layout).any()):
        raise InputError(f"{inner.label}: {name} is stored in the order of a GPU's tiles, not by rows. Save it again.")
    if not shape or inner.tensors[scales].numel != shape[0]:
        raise InputError(f"{inner.label}: {scales} does not have one number for each row of {name} {list(shape)}")
    return ScaledCodes(name, shape, tuple(hidden), (1, *shape[1:]), scales, 1 / 127)


@dataclass(frozen=True)
class TableCodes(Decoder):
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
    marks = (f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    mark = next((mark for mark in marks if mark in inner.tensors), None)
    if mark is None:
        return None

    def broken(why: str) -> InputError:
        return InputError(f"{inner.label}: cannot dequantize {name}: {why}. Save the model again.")

    try:
        state = json.loads(bytes(_whole(inner, mark).view(torch.uint8).tolist()))
        shape, block = tuple(int(n) for n in state["shape"]), int(state["blocksize"])
        nested_block = int(state["nested_blocksize"]) if "nested_blocksize" in state else None
        offset = float(state.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise broken(f"{mark} does not describe a quantized tensor") from error
    if min((*shape, block, nested_block or 1), default=0) < 1 or not math.isfinite(offset):
        raise broken(f"{mark} has sizes below 1")
    numel = math.prod(shape)
    sizes = {"absmax": math.ceil(numel / block), "quant_map": 16}
    if nested_block is not None:
        sizes |= {"nested_absmax": math.ceil(sizes["absmax"] / nested_block), "nested_quant_map": 256}
    stored = {part: inner.tensors.get(f"{name}.{part}") for part in sizes}
    wrong = [part for part, info in stored.items() if info is None or info.numel != sizes[part]]
    if wrong or inner.tensors[name].nbytes < math.ceil(numel / 2):
        raise broken(f"{'.'.join([name, *wrong[:1]])} is missing, or has the wrong size for a tensor {list(shape)}")
    if (inner.tensors[f"{name}.absmax"].dtype == "U8") != (nested_block is not None):
        raise broken(f"{name}.absmax and {mark} do not agree whether the largest entries are codes")
    values = {part: _whole(inner, f"{name}.{part}").float() for part in sizes if part != "absmax"}
    nested = None
    if nested_block is not None:
        nested = (values["nested_quant_map"], values["nested_absmax"], nested_block, offset)
    beside = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
    hidden = (mark, *(f"{name}.{part}" for part in beside if f"{name}.{part}" in inner.tensors))
    return TableCodes(name, shape, hidden, values["quant_map"], block, f"{name}.absmax", nested)


def _whole(checkpoint: Checkpoint, name: str) -> Tensor:
    info = checkpoint.tensors[name]
    return checkpoint.read(name, 0, info.numel, Buffers()).reshape(info.shape)
