"""mergekit recipes: translation, notes, and errors with their key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.recipe import Recipe, load_recipe, make_recipe

MODELS = """
models:
  - model: ./a
    parameters: {weight: 0.5}
  - model: ./b
    parameters: {weight: 0.5}
"""
TIES = "merge_method: ties\nbase_model: ./base" + MODELS
SLICES = """merge_method: linear
slices:
  - sources:
      - {model: ./a, layer_range: [0, 4]}
      - {model: ./b, layer_range: [0, 4]}
parameters: {weight: 1}
"""


def read(tmp_path: Path, text: str) -> Recipe:
    (tmp_path / "config.yml").write_text(text)
    return load_recipe(tmp_path / "config.yml")


def dumped(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude_defaults=True)


def test_a_parameter_is_the_models_then_its_slices_then_the_recipes_and_filters_fall_through(tmp_path: Path) -> None:
    recipe = read(
        tmp_path,
        """
merge_method: ties
base_model: ./base
modules:
  text:
    slices:
      - sources:
          - {model: ./base, layer_range: [0, 2]}
          - model: ./a
            layer_range: [0, 2]
            parameters:
              weight: [{filter: q_proj, value: 1.0}]
              density: 0.9
          - {model: ./b, layer_range: [0, 2]}
        parameters:
          weight: {filter: mlp, value: [0.1, 0.2]}
    parameters:
      weight: {filter: "v_proj", value: 3}
parameters:
  weight: 4
  density: 1e-1
""",
    )
    a, b = recipe.slices[0].models
    below = [{"filter": "mlp", "value": [0.1, 0.2]}, {"filter": "v_proj", "value": 3.0}, {"value": 4.0}]
    assert dumped(recipe)["slices"][0]["models"][0]["weight"] == [{"filter": "q_proj", "value": 1.0}, *below]
    assert dumped(recipe)["slices"][0]["models"][1]["weight"] == below
    assert (a.options, b.options) == ({"density": 0.9}, {"density": 0.1})
    assert recipe.slices[0].base == (0, 2)


def test_a_filter_is_a_part_of_a_name_and_nothing_in_it_is_a_glob(tmp_path: Path) -> None:
    text = TIES.replace("{weight: 0.5}", "{weight: [{filter: 'q[0]*', value: 1}, {filter: '', value: 2}]}", 1)
    weight = read(tmp_path, text).models[0].weight
    assert isinstance(weight, tuple)
    assert [case.fits("model.q[0]*.weight") for case in weight] == [True, True]
    assert [case.fits("model.q0.weight") for case in weight] == [False, True]


def test_keys_without_effect_are_noted(tmp_path: Path) -> None:
    extra = "parameters: {int8_mask: true, epsilon: 0.1}\ndtype: bfloat16\nregularization: 0.2\n"
    notes = read(tmp_path, TIES + extra).notes
    keys = [note.removeprefix(f"{tmp_path / 'config.yml'}: ").split()[0] for note in notes]
    assert keys == ["regularization", "parameters.int8_mask", "parameters.epsilon", "dtype"]


def test_paths_start_from_the_file_or_else_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("here/a", "there/a", "there/b"):
        (tmp_path / folder).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "there")
    recipe = read(tmp_path / "here", "merge_method: linear" + MODELS)
    assert [model.model for model in recipe.models] == ["./a", str(tmp_path / "there" / "b")]


def test_a_mapping_is_read_as_well(tmp_path: Path) -> None:
    value = {"merge_method": "slerp", "base_model": "x/base", "models": [{"model": "x/a"}], "parameters": {"t": "3e-1"}}
    recipe = make_recipe(value)
    assert (recipe.method, recipe.options["t"], recipe.base and recipe.base.model) == ("slerp", 0.3, "x/base")
    with pytest.raises(gm.InputError):
        make_recipe({**value, "merge_method": "slurp"})


def test_models_with_adapters_and_revisions(tmp_path: Path) -> None:
    text = """
merge_method: linear
models:
  - model: org/a@v2+org/lora@v1
  - model: {model: {path: org/b, revision: main}, lora: {path: org/lora}, override_architecture: X}
