"""Diffusers pipelines and their parts, timm folders, and plain state dicts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError
from tests.making import assert_close, near, random_state, read_model, write_model

PARTS = {
    "unet": {"conv_in.weight": (4, 3, 3, 3), "down_blocks.0.attn.to_q.weight": (8, 8)},
    "vae": {"encoder.conv_in.weight": (4, 3), "quant_conv.bias": (4,)},
    "text_encoder": {"text_model.embeddings.token_embedding.weight": (20, 8)},
}
STEM = "diffusion_pytorch_model"


def write_pipeline(folder: Path, states: dict[str, dict[str, Tensor]], shards: int = 1, **unet: Any) -> Path:
    """As diffusers saves a pipeline: each part in a folder, those of its own under another name than transformers'."""
    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": "0.30.0"}
    for part, state in states.items():
        config = {"_class_name": part, "act_fn": "silu", **(unet if part == "unet" else {})}
        place = write_model(folder / part, state, shards if part == "unet" else 1, config)
        if part != "text_encoder":
            for path in list(place.glob("model*")):
                path.rename(path.with_name(path.name.replace("model", STEM, 1)))
            listed = place / f"{STEM}.safetensors.index.json"
            if listed.is_file():
                listed.write_text(listed.read_text().replace('"model-', f'"{STEM}-'))
        index[part] = ["transformers" if part == "text_encoder" else "diffusers", part]
    for part, name in (("scheduler", "scheduler_config.json"), ("tokenizer", "vocab.json")):
        (folder / part).mkdir()
        (folder / part / name).write_text('{"a": 1}')
        index[part] = ["diffusers", part]
    (folder / "scheduler" / "notes.py").write_text("secret")
    index |= {"safety_checker": [None, None], "requires_safety_checker": False}
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def write_three(folder: Path) -> tuple[list[Path], list[dict[str, dict[str, Tensor]]]]:
    base = {part: random_state(seed, shapes) for seed, (part, shapes) in enumerate(PARTS.items())}
    states = [base] + [{part: near(state, seed) for part, state in base.items()} for seed in (7, 8)]
    names = ("base", "a", "b")
    return [write_pipeline(folder / n, s, k) for k, (n, s) in enumerate(zip(names, states, strict=True), 1)], states


def merged(states: list[dict[str, Tensor]], weight: float = 0.3) -> dict[str, Tensor]:
    base, *tuned = states
    return {
        n: (v.double() + sum(weight * (t[n].double() - v.double()) for t in tuned)).float() for n, v in base.items()
    }


@pytest.mark.parametrize(("include", "shard_size"), [(["*"], "5GB"), (["unet/*"], "300B")])
def test_parts_are_merged_or_copied_and_the_folder_stays_a_pipeline(
    include: list[str], shard_size: str, tmp_path: Path
) -> None:
    folders, states = write_three(tmp_path)
    recipe = {
        "method": "task-arithmetic",
        "base": str(folders[0]),
        "models": [{"model": str(folder), "weight": 0.3} for folder in folders[1:]],
        "include": include,
        "output": {"shard_size": shard_size},
    }
    result = gm.merge(recipe, tmp_path / "out")
    out = tmp_path / "out"
    assert result.merged == (2 if include == ["unet/*"] else 5)
    for part in PARTS:
        every = [state[part] for state in states]
        stem = "model" if part == "text_encoder" else STEM
        assert_close(read_model(out / part), merged(every) if part == "unet" or include == ["*"] else every[0])
        assert all(path.name.startswith(stem) for path in (out / part).glob("*.safetensors*"))
    for name in ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/vocab.json", "unet/config.json"):
        assert (out / name).read_bytes() == (folders[0] / name).read_bytes()
    assert not (out / "scheduler" / "notes.py").exists()
    gm.merge({"method": "average", "models": [str(out), str(folders[1])]}, tmp_path / "again")


