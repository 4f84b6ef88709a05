"""Models whose names differ by a prefix: `rename:`, and language models inside larger models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

import gradmerge as gm
from gradmerge.errors import InputError
from tests.checkpoints.families import moved, randomise
from tests.making import assert_close, near, random_curvature, random_state, read_model, write_model

BASE = random_state(0)
TEXT: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "rms_norm_eps": 1e-6,
}


def prefixed(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {prefix + name: value for name, value in state.items()}


def recipe_of(base: Path, *models: Any, **more: Any) -> dict[str, Any]:
    return {"method": "task-arithmetic", "base": str(base), "models": list(models), **more}


def test_a_renamed_model_merges_as_if_it_had_the_names_of_the_base(tmp_path: Path) -> None:
    tuned = near(BASE, 1)
    ours, theirs = "model.", ""
    base = write_model(tmp_path / "base", prefixed(BASE, ours))
    model = write_model(tmp_path / "tuned", prefixed(tuned, theirs), 2)
    entry = {"model": str(model), "weight": 0.5, "rename": {theirs: ours}}
    gm.merge(recipe_of(base, entry), tmp_path / "out")
    want = {ours + n: (BASE[n].double() + 0.5 * (tuned[n].double() - BASE[n].double())).float() for n in BASE}
    assert_close(read_model(tmp_path / "out"), want)


def test_a_prefix_that_fits_nothing_or_makes_one_name_of_two_is_refused(tmp_path: Path) -> None:
    base, model = write_model(tmp_path / "base", BASE), write_model(tmp_path / "tuned", near(BASE, 1))
    for rename in ({"modell.": "x."}, {"layers.0.linear.": "layers.1.linear."}):
        with pytest.raises(InputError):
            gm.merge(recipe_of(base, {"model": str(model), "rename": rename}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("names", ["of the model", "of the base"])
def test_curvature_follows_the_rename_unless_it_has_the_new_names(names: str, tmp_path: Path) -> None:
    tuned, curvature, prior = near(BASE, 1), random_curvature(2, BASE), random_curvature(3, BASE)

    def merge(folder: Path, base: str, model: str, measured: str, **more: Any) -> dict[str, list[Any]]:
        """The merge of models whose names begin with these prefixes, and the one of the curvature of the model."""
        write_model(folder / "base", prefixed(BASE, base))
        write_model(folder / "tuned", prefixed(tuned, model))
        for value, name, prefix in ((prior, "base", base), (curvature, "tuned", measured)):
            named = gm.Curvature(prefixed(dict(value), prefix), value.examples, "empirical", "test")
            named.save(folder / name / "curvature", precision="log8")
        entry = {"model": str(folder / "tuned"), **more}
        gm.merge(recipe_of(folder / "base", entry) | {"method": "gradient-matching"}, folder / "out")
        return {name.removeprefix(base): value.tolist() for name, value in read_model(folder / "out").items()}

    measured = "model." if names == "of the model" else "model.tower."
    got = merge(tmp_path / "renamed", "model.tower.", "model.", measured, rename={"model.": "model.tower."})
    assert got == merge(tmp_path / "plain", "", "", "")


# Language towers


def llava() -> Any:
    vision = CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    text = LlamaConfig(**TEXT)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=59, tie_word_embeddings=False)
    return LlavaForConditionalGeneration(config)


def write_pair(folder: Path) -> tuple[Path, list[Path], list[Any]]:
    """A model for text and images, and two language models near its tower, saved; and all as models."""
    torch.manual_seed(0)
    model = llava()
    randomise(model.parameters(), 7, 0.1)
    language = LlamaForCausalLM(LlamaConfig(**TEXT))
    language.model.load_state_dict(model.model.language_model.state_dict())
    language.lm_head.load_state_dict(model.lm_head.state_dict())
    models = [moved(language, seed) for seed in (1, 2)]
    model.save_pretrained(folder / "vlm")
    places = []
    for number, one in enumerate(models):
        one.save_pretrained(folder / f"llm{number}")
        places.append(folder / f"llm{number}")
    return folder / "vlm", places, [model, *models]


def test_the_language_tower_of_a_vision_language_model_is_merged_with_language_models(tmp_path: Path) -> None:
    vlm, llms, (model, *others) = write_pair(tmp_path)
    prefix = "language_model.model."
    entries = [{"model": str(llm), "weight": 0.4, "rename": {"model.": prefix}} for llm in llms]
    gm.merge(recipe_of(vlm, *entries, include=[f"{prefix}*"]), tmp_path / "out")
    got, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    states = [other.model.state_dict() for other in others]
    for name, value in model.model.language_model.state_dict().items():
        base = value.double()
        want = base + sum(0.4 * (state[name].double() - base) for state in states)
        torch.testing.assert_close(got.model.language_model.state_dict()[name].double(), want, atol=1e-6, rtol=0)
    for name, value in model.state_dict().items():
        if "language_model" not in name:
            assert got.state_dict()[name].equal(value), name
    assert (tmp_path / "out" / "config.json").read_bytes() == (vlm / "config.json").read_bytes()
