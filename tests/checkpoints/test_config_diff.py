"""Configs that compute something else from the same weights, compared after filling in the defaults of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.checkpoints.config_diff import differences
from gradmerge.errors import InputError
from tests.making import near, random_state, write_model

Config = dict[str, Any]
LLAMA: Config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
LINEAR = {"type": "linear", "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
QWEN = {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 28}
CLIP = {"model_type": "clip", "text_config": {"num_attention_heads": 8}}
BERT = {"model_type": "bert"}


def full(config: Config) -> Config:
    """A config as transformers writes it, with every default."""
    settings = {key: value for key, value in config.items() if key != "model_type"}
    return json.loads(CONFIG_MAPPING[config["model_type"]](**settings).to_json_string(use_diff=False))


SAME: dict[str, tuple[Config, Config]] = {
    "defaults written out": (LLAMA, full(LLAMA)),
    "scaling moved": (
        LLAMA | {"rope_scaling": LINEAR},
        full(LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ),
    "key-value heads": (LLAMA, LLAMA | {"num_key_value_heads": 4, "head_dim": 16}),
    "longer positions": (LLAMA, LLAMA | {"max_position_embeddings": 99}),
    "windows unused": (QWEN, QWEN | {"sliding_window": None, "max_window_layers": 2}),
    "old gemma": (
        {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        full({"model_type": "gemma3_text"}),
    ),
    "irrelevant keys": (
        BERT | {"hidden_dropout_prob": 0.5, "pad_token_id": 3, "_name_or_path": "a", "use_cache": False},
        BERT | {"initializer_range": 1, "problem_type": "regression", "dtype": "bfloat16", "unsloth_version": "1"},
    ),
    "other keys of an unknown type": ({"model_type": "mine", "x": 1}, {"model_type": "mine", "x": 2}),
}
OTHER: dict[str, tuple[Config, Config, set[str]]] = {
    "scaling": (LLAMA, LLAMA | {"rope_scaling": LINEAR}, {"rope_parameters.rope_type"}),
    "length": (
        LLAMA | {"rope_scaling": DYNAMIC},
        LLAMA | {"rope_scaling": DYNAMIC, "max_position_embeddings": 99},
        {"max_position_embeddings"},
    ),
    "heads and a base renamed": (
        {"model_type": "gpt_neox", "num_attention_heads": 8, "rotary_emb_base": 10000},
        {"model_type": "gpt_neox", "num_attention_heads": 4, "rotary_emb_base": 20000},
        {"num_attention_heads", "rope_parameters.rope_theta"},
    ),
    "window": ({"model_type": "mistral"}, {"model_type": "mistral", "sliding_window": None}, {"sliding_window"}),
    "inside": (
        CLIP,
        {"model_type": "clip", "text_config": {"num_attention_heads": 4}},
        {"text_config.num_attention_heads"},
    ),
    "model type": (BERT, {"model_type": "roberta"}, {"model_type"}),
    "an unknown type": ({"model_type": "mine", "norm_eps": 1}, {"model_type": "mine", "norm_eps": 2}, {"norm_eps"}),
}


@pytest.mark.parametrize("case", SAME)
def test_equivalent_configs_do_not_differ(case: str) -> None:
    one, other = SAME[case]
    assert not differences(one, other) and not differences(other, one)


@pytest.mark.parametrize("case", OTHER)
def test_configs_differ_in_the_keys_that_change_the_function(case: str) -> None:
    one, other, keys = OTHER[case]
    found = differences(one, other)
    assert found.keys() == keys
    assert differences(other, one) == {key: (theirs, ours) for key, (ours, theirs) in found.items()}


# Hostile configs


def test_a_config_with_a_billion_layers_is_compared_without_making_them() -> None:
    deep = {"num_hidden_layers": 10**9, "num_labels": 10**9}
    assert differences(LLAMA | deep, LLAMA | deep | {"hidden_act": "gelu"}) == {}


@pytest.mark.parametrize("wrong", [None, 3, "x", [[1]], {"a": {"b": []}}])
def test_a_config_with_values_of_any_type_is_compared(wrong: Any) -> None:
    keys = ["model_type", "rope_scaling", "rope_parameters", "layer_types", "text_config", "id2label", "label2id"]
    keys += ["vocab_size", "tie_word_embeddings"]
    odd = [{key: wrong} for key in [*keys, "num_attention_heads"]]
    odd += [{"rope_scaling": {"rope_type": wrong}}, {"label2id": {"a": wrong}}]
    plain = Checkpoint("base", memory=random_state(0), config=LLAMA | {"id2label": {"0": "a"}, "architectures": wrong})
    for config in odd:
        compare(plain, [Checkpoint("tuned", memory=random_state(0), config=LLAMA | config)])


def test_filling_in_defaults_does_not_use_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers looks up the backbone that a config names on the Hub."""
    asked: list[Any] = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *where, **_: asked.append(where))
    one = {"model_type": "dpt", "backbone": "someone/something", "use_timm_backbone": False, "layer_norm_eps": 1e-12}
    assert differences(one, one | {"layer_norm_eps": 1e-6}).keys() == {"layer_norm_eps"}
    assert not asked


