"""Kinds of input that a merge opens: weights, indexes, configs, adapters, pickles, tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save

import gradmerge as gm
from gradmerge.checkpoints import open_checkpoint
from gradmerge.checkpoints.checkpoint import Buffers
from tests.making import near, random_curvature, random_state, write_model

from .mutate import Draw, json_file, saved, tensor_file, tensor_values, torch_file
from .trial import Broken, Case, Kind, command

SHAPES = {"embed.weight": (6, 4), "a.weight": (4, 3), "a.bias": (4,), "norm.weight": (4,), "b.weight": (2, 4)}
CONFIG: dict[str, Any] = {
    "architectures": ["BertForSequenceClassification"],
    "model_type": "bert",
    "vocab_size": 6,
    "hidden_size": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "intermediate_size": 4,
    "max_position_embeddings": 8,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "id2label": {"0": "no", "1": "yes"},
    "label2id": {"no": 0, "yes": 1},
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "text_config": {"vocab_size": 6},
    "_name_or_path": "base",
    "quantization_config": None,
    "num_labels": 2,
    "auto_map": {},
}
TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    "model": {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, "unk_token": "<unk>"},
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "chat_template": "{{ messages }}",
    "model_max_length": 64,
}
METHODS: list[dict[str, Any]] = [
    {"method": "average"},
    {"method": "task-arithmetic", "models": ["a", {"model": "b", "weight": 0.5}]},
    {"method": "ties", "options": {"density": 0.5}},
    {"method": "dare", "options": {"density": 0.5}},
]


def write_models(*, shards: int = 1, curvature: bool = False) -> None:
    """`base`, `a` and `b` in the working directory, with configs and tokenizers, and their curvature if wanted."""
    base = random_state(0, SHAPES)
    for name, state in (("base", base), ("a", near(base, 1)), ("b", near(base, 2))):
        write_model(Path(name), state | {"step": torch.tensor([3])}, shards, CONFIG)
        for file, value in (("tokenizer.json", TOKENIZER), ("tokenizer_config.json", TOKENIZER_CONFIG)):
            (Path(name) / file).write_text(json.dumps(value))
        (Path(name) / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.7}')
        if curvature:
            random_curvature(5, state).save(Path(name) / "curvature")


def recipe(**changes: Any) -> dict[str, Any]:
    return {"method": "average", "base": "base", "models": ["a", "b"], **changes}


def read_all(reference: str, **settings: Any) -> None:
    """Open a checkpoint and read every tensor; those of safetensors are bytes of its files."""
    with open_checkpoint(reference, **settings) as checkpoint:
        files = [path.read_bytes() for path in checkpoint.files()]
        for name, info in checkpoint.tensors.items():
            if info.numel > 1_000_000:
                raise Broken(f"{name}: more elements than the file has bytes")
            values = checkpoint.read(name, 0, info.numel, Buffers())
            if values.numel() != info.numel:
                raise Broken(f"{name}: {values.numel()} elements instead of {info.numel}")
            if not settings and not any(values.view(torch.uint8).numpy().tobytes() in content for content in files):
                raise Broken(f"{name}: bytes that are in no file")


class Merging(Kind):
    """A kind whose cases end in a merge of `base`, `a` and `b`."""

    changes = st.sampled_from(
        [*METHODS, *METHODS, {"output": {"dtype": "bfloat16"}}, {"output": {"shard_size": "100"}}]
    )

    def make(self) -> None:
        write_models()

    def merge(self, given: dict[str, Any], **settings: Any) -> None:
        gm.merge(given, self.place.out, threads=1, **settings)


class Weights(Merging):
    """A model's safetensors file."""

    name, share = "safetensors", 14.0
    file = "a/model.safetensors"

    def case(self, draw: Draw) -> Case:
        raw = self.place.original(self.file)
        change = draw(st.sampled_from([tensor_file] * 9 + [tensor_values]))
        return Case({self.file: draw(change(raw))}, how={"changes": draw(self.changes)})

    def read(self, changes: dict[str, Any] = METHODS[0]) -> None:
        read_all(self.file.partition("/")[0])
        self.merge(recipe(**changes))


