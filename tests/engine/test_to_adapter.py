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
from gradmerge.errors import InputError
from tests.checkpoints.families import load, moved, save
from tests.checkpoints.test_lora import LLAMA, edit_config, make_base, merged_by_peft, tune
from tests.making import assert_close, read_model

SECOND = ["q_proj", "k_proj", "up_proj"]


def adapters_of(base: Path, family: str, tmp_path: Path, *settings: Mapping[str, Any]) -> list[str]:
    for place, one in enumerate(settings):
        tune(base, family, tmp_path / f"adapter{place}", LoraConfig(**one), seed=place + 1)
    return [str(tmp_path / f"adapter{place}") for place in range(len(settings))]


def both(recipe: dict[str, Any], tmp_path: Path, family: str, rank: int | None = None) -> tuple[Any, ...]:
    """The recipe as a model, and as an adapter that PEFT puts on the base."""
    gm.merge(recipe, tmp_path / "model")
    output = {"format": "adapter"} | ({"rank": rank} if rank is not None else {})
    result = gm.merge(recipe | {"output": recipe.get("output", {}) | output}, tmp_path / "out")
    return read_model(tmp_path / "model"), by_peft(tmp_path, family), result


def by_peft(tmp_path: Path, family: str, out: str = "out") -> dict[str, Tensor]:
    wrapped = PeftModel.from_pretrained(load(family, tmp_path / "base"), tmp_path / out)
    keys = {name.replace(".default", "") for name in wrapped.state_dict()}
    lost = [k for k in load_file(tmp_path / out / "adapter_model.safetensors") if not _known(k, keys)]
    assert not lost, lost
    return merged_by_peft(wrapped, tmp_path / f"{out}-by-peft")


def _known(key: str, keys: set[str]) -> bool:
    module, _, parameter = key.rpartition(".")
    parent, _, last = module.rpartition(".")
    return any(
        k in keys
        for k in (key, f"{module}.modules_to_save.{parameter}", f"{parent}.modules_to_save.{last}.{parameter}")
    )


EXACT: dict[str, tuple[str, list[dict[str, Any]]]] = {
    "other ranks and targets": (
        "llama-untied",
        [{"r": 4, "lora_alpha": 9, "target_modules": LLAMA}, {"r": 2, "target_modules": SECOND}],
    ),
    "patterns and rslora": (
        "llama-untied",
        [
            {"r": 4, "target_modules": LLAMA, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 20}},
            {"r": 3, "target_modules": ["q_proj", "o_proj"], "use_rslora": True},
        ],
    ),
    "some layers": (
        "llama-untied",
        [{"r": 2, "target_modules": LLAMA, "layers_to_transform": [1]}, {"r": 2, "target_modules": ["v_proj"]}],
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
    "a classifier saved whole": (
        "bert",
        [{"r": 2, "target_modules": ["query"], "task_type": "SEQ_CLS"}, {"r": 3, "target_modules": ["key", "query"]}],
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
LINEAR: dict[str, dict[str, Any]] = {
    "task-arithmetic": {"weights": [0.7, -0.4]},
    "average": {"weights": [1, 1]},
    "weighted-average": {"weights": [0.5, 2.0]},
}


@pytest.mark.parametrize("case", EXACT)
def test_adapters_in_one_adapter_out_that_peft_makes_the_merged_model_of(case: str, tmp_path: Path) -> None:
    family, settings = EXACT[case]
    base = make_base(tmp_path / "base", family)
    models = adapters_of(base, family, tmp_path, *settings)
    recipe = {
        "method": "task-arithmetic",
        "base": str(base),
        "models": [{"model": m, "weight": w} for m, w in zip(models, (0.7, -0.4), strict=True)],
    }
    want, got, result = both(recipe, tmp_path, family)
    assert_close(got, want, 1e-6)
    assert result.lost_share == 0 and set(result.lost.values()) == {0.0}
    again = gm.merge({"method": "average", "base": str(base), "models": [str(tmp_path / "out")]}, tmp_path / "again")
    assert_close(read_model(tmp_path / "again"), want, 1e-6)
    assert not [note for note in again.notes if "trained on" in note]
