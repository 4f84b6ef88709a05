"""Gradients against a loop over single examples, and the files that they are kept in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.gradients import Gradient, estimate_gradient

from . import slow
from .families import EXACT, FAMILIES, batch_of, batches_of
from .slow import Example


def by_hand(model: nn.Module, examples: list[Example], output: str) -> tuple[dict[str, Tensor], float]:
    """Σ ∇ℓ_i and Σ ℓ_i, one example after the other, without padding."""
    total, loss = {name: torch.zeros_like(p).double() for name, p in model.named_parameters()}, 0.0
    for example in examples:
        one = slow.loss_of(slow.logits_of(model, example), example["labels"], output)
        for name, value in slow.gradients(model, one).items():
            total[name] += value
        loss += float(one.detach())
    return total, loss


def assert_near(got: Any, want: dict[str, Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    largest = max(float(value.abs().max()) for value in want.values())
    for name, value in want.items():
        error = float((got[name].double() - value).abs().max())
        assert error <= tolerance * largest, f"{name}: {error:.2e} of {largest:.2e}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_gradient_is_the_sum_over_single_examples_whatever_the_batches(name: str) -> None:
    family = FAMILIES[name]
    model, examples = family.model(), family.examples()
    want, loss = by_hand(model, examples, family.output)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model.train()
    for batches in ([batch_of(examples)], batches_of(examples, (2, 1, 2), longer=1)):
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
            model.eval()
        got = estimate_gradient(model, batches, output=family.output)
        assert_near(got, want, max(family.tolerance, EXACT))
        assert got.loss == pytest.approx(loss, rel=max(family.tolerance, 1e-9)) and got.examples == 5
    assert all(torch.equal(before[n], p) and p.requires_grad for n, p in model.named_parameters())
    assert name != "clip" or "post_layernorm" in got.notes[0]
    assert name in ("clip",) or not got.notes


def test_sums_are_kept_in_float32_where_the_model_is_narrow() -> None:
    family = FAMILIES["bert"]
    model = family.model(torch.bfloat16)
    got = estimate_gradient(model, batches_of(family.examples(), [1] * 5))
    assert {value.dtype for value in got.values()} == {torch.float32}
    want, _ = by_hand(family.model(), family.examples(), "classes")
    assert_near(got, want, 0.1)


class Net(nn.Module):
    """A layer that counts, one behind a ``detach``, one that nothing asks."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.first, self.second, self.idle, self._cut = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2), cut

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        out = self.second(hidden.detach() if self._cut else hidden)
        self.idle(out)
        return out


def rows(seed: int = 0, count: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.arange(count) % 2


def test_what_the_output_does_not_depend_on_has_a_gradient_of_zero_and_is_named() -> None:
    got = estimate_gradient(Net(cut=False), [rows()])
    assert not bool(got["idle.weight"].any()) and "idle.weight" in got.notes[0] and "first" not in got.notes[0]


def test_a_layer_that_counts_and_gets_no_gradient_is_an_error_that_names_it() -> None:
    model = Net(cut=True)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(gm.InputError, match=r"(?s)output depends on them.*first\.weight") as caught:
        estimate_gradient(model, [rows()])
    assert "idle" not in str(caught.value) and "second" not in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    model.first.requires_grad_(False)
    assert set(estimate_gradient(model, [rows()])) == {"second.weight", "second.bias", "idle.weight", "idle.bias"}


def test_nothing_to_differentiate_is_an_error() -> None:
    model = Net(cut=False)
    with pytest.raises(gm.InputError, match="no examples"):
        estimate_gradient(model, [])
    with pytest.raises(gm.InputError, match="not one of the model's 2 classes"):
        estimate_gradient(model, [(rows()[0], torch.full((6,), 5))])
    with pytest.raises(gm.InputError, match=r"example 3 .*loss is nan"):
        estimate_gradient(model, [(torch.cat([rows()[0][:3], torch.full((1, 3), torch.nan)]), torch.zeros(4).long())])
    family = FAMILIES["gpt2"]
    batch = batch_of(family.examples())
    batch["labels"] = torch.full_like(batch["labels"], slow.MASKED)
    with pytest.raises(gm.InputError, match="the gradient of every parameter is 0"):
        estimate_gradient(family.model(), [batch])
    with pytest.raises(gm.InputError, match="no parameter with requires_grad"):
        estimate_gradient(model.requires_grad_(False), [rows()])


@pytest.mark.parametrize("shard_size", [5_000_000_000, 600])
def test_a_file_gives_back_what_was_saved(tmp_path: Path, shard_size: int) -> None:
    family = FAMILIES["vit"]
    model = family.model(torch.float32)
    got = estimate_gradient(model, [batch_of(family.examples(torch.float32))])
    got.digest = "xxh3-128:0f"
    got.save(tmp_path / "g", shard_size=shard_size)
    again = Gradient.load(tmp_path / "g")
    model.save_pretrained(tmp_path / "model")
    assert again.keys() == load_file(tmp_path / "model" / "model.safetensors").keys()
    want = got.for_files()
    assert all(torch.equal(again[name], want[name]) for name in want)
    assert again.loss == got.loss and again.examples == 5 and again.digest == got.digest
    file = sorted((tmp_path / "g").glob("*.safetensors"))[0]
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "gradmerge-gradient/1"
        assert set(opened.metadata()) == {"format", "examples", "loss", "model", "digest"}
    assert (shard_size == 600) is (tmp_path / "g" / "gradient.safetensors.index.json").exists()
    got.save(tmp_path / "g", force=True)
    assert [path.name for path in (tmp_path / "g").iterdir()] == ["gradient.safetensors"]
    assert Gradient.load(tmp_path / "g" / "gradient.safetensors").keys() == want.keys()


def test_bad_files_are_refused_in_words(tmp_path: Path) -> None:
    head = {"format": "gradmerge-gradient/1", "examples": "3", "loss": "1.5", "model": "", "digest": ""}
    cases: list[tuple[dict[str, str], Any, str]] = [
        ({"format": "gradmerge-curvature/1"}, torch.ones(2), "not a gradient file"),
        ({"examples": "0"}, torch.ones(2), "number of examples is '0'"),
        ({"loss": "much"}, torch.ones(2), "loss is 'much'"),
        ({}, torch.ones(2).double(), "w is F64"),
        ({}, torch.tensor([1.0, torch.inf]), "not finite"),
    ]
    for change, value, message in cases:
        save_file({"w": value}, tmp_path / "gradient.safetensors", metadata=head | change)
        with pytest.raises(gm.InputError, match=message):
            Gradient.load(tmp_path)
    with pytest.raises(gm.InputError, match="no such gradient"):
        Gradient.load(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(gm.InputError, match=r"no gradient\.safetensors"):
        Gradient.load(tmp_path / "empty")
    with pytest.raises(gm.InputError, match="float32 only"):
        Gradient({"w": torch.ones(2)}, 1, 0.5).save(tmp_path / "g", precision="log8")
    save_file({"w": torch.ones(2)}, tmp_path / "curvature.safetensors", metadata=head)
    with pytest.raises(gm.InputError, match="not a curvature file"):
        gm.Curvature.load(tmp_path)
