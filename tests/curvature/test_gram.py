"""XᵀX of linear layers' inputs, against a loop over the input vectors of single examples without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from gradmerge.curvature.curvature import Curvature
from gradmerge.curvature.estimate import estimate_curvature

from . import slow
from .families import FAMILIES, batch_of, batches_of
from .test_accumulate import ByKeyword, Folded, tokens_of

MODELS = ["bert, masked", "albert", "gpt2", "llama, tied", "t5", "vit"]


def estimate_gram(model: nn.Module, batches: Any, **options: Any) -> Curvature:
    return estimate_curvature(model, batches, kind="gram", **options)


def linear_layers(model: nn.Module) -> dict[str, Any]:
    """Every linear layer whose weight is no embedding."""
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and not any(module.weight is table for table in tables)
    }


def by_hand(name: str, tmp_path: Path) -> dict[str, Tensor]:
    """XᵀX by the names of the checkpoint, which are found by the values of the weights."""
    model, examples = FAMILIES[name].model(), FAMILIES[name].examples()
    layers = linear_layers(model)
    with torch.no_grad():
        found = slow.grams(model, list(layers), lambda m: [slow.logits_of(m, example) for example in examples])
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    wanted = {}
    for layer, matrix in found.items():
        weight = layers[layer].weight
        (file_name,) = [n for n, v in stored.items() if v.shape == weight.shape and torch.equal(v, weight)]
        wanted[file_name] = matrix
    return wanted


@pytest.mark.parametrize("name", MODELS)
def test_padding_is_left_out_and_batches_do_not_matter(name: str, tmp_path: Path) -> None:
    want = by_hand(name, tmp_path)
    model, examples = FAMILIES[name].model(), FAMILIES[name].examples()
    padded = {"longer": 2} if "input_ids" in examples[0] else {}
    for batches in ([batch_of(examples)], batches_of(examples, (2, 3), **padded), batches_of(examples, [1] * 5)):
        got = estimate_gram(model, batches)
        assert got.examples == 5
        slow.assert_same(got, want, FAMILIES[name].tolerance)
        assert got.transposed == (set(got) if name == "gpt2" else set())  # its layers are Conv1D


def test_any_module_and_rows_without_an_axis_of_tokens() -> None:
    model, examples = Folded(), tokens_of(0)
    found = slow.grams(model, ["layer", "head"], lambda m: [slow.logits_of(m, e) for e in examples])
    want = {f"{name}.weight": value for name, value in found.items()}
    for sizes in ((6,), (2, 4)):
        slow.assert_same(estimate_gram(model, batches_of(examples, sizes)), want, 1e-12)
    slow.assert_same(estimate_gram(ByKeyword(), [batch_of(examples)]), want, 1e-12)
    alone, x = nn.Linear(3, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    assert torch.allclose(estimate_gram(alone, [(x, torch.zeros(5))])["weight"], x.T @ x)


def test_padding_is_left_out_where_rows_have_no_axis_of_tokens() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.layer = nn.Embedding(9, 4), nn.Linear(4, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.layer(self.table(input_ids).reshape(-1, 4)).view(*input_ids.shape, 3)

    model = Model()
    ids, mask = torch.tensor([[1, 2, 3], [4, 0, 0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    got = estimate_gram(model, [{"input_ids": ids, "attention_mask": mask, "labels": ids}])
    x = model.table.weight[1:5].detach()
    assert torch.allclose(got["layer.weight"], x.T @ x)
