"""Merges of models with different vocabularies, compared with dictionaries of token → vector in float64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import gradmerge as gm
from gradmerge.engine.run import MergeResult
from gradmerge.errors import InputError
from gradmerge.recipe import make_recipe

from ..checkpoints.vocabularies import (
    ENGLISH,
    MERGING,
    ROWED,
    Vectors,
    by_token,
    completed,
    encode,
    read_config,
    save_model,
    save_tokenizer,
    state,
    vocabulary,
)
from ..making import random_curvature, read_model

WEIGHTS = (0.3, 0.6)
State = dict[str, Tensor]


class Models:
    """A base and two fine-tuned models, each with another tokenizer."""

    def __init__(self, folder: Path, kind: str = "BPE", **settings: Any) -> None:
        self.folder = folder
        texts = {"base": (ENGLISH, ["<x>"]), "one": (MERGING, ["<tool>", "<x>"]), "two": (MERGING, ["<tool>"])}
        self.ids = {name: save_tokenizer(folder / name, kind, *text) for name, text in texts.items()}
        self.states: dict[str, State] = {}
        # The last model has more rows than tokens, as many models do.
        for seed, (name, extra) in enumerate({"base": 0, "one": 0, "two": 5}.items()):
            self.states[name] = state(len(self.ids[name]) + extra, seed, **settings)
            save_model(folder / name, self.states[name], shards=1 + seed)

    def recipe(self, **keys: Any) -> dict[str, Any]:
        models = [{"model": str(self.folder / n), "weight": w} for n, w in zip(("one", "two"), WEIGHTS, strict=True)]
        return {"method": "task-arithmetic", "base": str(self.folder / "base"), "models": models, **keys}

    def merge(self, **keys: Any) -> MergeResult:
        return gm.merge(make_recipe(self.recipe(**keys), folder=self.folder), self.folder / "out", force=True)

    def expected(self, name: str, tokens: Sequence[str]) -> Vectors:
        """Return task arithmetic, token by token."""
        every = [by_token(self.states[model], self.ids[model], name) for model in self.states]
        base, *tuned = completed(every, tokens, base=0)
        return {t: base[t] + sum(w * (one[t] - base[t]) for w, one in zip(WEIGHTS, tuned, strict=True)) for t in tokens}

    def check(self, names: Sequence[str] = ROWED) -> dict[str, int]:
        """Check every vocabulary row of the result, and return its token ids."""
        out, ids = read_model(self.folder / "out"), vocabulary(self.folder / "out")
        for name in names:
            assert_rows(out[name], self.expected(name, list(ids)), ids)
        return ids


def assert_rows(got: Tensor, want: Mapping[str, Tensor], ids: Mapping[str, int], tolerance: float = 1e-14) -> None:
    for token, row in ids.items():
        assert torch.allclose(got[row].double(), want[token], rtol=0, atol=tolerance), token


@pytest.fixture
def models(tmp_path: Path) -> Models:
    return Models(tmp_path)


@pytest.mark.parametrize("kind", ["BPE", "WordPiece", "Unigram"])
def test_a_union_has_the_tokens_of_all_models_with_their_rows(kind: str, tmp_path: Path) -> None:
    models = Models(tmp_path, kind, bias=True)
    result = models.merge(tokenizer="union")
    ids = models.check()
    assert ids.keys() == set().union(*models.ids.values())
    assert {token: ids[token] for token in models.ids["base"]} == models.ids["base"]
    assert sorted(ids.values()) == list(range(len(ids)))
    assert read_config(tmp_path / "out")["vocab_size"] == len(ids) == len(read_model(tmp_path / "out")[ROWED[0]])
    assert result.notes
    for text in (ENGLISH, f"{MERGING} zebra") if kind == "BPE" else (ENGLISH,):  # the base knows these characters
        assert encode(tmp_path / "out", text) == encode(tmp_path / "base", text)
    pieces = encode(tmp_path / "out", "the <tool> dog <x>")
    assert [token for token in pieces if token.startswith("<")] == ["<tool>", "<x>"]


@pytest.mark.parametrize("source", ["base", "one"])
def test_the_tokenizer_of_one_model_is_copied_and_rows_follow_it(source: str, tmp_path: Path) -> None:
    models = Models(tmp_path, bias=True)
    result = models.merge(tokenizer=source)
    assert models.check() == models.ids[source]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / source / name).read_bytes()
    assert result.notes


def test_curvature_is_reordered_and_0_for_missing_tokens(models: Models, tmp_path: Path) -> None:
    curvature = {}
    for seed, (name, weights) in enumerate(models.states.items()):
        found = random_curvature(seed + 10, weights)
        found.save(tmp_path / name / "curvature")
        curvature[name] = found
    models.merge(method="gradient-matching", tokenizer="union", damping=0.1)
    out, ids = read_model(tmp_path / "out"), vocabulary(tmp_path / "out")
    for name in ROWED[:2]:
        base, *tuned = completed(
            [by_token(models.states[m], models.ids[m], name) for m in models.states], list(ids), base=0
        )
        prior, *own = [by_token({ROWED[0]: c[name]}, models.ids[m], ROWED[0]) for m, c in curvature.items()]
        for token, row in ids.items():
            h0 = prior.get(token, torch.zeros(8)) + 0.1
            ht = [c.get(token, torch.zeros(8)) for c in own]
            total = h0 + sum(w * h for w, h in zip(WEIGHTS, ht, strict=True))
            steps = [w * (h0 + h) * (t[token] - base[token]) for w, h, t in zip(WEIGHTS, ht, tuned, strict=True)]
            assert torch.allclose(out[name][row], base[token] + sum(steps) / total, rtol=0, atol=1e-5)


def test_the_result_loads_in_transformers_with_its_special_tokens(tmp_path: Path) -> None:
    ids = {
        "base": save_tokenizer(tmp_path / "base", "BPE", ENGLISH),
        "chat": save_tokenizer(
            tmp_path / "chat", "BPE", ENGLISH, ["<|im_end|>"], pad_token="<pad>", eos_token="<|im_end|>"
        ),
    }
    for name, vocabulary_ in ids.items():
        config = LlamaConfig(
            vocab_size=len(vocabulary_), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, bos_token_id=0,
            eos_token_id=1 if name == "base" else vocabulary_["<|im_end|>"],
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    for source, eos in (("union", "</s>"), ("chat", "<|im_end|>")):
        out = tmp_path / f"merged by {source}"
        recipe = {"method": "average", "models": [str(tmp_path / "base"), str(tmp_path / "chat")], "tokenizer": source}
        gm.merge(make_recipe(recipe), out)
        model, tokenizer = (kind.from_pretrained(out) for kind in (AutoModelForCausalLM, AutoTokenizer))
        assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().num_embeddings
        assert tokenizer.eos_token == eos
        assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(eos)
        assert torch.isfinite(model(**tokenizer("the dog", return_tensors="pt")).logits).all()
        assert model.config.pad_token_id == (tokenizer.pad_token_id if source == "union" else None)


def test_stacked_layers_have_one_vocabulary(models: Models, tmp_path: Path) -> None:
    """Embeddings come from the model of the first layers, and heads from that of the last."""
    slices = [{"models": [{"model": str(tmp_path / name), "layers": [0, 1]}]} for name in ("base", "one", "two")]
    recipe = {"method": "passthrough", "slices": slices, "tokenizer": "union"}
    gm.merge(make_recipe(recipe), tmp_path / "out")
    out, ids = read_model(tmp_path / "out"), vocabulary(tmp_path / "out")
    for name, place in ((ROWED[0], 0), (ROWED[1], 2)):
        rows = [by_token(models.states[m], models.ids[m], name) for m in models.states]
        assert_rows(out[name], completed(rows, list(ids), base=None)[place], ids)
    for number, weights in enumerate(models.states.values()):
        layer = "model.layers.{}.mlp.up_proj.weight"
        assert torch.equal(out[layer.format(number)], weights[layer.format(0)])


@pytest.mark.parametrize(
    "tokenizer",
    [
        "bse",
        "\0",
        {"source": "union", "tokens": {"<x>": {"force": True}}},
        {"tokens": {"<x>": "nobody"}},
        {"tokens": {"<x>": {"model": "base", "token": "<y>"}}},
        {"tokens": {"<x>": {"model": "base", "token_id": 10**6}}},
    ],
)
def test_invalid_tokenizer_settings_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Models(tmp_path).merge(tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()


CHAT, OTHER = "{{ messages[0]['content'] }}", "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_template(folder: Path, text: str, stored: str = "file") -> None:
    if stored == "file":
        (folder / "chat_template.jinja").write_text(text)
    else:
        config = read_config(folder, "tokenizer_config.json") | {"chat_template": text}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("value", "tokenizer", "expected", "stored"),
    [
        ("auto", "one", OTHER, "config"),
        ("base", "one", CHAT, "config"),
        ("common", "two", CHAT, "file"),
        ("one", None, OTHER, "config"),
        ("template.jinja", "union", "{{ 1 }}", "config"),
    ],
)
def test_chat_templates(
    value: str, tokenizer: str | None, expected: str, stored: str, models: Models, tmp_path: Path
) -> None:
    for name, text in (("base", CHAT), ("one", OTHER)):
        write_template(tmp_path / name, text, stored)
    (tmp_path / "template.jinja").write_text("{{ 1 }}")
    keys = {"tokenizer": tokenizer} if tokenizer else {"exclude": ["*embed*", "lm_head*"]}
    if tokenizer is None:
        for name in ("one", "two"):
            models.states[name] = state(len(models.ids["base"]), 3)
            save_model(tmp_path / name, models.states[name])
    models.merge(chat_template=value, **keys)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == expected


@pytest.mark.parametrize("value", ["two", "nowhere", "\0"])
def test_invalid_chat_templates_are_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        Models(tmp_path).merge(tokenizer="union", chat_template=value)