def test_a_part_merges_alone_and_into_a_pipeline(tmp_path: Path) -> None:
    folders, states = write_three(tmp_path)
    want = merged([state["unet"] for state in states[:2]])
    model = {"model": str(folders[1] / "unet"), "weight": 0.3}
    gm.merge({"method": "task-arithmetic", "base": str(folders[0] / "unet"), "models": [model]}, tmp_path / "part")
    assert_close(load_file(tmp_path / "part" / f"{STEM}.safetensors"), want)
    recipe = {"method": "task-arithmetic", "base": str(folders[0]), "models": [model | {"rename": {"": "unet/"}}]}
    gm.merge(recipe | {"include": ["unet/*"]}, tmp_path / "whole")
    assert_close(read_model(tmp_path / "whole" / "unet"), want)
    assert_close(read_model(tmp_path / "whole" / "vae"), states[0]["vae"])
    with pytest.raises(InputError, match="rename"):
        gm.merge(recipe | {"models": [str(folders[1] / "unet")]}, tmp_path / "out")


def test_a_pipeline_whose_list_of_parts_is_wrong_is_refused(tmp_path: Path) -> None:
    folders, _ = write_three(tmp_path)
    index = json.loads((folders[1] / "model_index.json").read_text())
    recipe = {"method": "average", "models": [str(folder) for folder in folders]}
    for name in ("nowhere", "../a", "unet/.."):
        (folders[1] / "model_index.json").write_text(json.dumps(index | {name: ["diffusers", "UNet"]}))
        with pytest.raises(InputError):
            gm.merge(recipe, tmp_path / "out")
    (folders[1] / "model_index.json").write_text(json.dumps(index))
    (folders[1] / "vae").rename(tmp_path / "vae")
    (folders[1] / "vae").symlink_to(tmp_path / "vae")
    with pytest.raises(InputError, match="vae"):
        gm.merge(recipe, tmp_path / "out")


# timm and plain state dicts

SHAPES = {"patch_embed.proj.weight": (8, 3, 4, 4), "blocks.0.attn.qkv.weight": (24, 8), "head.weight": (3, 8)}
TIMM = {
    "architecture": "vit_tiny_patch16_224",
    "num_classes": 3,
    "global_pool": "token",
    "pretrained_cfg": {"tag": "x"},
}


def write_timm(folder: Path, state: dict[str, Tensor], pickled: bool = False, **changes: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TIMM | changes))
    if pickled:
        torch.save(state, folder / "pytorch_model.bin")
    else:
        save_file(state, folder / "model.safetensors")
    return folder


def test_timm_folders_merge_and_another_architecture_is_refused(tmp_path: Path) -> None:
    base = random_state(0, SHAPES)
    one, two = write_timm(tmp_path / "base", base), write_timm(tmp_path / "a", near(base, 1), pickled=True)
    recipe = {"method": "task-arithmetic", "base": str(one), "models": [{"model": str(two), "weight": 0.3}]}
    gm.merge(recipe, tmp_path / "out", allow_pickle=True)
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), merged([base, near(base, 1)]))
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == TIMM
    write_timm(tmp_path / "other", near(base, 1), architecture="deit_tiny_patch16_224")
    with pytest.raises(InputError, match="architecture"):
        gm.merge({"method": "average", "base": str(one), "models": [str(tmp_path / "other")]}, tmp_path / "refused")


@pytest.mark.parametrize("wrapper", ["", "state_dict"])
def test_state_dicts_of_training_programs_merge_with_plain_files(wrapper: str, tmp_path: Path) -> None:
    base = random_state(0, SHAPES)
    save_file(base, tmp_path / "base.safetensors")
    parallel = {f"module.{name}": value for name, value in near(base, 1).items()}
    torch.save({wrapper: parallel, "epoch": 3, "optimizer": {"lr": 0.1}} if wrapper else parallel, tmp_path / "a.pt")
    model: dict[str, Any] = {"model": str(tmp_path / "a.pt")}
    recipe = {"method": "task-arithmetic", "base": str(tmp_path / "base.safetensors"), "models": [model]}
    with pytest.raises(InputError, match="rename"):
        gm.merge(recipe, tmp_path / "out", allow_pickle=True)
    model["rename"] = {"module.": ""}
    gm.merge(recipe, tmp_path / "out", allow_pickle=True)
    assert_close(load_file(tmp_path / "out" / "model.safetensors"), near(base, 1))
