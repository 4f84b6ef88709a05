"""Quantised checkpoints and integers: refused with the method and what to do, never merged as if they were weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.checkpoints.quantization import quantisation
from gradmerge.cli.app import app
from gradmerge.errors import InputError
from tests.making import near, random_state, read_model, write_model

State = dict[str, Tensor]
BODY = random_state(0, {"model.embed_tokens.weight": (20, 8), "model.norm.weight": (8,)})
Q = "model.layers.0.self_attn.q_proj"


def packed(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


GPTQ = {
    f"{Q}.qweight": packed(torch.int32, 1, 8),
    f"{Q}.qzeros": packed(torch.int32, 1, 1),
    f"{Q}.scales": torch.ones(1, 8).half(),
    f"{Q}.g_idx": packed(torch.int32, 8),
}
AWQ = {name: value for name, value in GPTQ.items() if "g_idx" not in name}
BNB4 = {
    f"{Q}.weight": packed(torch.uint8, 32, 1),
    f"{Q}.weight.absmax": torch.ones(1),
    f"{Q}.weight.quant_map": torch.ones(16),
    f"{Q}.weight.quant_state.bitsandbytes__nf4": packed(torch.uint8, 80),
}
BNB8 = {
    f"{Q}.weight": packed(torch.int8, 8, 8),
    f"{Q}.SCB": torch.ones(8),
    f"{Q}.weight_format": packed(torch.uint8),
}
FP8 = {f"{Q}.weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), f"{Q}.weight_scale_inv": torch.ones(1, 1)}
PACKED = {f"{Q}.weight_packed": packed(torch.int32, 8, 1), f"{Q}.weight_scale": torch.ones(8, 1)}
INT8 = {f"{Q}.weight": packed(torch.int8, 8, 8), f"{Q}.weight_scale": torch.ones(8, 1)}
MXFP4 = {
    "model.layers.0.mlp.experts.down_proj_blocks": packed(torch.uint8, 2, 4, 1, 4),
    "model.layers.0.mlp.experts.down_proj_scales": packed(torch.uint8, 2, 4, 1),
}
CASES: dict[str, tuple[State, dict[str, Any], str]] = {
    # tensors, quantization_config, and the method by the config; by tensors alone it may be one of several
    "gptq": (GPTQ, {"quant_method": "gptq", "bits": 4}, "gptq, 4 bits"),
    "awq": (AWQ, {"quant_method": "awq", "bits": 4}, "awq, 4 bits"),
    "bitsandbytes-4": (BNB4, {"load_in_4bit": True, "load_in_8bit": False}, "bitsandbytes, 4 bits"),
    "bitsandbytes-8": (BNB8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes, 8"),
    "fp8": (FP8, {"quant_method": "fp8"}, "fp8"),
    "compressed-tensors": (PACKED, {"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "compressed-int8": (INT8, {"quant_method": "compressed-tensors"}, "compressed-tensors"),
    "mxfp4": (MXFP4, {"quant_method": "mxfp4"}, "mxfp4"),
    "hqq": ({f"{Q}.W_q": packed(torch.uint8, 8, 4)}, {"quant_method": "hqq"}, "hqq"),
}
#: Those that `--dequantize` reads.
READABLE = {"bitsandbytes-4", "bitsandbytes-8", "fp8"}


def write_pair(folder: Path, codes: State, config: dict[str, Any]) -> list[str]:
    """A quantised model, and another one whose scales and codes are others."""
    moved = {n: v + 1 if v.is_floating_point() and v.element_size() > 1 else v for n, v in codes.items()}
    one = write_model(folder / "base", BODY | codes, 1, config)
    two = write_model(folder / "tuned", near(BODY, 1) | moved, 1, config)
    return [str(one), str(two)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config", "tensors alone"])
def test_quantised_models_are_refused_with_their_method(case: str, place: str, tmp_path: Path) -> None:
    codes, settings, method = CASES[case]
    config = {"text_config": {"quantization_config": settings}} if place == "text_config" else {place: settings}
    base, tuned = write_pair(tmp_path, codes, {} if place == "tensors alone" else config)
    with pytest.raises(InputError) as error:
        gm.merge({"method": "average", "base": base, "models": [tuned]}, tmp_path / "out")
    message = str(error.value)
    assert (method.partition(",")[0] if place == "tensors alone" else method) in message
    assert any(name in message for name in codes) and (case not in READABLE or "--dequantize" in message)
    assert message.count("•") == 2
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "method"), [("quantize_config.json", "gptq, 4"), ("quant_config.json", "awq, 4")])
def test_a_file_beside_the_config_says_the_method_too(name: str, method: str, tmp_path: Path) -> None:
    base, tuned = write_pair(tmp_path, AWQ, {})
    (Path(tuned) / name).write_text(json.dumps({"bits": 4} if "quantize" in name else {"w_bit": 4}))
    with pytest.raises(InputError, match=rf"tuned.*{method}.*{name}"):
        gm.merge({"method": "average", "base": base, "models": [tuned]}, tmp_path / "out")


def test_one_quantised_model_among_others_is_one_line_and_not_a_list_of_its_tensors(tmp_path: Path) -> None:
    whole = BODY | {f"{Q}.weight": torch.ones(8, 8)}
    result = compare(Checkpoint("base", memory=whole), [Checkpoint("tuned", memory=BODY | GPTQ)])
    assert len(result.problems) == 1 and "tuned" in result.problems[0]


def test_a_config_that_calls_plain_weights_quantised_is_refused_and_says_how_to_go_on(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", BODY, 1, {"quantization_config": {"quant_method": "torchao"}})
    tuned = write_model(tmp_path / "tuned", near(BODY, 1))
    with pytest.raises(InputError, match="torchao"):
        gm.merge({"method": "average", "base": str(base), "models": [str(tuned)]}, tmp_path / "out")


@pytest.mark.parametrize(
    "stated", [None, {}, [], "gptq", {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}]
)
def test_settings_that_quantise_nothing_stand_in_nobodys_way(stated: Any) -> None:
    assert quantisation(Checkpoint("base", memory=BODY, config={"quantization_config": stated})) is None


def test_a_quantised_model_merges_where_its_codes_are_excluded(tmp_path: Path) -> None:
    base, tuned = write_pair(tmp_path, GPTQ, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    recipe = {"method": "average", "base": base, "models": [tuned], "exclude": ["*.q_proj.*"]}
    gm.merge(recipe, tmp_path / "out")
    got = read_model(tmp_path / "out")
    assert all(got[name].equal(value) for name, value in GPTQ.items())


def test_an_adapter_on_a_quantised_base_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    base, _ = write_pair(tmp_path, BNB4, {"quantization_config": {"load_in_4bit": True}})
    adapter = tmp_path / "adapter"
    write_model(adapter, {f"base_model.model.{Q}.lora_A.weight": torch.ones(2, 8)})
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    for recipe in ({"models": [str(adapter)]}, {"base": base, "models": [str(adapter)]}):
        with pytest.raises(InputError, match="bitsandbytes, 4 bits"):
            gm.merge({"method": "average", **recipe}, tmp_path / "out")


def test_inspect_says_that_one_model_is_quantised_and_that_two_cannot_be_merged(tmp_path: Path) -> None:
    base, tuned = write_pair(tmp_path, GPTQ, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    alone = CliRunner().invoke(app, ["inspect", base, "--json"])
    assert alone.exit_code == 0 and "gptq, 4 bits" in json.loads(alone.stdout)["models"][0]["quantized"]
    assert CliRunner().invoke(app, ["inspect", base, tuned]).exit_code == 2


# Integers that belong to no known method


def two(ours: State, theirs: State) -> tuple[list[str], list[str]]:
    """What is refused and what is noted of two models with these tensors beside their weights."""
    plain = random_state(0)
    result = compare(Checkpoint("base", memory=plain | ours), [Checkpoint("tuned", memory=near(plain, 1) | theirs)])
    return result.problems, result.notes


def test_integer_matrices_with_other_values_are_refused_by_name_unless_they_are_excluded(tmp_path: Path) -> None:
    one, other = ({"codes": packed(torch.int64, 700, 400, seed=seed)} for seed in (0, 1))
    (problem,), _ = two(one, other)
    assert "codes: I64 [700, 400]" in problem
    assert two(one, one) == ([], []) and two(one, {"codes": one["codes"].int()}) == ([], [])
    late = {"codes": one["codes"].clone()}
    late["codes"][-1, -1] += 1
    assert len(two(one, late)[0]) == 1
    plain = random_state(0)
    pair = [Checkpoint("base", memory=plain | one), Checkpoint("tuned", memory=plain | other)]
    assert not compare(pair[0], pair[1:], exclude=["codes"]).problems


def test_integers_of_other_shapes_or_that_are_floats_elsewhere_are_refused_by_name() -> None:
    one = {"table": packed(torch.int32, 4)}
    assert "table: I32 [4] in base, I32 [5] in tuned" in two(one, {"table": packed(torch.int32, 5)})[0][0]
    assert "table: I32 [4] in base, float32 [4] in tuned" in two(one, {"table": torch.ones(4)})[0][0]
    assert "table: float32 [4] in base, I32 [4] in tuned" in two({"table": torch.ones(4)}, one)[0][0]


def test_small_integer_buffers_that_differ_are_noted_by_name() -> None:
    one, other = {"step": torch.tensor(3), "ids": torch.arange(4)}, {"step": torch.tensor(4), "ids": torch.arange(4)}
    for theirs in (other, {"ids": torch.arange(4)}):
        problems, (note,) = two(one, theirs)
        assert not problems and "step" in note and "ids" not in note
    known = {"bert.embeddings.position_ids": torch.arange(4), "bn.num_batches_tracked": torch.tensor(1)}
    assert two(known, {name: value + 1 for name, value in known.items()}) == ([], [])