parameters: {weight: 1}
"""
    recipe = read(tmp_path, text)
    assert [(model.model, model.adapter) for model in recipe.models] == [
        ("org/a@v2", "org/lora@v1"),
        ("org/b@main", "org/lora"),
    ]


FLATTEN = "nuslerp_flatten: {filter: mlp, value: false}"
WRONG = [
    # recipe, the key that the message names
    (TIES.replace("ties", "tyes"), "merge_method"),
    ("merge_method: ties" + MODELS, "base_model"),
    (TIES.replace("models:", "model:"), "recipe"),
    (TIES.replace("    parameters: {weight: 0.5}\n", "", 1), "models[0]"),
    (TIES.replace("{weight: 0.5}", "{weight: {filter: mlp, value: 1}}", 1), "models[0]"),
    (TIES.replace("0.5", "half", 1), "models[0].parameters.weight"),
    (TIES.replace("0.5}", "0.5, density: 1.5}", 1), "models[0].options"),
    (TIES + "parameters:\n  normalize: [true, false]\n", "parameters.normalize"),
    (TIES + "dtype: int8\n", "dtype"),
    (TIES + "chat_template: mistral\n", "chat_template"),
    (TIES + "tokenizer_source: base\ntokenizer: {source: base}\n", "tokenizer"),
    (TIES + "tokenizer: {tokens: {x: {source: {kind: null, model: ./a}}}}\n", "tokenizer.tokens.x.source"),
    (TIES + "tokenizer:\n  tokens:\n    x: {source: {kind: model_token, model: ./a}}\n", "tokenizer.tokens.x.source"),
    (TIES.replace("./b", "./a"), "models"),
    (TIES.replace("./a", "./a+./l+./m"), "models[0].model"),
    ("merge_method: slerp\nbase_model: ./base" + MODELS + "parameters: {t: 1}\n", "models"),
    (SLICES.replace("[0, 4]}", "[0, 3]}", 1), "slices[0].models[1].layers"),
    (SLICES.replace("[0, 4]}", "[4, 0]}", 1), "slices[0].models[0].layers"),
    (SLICES.replace("[0, 4]}", "4}", 1), "slices[0].sources[0].layer_range"),
    (SLICES.replace(", layer_range: [0, 4]", "", 1), "slices[0].sources[0].layer_range"),
    (SLICES.replace("linear", "ties") + "base_model: ./base\n", "slices[0].sources"),
    (SLICES.replace("  - sources", "  - base_model: ./c\n    sources"), "slices[0].base_model"),
    (SLICES.replace("slices", "modules"), "modules"),
    ("merge_method: linear\nmodules:\n  x: {models: [{model: ./a}]}\n  y: {models: [{model: ./b}]}\n", "modules"),
    ("merge_method: linear\n", "recipe"),
    ("merge_method: nuslerp" + MODELS + f"parameters:\n  {FLATTEN}\n", "parameters.nuslerp_flatten"),
    ("merge_method: multislerp" + MODELS + "parameters: {eps: 0.1}\n", "parameters.eps"),
]


@pytest.mark.parametrize(("text", "key"), WRONG)
def test_unsupported_keys_and_values_are_refused_by_name(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(gm.InputError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'config.yml'}: {key}: ")


SYSTEM, USER, ASSISTANT = (
    {"role": role, "content": text} for role, text in (("system", "Be kind."), ("user", "Hi!"), ("assistant", "Hello."))
)


def test_a_chat_template_by_name_renders_the_format_as_published(tmp_path: Path) -> None:
    rendered = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\nHello."
        "<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    )
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    template = read(tmp_path, f"{TIES}chat_template: chatml\n").chat_template
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"<s>": 0})), bos_token="<s>")
    turns = [SYSTEM, USER, ASSISTANT, USER]
    shown = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert shown == rendered
    without = tokenizer.apply_chat_template(turns, chat_template=template, tokenize=False)
    assert rendered.startswith(without) and without.count("Hi!") == 2 and "ssistant" not in without.rpartition("Hi!")[2]
