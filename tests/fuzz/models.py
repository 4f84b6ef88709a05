"""Kinds of input that a merge opens: weights, indexes, configs, adapters, pickles, tokenizers, recipes, names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import save

import gradmerge as gm
from gradmerge.checkpoints import open_checkpoint
from gradmerge.checkpoints.checkpoint import Buffers
from gradmerge.recipe import make_recipe
from gradmerge.yaml import parse_yaml
from tests.making import near, random_curvature, random_state, write_model

from .mutate import (
    PATHS,
    WRONG,
    Draw,
    edited,
    edited_value,
    json_file,
    saved,
    tensor_file,
    tensor_values,
    torch_file,
    yaml_of,
)
from .trial import MACHINE, WORKED, Broken, Case, Kind, command

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
    {"method": "slerp", "models": ["a"]},
    {"method": "gradient-matching"},
    {"method": "fisher-averaging"},
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

    stays_inside = True
    changes = st.sampled_from(METHODS[:4]).flatmap(
        lambda method: st.sampled_from(
            [method] * 8 + [method | {"output": out} for out in ({"dtype": "bfloat16"}, {"shard_size": "100"})]
        )
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


class BaseWeights(Weights):
    """The base's safetensors file, of which a merge copies what it does not merge."""

    name, share = "safetensors-base", 5.0
    file = "base/model.safetensors"
    changes = st.sampled_from([{"models": ["a"], "include": include} for include in (["*"], ["b.weight"])])


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
    """`config.json` of the base or a model."""

    name, share = "config", 7.0
    files = ("config.json",)
    commands = st.sampled_from([None] * 20 + [[], ["--json"], ["--tensors"]])

    def case(self, draw: Draw) -> Case:
        name = f"{draw(st.sampled_from(['a', 'base', 'base']))}/{draw(st.sampled_from(self.files))}"
        how = {"changes": draw(self.changes), "inspect": draw(self.commands)}
        return Case({name: draw(json_file(self.place.original(name)))}, how=how)

    def read(self, changes: dict[str, Any] = METHODS[0], inspect: list[str] | None = None) -> None:
        if inspect is None:
            self.merge(recipe(**changes))
        else:
            command("inspect", "base", "a", "b", *inspect)


class SideFiles(Config):
    """Tokenizers and the other small files, which a merge compares and copies."""

    name, share = "side-files", 4.0
    files = ("tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")  # type: ignore[assignment]


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
    stays_inside = False  # an adapter names its base

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


class PickleIndex(Merging):
    """The index of a pickled model in several files."""

    name, share = "pickle-index", 2.0
    file = "p/pytorch_model.bin.index.json"

    def make(self) -> None:
        write_models()
        Path("p").mkdir()
        parts = {
            "pytorch_model-1.bin": {"a.weight": torch.ones(4, 3)},
            "pytorch_model-2.bin": {"b.weight": torch.ones(2, 4)},
        }
        for name, state in parts.items():
            torch.save(state, Path("p") / name)
        places = {tensor: name for name, state in parts.items() for tensor in state}
        Path(self.file).write_text(json.dumps({"metadata": {}, "weight_map": places}))

    def case(self, draw: Draw) -> Case:
        return Case({self.file: draw(json_file(self.place.original(self.file)))})

    def read(self) -> None:
        read_all("p", allow_pickle=True)


RECIPE: dict[str, Any] = {
    "method": "gradient-matching",
    "base": {"model": "base", "curvature": {"identity": 1.0}},
    "models": [{"model": "a", "curvature": "a/curvature", "weight": 0.7}, {"model": "b", "weight": 1}],
    "reduction": "mean",
    "damping": 1e-8,
    "include": ["*"],
    "exclude": ["*.bias"],
    "missing": "zero",
    "options": {},
    "output": {"dtype": "float32", "shard_size": "5GB", "curvature": True},
}


