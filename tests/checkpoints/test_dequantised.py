"""`--dequantize`: fp8 and bitsandbytes read as the numbers that their codes stand for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.checkpoints import Buffers, Checkpoint, open_checkpoint
from gradmerge.checkpoints.dequantize import dequantised
from gradmerge.cli.app import app
from gradmerge.errors import InputError
from tests.making import near, random_state, read_model, write_model
from tests.tasks.making import sentences, tiny_llama_checkpoint, write_jsonl

Q = "model.layers.0.self_attn.q_proj.weight"
BODY = random_state(0, {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)}, torch.bfloat16)
STORED = Path(__file__).with_name("files") / "bitsandbytes.safetensors"
STATED = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [3, 4]}, "torch_dtype": "bfloat16"}


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
    wide = codes.double()
    for place in torch.cartesian_prod(*(torch.arange(n) for n in codes.shape)).tolist():
        own = tuple(n // size for n, size in zip(place, block, strict=True))
        want[tuple(place)] = wide[tuple(place)] * scales.double()[own]
    return want


def float8(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)


def scales_of(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(3)) * 0.01 + 0.001).to(dtype)


FP8: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], str, dict[str, Any]]] = {
    # shape, shape of the scales, block, end of the scales' name, quantization_config
    "blocks": ((7, 10), (3, 3), (3, 4), "_scale_inv", {"quant_method": "fp8", "weight_block_size": [3, 4]}),
    "blocks, none stated": ((256, 140), (2, 2), (128, 128), "_scale_inv", {"quant_method": "fp8"}),
    "experts": ((2, 6, 8), (2, 2, 2), (1, 3, 4), "_scale_inv", {"quant_method": "fp8", "weight_block_size": [3, 4]}),
    "tensor": ((7, 10), (), (7, 10), "_scale", {"quant_method": "compressed-tensors"}),
    "tensor, one entry": ((7, 10), (1,), (7, 10), "_scale", {"quant_method": "modelopt"}),
    "rows": ((7, 10), (7, 1), (1, 10), "_scale", {"quant_method": "compressed-tensors"}),
    "rows, flat": ((7, 10), (7,), (1, 10), "_scale", {"quant_method": "fbgemm_fp8"}),
    "groups": (
        (8, 6),
        (4, 2),
        (2, 3),
        "_scale",
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [2, 3]}}},
        },
    ),
}


@pytest.mark.parametrize("case", FP8)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("wide", [torch.float32, torch.bfloat16], ids=str)
def test_float8_codes_are_multiplied_with_their_scales(case: str, dtype: torch.dtype, wide: torch.dtype) -> None:
    shape, of_scales, block, end, stated = FP8[case]
    codes, scales = float8(*shape, dtype=dtype), scales_of(*of_scales, dtype=wide)
    name = "mlp.experts.gate_up_proj" if case == "experts" else Q
    state = {name.replace("weight", "input_scale"): torch.ones(()), name: codes, name + end: scales}
    view = dequantised(Checkpoint("m", memory=state | BODY, config={"quantization_config": stated}))
    assert view.tensors.keys() == {name, *BODY} and str(view.tensors[name]) == f"bfloat16 {list(shape)}"
    axes = [math.ceil(n / size) for n, size in zip(shape, block, strict=True)]
    want = slowly(codes, scales.reshape(axes), block)
    for step in (1 << 18, 13):
        got = whole(view, name, step)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, atol=0, rtol=2**-23)


def write_fp8(folder: Path, seed: int, config: dict[str, Any] = STATED) -> tuple[Path, Tensor]:
    codes, scales = float8(7, 10, seed=seed), scales_of(3, 3)
    write_model(folder, near(BODY, seed) | {Q: codes, f"{Q}_scale_inv": scales}, 1, config)
    return folder, slowly(codes, scales, (3, 4))


def test_quantised_models_merge_to_a_plain_one(tmp_path: Path) -> None:
    (base, zero), (tuned, one) = (write_fp8(tmp_path / name, seed) for seed, name in enumerate(("base", "tuned")))
    recipe = {"method": "task-arithmetic", "base": str(base), "models": [{"model": str(tuned), "weight": 0.3}]}
    with pytest.raises(InputError, match="dequantize"):
        gm.merge(recipe, tmp_path / "out")
    result = gm.merge(recipe, tmp_path / "out", dequantize=True)
    got = read_model(tmp_path / "out")
    assert got.keys() == {Q, *BODY} and got[Q].dtype == torch.bfloat16
    want = zero + 0.3 * (one - zero)
    assert ((got[Q].double() - want).abs() <= want.abs() * 2**-8).all()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == {"model_type": "test", "torch_dtype": "bfloat16"}
    assert any("fp8" in note for note in result.notes)
    plain = write_model(tmp_path / "plain", near(BODY, 5) | {Q: torch.randn(7, 10).bfloat16()})
    recipe["base"] = str(plain)  # and the other way round, plain numbers as the base
    gm.merge(recipe, tmp_path / "second", dequantize=True)
    kept = read_model(plain)[Q].double()
    want = kept + 0.3 * (one - kept)
    assert ((read_model(tmp_path / "second")[Q].double() - want).abs() <= want.abs() * 2**-8).all()


@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "base", "tuned"],
        ["merge", "recipe.yml", "--dry-run"],
        ["merge", "recipe.yml", "-o", "out"],
        ["diagnose", "recipe.yml", "-o", "out"],
        ["preview", "recipe.yml", "--weights", "0:1:0.5", "-o", "out"],
    ],
    ids=" ".join,
)
def test_every_command_that_opens_models_takes_dequantize(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("base", "tuned")):
        write_fp8(tmp_path / name, seed)
        names = {**{n: v.float().square() for n, v in BODY.items()}, Q: torch.ones(7, 10)}
        gm.Curvature(names, 10).save(tmp_path / name / "curvature")
    Path("recipe.yml").write_text(json.dumps({"method": "gradient-matching", "base": "base", "models": ["tuned"]}))
    assert CliRunner().invoke(app, command).exit_code == 2
    done = CliRunner().invoke(app, [*command, "--dequantize"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("name", [name.removeprefix("want.") for name in load_file(STORED) if name.startswith("want.")])
def test_bitsandbytes_codes_are_read_as_bitsandbytes_reads_them(name: str) -> None:
    stored = load_file(STORED)
    state = {n: v for n, v in stored.items() if n.startswith(f"{name}.")}
    want = stored[f"want.{name}"]
    word = str(want.dtype).removeprefix("torch.")
    view = dequantised(Checkpoint("m", memory=state, config={"torch_dtype": word}))
    assert view.tensors.keys() == {f"{name}.weight"}
    for step in (1 << 18, 64, 13):
        got = whole(view, f"{name}.weight", step)
        if want.dtype == torch.float32:
            torch.testing.assert_close(got, want, atol=0, rtol=2**-22)
        else:
            assert got.shape == want.shape
            one_unit = want.float().abs() * torch.finfo(want.dtype).eps
            assert bool(((got - want.float()).abs() <= one_unit).all())


def test_codes_in_storage_of_another_type_are_read() -> None:
    stored = load_file(STORED)
    state = {n: v for n, v in stored.items() if n.startswith("nf4.")}
    packed = state | {"nf4.weight": state["nf4.weight"].reshape(-1).view(torch.bfloat16)}
    one, two = (dequantised(Checkpoint("m", memory=s)) for s in (state, packed))
    for step in (10**6, 7):
        assert whole(two, "nf4.weight", step).equal(whole(one, "nf4.weight"))


def test_a_dequantised_base_takes_an_adapter(tmp_path: Path) -> None:
    base, plain = write_fp8(tmp_path / "base", 0)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    a, b = torch.randn(2, 10), torch.randn(7, 2)
    module = f"base_model.model.{Q.removesuffix('.weight')}"
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": str(base), "lora_alpha": 2, "r": 2}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    with open_checkpoint(adapter, dequantize=True) as opened:
        torch.testing.assert_close(whole(opened, Q).double(), plain + (b @ a).double(), atol=1e-5, rtol=1e-5)


def test_unknown_and_damaged_formats_are_refused(tmp_path: Path) -> None:
    codes = {Q: float8(7, 10)}
    nf4 = load_file(STORED)
    nf4 = {n: v for n, v in nf4.items() if n.startswith("nf4.")}
    mark = "nf4.weight.quant_state.bitsandbytes__nf4"
    packed = {"x.weight_packed": torch.zeros(4, 4, dtype=torch.int32), "x.weight_scale": torch.ones(4, 1)}
    gptq = {"x.qweight": torch.zeros(4, 4, dtype=torch.int32), "x.scales": torch.ones(4, 1)}
    mxfp4 = {"x_blocks": torch.zeros(4, dtype=torch.uint8), "x_scales": torch.zeros(4, dtype=torch.uint8)}
    turned = {
        "x.weight": torch.ones(2, 2, dtype=torch.int8),
        "x.SCB": torch.ones(2),
        "x.weight_format": torch.tensor(1, dtype=torch.uint8),
    }
    for state, stated in (
        (codes | {f"{Q}_scale_inv": torch.ones(2, 3)}, [3, 4]),
        (codes | {f"{Q}_scale_inv": torch.ones(3, 3)}, None),
        (codes, [3, 4]),
        (codes | {Q.replace("weight", "strange_scale"): torch.ones(1)}, None),
        (packed, None),
        (gptq, None),
        (mxfp4, None),
        (packed | codes | {f"{Q}_scale": torch.ones(1)}, None),
        (turned, None),
        (nf4 | {mark: torch.zeros(5, dtype=torch.uint8)}, None),
        ({n: v for n, v in nf4.items() if "absmax" not in n}, None),
        (nf4 | {"nf4.weight": nf4["nf4.weight"][:-1]}, None),
    ):
        config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": stated}} if stated else {}
        write_model(tmp_path / "m", state, 1, config)
        with pytest.raises(InputError, match="m"):
            open_checkpoint(tmp_path / "m", dequantize=True)


def test_plain_models_and_float8_without_scales_are_read_as_they_are() -> None:
    plain = Checkpoint("m", memory=BODY)
    assert dequantised(plain) is plain
    cast = {Q: float8(7, 10)}
    assert whole(dequantised(Checkpoint("m", memory=cast)), Q).equal(cast[Q].float())


def test_merges_of_quantised_models_are_evaluated_on_data(tmp_path: Path) -> None:
    folders = [tiny_llama_checkpoint(tmp_path / name, seed) for seed, name in enumerate(("base", "tuned"))]
    name = "model.layers.0.mlp.up_proj.weight"
    for folder in folders:
        state = load_file(folder / "model.safetensors")
        codes = (state[name] * 100).to(torch.float8_e4m3fn)
        stored = state | {name: codes, f"{name}_scale_inv": torch.full((1, 1), 0.01)}
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        stated = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))
    data = write_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in sentences(6)])
    recipe = {"method": "task-arithmetic", "base": str(folders[0]), "models": [str(folders[1])]}
    found = gm.preview(recipe, data={"tuned": str(data)}, weights="0:1:1", dequantize=True, progress=False)
    gm.merge(recipe, tmp_path / "out", dequantize=True)
    want = gm.evaluate(tmp_path / "out", data, progress=False)["loss_per_token"]
    row = next(row for row in found.rows if row.setting.weights == (1.0,))
    assert row.values["tuned"] == pytest.approx(want, rel=1e-6)