class Index(Merging):
    """The index of a model in several files."""

    name, share = "index", 7.0

    def make(self) -> None:
        write_models(shards=2)

    def case(self, draw: Draw) -> Case:
        name = f"{draw(st.sampled_from(['a', 'base']))}/model.safetensors.index.json"
        return Case({name: draw(json_file(self.place.original(name)))}, how={"changes": draw(self.changes)})

    def read(self, changes: dict[str, Any] = METHODS[0]) -> None:
        read_all("a")
        self.merge(recipe(**changes))


class Config(Merging):
    """The configs and the tokenizer of the base or a model, which a merge compares and copies."""

    name, share = "config", 7.0
    files = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")

    def case(self, draw: Draw) -> Case:
        name = f"{draw(st.sampled_from(['a', 'base', 'base']))}/{draw(st.sampled_from(self.files))}"
        how = {"changes": draw(self.changes), "inspect": draw(st.sampled_from([False] * 20 + [True]))}
        return Case({name: draw(json_file(self.place.original(name)))}, how=how)

    def read(self, changes: dict[str, Any] = METHODS[0], inspect: bool = False) -> None:
        if inspect:
            command("inspect", "base", "a", "b", "--tensors")
        else:
            self.merge(recipe(**changes))


ADAPTER: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "alpha_pattern": {"a": 8},
    "rank_pattern": {"a": 2},
    "use_rslora": False,
    "fan_in_fan_out": False,
    "base_model_name_or_path": "base",
    "modules_to_save": ["b"],
    "target_modules": ["a"],
    "bias": "none",
    "task_type": "SEQ_CLS",
    "use_dora": False,
    "layers_to_transform": None,
    "exclude_modules": None,
    "trainable_token_indices": None,
}


class Adapters(Merging):
    """A LoRA adapter, or one with DoRA: its config or its weights. It comes out merged, or as one."""

    name, share = "adapter", 9.0

    def make(self) -> None:
        write_models()
        Path("adapter").mkdir()
        tensors = {
            "base_model.model.a.lora_A.weight": torch.ones(2, 3),
            "base_model.model.a.lora_B.weight": torch.ones(4, 2),
            "base_model.model.b.weight": torch.ones(2, 4),
        }
        Path("adapter/adapter_model.safetensors").write_bytes(save(tensors))
        Path("adapter/adapter_config.json").write_text(json.dumps(ADAPTER))
        Path("dora").mkdir()
        del tensors["base_model.model.b.weight"]
        tensors["base_model.model.a.lora_magnitude_vector"] = torch.ones(4)
        Path("dora/adapter_model.safetensors").write_bytes(save(tensors))
        more = {"use_dora": True, "modules_to_save": None}
        Path("dora/adapter_config.json").write_text(json.dumps(ADAPTER | more))

    def case(self, draw: Draw) -> Case:
        folder = draw(st.sampled_from(["adapter", "dora"]))
        file = draw(st.sampled_from(["adapter_config.json", "adapter_model.safetensors"]))
        name = f"{folder}/{file}"
        change = json_file if file.endswith(".json") else tensor_file
        how = {"folder": folder, "format": draw(st.sampled_from(["model", "model", "adapter"]))}
        return Case({name: draw(change(self.place.original(name)))}, how=how)

    def read(self, folder: str = "adapter", format: str = "model") -> None:
        models = [folder] if format == "adapter" else [folder, "a"]
        self.merge(recipe(method="task-arithmetic", models=models, output={"format": format}))


class Pickles(Merging):
    """A model saved by `torch.save`, as an archive or in the older form, read with --allow-pickle."""

    name, share = "pickle", 10.0

    def make(self) -> None:
        write_models()
        self.state = random_state(0, SHAPES)
        self.state["a.weight"] = torch.ones(3, 4).t()  # not one run of the file
        Path("p").mkdir()
        Path("p/pytorch_model.bin").write_bytes(saved(self.state))
        Path("p/config.json").write_text(json.dumps(CONFIG))

    def case(self, draw: Draw) -> Case:
        value = draw(st.sampled_from([self.state, {"state_dict": self.state}]))
        return Case(
            {"p/pytorch_model.bin": draw(torch_file(value))}, how={"base": draw(st.sampled_from(["p", "base"]))}
        )

    def read(self, base: str = "base") -> None:
        read_all("p", allow_pickle=True)
        self.merge(recipe(base=base, models=["p"]), allow_pickle=True)


KINDS: list[type[Kind]] = [Weights, Index, Config, Adapters, Pickles]
