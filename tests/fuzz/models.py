"""Kinds of input that a merge opens: weights, indexes, configs, adapters, pickles, tokenizers, recipes, names."""

from __future__ import annotations

import io
import json
import os
import random
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save

import gradmerge as gm
from gradmerge.checkpoints import open_checkpoint
from gradmerge.checkpoints.model import Buffers
from gradmerge.recipe import make_recipe
from gradmerge.safe_yaml import parse_yaml
from tests.making import near, random_curvature, random_state, write_model

from .mutate import (
    WRONG,
    mutate_file,
    mutate_json_file,
    mutate_numbers,
    mutate_text,
    mutate_torch,
    mutate_value,
    mutate_yaml,
)
from .trial import MACHINE, WORKED, Broken, Kind, command

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
    """Open a checkpoint and read every tensor."""
    with open_checkpoint(reference, **settings) as checkpoint:
        for name, info in checkpoint.tensors.items():
            if info.numel > 1_000_000:
                raise Broken(f"{name}: more elements than the file has bytes")
            values = checkpoint.read(name, 0, info.numel, Buffers())
            if values.numel() != info.numel:
                raise Broken(f"{name}: {values.numel()} elements, where {info.numel} are told of")


class Merging(Kind):
    """A kind whose cases end in a merge of `base`, `a` and `b`."""

    methods = METHODS[:4]

    def make(self) -> None:
        write_models()

    def merge(self, rng: random.Random | None, **settings: Any) -> None:
        changes = dict(rng.choice(self.methods)) if rng else dict(self.methods[0])
        if rng and rng.random() < 0.2:
            changes["output"] = rng.choice([{"dtype": "bfloat16"}, {"shard_size": "100"}, {"dtype": "float64"}])
        self.merge_recipe(recipe(**changes), **settings)

    def merge_recipe(self, given: dict[str, Any], **settings: Any) -> None:
        gm.merge(given, self.place.out, threads=1, **settings)


class Weights(Merging):
    """A model's safetensors file."""

    name, share = "safetensors", 14.0
    file = "a/model.safetensors"

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            change = mutate_numbers if rng.random() < 0.1 else mutate_file
            self.place.put(self.file, change(self.place.original(self.file), rng))
        read_all(self.file.partition("/")[0])
        self.merge(rng)


class BaseWeights(Weights):
    """The base's safetensors file, of which a merge copies what it does not merge."""

    name, share = "safetensors-base", 5.0
    file = "base/model.safetensors"

    def merge(self, rng: random.Random | None, **settings: Any) -> None:
        self.merge_recipe(recipe(include=["b.weight"] if rng and rng.random() < 0.5 else ["*"], models=["a"]))


class Index(Merging):
    """The index of a model in several files."""

    name, share = "index", 7.0

    def make(self) -> None:
        write_models(shards=2)

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            name = f"{rng.choice(['a', 'base'])}/model.safetensors.index.json"
            self.place.put(name, mutate_json_file(self.place.original(name), rng))
        read_all("a")
        self.merge(rng)


class Config(Merging):
    """`config.json` of the base or a model."""

    name, share = "config", 7.0

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            name = f"{rng.choice(['a', 'base', 'base'])}/config.json"
            self.place.put(name, mutate_json_file(self.place.original(name), rng))
            if rng.random() < 0.1:
                command("inspect", "base", "a", "b", *rng.choice([[], ["--json"], ["--tensors"]]))
                return
        self.merge(rng)


