"""`model_args`: how transformers loads a model. This module checks the keys and makes from_pretrained arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch

from ..arguments import check, check_known
from ..curvature.offload import return_freed_memory
from ..distributed import launched
from ..errors import InputError
from ..io.small_files import check_implementation

#: Keys for models that load and compute on one device.
BASIC_KEYS = ("attn_implementation", "tokenizer")


@dataclass(frozen=True)
class ModelArgs:
    """Valid `model_args`."""

    attn_implementation: str | None = None
    """`eager`, `sdpa`, `flex_attention`, `flash_attention_2`, …"""
    tokenizer: str | None = None
    """Folder or Hub id of the tokenizer. Default: the model's own."""
    device_map: str | Mapping[str, Any] | None = None
    """`auto`, or a mapping from layers to devices."""
    load_in_4bit: bool = False
    """Quantize the model with bitsandbytes."""
    load_in_8bit: bool = False
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass instead of storing them."""

    @classmethod
    def parse(cls, model_args: Mapping[str, Any] | None, allowed: Sequence[str] | None = None) -> ModelArgs:
        """Check keys and values. ``allowed``: the keys that the calling function supports, by default all."""
        types = get_type_hints(cls)
        for key, value in (model_args or {}).items():
            check_known(f"model_args: {key}", str(key), types)
            if allowed is not None and key not in allowed:
                raise InputError(
                    f"model_args: {key} is for evaluate and curvature estimate; allowed here are "
                    f"{' and '.join(allowed)}"
                )
            check(f"model_args: {key}", value, types[key])
        args = cls(**(model_args or {}))
        check_implementation("attn_implementation", args.attn_implementation, "model_args: attn_implementation")
        if args.load_in_4bit and args.load_in_8bit:
            raise InputError("model_args: load_in_4bit and load_in_8bit are both true. Give one of them.")
        if isinstance(args.device_map, str) and args.device_map != "auto":
            raise InputError("model_args: device_map must be auto, or in Python a mapping from layers to devices")
        return args

    @property
    def bits(self) -> int:
        """4 or 8 to quantize, 0 to leave weights as they are stored."""
        return 4 if self.load_in_4bit else 8 if self.load_in_8bit else 0

    def check_device(self, device: str) -> None:
        """Raise if ``device_map`` contradicts ``device`` or several processes."""
        if self.device_map is not None and (device != "auto" or launched() is not None):
            raise InputError("model_args: device_map is for one process, without device. Remove the other.")

    def from_pretrained(
        self, config: Any, dtype: str, device: torch.device, quantized: bool, bytes_per_parameter: int
    ) -> dict[str, Any]:
        """Return arguments of ``from_pretrained``.

        Args:
            config: The model's config.
            dtype: The type to compute in, by name.
            device: Where a model without ``device_map`` goes.
            quantized: The model computes with bitsandbytes weights, stored ones or those that ``bits`` asks for.
            bytes_per_parameter: Memory that a parameter needs on its device besides its value, such as for a sum.
        """
        arguments: dict[str, Any] = {}
        if self.attn_implementation is not None:
            arguments["attn_implementation"] = self.attn_implementation
        if self.device_map is None and not quantized:
            return arguments
        return_freed_memory()
        for library in ("accelerate", "bitsandbytes"):
            logging.getLogger(library).setLevel(logging.ERROR)  # notes of gradmerge replace their warnings
        compute_dtype = getattr(config, "dtype", None) if dtype == "auto" else getattr(torch, dtype)
        if not isinstance(compute_dtype, torch.dtype):
            compute_dtype = torch.float32
        if self.bits:
            arguments["quantization_config"] = _bitsandbytes_config(self.bits, config, compute_dtype)
        arguments["device_map"] = {"": device} if self.device_map is None else self.device_map
        if self.device_map == "auto":
            from accelerate.utils import get_max_memory  # type: ignore[import-untyped]

            share = compute_dtype.itemsize / (compute_dtype.itemsize + bytes_per_parameter)
            arguments["max_memory"] = {key: int(free * share) for key, free in get_max_memory().items()}
        return arguments


def _bitsandbytes_config(bits: int, config: Any, compute_dtype: torch.dtype) -> Any:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError as error:
        raise InputError(f"model_args: load_in_{bits}bit needs bitsandbytes: pip install bitsandbytes") from error
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(f"model_args: load_in_{bits}bit: the model is already stored quantized. Leave the key out.")
    import transformers

    config_class: Any = transformers.BitsAndBytesConfig
    if bits == 8:
        return config_class(load_in_8bit=True)
    return config_class(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute_dtype)
