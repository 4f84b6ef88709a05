"""Quantized checkpoints: refused with their method, or dequantized entry by entry as their codes say."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gradmerge as gm
from gradmerge.checkpoints import Buffers, Checkpoint, compare, open_checkpoint
from gradmerge.checkpoints.quantization import DequantizedCheckpoint, detect_quantization
from gradmerge.errors import InputError
from tests.making import near, random_state, read_model, write_model

State = dict[str, Tensor]
BODY = random_state(0, {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)}, torch.bfloat16)
Q = "model.layers.0.self_attn.q_proj"
WEIGHT = f"{Q}.weight"
STORED = Path(__file__).with_name("files") / "bitsandbytes.safetensors"
"""Random weights as bitsandbytes 0.45 stores them (quantize_4bit with nf4 and fp4, compress_statistics for the nested
ones, and int8_vectorwise_quant), and as its own functions dequantize them (`want.*`)."""
CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}, "torch_dtype": "bfloat16"}


def integers(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def float8(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


# Detection

GPTQ = {
    f"{Q}.qweight": integers(torch.int32, 1, 8),
    f"{Q}.qzeros": integers(torch.int32, 1, 1),
    f"{Q}.scales": torch.ones(1, 8).half(),
    f"{Q}.g_idx": integers(torch.int32, 8),
}
BNB4 = {
    WEIGHT: integers(torch.uint8, 32, 1),
    f"{WEIGHT}.absmax": torch.ones(1),
    f"{WEIGHT}.quant_map": torch.ones(16),
    f"{WEIGHT}.quant_state.bitsandbytes__nf4": integers(torch.uint8, 80),
}
BNB8 = {WEIGHT: integers(torch.int8, 8, 8), f"{Q}.SCB": torch.ones(8), f"{WEIGHT}_format": integers(torch.uint8)}
FP8 = {WEIGHT: float8(8, 8), f"{WEIGHT}_scale_inv": torch.ones(1, 1)}
PACKED = {f"{Q}.weight_packed": integers(torch.int32, 8, 1), f"{WEIGHT}_scale": torch.ones(8, 1)}
INT8 = {WEIGHT: integers(torch.int8, 8, 8), f"{WEIGHT}_scale": torch.ones(8, 1)}
MXFP4 = {
    "model.layers.0.mlp.experts.down_proj_blocks": integers(torch.uint8, 2, 4, 1, 4),
    "model.layers.0.mlp.experts.down_proj_scales": integers(torch.uint8, 2, 4, 1),
}
CASES: dict[str, tuple[State, dict[str, Any], str]] = {
    # tensors, quantization_config, the method in the config (tensors alone can belong to several methods)
    "gptq": (GPTQ, {"quant_method": "gptq", "bits": 4}, "gptq"),
    "bitsandbytes-4": (BNB4, {"load_in_4bit": True, "load_in_8bit": False}, "bitsandbytes"),
    "bitsandbytes-8": (BNB8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    "fp8": (FP8, {"quant_method": "fp8"}, "fp8"),
    "compressed-int8": (INT8, {"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "mxfp4": (MXFP4, {"quant_method": "mxfp4"}, "mxfp4"),
}
READABLE = {"bitsandbytes-4", "bitsandbytes-8", "fp8"}


@pytest.mark.parametrize("case", CASES)
def test_the_method_is_recognized_by_the_config_or_the_tensors(case: str) -> None:
    codes, settings, method = CASES[case]
    for config in ({}, {"text_config": {"quantization_config": settings}}):
        found = detect_quantization(Checkpoint("m", memory=BODY | codes, config=config))
        assert found is not None and found.readable == (case in READABLE)
        assert not config or found.method == method
        assert codes.keys() >= set(found.codes) and found.codes


@pytest.mark.parametrize(
    "settings", [None, {}, [], "gptq", {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}]
)
def test_settings_that_quantize_nothing_are_ignored(settings: Any) -> None:
    assert detect_quantization(Checkpoint("base", memory=BODY, config={"quantization_config": settings})) is None


def write_pair(folder: Path, codes: State, config: dict[str, Any]) -> list[str]:
    """A quantized model, and another one with other codes and scales."""
    moved = {n: v + 1 if v.is_floating_point() and v.element_size() > 1 else v for n, v in codes.items()}
    one = write_model(folder / "base", BODY | codes, 1, config)
    two = write_model(folder / "tuned", near(BODY, 1) | moved, 1, config)
    return [str(one), str(two)]


def test_quantized_models_are_refused_unless_their_codes_are_excluded(tmp_path: Path) -> None:
    base, tuned = write_pair(tmp_path, GPTQ, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    recipe = {"method": "average", "base": base, "models": [tuned]}
    with pytest.raises(InputError):
        gm.merge(recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    gm.merge(recipe | {"exclude": ["*.q_proj.*"]}, tmp_path / "out")
    got = read_model(tmp_path / "out")
    assert all(got[name].equal(value) for name, value in GPTQ.items())
    whole = Checkpoint("base", memory=BODY | {WEIGHT: torch.ones(8, 8)})
    assert len(compare(whole, [Checkpoint("tuned", memory=BODY | GPTQ)]).problems) == 1


# Dequantization


def whole(checkpoint: Checkpoint, name: str, step: int = 10**9) -> Tensor:
    """A tensor, read a few entries at a time."""
    info = checkpoint.tensors[name]
    parts = [
        checkpoint.read(name, start, min(start + step, info.numel), Buffers()).clone()
        for start in range(0, info.numel, step)
    ]
    return torch.cat(parts).reshape(info.shape)


def slowly(codes: Tensor, scales: Tensor, block: tuple[int, ...]) -> Tensor:
    """Entry by entry, in float64."""
    want = torch.zeros(codes.shape, dtype=torch.float64)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in codes.shape)).tolist():
        scale = scales.double()[tuple(n // size for n, size in zip(index, block, strict=True))]
        want[tuple(index)] = codes.double()[tuple(index)] * scale
    return want


def scales_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.001).to(dtype)


FLOAT8: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str, dict[str, Any]]] = {
    # shape, shape of the scales, block, end of the scales' name, quantization_config
    "blocks": ((7, 10), (3, 3), (3, 4), "_scale_inv", {"quant_method": "fp8", "weight_block_size": [3, 4]}),
    "tensor": ((7, 10), (), (7, 10), "_scale", {"quant_method": "compressed-tensors"}),
    "rows": ((7, 10), (7, 1), (1, 10), "_scale", {"quant_method": "compressed-tensors"}),
    "rows, flat": ((7, 10), (7,), (1, 10), "_scale", {"quant_method": "fbgemm_fp8"}),
}


@pytest.mark.parametrize("case", FLOAT8)
def test_float8_codes_are_multiplied_by_their_scales(case: str) -> None:
    shape, of_scales, block, end, settings = FLOAT8[case]
    dtype, wide = (torch.float8_e4m3fn, torch.float32) if "rows" not in case else (torch.float8_e5m2, torch.bfloat16)
    codes, scales = float8(*shape, dtype=dtype), scales_of(*of_scales, dtype=wide)
    state = {f"{Q}.input_scale": torch.ones(()), WEIGHT: codes, WEIGHT + end: scales}
    view = DequantizedCheckpoint(Checkpoint("m", memory=state | BODY, config={"quantization_config": settings}))
    assert view.tensors.keys() == {WEIGHT, *BODY} and str(view.tensors[WEIGHT]) == f"bfloat16 {list(shape)}"
    want = slowly(codes, scales.reshape([math.ceil(n / size) for n, size in zip(shape, block, strict=True)]), block)
    for step in (1 << 18, 13):
        got = whole(view, WEIGHT, step)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=0, rtol=2**-23)


@pytest.mark.parametrize("name", [name.removeprefix("want.") for name in load_file(STORED) if name.startswith("want.")])
def test_bitsandbytes_codes_are_read_as_bitsandbytes_reads_them(name: str) -> None:
    stored = load_file(STORED)
    state = {n: v for n, v in stored.items() if n.startswith(f"{name}.")}
    want = stored[f"want.{name}"]
    view = DequantizedCheckpoint(
        Checkpoint("m", memory=state, config={"torch_dtype": str(want.dtype).removeprefix("torch.")})
    )
    assert view.tensors.keys() == {f"{name}.weight"}
    for step in (1 << 18, 64, 13):
        got = whole(view, f"{name}.weight", step)
        if want.dtype == torch.float32:
            torch.testing.assert_close(got, want, atol=0, rtol=2**-22)
        else:
            assert got.shape == want.shape
            one_unit = want.float().abs() * torch.finfo(want.dtype).eps
            assert bool(((got - want.float()).abs() <= one_unit).all())


def write_fp8(folder: Path, seed: int) -> tuple[Path, Tensor]:
    codes, scales = float8(7, 10, seed=seed), scales_of(3, 3)
    write_model(folder, near(BODY, seed) | {WEIGHT: codes, f"{WEIGHT}_scale_inv": scales}, 1, CONFIG)
    return folder, slowly(codes, scales, (3, 4))


def test_quantized_models_merge_to_a_plain_model(tmp_path: Path) -> None:
    (base, zero), (tuned, one) = (write_fp8(tmp_path / name, seed) for seed, name in enumerate(("base", "tuned")))
    plain = write_model(tmp_path / "plain", near(BODY, 5) | {WEIGHT: torch.randn(7, 10).bfloat16()})
    for first, ours in ((base, zero), (plain, read_model(plain)[WEIGHT].double())):
        recipe = {"method": "task-arithmetic", "base": str(first), "models": [{"model": str(tuned), "weight": 0.3}]}
        with pytest.raises(InputError):
            gm.merge(recipe, tmp_path / "out")
        gm.merge(recipe, tmp_path / "out", dequantize=True, force=True)
        got = read_model(tmp_path / "out")
        assert got.keys() == {WEIGHT, *BODY} and got[WEIGHT].dtype == torch.bfloat16
        want = ours + 0.3 * (one - ours)
        assert ((got[WEIGHT].double() - want).abs() <= want.abs() * 2**-8).all()
        assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


NF4 = {n: v for n, v in load_file(STORED).items() if n.startswith("nf4.")}
UNREADABLE: dict[str, tuple[State, list[int] | None]] = {
    # tensors, weight_block_size
    "scales of too few blocks": ({WEIGHT: float8(7, 10), f"{WEIGHT}_scale_inv": torch.ones(2, 3)}, [3, 4]),
    "scales of unknown blocks": ({WEIGHT: float8(7, 10), f"{WEIGHT}_scale_inv": torch.ones(3, 3)}, None),
    "no scales": ({WEIGHT: float8(7, 10)}, [3, 4]),
    "mxfp4": (MXFP4, None),
    "two methods": (PACKED | {"x.weight": float8(7, 10), "x.weight_scale": torch.ones(1)}, None),
    "a broken description": (
        NF4 | {"nf4.weight.quant_state.bitsandbytes__nf4": torch.zeros(5, dtype=torch.uint8)},
        None,
    ),
    "no largest entries": ({n: v for n, v in NF4.items() if "absmax" not in n}, None),
    "too few codes": (NF4 | {"nf4.weight": NF4["nf4.weight"][:-1]}, None),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_unknown_and_damaged_formats_are_refused(case: str, tmp_path: Path) -> None:
    state, block = UNREADABLE[case]
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}} if block else {}
    write_model(tmp_path / "m", state, 1, config)
    with pytest.raises(InputError):
        open_checkpoint(tmp_path / "m", dequantize=True)
