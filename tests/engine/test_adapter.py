"""Merges that are written as adapters: PEFT makes the model of them that the same recipe writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError
from tests.checkpoints.families import EXPERTS, FAMILIES, load, moved, randomise, save
from tests.checkpoints.test_lora import LLAMA, edit_tensors, make_base, merged_by_peft, write_adapter
from tests.making import assert_close, read_model

SECOND = ["q_proj", "k_proj", "up_proj"]


def adapters_of(base: Path, family: str, *settings: dict[str, Any]) -> list[str]:
    for number, config in enumerate(settings):
        write_adapter(base, family, base.parent / f"adapter{number}", LoraConfig(**config), seed=number + 1)
    return [str(base.parent / f"adapter{number}") for number in range(len(settings))]


def llama(tmp_path: Path, *targets: list[str]) -> tuple[Path, list[str]]:
    base = make_base(tmp_path / "base", "llama-untied")
    settings = [{"r": 3 + i, "lora_alpha": 7, "target_modules": names} for i, names in enumerate(targets)]
    return base, adapters_of(base, "llama-untied", *settings)


def weighted(method: str, base: Path, models: list[str], *weights: Any, **more: Any) -> dict[str, Any]:
    pairs = zip(models, weights, strict=True)
    return {"method": method, "base": str(base), "models": [{"model": m, "weight": w} for m, w in pairs], **more}


def as_adapter(recipe: dict[str, Any], **output: Any) -> dict[str, Any]:
    return recipe | {"output": {"format": "adapter"} | output}


def merge_both(recipe: dict[str, Any], tmp_path: Path, family: str, **output: Any) -> tuple[Any, Any, Any]:
    """The model of a recipe, what PEFT makes of its adapter, and the result."""
    gm.merge(recipe, tmp_path / "model")
    result = gm.merge(as_adapter(recipe, **output), tmp_path / "out")
    return read_model(tmp_path / "model"), by_peft(tmp_path, family), result


def by_peft(tmp_path: Path, family: str) -> dict[str, Tensor]:
    wrapped = PeftModel.from_pretrained(load(family, tmp_path / "base", dtype="auto"), tmp_path / "out")
    keys = {name.replace(".default", "").replace(".modules_to_save", "") for name in wrapped.state_dict()}
    written = load_file(tmp_path / "out/adapter_model.safetensors")
    assert {name.replace(".modules_to_save", "") for name in written} <= keys  # PEFT ignores other keys
    return merged_by_peft(wrapped, tmp_path / "by-peft")


def remerged(tmp_path: Path) -> dict[str, Tensor]:
    recipe = {"method": "average", "base": str(tmp_path / "base"), "models": [str(tmp_path / "out")]}
    gm.merge(recipe, tmp_path / "again")
    return read_model(tmp_path / "again")


EXACT: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "conv1d": ("gpt2", [{"r": 3, "target_modules": ["c_attn", "c_proj"]}, {"r": 2, "target_modules": ["c_fc"]}]),
    "embeddings": (
        "llama-untied",
        [
            {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
            {"r": 3, "target_modules": ["embed_tokens", "lm_head"]},
        ],
    ),
    "biases": (
        "bert",
        [{"r": 2, "target_modules": ["query"], "bias": "all"}, {"r": 3, "target_modules": ["key"]}],
    ),
    "conv2d": ("vit", [{"r": 3, "target_modules": ["projection"]}, {"r": 2, "target_modules": ["projection"]}]),
    "a whole module with factors elsewhere": (
        "llama-untied",
        [
            {"r": 2, "target_modules": ["lm_head", "q_proj"]},
            {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
        ],
    ),
}


@pytest.mark.parametrize("case", EXACT)
def test_weighted_sums_of_adapters_are_exact(case: str, tmp_path: Path) -> None:
    family, settings = EXACT[case]
    base = make_base(tmp_path / "base", family)
    recipe = weighted("task-arithmetic", base, adapters_of(base, family, *settings), 0.7, -0.4)
    want, got, result = merge_both(recipe, tmp_path, family)
    assert_close(got, want, 1e-6)
    assert result.lost_share == 0 and set(result.lost.values()) == {0.0}
    assert_close(remerged(tmp_path), want, 1e-6)


def test_weights_for_layers_and_modules_are_exact_and_no_weights_are_read(tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, SECOND)
    weights = [[0.0, 1.0], [{"filter": "q_proj", "value": 0.25}, {"value": [1.0, 2.0]}]]
    want, got, result = merge_both(weighted("task-arithmetic", base, models, *weights), tmp_path, "llama-untied")
    assert_close(got, want, 1e-6)
    assert result.bytes_read == 0
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] and config["alpha_pattern"] == config["rank_pattern"]
    assert "model.layers.1.self_attn.v_proj" in config["target_modules"]  # its weight in the first layer is 0


def lost_by_svd(base: dict[str, Tensor], model: dict[str, Tensor], rank: int) -> tuple[dict[str, float], float]:
    """The share that the best product of a rank lacks of each matrix, and of all tensors together, by plain SVD."""
    shares, lost, total = {}, 0.0, 0.0
    for name, value in model.items():
        delta = value.double() - base[name].double()
        total += float(delta.square().sum())
        if delta.ndim < 2 or not delta.any():
            continue
        roots = torch.linalg.svdvals(delta.flatten(1)).square()
        shares[name] = float(roots[rank:].sum() / roots.sum())
        lost += float(roots[rank:].sum())
    return shares, lost / total


@pytest.mark.parametrize("family", FAMILIES)
def test_at_full_rank_the_adapter_of_a_fine_tuned_model_is_the_model(family: str, tmp_path: Path) -> None:
    """Norms, biases, tied embeddings and bare parameters are in it too."""
    base = make_base(tmp_path / "base", family, torch.float64)
    save(moved(load(family, base, dtype="auto"), 3), tmp_path / "tuned")
    result = gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=64, dtype="float64")
    assert result.lost_share < 1e-20
    got, want = by_peft(tmp_path, family), read_model(tmp_path / "tuned")
    assert_close({name: got[name] for name in want}, want, 1e-6)
    assert_close(remerged(tmp_path), want, 1e-6)


@pytest.mark.parametrize("family", ["llama-untied", "vit"])
def test_the_loss_of_a_rank_is_what_singular_values_say(family: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", family)
    model = load(family, base)
    matrices = [p for n, p in model.named_parameters() if p.ndim > 1 and n.endswith("weight") and "layer" in n]
    randomise(matrices, 3, 0.05)
    save(model, tmp_path / "tuned", "9KB")
    result = gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=5)
    start, want, got = read_model(base), read_model(tmp_path / "tuned"), by_peft(tmp_path, family)
    shares, total = lost_by_svd(start, want, 5)
    assert result.lost == pytest.approx(shares, rel=1e-5) and result.lost_share == pytest.approx(total, rel=1e-5)
    for name, share in shares.items():
        left = (got[name].double() - want[name].double()).square().sum()
        norm = (want[name].double() - start[name].double()).square().sum()
        assert float(left / norm) == pytest.approx(share, rel=1e-4)
    record = json.loads((tmp_path / "out/gradmerge.json").read_text())["output"]
    assert record["format"] == "adapter" and record["rank"] == 5 and record["lost"] == pytest.approx(shares, rel=1e-5)


OTHERS: dict[str, dict[str, Any]] = {"ties": {"density": 0.3}, "slerp": {}}


@pytest.mark.parametrize("method", OTHERS)
def test_methods_that_are_no_sums_are_factored_and_need_a_rank(method: str, tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, SECOND)
    models = models[:1] if method == "slerp" else models
    recipe = weighted(method, base, models, *[1.0] * len(models), options=OTHERS[method])
    with pytest.raises(InputError, match=r"output\.rank"):
        gm.merge(as_adapter(recipe), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    want, got, result = merge_both(recipe, tmp_path, "llama-untied", rank=16)
    assert_close(got, want, 2e-6)
    assert result.lost_share < 1e-10
    targets = {name for name in want if any(part in name for part in (*LLAMA, *(SECOND if len(models) > 1 else [])))}
    assert result.lost.keys() == targets  # and nothing else, by rounding


def test_factors_that_add_up_to_more_than_the_rank_are_cut_to_the_nearest(tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, ["q_proj"])
    recipe = weighted("task-arithmetic", base, models, 1.0, 2.0)
    want, got, result = merge_both(recipe, tmp_path, "llama-untied", rank=4)
    shares, total = lost_by_svd(read_model(base), want, 4)
    assert result.lost_share == pytest.approx(total, rel=1e-4) and total > 0.01
    for name in want:
        exact = name not in shares or shares[name] < 1e-9
        assert exact is bool(torch.allclose(got[name], want[name], atol=2e-6)), name


def test_a_rank_larger_than_one_side_of_a_matrix_keeps_all_of_it(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied")
    settings = {"r": 10, "target_modules": ["k_proj", "q_proj"]}  # k_proj is (8, 16)
    recipe = weighted("task-arithmetic", base, adapters_of(base, "llama-untied", settings, settings), 1.0, 0.5)
    want, got, result = merge_both(recipe, tmp_path, "llama-untied", rank=10)
    assert {name: lost == pytest.approx(0) for name, lost in result.lost.items()} == {
        name: "k_proj" in name for name in result.lost
    }
    for name in want:
        assert "q_proj" in name or torch.allclose(got[name], want[name], atol=2e-6), name


def fill_b(adapter: str, module: str, value: float) -> None:
    """Replace the factors B of a module's adapter."""

    def fill(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {k: v.fill_(value) if f"{module}.lora_B" in k else v for k, v in tensors.items()}

    edit_tensors(Path(adapter), fill)


def test_modules_that_no_adapter_has_trained_are_left_out(tmp_path: Path) -> None:
    base, models = llama(tmp_path, SECOND, SECOND)
    for model in models:
        fill_b(model, "k_proj", 0.0)  # as PEFT initializes it
    want, got, result = merge_both(weighted("task-arithmetic", base, models, 1.0, 0.5), tmp_path, "llama-untied")
    assert_close(got, want, 1e-6)
    assert result.lost and not any("k_proj" in name for name in result.lost)


def test_nan_in_an_adapter_is_an_error_that_names_the_tensor(tmp_path: Path) -> None:
    base, models = llama(tmp_path, SECOND, SECOND)
    fill_b(models[0], "k_proj", torch.nan)
    with pytest.raises(InputError, match=r"k_proj\.weight has values that are NaN"):
        gm.merge(as_adapter(weighted("task-arithmetic", base, models, 1.0, 0.5), rank=2), tmp_path / "out")


def test_a_narrow_type_of_the_base_does_not_round_the_difference(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied", torch.bfloat16)
    models = adapters_of(base, "llama-untied", {"r": 2, "target_modules": LLAMA, "lora_alpha": 0.002})
    recipe = weighted("ties", base, models, 1.0, options={"density": 1.0})
    gm.merge(as_adapter(recipe, rank=2), tmp_path / "out")
    got, want = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("out", "adapter0"))
    for key in (key for key in want if key.endswith("lora_A.weight")):
        other = key.replace("lora_A", "lora_B")
        delta = want[other].double() @ want[key].double() * 0.001
        assert ((got[other].double() @ got[key].double()) - delta).norm() < 1e-4 * delta.norm(), key


def test_the_bytes_do_not_depend_on_threads_and_blocks(tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, SECOND)
    recipe = as_adapter(weighted("ties", base, models, 1.0, 1.0), rank=3)
    gm.merge(recipe, tmp_path / "x/out", block=50, threads=2)
    gm.merge(recipe, tmp_path / "y/out", threads=1, resume=True)
    names = sorted(path.name for path in (tmp_path / "y/out").iterdir())
    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors", "gradmerge.json"]
    one, two = ((tmp_path / f / "out/adapter_model.safetensors").read_bytes() for f in "xy")
    assert one == two
    assert gm.merge(recipe, tmp_path / "y/out", resume=True).already_done


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole models without a rank": ({}, "output.rank"),
    "curvature": ({"output": {"format": "adapter", "curvature": True, "rank": 4}}, "output.curvature"),
    "no base": ({"method": "average", "base": None}, "base"),
    "a rank for a model": ({"output": {"format": "model", "rank": 4}}, "output.rank"),
    "another vocabulary": ({"tokenizer": "union"}, "vocabulary"),
    "nothing for LoRA": ({"include": ["*norm*"]}, "base"),
    "the base itself": ({"models": ["base"]}, "base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_written_are_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, message = REFUSED[case]
    monkeypatch.chdir(tmp_path)
    save(moved(load("llama-untied", make_base(Path("base"), "llama-untied")), 3), Path("tuned"))
    recipe: dict[str, Any] = {"method": "task-arithmetic", "base": "base", "models": ["tuned"]}
    recipe["output"] = {"format": "adapter"} | ({"rank": 4} if changes else {})
    recipe |= changes
    if case == "curvature":
        recipe |= {"method": "gradient-matching", "base": {"model": "base", "curvature": {"identity": 1.0}}}
        recipe["models"] = [{"model": "tuned", "curvature": {"identity": 1.0}}]
    with pytest.raises(InputError, match=message):
        gm.merge({k: v for k, v in recipe.items() if v is not None}, "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "tuned"]


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_that_transformers_fuses_are_refused_in_an_adapter(family: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", family)
    save(moved(load(family, base), 3), tmp_path / "tuned")
    if family != "gpt-oss":  # which stores them as it has them in memory
        with pytest.raises(InputError, match="experts"):
            gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=4)
    gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=64, exclude=["*experts*"])
    start, want = read_model(base), read_model(tmp_path / "tuned")
    want |= {name: value for name, value in start.items() if "experts" in name}
    assert_close(by_peft(tmp_path, family), want, 1e-6)
