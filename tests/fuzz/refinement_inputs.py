"""Inputs of `calibrate` and `distill`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import gradmerge as gm

TEXTS = {"a": ["a good film", "great music", "i loved it"], "b": ["the plot was bad", "paris is blue", "very dull"]}


def write_refinement_inputs() -> None:
    """Write `base`, `a`, `b`, their merge and unlabeled rows into the working directory."""
    from tests.tasks.making import tiny_llama_checkpoint

    tiny_llama_checkpoint(Path("base"), hidden_size=8, intermediate_size=8)
    for seed, (name, texts) in enumerate(TEXTS.items()):
        shutil.copytree("base", name)
        generator = torch.Generator().manual_seed(seed)
        state = load_file(f"{name}/model.safetensors")
        for key, value in state.items():
            state[key] = value + 0.3 * value.std(correction=0) * torch.randn(value.shape, generator=generator)
        save_file(state, f"{name}/model.safetensors", {"format": "pt"})
        Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    gm.merge({"method": "average", "base": "base", "models": ["a", "b"]}, "merged", progress=False)
