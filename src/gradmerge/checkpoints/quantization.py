"""Whether a checkpoint is quantised: its numbers are codes, and scales that lie beside them say what they stand for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from ..io.reader import TensorInfo
from ..io.small_files import read_json
from .checkpoint import Checkpoint
from .compat.config_diff import DEPTH, parts

#: Keys of a config, also of one of its parts, that say how the weights were quantised.
KEYS = ("quantization_config", "compression_config")
#: Files beside the config that say it instead, and the method where they do not name it.
FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
#: Last parts of the names of codes, and the method that writes them; they are codes if they are integers.
CODES = {
    "qweight": "gptq or awq",
    "qzeros": "gptq or awq",
    "g_idx": "gptq or awq",
    "weight_packed": "compressed-tensors",
    "W_q": "hqq",
    "weight_format": "bitsandbytes",
}
#: What lies beside a weight that holds codes.
SCALES = {
    "weight_scale": "fp8 or compressed-tensors",
    "weight_scale_inv": "fp8",
    "SCB": "bitsandbytes",
    "weight.absmax": "bitsandbytes",
    "weight.quant_map": "bitsandbytes",
    "scales": "gptq or awq",
}
ADVICE = (
    "Codes and scales cannot be merged. Take the original, unquantised checkpoint, or dequantise it first: load it "
    "with transformers, call model.dequantize(), and save it with save_pretrained."
)
#: Methods whose codes can be read as the numbers that they stand for, and what to do about them.
READABLE = {"fp8", "bitsandbytes"}
ADVICE_READABLE = (
    "Codes and scales cannot be merged. Take the original, unquantised checkpoint, or pass --dequantize "
    "(dequantize=True) to read the numbers that they stand for."
)


@dataclass
class Quantisation:
    """How a checkpoint is quantised, and where that shows."""

    method: str
    where: str
    """The file and key that say so, or nothing."""
    tensors: list[str] = field(default_factory=list)
    """Codes, and what lies beside them."""
    readable: bool = False
    """Whether `--dequantize` can read them."""

    @property
    def advice(self) -> str:
        return ADVICE_READABLE if self.readable else ADVICE

    def __str__(self) -> str:
        signs = [self.where] if self.where else []
        if self.tensors:
            signs.append(f"{len(self.tensors)} tensors of codes and scales, such as {self.tensors[0]}")
        return f"quantised with {self.method} ({'; '.join(signs)})"

    def problem(self, label: str) -> str:
        hint = "" if self.tensors else f" If its weights are plain numbers after all, remove {self.where}."
        return f"{label}: {self}. {self.advice}{hint}"


def quantisation(checkpoint: Checkpoint, chosen: Callable[[str], bool] = lambda name: True) -> Quantisation | None:
    """How a checkpoint is quantised, or None.

    ``chosen`` says which tensors matter: a checkpoint whose codes are all left out of the merge counts as plain.
    """
    methods = dict(_codes(checkpoint.tensors))
    tensors = [name for name in methods if chosen(name)]
    if methods and not tensors:
        return None
    stated = next(_stated(checkpoint), (methods[tensors[0]], "") if tensors else None)
    readable = bool(tensors) and {methods[name] for name in tensors} <= READABLE
    return Quantisation(*stated, tensors, readable) if stated else None


def refuse_quantised(base: Checkpoint, adapter: str) -> None:
    """Stop where an adapter would be added to codes."""
    found = quantisation(base)
    if found is not None:
        raise InputError(
            f"{adapter}: its base {found.problem(base.label)} Then give that one as the base; an adapter that was "
            "trained on a quantised model fits the model that this was made from."
        )


def without_quantisation(config: Mapping[str, Any], depth: int = DEPTH) -> dict[str, Any]:
    """The config of the plain model that a quantised one stands for."""
    return {
        key: without_quantisation(value, depth - 1) if isinstance(value, dict) and depth else value
        for key, value in config.items()
        if key not in KEYS
    }


def _stated(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Methods that the config or a file beside it names, and where."""
    for place, config in parts(checkpoint.config):
        for key in KEYS:
            stated = config.get(key)
            if isinstance(stated, dict) and stated and _in_use(stated):
                yield _method(stated, "an unnamed method"), f"{place}{key} in config.json"
    for name, method in FILES.items():
        if checkpoint.folder is not None and (checkpoint.folder / name).is_file():
            yield _method(read_json(checkpoint.folder / name), method), name


def _in_use(stated: Mapping[str, Any]) -> bool:
    """bitsandbytes also leaves its settings in configs of models that it does not quantise."""
    bits = [stated[key] for key in ("load_in_4bit", "load_in_8bit") if key in stated]
    return not bits or any(bits)


def _method(stated: Mapping[str, Any], default: str) -> str:
    inner = stated.get("quantization")
    of_inner = inner.get("quant_algo") if isinstance(inner, dict) else None
    named = stated.get("quant_method") or stated.get("quant_algo") or of_inner
    if not isinstance(named, str):
        named = "bitsandbytes" if "load_in_4bit" in stated or "load_in_8bit" in stated else default
    bits = 4 if stated.get("load_in_4bit") else 8 if stated.get("load_in_8bit") else None
    bits = bits or stated.get("bits") or stated.get("w_bit")
    return f"{named[:40]}, {bits} bits" if isinstance(bits, int) else named[:40]


def _codes(tensors: dict[str, TensorInfo]) -> Iterator[tuple[str, str]]:
    """Tensors that can only be codes or their scales, each with the method that they look like."""
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
            beside = next((scale for scale in SCALES if f"{module}{dot}{scale}" in tensors), None)
            if beside is not None:
                method = "fp8" if info.dtype.startswith("F8") else SCALES[beside]
                yield name, method
                yield f"{module}{dot}{beside}", method
        elif info.dtype.startswith("F8") and (f"{name}_scale_inv" in tensors or f"{name}_scale" in tensors):
            yield name, "fp8"
