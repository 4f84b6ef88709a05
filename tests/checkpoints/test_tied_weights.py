"""Tied weights: merges agree with what transformers loads, and files that loaders read differently are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.errors import InputError
from tests.forked import forked
from tests.making import assert_close, random_state, write_model

from .families import make, randomise

KEY = "tie_word_embeddings"


def bert(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForMaskedLM(BertConfig(vocab_size=60, tie_word_embeddings=False, **sizes))


#: Family → a model with a separate head, and the tensors that are the same if it is tied.
MODELS: dict[str, tuple[Callable[[int], Any], dict[str, str]]] = {
    "llama": (lambda seed: make("llama-untied", seed), {"lm_head.weight": "model.embed_tokens.weight"}),
    "t5": (lambda seed: make("t5", seed), {"lm_head.weight": "shared.weight"}),
    "bert": (
        bert,
        {
            "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        },
    ),
}
KINDS = ("stored once", "stored twice", "untied", "contradictory")


def write(folder: Path, family: str, kind: str, seed: int) -> Path:
    """A checkpoint whose head is tied or separate, as its config and its file say."""
    builder, ties = MODELS[family]
    model = builder(seed)
    randomise(model.parameters(), seed, 0.1)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    for head, source in ties.items():
        if kind == "stored once":
            del state[head]
        else:
            separate = random_state(seed, {head: tuple(state[source].shape)})[head]
            state[head] = state[source].clone() if kind == "stored twice" else separate
    for stack in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        state.pop(stack, None)
    config = json.loads(model.config.to_json_string(use_diff=False)) | {"architectures": [type(model).__name__]}
    return write_model(folder, state, 1, config | {KEY: kind != "untied"})


def loaded(folder: Path, family: str) -> dict[str, Tensor]:
    """Every parameter as transformers loads it."""
    return dict(type(MODELS[family][0](0)).from_pretrained(folder).state_dict())


def merges(family: str, base: str, tuned: str) -> bool:
    tied = {"stored once", "stored twice"}
    if family == "t5" and tied.isdisjoint({base, tuned}):
        return True  # transformers 5 writes "tied" into the config of every T5
    return {base, tuned} <= tied or base == tuned


@pytest.mark.parametrize("tuned", KINDS)
@pytest.mark.parametrize("base", KINDS)
@pytest.mark.parametrize("family", MODELS)
def test_a_merge_is_that_of_the_models_that_transformers_loads_or_is_refused(
    family: str, base: str, tuned: str, tmp_path: Path
) -> None:
    folders = [write(tmp_path / name, family, kind, i) for i, (name, kind) in enumerate((("b", base), ("t", tuned)))]
    recipe = {"method": "average", "base": str(folders[0]), "models": list(map(str, folders))}
    states = [loaded(folder, family) for folder in folders]
    want = {name: (value.double() + states[1][name].double()) / 2 for name, value in states[0].items()}
    if merges(family, base, tuned):
        gm.merge(recipe, tmp_path / "out")
    else:
        with pytest.raises(InputError):
            gm.merge(recipe, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        if base == "stored once":
            return  # the result would have no tensor for a separate head
        gm.merge(recipe, tmp_path / "out", allow_config=[KEY])
    assert_close(loaded(tmp_path / "out", family), want, 1e-6)


LLAMA_EMBEDDING, LLAMA_HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("config", [{}, {KEY: True}, {"text_config": {KEY: True}}, {KEY: False}])
def test_a_head_that_is_not_stored_is_the_embedding_unless_the_config_says_no(config: dict[str, Any]) -> None:
    base = random_state(0, {LLAMA_EMBEDDING: (5, 2), LLAMA_HEAD: (5, 2)})
    tuned = Checkpoint("tuned", memory={LLAMA_EMBEDDING: base[LLAMA_EMBEDDING]}, config=config)
    result = compare(Checkpoint("base", memory=base), [tuned])
    if config == {KEY: False}:
        assert result.aliases == [{}] and len(result.problems) == 1
    else:
        assert result.aliases == [{LLAMA_HEAD: LLAMA_EMBEDDING}] and not result.problems


def test_tied_models_merge_without_importing_transformers(tmp_path: Path) -> None:
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], KEY: True}
    state = random_state(0, {"model.embed_tokens.weight": (6, 4), "model.layers.0.up.weight": (4, 4)})
    write_model(tmp_path / "base", state, 1, config)
    write_model(tmp_path / "tuned", state | {"lm_head.weight": state["model.embed_tokens.weight"].clone()}, 1, config)
    code = (
        "import sys, gradmerge as gm\n"
        "gm.merge({'method': 'average', 'base': 'base', 'models': ['tuned']}, 'out')\n"
        "assert 'transformers' not in sys.modules and 'regex' not in sys.modules\n"
    )
    done = forked(code=code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