class Recipes(Merging):
    """A recipe file."""

    name, share = "recipe", 9.0
    stays_inside = False  # a recipe names any path

    def make(self) -> None:
        write_models(curvature=True)
        Path("recipe.yml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))

    def case(self, draw: Draw) -> Case:
        value = RECIPE | draw(st.sampled_from([{}, *METHODS]))
        return Case({"recipe.yml": draw(yaml_of(value))}, how={"dry_run": draw(st.integers(0, 19)) == 0})

    def read(self, dry_run: bool = False) -> None:
        if dry_run:
            command("merge", "recipe.yml", "--dry-run")
        else:
            gm.merge("recipe.yml", self.place.out, threads=1)


class Mappings(Kind):
    """A recipe given as a mapping, and YAML on its own."""

    name, share = "recipe-mapping", 7.0

    def make(self) -> None:
        pass

    def case(self, draw: Draw) -> Case:
        value = draw(edited_value(RECIPE))
        text = draw(st.none() | edited(yaml.safe_dump(value).encode("utf-8", "replace")))
        return Case(how={"value": value, "text": text})

    def read(self, value: Any = RECIPE, text: bytes | None = None) -> None:
        if text is not None:
            parse_yaml(text, "here")
        make_recipe(value)


NAMES = [
    *["a=b", "a:b", "a b", "a\nb", "a\tb", "\x1b[2J", "é", "ﬀ", "a" * 200, "-a", "--help", "base=", "=1", "a@b", "~"],
    *["~a", "a%20b", "<b>", "a'b\"", "a\udcff", "\u202eb", "=cmd()", "a\\b", "${HOME}", "*", "[a]", "a#b", "{}"],
    *["a|b", "...", ".a", "curvature", "a.safetensors", "identity:1"],
]


class Names(Merging):
    """Folders with strange names, in all places where a name is read or shown."""

    name, share = "names", 3.0
    stays_inside = False
    ways = ("model", "base", "merge", "inspect", "weight", "inspect alone")

    def case(self, draw: Draw) -> Case:
        name = "".join(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=3)))
        while len(os.fsencode(name)) > 240:
            name = name[:-1]
        name += "x" if name in ("~", "...", "a", "b", "base") else ""
        files = {f"{name}/{file}": self.place.original(f"a/{file}") for file in ("config.json", "model.safetensors")}
        return Case(
            files, how={"named": draw(st.sampled_from(["", "./"])) + name, "way": draw(st.sampled_from(self.ways))}
        )

    def read(self, named: str = "a", way: str = "model") -> None:
        if way == "model":
            self.merge(recipe(models=[named, "b"]))
        elif way == "base":
            self.merge(recipe(base=named))
        elif way == "merge":
            command("merge", "-m", "average", "--base", "base", "--model", named, "-o", str(self.place.out))
        elif way == "weight":
            command("merge", "-m", "task-arithmetic", "--base", "base", f"--model={named}=0.5", "--dry-run")
        else:
            command("inspect", *(["base", "--json"] if way == "inspect" else []), "--", named)


