"""Makes files/bitsandbytes.safetensors: tensors as bitsandbytes stores them, and what its own functions read in them.

Run it by hand where bitsandbytes 0.45 or newer is installed (a CPU will do): python make_bitsandbytes.py
"""

from __future__ import annotations

from pathlib import Path

import bitsandbytes  # type: ignore[import-not-found]
import bitsandbytes.functional as bnb  # type: ignore[import-not-found]
import torch
from safetensors.torch import save_file

#: Name → kind, nested, type, shape: odd numbers of entries, and more than one block of nested statistics.
CASES = {
    "nf4": ("nf4", False, torch.bfloat16, (24, 20)),
    "nf4-odd": ("nf4", False, torch.float32, (7, 11)),
    "nf4-nested": ("nf4", True, torch.bfloat16, (130, 127)),
    "nf4-nested-float16": ("nf4", True, torch.float16, (9, 30)),
    "fp4": ("fp4", False, torch.float16, (24, 20)),
    "fp4-nested": ("fp4", True, torch.float32, (16, 33)),
}


def main() -> None:
    torch.manual_seed(0)
    found = {}
    for name, (kind, nested, dtype, shape) in CASES.items():
        weight = (torch.randn(shape) * 0.05).to(dtype)
        codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        found[f"{name}.weight"] = codes
        found |= {f"{name}.weight.{part}": value for part, value in state.as_dict(packed=True).items()}
        found[f"want.{name}"] = bnb.dequantize_4bit(codes, state)
    codes, rows, _ = bnb.int8_vectorwise_quant((torch.randn(9, 14) * 0.05).half())
    found |= {"int8.weight": codes, "int8.SCB": rows, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    found["want.int8"] = bnb.int8_vectorwise_dequant(codes, rows)
    found = {name: value.contiguous().clone() for name, value in found.items()}
    place = Path(__file__).with_name("files") / "bitsandbytes.safetensors"
    save_file(found, place, metadata={"bitsandbytes": bitsandbytes.__version__})


if __name__ == "__main__":
    main()
