"""Curvature under the names of a checkpoint, against the files that transformers writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from safetensors.torch import load_file
from torch import nn

import gradmerge as gm
from gradmerge.curvature import checkpoint_names as stored_names
from gradmerge.curvature.checkpoint_names import stored_shapes, stored_tensors

from ..checkpoints.families import EXPERTS, FAMILIES

CASES: dict[str, tuple[Any, Any]] = {
    name: (model_class, config_class(**settings))
    for name, (model_class, config_class, settings) in (FAMILIES | EXPERTS).items()
}
CASES["bert, tied"] = (t.BertForMaskedLM, t.BertConfig(**FAMILIES["bert"][2]))
CASES["clip"] = (t.CLIPVisionModel, t.CLIPVisionConfig(**FAMILIES["vit"][2]))


def saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("family", CASES)
def test_tensors_follow_the_weights_into_the_file(family: str, tmp_path: Path) -> None:
    model_class, config = CASES[family]
    model = model_class(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    file = saved(model, tmp_path)
    with torch.device("meta"):
        empty = model_class(config)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for at in (model, model_class.from_pretrained(tmp_path), empty):
        got = stored_tensors(at, weights)
        assert got.keys() == file.keys() == stored_shapes(at).keys()
        assert all(torch.equal(got[name], file[name]) for name in file)


def test_a_tied_parameter_has_one_value_under_any_name() -> None:
    model_class, config = CASES["bert, tied"]
    model = model_class(config)
    kept, other = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
    value = torch.rand(60, 16)
    assert list(stored_tensors(model, {other: value})) == [kept]
    assert torch.equal(stored_tensors(model, {other: value, kept: value.clone()})[kept], value)
    with pytest.raises(gm.InputError, match="embeddings"):
        stored_tensors(model, {other: value, kept: value + 1})


def test_tensors_of_another_model_are_refused() -> None:
    model = nn.Linear(2, 3)
    assert list(stored_tensors(model, {"bias": torch.ones(3)})) == ["bias"]
    with pytest.raises(gm.InputError, match="weight"):
        stored_tensors(model, {"weight": torch.ones(3, 3)})
    with pytest.raises(gm.InputError, match="other"):
        stored_tensors(model, {"other": torch.ones(3)})


def _fused(_: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"both": torch.cat([value.reshape(-1) for value in tensors.values()])} if tensors else {}


def test_a_part_of_a_tensor_that_is_stored_as_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 3)
    monkeypatch.setattr(stored_names, "_reverted", _fused)
    assert stored_tensors(model, {"weight": torch.ones(3, 2), "bias": torch.ones(3)})["both"].shape == (9,)
    with pytest.raises(gm.InputError, match="both"):
        stored_tensors(model, {"bias": torch.ones(3)})
