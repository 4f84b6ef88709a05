"""Models of sentence-transformers: every module's weights are merged, and every module's folder comes along."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm

from ..making import near, random_state, write_model

DENSE = {"linear.weight": (4, 8), "linear.bias": (4,)}
TRANSFORMER = {"embeddings.weight": (11, 8), "layer.0.weight": (8, 8)}


def write_sentence_model(
    folder: Path, transformer: Mapping[str, Tensor], dense: Mapping[str, Tensor], first: str = ""
) -> Path:
    """As sentence-transformers saves a transformer, pooling, a dense layer and normalisation."""
    write_model(folder / first, transformer)
    modules = [(first, "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(modules)
    ]
    for path, _ in modules:
        (folder / path).mkdir(exist_ok=True)
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "config_sentence_transformers.json").write_text('{"similarity_fn_name": "cosine"}')
    (folder / first / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    (folder / "1_Pooling" / "config.json").write_text('{"word_embedding_dimension": 8}')
    (folder / "2_Dense" / "config.json").write_text('{"in_features": 8, "out_features": 4}')
    (folder / "2_Dense" / "secret.key").write_text("secret")
    save_file(dict(dense), folder / "2_Dense" / "model.safetensors")
    return folder


def write_three(folder: Path, **options: Any) -> list[Path]:
    transformer, dense = random_state(0, TRANSFORMER), random_state(1, DENSE)
    return [
        write_sentence_model(folder / "base", transformer, dense, **options),
        write_sentence_model(folder / "a", near(transformer, 2), near(dense, 3), **options),
        write_sentence_model(folder / "b", near(transformer, 4), near(dense, 5), **options),
    ]


@pytest.mark.parametrize(("first", "shard_size"), [("", "130B"), ("0_Transformer", "5GB")])
def test_every_module_is_merged_and_copied(tmp_path: Path, first: str, shard_size: str) -> None:
    models = write_three(tmp_path, first=first)
    (models[1] / "3_Normalize").rmdir()  # which git does not keep
    recipe = {
        "method": "task-arithmetic",
        "base": str(models[0]),
        "models": [{"model": str(m), "weight": 0.3} for m in models[1:]],
        "output": {"shard_size": shard_size},
    }
    gm.merge(recipe, tmp_path / "out")
    out = tmp_path / "out"
    for module, shapes in ((first, TRANSFORMER), ("2_Dense", DENSE)):
        states = [load_file(model / module / "model.safetensors") for model in models]
        got = {name: value for path in (out / module).glob("*.safetensors") for name, value in load_file(path).items()}
        assert got.keys() == shapes.keys()
        assert (out / module / "model.safetensors.index.json").is_file() == (shard_size == "130B")
        for name in shapes:
            base, a, b = (state[name].double() for state in states)
            torch.testing.assert_close(
                got[name].double(), base + 0.3 * (a - base) + 0.3 * (b - base), atol=1e-6, rtol=0
            )
    for name in ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json", "2_Dense/config.json"):
        assert (out / name).read_bytes() == (models[0] / name).read_bytes()
    assert not (out / "2_Dense" / "secret.key").exists()


def test_models_that_pool_in_another_way_are_refused_in_whatever_layout_they_say_so(tmp_path: Path) -> None:
    models = write_three(tmp_path)
    flags = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
    for model, config in zip(models, (flags, {"pooling_mode": "mean"}, {"pooling_mode": ["mean"]}), strict=True):
        (model / "1_Pooling" / "config.json").write_text(json.dumps(config))
    recipe = {"method": "average", "base": str(models[0]), "models": [str(m) for m in models[1:]]}
    gm.merge(recipe, tmp_path / "out")
    (models[1] / "1_Pooling" / "config.json").write_text('{"pooling_mode": "cls"}')
    with pytest.raises(gm.InputError, match=r"1_Pooling_config\.pooling_mode"):
        gm.merge(recipe, tmp_path / "refused")


@pytest.mark.parametrize(
    "text",
    ["{}", '[{"path": "../a"}]', '[{"path": "nowhere"}]', '[{"idx": 0}]', "[" * 9999],
)
def test_a_list_of_modules_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    models = write_three(tmp_path)
    (models[0] / "modules.json").write_text(text)
    with pytest.raises(gm.InputError):
        gm.merge({"method": "average", "models": [str(m) for m in models]}, tmp_path / "out")