def test_a_config_nested_too_deeply_is_refused() -> None:
    ours, theirs = (Checkpoint(n, memory=random_state(0), config={"n_head": []}) for n in ("base", "tuned"))
    for _ in range(5000):
        for config in (ours.config, theirs.config):
            config["n_head"] = [config["n_head"]]
    with pytest.raises(InputError):
        compare(ours, [theirs])


# Merges


def write_pair(folder: Path, ours: Config, theirs: Config, **more: Tensor) -> dict[str, Any]:
    """A recipe for a base and a fine-tuned model with these configs."""
    state = random_state(0) | more
    base, tuned = write_model(folder / "base", state, 1, ours), write_model(folder / "tuned", near(state, 1), 1, theirs)
    return {"method": "average", "base": str(base), "models": [str(tuned)]}


def refusal(folder: Path, recipe: dict[str, Any], **more: Any) -> str:
    with pytest.raises(InputError) as error:
        gm.merge(recipe, folder / "out", **more)
    assert not (folder / "out").exists()
    return str(error.value).replace(f"{folder}/", "")


def test_all_differences_are_in_one_message_and_each_can_be_allowed(tmp_path: Path) -> None:
    theirs = LLAMA | {"rope_scaling": LINEAR, "rms_norm_eps": 1e-5}
    recipe = write_pair(tmp_path, LLAMA, theirs)
    state = random_state(0)
    write_model(tmp_path / "tuned", near(state, 1) | {"more.weight": torch.ones(2)}, 1, theirs)
    message = refusal(tmp_path, recipe)
    assert all(key in message for key in ("more.weight", "rms_norm_eps", "rope_parameters.rope_type"))
    recipe["exclude"] = ["more.*"]
    message = refusal(tmp_path, recipe, allow_config=["rms_norm_eps"])
    assert "rope_type" in message and "rms_norm_eps" not in message
    for number, rope in enumerate(("rope_scaling", "rope_type")):
        result = gm.merge(recipe, tmp_path / f"out{number}", allow_config=["rms_norm_eps", rope])
        assert any("rms_norm_eps" in note and "rope_type" in note for note in result.notes)


# Labels

NAMES = {"0": "negative", "1": "neutral", "2": "positive"}


def test_labels_in_another_order_are_refused_where_their_head_is_merged() -> None:
    theirs = {"0": "POSITIVE", "1": "NEUTRAL", "2": "NEGATIVE"}
    base, tuned = (
        Checkpoint(label, memory=random_state(0), config={"id2label": names})
        for label, names in (("base", NAMES), ("tuned", theirs))
    )
    (problem,) = compare(base, [tuned]).problems
    assert "id2label" in problem
    for accepted in ({"allow_config": ["id2label"]}, {"exclude": ["classifier.*"]}):
        assert not compare(base, [tuned], **accepted).problems