WORDS = [
    *["--method", "-m", "--base", "--model", "--curvature", "--set", "--threads", "--device", "--resume"],
    *["--dry-run", "--allow-pickle", "--json", "--quiet", "--exclude", "--tensors", "--dataset-size"],
    *["--limit", "--data", "--weights", "--methods", "--suggest", "--force", "--", "-h"],
    *["--version", "base", "a", "b", "a=0.5", "b=nan", "a=-1", "a=1e400", "a==1", "=", "a=", "=0.5", "average"],
    *["ties", "slerp", "gradient-matching", "removal", "recipe.yml", "density=0.5", "damping=1e-8", "damping=.nan"],
    *["options.x=1", "models[0].weight=2", "models[9].weight=2", "models.0=5", "base.curvature.identity=1"],
    *["output.dtype=int8", "include=[a*]", "x=y", "[=1", "damping=!!python/object:x y", "damping=1:2:3"],
    *["base=&a [*a]", "output={shard_size: 0}", "a/curvature", "base=identity:1", "identity:x", "identity:1e400"],
    *["a=identity:0", "cpu", "cuda:7", "meta", "0", "-1", "1", "9" * 400, "", " ", "\udcff", "é", "\x1b[31m"],
    *["0:1:0.5", "1:0:0.1", "0:1:0", "0:1:1e-12", "0,nan", "a=0:1:0.5", "c=0:1", "a=data.jsonl", "worst", "sum", "*"],
    *["[", "*.bias", "0.5", "nan", "inf"],
]
GRADIENT_MATCHING = ["--method", "gradient-matching", "--base", "base", "--model", "a"]
LINES = [
    ["merge", "recipe.yml", "--threads", "1"],
    ["merge", "recipe.yml", "--set", "damping=0.1", "--method", "fisher-averaging"],
    ["merge", "--method", "ties", "--base", "base", "--model", "a=0.7", "--model", "b", "--set", "density=0.3"],
    ["merge", *GRADIENT_MATCHING, "--curvature", "identity:1", "--curvature", "a/curvature"],
    ["remove", "--base", "base", "--model", "a=0.8", "--set", "damping=1.0"],
    ["remove", "--base", "base", "--model", "a", "--method", "negation"],
    ["inspect", "base", "a", "--exclude", "*.bias"],
    ["inspect", "a", "--tensors", "--json"],
    ["methods", "ties"],
    ["methods", "--json"],
    ["curvature", "show", "a/curvature"],
    ["curvature", "import", "a"],
    ["preview", "recipe.yml", "--weights", "0:1:0.5"],
    ["preview", "recipe.yml", "--suggest"],
    ["diagnose", "recipe.yml"],
    ["evaluate", "a", "--data", "data.jsonl"],
    ["curvature", "estimate", "a", "--data", "data.jsonl", "--limit", "2"],
]
#: Commands that do not write, and so know no -o.
ONLY_READ = {"inspect", "methods", "evaluate"}


class CommandLine(Kind):
    """Words of the command line. OUT stays what it is, so that no case can write anywhere else."""

    name, share = "command-line", 4.0

    def make(self) -> None:
        write_models(curvature=True)
        Path("recipe.yml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))
        Path("data.jsonl").write_text('{"text": "a", "label": 0}\n')

    def case(self, draw: Draw) -> Case:
        words = list(draw(st.sampled_from(LINES)))
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            place = draw(st.integers(1, len(words)))
            own = words[place : place + 1]
            changes: list[list[str]] = [[], [draw(st.sampled_from(WORDS))], [draw(st.sampled_from(WORDS)), *own]]
            words[place : place + 1] = draw(st.sampled_from([*changes, *([self.changed(draw, word)] for word in own)]))
        return Case(how={"words": words})

    def changed(self, draw: Draw, word: str) -> str:
        if "=" in word and draw(st.booleans()):
            return word.partition("=")[0] + "=" + str(draw(st.sampled_from([*PATHS, *WRONG])))
        changed = os.fsdecode(draw(edited(os.fsencode(word)))[:500].replace(b"\x00", b""))
        # No option that writes, and no path that leads elsewhere.
        return changed if not changed.startswith(("-", "/", "~", "..")) else "x" + changed

    def read(self, words: list[str] = LINES[0]) -> None:
        self.words = list(words)
        if words[0] not in ONLY_READ and words[1:2] != ["show"]:
            self.words += ["-o", str(self.place.out)]
        command(*self.words)

    def check(self, outcome: str) -> None:
        if self.words[0] in ("merge", "remove"):
            super().check(outcome)
        elif any(self.place.out.parent.iterdir()) and outcome not in (WORKED, MACHINE):
            raise Broken("something was left of a request that was refused")


FOLDERS: list[type[Kind]] = [Weights, BaseWeights, Index, Config, SideFiles, Adapters, Pickles, PickleIndex]
KINDS: list[type[Kind]] = [*FOLDERS, Recipes, Mappings, Names, CommandLine]