class SideFiles(Merging):
    """Tokenizers and the other small files, which a merge compares and copies."""

    name, share = "side-files", 4.0

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            file = rng.choice(["tokenizer.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
            name = f"{rng.choice(['a', 'base'])}/{file}"
            self.place.put(name, mutate_json_file(self.place.original(name), rng))
        self.merge(rng)


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
    """A LoRA adapter, or one with DoRA and trained rows: its config or its weights. It comes out merged, or as one."""

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
        tensors["base_model.model.b.token_adapter.trainable_tokens_delta"] = torch.ones(1, 4)
        Path("dora/adapter_model.safetensors").write_bytes(save(tensors))
        more = {"use_dora": True, "trainable_token_indices": {"b": [1]}, "modules_to_save": None}
        Path("dora/adapter_config.json").write_text(json.dumps(ADAPTER | more))

    def run(self, rng: random.Random | None) -> None:
        folder = "dora" if rng is not None and rng.random() < 0.4 else "adapter"
        if rng is not None and rng.random() < 0.6:
            name = f"{folder}/adapter_config.json"
            self.place.put(name, mutate_json_file(self.place.original(name), rng))
        elif rng is not None:
            name = f"{folder}/adapter_model.safetensors"
            self.place.put(name, mutate_file(self.place.original(name), rng))
        if rng is not None and rng.random() < 0.3:
            read_all(folder)
        out = {"output": {"format": "adapter"}} if rng is not None and rng.random() < 0.3 else {}
        models = [folder] if out else [folder, "a"]
        self.merge_recipe(recipe(method="task-arithmetic", models=models, **out))


class Pickles(Merging):
    """A model saved by `torch.save`, as an archive or in the older form, read with --allow-pickle."""

    name, share = "pickle", 10.0

    def make(self) -> None:
        write_models()
        self.state = random_state(0, SHAPES)
        self.state["a.weight"] = torch.ones(3, 4).t()  # not one run of the file
        self.saved: dict[bool, bytes] = {}
        for zipped in (True, False):
            file = io.BytesIO()
            torch.save(self.state, file, _use_new_zipfile_serialization=zipped)
            self.saved[zipped] = file.getvalue()
        Path("p").mkdir()
        Path("p/pytorch_model.bin").write_bytes(self.saved[True])
        Path("p/config.json").write_text(json.dumps(CONFIG))

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            zipped = rng.random() < 0.6
            value = self.state if rng.random() < 0.5 else {"state_dict": self.state}
            self.place.put("p/pytorch_model.bin", mutate_torch(value, self.saved[zipped], rng, zipped))
        read_all("p", allow_pickle=True)
        given = recipe(base="p", models=["p"]) if rng and rng.random() < 0.5 else recipe(models=["p"])
        self.merge_recipe(given, allow_pickle=True)


class PickleIndex(Merging):
    """The index of a pickled model in several files."""

    name, share = "pickle-index", 2.0

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
        Path("p/pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))

    def run(self, rng: random.Random | None) -> None:
        name = "p/pytorch_model.bin.index.json"
        if rng is not None:
            self.place.put(name, mutate_json_file(self.place.original(name), rng))
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

    def make(self) -> None:
        write_models(curvature=True)
        Path("recipe.yml").write_text(yaml.safe_dump(RECIPE, sort_keys=False))

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            value = RECIPE | rng.choice([{}, rng.choice(METHODS)])
            self.place.put("recipe.yml", mutate_yaml(value, rng))
            if rng.random() < 0.05:
                command("merge", "recipe.yml", "--dry-run")
                return
        gm.merge("recipe.yml", self.place.out, threads=1)


class Mappings(Kind):
    """A recipe given as a mapping, and YAML on its own."""

    name, share = "recipe-mapping", 7.0

    def make(self) -> None:
        pass

    def run(self, rng: random.Random | None) -> None:
        value = json.loads(json.dumps(RECIPE))
        if rng is not None:
            mutate_value(value, rng)
            if rng.random() < 0.3:
                parse_yaml(mutate_text(yaml.safe_dump(value).encode("utf-8", "replace"), rng), "here")
        make_recipe(value)


NAMES = [
    *["a=b", "a:b", "a b", "a\nb", "a\tb", "\x1b[2J", "é", "ﬀ", "a" * 200, "-a", "--help", "base=", "=1", "a@b", "~"],
    *["~a", "a%20b", "<b>", "a'b\"", "a\udcff", "\u202eb", "=cmd()", "a\\b", "${HOME}", "*", "[a]", "a#b", "{}"],
    *["a|b", "...", ".a", "curvature", "a.safetensors", "identity:1"],
]


class Names(Merging):
    """Folders with strange names, in all places where a name is read or shown."""

    name, share = "names", 3.0

    def run(self, rng: random.Random | None) -> None:
        name = self._name(rng) if rng else "x"
        Path(name).mkdir()
        for file in ("config.json", "model.safetensors"):
            self.place.put(f"{name}/{file}", self.place.original(f"a/{file}"))
        self._use(name, rng)

    def _use(self, name: str, rng: random.Random | None) -> None:
        way = rng.randrange(6) if rng else 0
        prefix = "./" if rng and rng.random() < 0.5 else ""
        if way == 0:
            self.merge_recipe(recipe(models=[prefix + name, "b"]))
        elif way == 1:
            self.merge_recipe(recipe(base=prefix + name))
        elif way == 2:
            command("merge", "-m", "average", "--base", "base", "--model", prefix + name, "-o", str(self.place.out))
        elif way == 3:
            command("inspect", "--", prefix + name, "base", "--json")
        elif way == 4:
            command("merge", "-m", "task-arithmetic", "--base", "base", f"--model={prefix}{name}=0.5", "--dry-run")
        else:
            command("inspect", "--", prefix + name)

    def _name(self, rng: random.Random) -> str:
        name = "".join(rng.choice(NAMES) for _ in range(rng.choice([1, 1, 2, 3])))
        while len(os.fsencode(name)) > 240:
            name = name[:-1]
        return name + "x" if name in ("~", "...", "a", "b", "base") else name


WORDS = [
    *["--method", "-m", "--base", "--model", "--curvature", "--set", "--threads", "--device", "--resume"],
    *["--dry-run", "--allow-pickle", "--json", "--quiet", "--exclude", "--tensors", "--examples"],
    *["--limit", "--data", "--weights", "--methods", "--suggest", "--objective", "--force", "--", "-h"],
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
    ["remove", "--base", "base", "--model", "a=0.8", "--strength", "0.5", "--set", "damping=1.0"],
    ["remove", "--base", "base", "--model", "a", "--method", "task-arithmetic", "--dry-run"],
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

    def run(self, rng: random.Random | None) -> None:
        words = list(rng.choice(LINES)) if rng else LINES[0]
        for _ in range(rng.choice([1, 1, 2, 3]) if rng else 0):
            assert rng is not None
            place, kind = rng.randrange(1, len(words) + 1), rng.randrange(4)
            if kind == 0:
                words.insert(place, rng.choice(WORDS))
            elif kind == 1 and place < len(words):
                words[place] = rng.choice(WORDS)
            elif kind == 2 and place < len(words) and len(words) > 2:
                del words[place]
            elif place < len(words):
                words[place] = self._changed(words[place], rng)
        if words[0] not in ONLY_READ and words[1:2] != ["show"]:
            words += ["-o", str(self.place.out)]
        self.words = words
        command(*words)

    def _changed(self, word: str, rng: random.Random) -> str:
        value = rng.choice([w for w in WRONG if isinstance(w, str | int | float)])
        if "=" in word and rng.random() < 0.7:
            return word.partition("=")[0] + "=" + str(value)
        changed = os.fsdecode(mutate_text(os.fsencode(word), rng)[:500].replace(b"\x00", b""))
        # No option that writes, and no path that leads elsewhere.
        return changed if not changed.startswith(("-", "/", "~", "..")) else "x" + changed

    def check(self, outcome: str) -> None:
        if self.words[0] in ("merge", "remove"):
            super().check(outcome)
        elif any(self.place.out.parent.iterdir()) and outcome not in (WORKED, MACHINE):
            raise Broken("something was left of a request that was refused")


FOLDERS: list[type[Kind]] = [Weights, BaseWeights, Index, Config, SideFiles, Adapters, Pickles, PickleIndex]
KINDS: list[type[Kind]] = [*FOLDERS, Recipes, Mappings, Names, CommandLine]
