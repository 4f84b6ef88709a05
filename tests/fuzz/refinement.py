"""Kinds of input that `calibrate` reads: weights, configs, tokenizers, records and rows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import gradmerge as gm

from .data import config_file
from .mutate import Draw, edited, json_file, tensor_file, tensor_values
from .trial import Case, Kind

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


class Calibrate(Kind):
    """What a calibration reads."""

    name, share = "calibrate", 1.5
    options = st.fixed_dictionaries(
        {},
        optional={
            "curvature": st.sampled_from(["none", "merge"]),
            "cache_memory": st.sampled_from([1, 1000]),
            "ridge": st.sampled_from([0.0, 1e-9]),
            "alpha": st.sampled_from([0.0, 1.0]),
        },
    )

    def make(self) -> None:
        write_refinement_inputs()

    def case(self, draw: Draw) -> Case:
        model = draw(st.sampled_from(["merged", "a"]))
        changes: dict[str, Any] = {
            f"{model}/model.safetensors": draw(st.sampled_from([tensor_file, tensor_values, tensor_values])),
            f"{model}/config.json": config_file,
            "merged/tokenizer.json": json_file,
            "merged/gradmerge.json": json_file,
            "a.jsonl": edited,
        }
        file = draw(st.sampled_from(list(changes)))
        return Case({file: draw(changes[file](self.place.original(file)))}, how=draw(self.options))

    def read(self, **options: Any) -> None:
        data = {name: f"{name}.jsonl" for name in TEXTS}
        options = {"curvature": "none", "batch_size": 2, "device": "cpu", **options}
        gm.calibrate("merged", data, out=self.place.out, progress=False, **options)


KINDS: list[type[Kind]] = [Calibrate]
