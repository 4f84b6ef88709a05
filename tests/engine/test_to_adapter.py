"""Merges that are written as adapters, against the whole model that the same recipe writes, by way of PEFT."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor

import gradmerge as gm
from gradmerge.engine.adapter import build as adapter_changes
from gradmerge.engine.adapter.low_rank import factored
from gradmerge.errors import InputError
from tests.checkpoints.families import FAMILIES, load, moved, randomise, save
from tests.checkpoints.test_lora import LLAMA, make_base, merged_by_peft, write_adapter
from tests.making import assert_close, read_model, write_model

SECOND = ["q_proj", "k_proj", "up_proj"]


def adapters_of(base: Path, family: str, tmp_path: Path, *settings: Mapping[str, Any]) -> list[str]:
    for place, one in enumerate(settings):
        write_adapter(base, family, tmp_path / f"adapter{place}", LoraConfig(**one), seed=place + 1)
    return [str(tmp_path / f"adapter{place}") for place in range(len(settings))]


def both(recipe: dict[str, Any], tmp_path: Path, family: str, rank: int | None = None) -> tuple[Any, ...]:
    """The recipe as a model, and as an adapter that PEFT puts on the base."""
    gm.merge(recipe, tmp_path / "model")
    output = {"format": "adapter"} | ({"rank": rank} if rank is not None else {})
    result = gm.merge(recipe | {"output": recipe.get("output", {}) | output}, tmp_path / "out")
    return read_model(tmp_path / "model"), by_peft(tmp_path, family), result


def by_peft(tmp_path: Path, family: str, out: str = "out") -> dict[str, Tensor]:
    wrapped = PeftModel.from_pretrained(load(family, tmp_path / "base", dtype="auto"), tmp_path / out)
    keys = {name.replace(".default", "").replace(".modules_to_save", "") for name in wrapped.state_dict()}
    written = load_file(tmp_path / out / "adapter_model.safetensors")
    assert {name.replace(".modules_to_save", "") for name in written} <= keys  # PEFT passes over what it does not know
    return merged_by_peft(wrapped, tmp_path / f"{out}-by-peft")


EXACT: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "other ranks and targets": (
        "llama-untied",
        [{"r": 4, "lora_alpha": 9, "target_modules": LLAMA}, {"r": 2, "target_modules": SECOND}],
    ),
    "conv1d": ("gpt2", [{"r": 3, "target_modules": ["c_attn", "c_proj"]}, {"r": 2, "target_modules": ["c_fc"]}]),
    "embeddings": (
        "llama-untied",
        [
            {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
            {"r": 3, "target_modules": ["embed_tokens", "lm_head"]},
        ],
    ),
    "modules saved whole": (
        "llama-untied",
        [
            {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]},
            {"r": 2, "target_modules": LLAMA},
        ],
    ),
    "biases": (
        "bert",
        [{"r": 2, "target_modules": ["query"], "bias": "all"}, {"r": 3, "target_modules": ["key"], "lora_bias": True}],
    ),
    "conv2d": ("vit", [{"r": 3, "target_modules": ["projection"]}, {"r": 2, "target_modules": ["projection"]}]),
    "a whole module with factors elsewhere": (
        "llama-untied",
        [
            {"r": 2, "target_modules": ["lm_head", "q_proj"]},
            {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
        ],
    ),
    "tokens": (
        "llama-tied",
        [{"r": 2, "target_modules": ["q_proj"], "trainable_token_indices": [3, 5]}, {"r": 2, "target_modules": LLAMA}],
    ),
}


@pytest.mark.parametrize("case", EXACT)
def test_adapters_in_one_adapter_out_that_peft_makes_the_merged_model_of(case: str, tmp_path: Path) -> None:
    family, settings = EXACT[case]
    base = make_base(tmp_path / "base", family)
    models = adapters_of(base, family, tmp_path, *settings)
    recipe = weighted("task-arithmetic", base, models, 0.7, -0.4)
    want, got, result = both(recipe, tmp_path, family)
    assert_close(got, want, 1e-6)
    assert result.lost_share == 0 and set(result.lost.values()) == {0.0}
    gm.merge({"method": "average", "base": str(base), "models": [str(tmp_path / "out")]}, tmp_path / "again")
    assert_close(read_model(tmp_path / "again"), want, 1e-6)


def weighted(method: str, base: Path, models: list[str], *weights: Any, **more: Any) -> dict[str, Any]:
    pairs = zip(models, weights, strict=True)
    return {"method": method, "base": str(base), "models": [{"model": m, "weight": w} for m, w in pairs], **more}


def llama(tmp_path: Path, *targets: list[str]) -> tuple[Path, list[str]]:
    base = make_base(tmp_path / "base", "llama-untied")
    settings = [{"r": 3 + i, "lora_alpha": 7, "target_modules": names} for i, names in enumerate(targets)]
    return base, adapters_of(base, "llama-untied", tmp_path, *settings)


SUMS: dict[str, list[Any]] = {
    "average": [1, 1],
    "weighted-average": [0.5, 2.0],
    "task-arithmetic": [[0.0, 1.0], [{"filter": "q_proj", "value": 0.25}, {"value": [1.0, 2.0]}]],
}


@pytest.mark.parametrize("method", SUMS)
def test_sums_with_weights_for_layers_and_modules_are_exact_and_read_no_weights(method: str, tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, SECOND)
    want, got, result = both(weighted(method, base, models, *SUMS[method]), tmp_path, "llama-untied")
    assert_close(got, want, 1e-6)
    own = sum(value.numel() * 4 for m in models for value in load_file(f"{m}/adapter_model.safetensors").values())
    assert result.bytes_read <= own
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["lora_alpha"] == config["r"] and config["alpha_pattern"] == config["rank_pattern"]
    some = "model.layers.1.self_attn.v_proj"  # whose weight in the first layer is 0
    assert (some if method == "task-arithmetic" else "v_proj") in config["target_modules"]


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
    assert got.keys() >= want.keys()
    assert_close({name: got[name] for name in want}, want, 1e-6)
    ours = gm.merge({"method": "average", "base": str(base), "models": [str(tmp_path / "out")]}, tmp_path / "again")
    assert_close(read_model(tmp_path / "again"), want, 1e-6)
    assert ours.merged == len(want)


@pytest.mark.parametrize("family", ["llama-untied", "vit"])
def test_what_a_rank_loses_is_what_singular_values_say(family: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", family)
    model = load(family, base)
    only = [
        p for n, p in model.named_parameters() if p.ndim > 1 and n.endswith("weight") and ("h." in n or "layer" in n)
    ]
    randomise(only, 3, 0.05)
    save(model, tmp_path / "tuned", "9KB")
    result = gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=5)
    shares, total = lost_by_svd(read_model(base), read_model(tmp_path / "tuned"), 5)
    assert result.lost == pytest.approx(shares, rel=1e-5) and result.lost_share == pytest.approx(total, rel=1e-5)
    got, want, start = by_peft(tmp_path, family), read_model(tmp_path / "tuned"), read_model(base)
    for name, share in shares.items():
        left = (got[name].double() - want[name].double()).square().sum()
        assert float(left / (want[name].double() - start[name].double()).square().sum()) == pytest.approx(
            share, rel=1e-4
        )
    record = json.loads((tmp_path / "out/gradmerge.json").read_text())["output"]
    assert record["format"] == "adapter" and record["rank"] == 5 and record["lost"] == pytest.approx(shares, rel=1e-5)
    card = (tmp_path / "out/README.md").read_text()
    assert "library_name: peft" in card and f"{100 * total:.3g} %" in card


OTHERS: dict[str, dict[str, Any]] = {
    "ties": {"options": {"density": 0.3}},
    "dare": {"options": {"density": 0.5}},
    "slerp": {},
}


@pytest.mark.parametrize("method", OTHERS)
def test_methods_that_are_no_sums_are_factored_and_need_a_rank(method: str, tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, SECOND)
    models = models[:1] if method == "slerp" else models
    recipe = weighted(method, base, models, *[1.0] * len(models), **OTHERS[method])
    with pytest.raises(InputError, match=r"output\.rank"):
        gm.merge(recipe | {"output": {"format": "adapter"}}, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    want, got, result = both(recipe, tmp_path, "llama-untied", rank=16)
    assert_close(got, want, 2e-6)
    assert result.lost_share < 1e-10
    targets = {name for name in want if any(part in name for part in (*LLAMA, *(SECOND if len(models) > 1 else [])))}
    assert result.lost.keys() == targets  # and nothing else, by rounding


def test_factors_that_add_up_to_more_than_the_rank_are_cut_to_the_nearest(tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA, ["q_proj"])
    want, got, result = both(weighted("task-arithmetic", base, models, 1.0, 2.0), tmp_path, "llama-untied", rank=4)
    shares, total = lost_by_svd(read_model(base), want, 4)
    assert result.lost_share == pytest.approx(total, rel=1e-4) and total > 0.01
    for name in want:
        exact = name not in shares or shares[name] < 1e-9
        assert exact is bool(torch.allclose(got[name], want[name], atol=2e-6)), name


def test_dora_is_folded_into_the_adapter(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied")
    models = adapters_of(base, "llama-untied", tmp_path, {"r": 2, "target_modules": LLAMA, "use_dora": True})
    recipe = weighted("task-arithmetic", base, models, 1.0)
    with pytest.raises(InputError, match=r"output\.rank.*proj"):
        gm.merge(recipe | {"output": {"format": "adapter"}}, tmp_path / "out")
    want, got, _ = both(recipe, tmp_path, "llama-untied", rank=16)
    assert_close(got, want, 2e-6)


def test_a_base_stored_without_the_prefix_of_its_class_gives_an_adapter_that_peft_finds_the_modules_of(
    tmp_path: Path,
) -> None:
    """As GPT-2 on the Hub: `h.0…`, where the model has `transformer.h.0…`."""
    base = make_base(tmp_path / "base", "gpt2")
    save(moved(load("gpt2", base), 3), tmp_path / "tuned")
    config = json.loads((base / "config.json").read_text())
    for name in ("base", "tuned"):
        bare = {n.removeprefix("transformer."): v for n, v in read_model(tmp_path / name).items()}
        write_model(tmp_path / f"bare-{name}", bare, 2, config)
    gm.extract_lora(tmp_path / "bare-tuned", tmp_path / "out", base=tmp_path / "bare-base", rank=64)
    want = read_model(tmp_path / "tuned")
    got = by_peft(tmp_path, "gpt2")
    assert_close({name: got[name] for name in want}, want, 2e-6)


def test_a_narrow_type_of_the_base_does_not_round_the_difference(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama-untied", torch.bfloat16)
    write_adapter(base, "llama-untied", tmp_path / "adapter0", LoraConfig(r=2, target_modules=LLAMA, lora_alpha=0.002))
    recipe = weighted("ties", base, [str(tmp_path / "adapter0")], 1.0, options={"density": 1.0})
    gm.merge(recipe | {"output": {"format": "adapter", "rank": 2}}, tmp_path / "out")
    got, want = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("out", "adapter0"))
    for key in (key for key in want if key.endswith("lora_A.weight")):
        other = key.replace("lora_A", "lora_B")
        delta = want[other].double() @ want[key].double() * 0.001
        assert ((got[other].double() @ got[key].double()) - delta).norm() < 1e-4 * delta.norm(), key


def test_the_type_of_the_factors_follows_the_recipe(tmp_path: Path) -> None:
    base, models = llama(tmp_path, LLAMA)
    recipe = weighted("task-arithmetic", base, models, 1.0)
    for dtype, want in (("auto", torch.float32), ("bfloat16", torch.bfloat16)):
        gm.merge(recipe | {"output": {"format": "adapter", "dtype": dtype}}, tmp_path / dtype)
        tensors = load_file(tmp_path / dtype / "adapter_model.safetensors")
        assert {value.dtype for value in tensors.values()} == {want}


def test_a_merge_that_was_killed_goes_on_and_ends_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, models = llama(tmp_path, LLAMA, SECOND)
    recipe = weighted("ties", base, models, 1.0, 1.0) | {"output": {"format": "adapter", "rank": 3}}
    gm.merge(recipe, tmp_path / "x/out", block=50, threads=2)
    whole, calls = factored, []

    def dies(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(adapter_changes, "factored", dies)
    with pytest.raises(KeyboardInterrupt):
        gm.merge(recipe, tmp_path / "y/out", resume=True, threads=1)
    assert not (tmp_path / "y/out").exists()
    made = len(calls)
    gm.merge(recipe, tmp_path / "y/out", resume=True)
    matrices = 2 * len({*LLAMA, *SECOND})
    assert len(calls) - made == matrices - 3
    one, two = (sorted(p.name for p in (tmp_path / f / "out").iterdir()) for f in "xy")
    assert one == two == ["README.md", "adapter_config.json", "adapter_model.safetensors", "gradmerge.json"]
    same = [(tmp_path / f / "out/adapter_model.safetensors").read_bytes() for f in "xy"]
    assert same[0] == same[1]
    assert gm.merge(recipe, tmp_path / "y/out", resume=True).already_done


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "whole models without a rank": ({}, "output.rank"),
    "curvature": ({"method": "gradient-matching", "output": {"curvature": True, "rank": 4}}, "output.curvature"),
    "no base": ({"method": "average", "base": None, "output": {"rank": 4}}, "base"),
    "a rank for a model": ({"output": {"format": "model", "rank": 4}}, "output.rank"),
    "another vocabulary": ({"tokenizer": "union", "output": {"rank": 4}}, "vocabulary"),
    "nothing for LoRA": ({"include": ["*norm*"], "output": {"rank": 4}}, "base"),
    "the base itself": ({"models": ["BASE"], "output": {"rank": 4}}, "base"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_cannot_be_written_are_refused(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    base = make_base(tmp_path / "base", "llama-untied")
    save(moved(load("llama-untied", base), 3), tmp_path / "tuned")
    recipe = {"method": "task-arithmetic", "base": str(base), "models": [str(tmp_path / "tuned")]} | changes
    if recipe["models"] == ["BASE"]:
        recipe["models"] = [str(base)]
    if recipe["method"] == "gradient-matching":
        recipe |= {"base": {"model": str(base), "curvature": {"identity": 1.0}}}
        recipe["models"] = [{"model": str(tmp_path / "tuned"), "curvature": {"identity": 1.0}}]
    recipe["output"] = {"format": "adapter"} | changes.get("output", {})
    with pytest.raises(InputError, match=message):
        gm.merge({k: v for k, v in recipe.items() if v is not None}, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.gradmerge-partial").exists()


def test_experts_that_transformers_fuses_are_refused_in_an_adapter(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "mixtral")
    save(moved(load("mixtral", base), 3), tmp_path / "tuned")
    with pytest.raises(InputError, match="experts"):
        gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=4)
    gm.extract_lora(tmp_path / "tuned", tmp_path / "out", base=base, rank=64, exclude=["*experts*"])
    want, got = read_model(tmp_path / "tuned"), by_peft(tmp_path, "mixtral")
    start = read_model(base)
    assert_close(got, {name: (start if "experts" in name else want)[name] for name in want}, 1e-6)


def test_an_adapter_on_an_adapter_is_refused_as_base(tmp_path: Path) -> None:
    _, models = llama(tmp_path, LLAMA, SECOND)
    recipe = {"method": "task-arithmetic", "base": models[0], "models": [models[1]], "output": {"format": "adapter"}}
    with pytest.raises(InputError, match="adapter0"):
        gm.merge(recipe, tmp_path / "out")
