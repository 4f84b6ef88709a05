"""Make the golden files: tiny models, and the results of mergekit 0.1.5 for every recipe in `recipes/`.

    .venv-mergekit/bin/python tests/golden/make.py

in an environment with mergekit (`make bench` makes it, with the versions in `benchmarks/constraints.txt`).

It writes `models/` (tiny Llama and GPT-2 models, a LoRA adapter, three tokenizers) and `outputs.safetensors`: every
tensor that mergekit wrote, as RECIPE/TENSOR, and the token of each vocabulary row. The tests need these files and not
mergekit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from mergekit.config import MergeConfiguration
from mergekit.merge import run_merge
from mergekit.options import MergeOptions
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from yaml import safe_load

HERE = Path(__file__).parent
MODELS = HERE / "models"
WORDS = ["<unk>", "<s>", "</s>", "the", "cat", "dog", "sat", "on", "a", "mat", "and", "ran"]
#: Another order, with two new words and without `mat` and `ran`.
OTHER = ["<unk>", "<s>", "</s>", "a", "on", "sat", "dog", "cat", "the", "and", "blue", "sky"]
SEED = 2024


def llama(vocabulary: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=12, n_embd=8, n_layer=3, n_head=2, n_positions=16))


def fill(model: torch.nn.Module, like: torch.nn.Module | None, number: int) -> torch.nn.Module:
    """Set the weights to those of `like` with noise, independent of the initialization in transformers."""
    generator = torch.Generator().manual_seed(SEED + number)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if like is None:
                parameter.copy_(noise * 0.3 + (1 if "norm" in name or "ln_" in name else 0))
                continue
            kept = like.get_parameter(name)
            rows = min(len(kept), len(parameter))
            parameter.copy_(noise * 0.3)
            parameter[:rows] = kept[:rows] + noise[:rows] * 0.05
    return model


def save(model: torch.nn.Module, name: str, words: list[str] | None = None, added: tuple[str, ...] = ()) -> None:
    model.save_pretrained(MODELS / name)
    (MODELS / name / "generation_config.json").unlink(missing_ok=True)
    if words is not None:
        tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
        tokenizer.pre_tokenizer = Whitespace()
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
        fast.add_tokens(list(added))
        fast.save_pretrained(MODELS / name)


def make_models() -> None:
    shutil.rmtree(MODELS, ignore_errors=True)
    base = fill(llama(12), None, 0)
    save(base, "base", WORDS)
    for number, name in enumerate("abc", 1):
        tuned = fill(llama(12), base, number)
        save(tuned, name, WORDS)
        if name != "c":
            save(tuned.to(torch.bfloat16), f"{name}-bf16", WORDS)
    save(fill(llama(13), base, 4), "tok-a", WORDS, ("<a1>",))
    save(fill(llama(12), base, 5), "tok-b", OTHER)
    save(fill(llama(12), None, 0).to(torch.bfloat16), "base-bf16", WORDS)
    other = fill(gpt2(), None, 6)
    save(other, "gpt2-base")
    save(fill(gpt2(), other, 7), "gpt2-a")
    save(fill(gpt2(), other, 8), "gpt2-b")
    make_adapter()


def make_adapter() -> None:
    folder = MODELS / "lora"
    folder.mkdir()
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": 2,
        "lora_alpha": 6,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "down_proj"],
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    generator = torch.Generator().manual_seed(SEED + 9)
    tensors = {}
    for layer in range(4):
        for module, inputs, outputs in (("self_attn.q_proj", 8, 8), ("mlp.down_proj", 16, 8)):
            place = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(2, inputs, generator=generator) * 0.2
            tensors[f"{place}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator) * 0.2
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def run(recipe: Path, out: Path, cache: Path) -> None:
    text = recipe.read_text()
    if "\n---" in text:
        command = [str(Path(sys.executable).parent / "mergekit-multi"), str(recipe), "-I", str(cache / recipe.stem)]
        subprocess.run([*command, "--out-path", str(out), "--no-copy-tokenizer", "--quiet"], check=True)
        if not out.exists():  # all recipes have names: the last is the result
            names = [safe_load(document)["name"] for document in text.split("\n---")]
            shutil.copytree(cache / recipe.stem / names[-1], out)
        return
    options = MergeOptions(lora_merge_cache=str(cache), random_seed=SEED, quiet=True)
    run_merge(MergeConfiguration.model_validate(safe_load(text)), str(out), options)


def main() -> None:
    make_models()
    os.chdir(HERE / "recipes")  # mergekit resolves relative paths from here
    everything, vocabularies = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in sorted(Path().glob("*.yml")):
            out = Path(folder) / "out" / recipe.stem
            run(recipe, out, Path(folder) / "cache")
            for file in sorted(out.glob("*.safetensors")):
                for name, tensor in load_file(file).items():
                    everything[f"{recipe.stem}/{name}"] = tensor.contiguous()
            if recipe.stem.startswith("tokenizer"):  # the order of a union differs from run to run
                vocabularies[recipe.stem] = AutoTokenizer.from_pretrained(out).get_vocab()
    facts = {"made by": "mergekit 0.1.5", "vocabularies": json.dumps(vocabularies, sort_keys=True)}
    save_file(everything, HERE / "outputs.safetensors", metadata=facts)


if __name__ == "__main__":
    main()
