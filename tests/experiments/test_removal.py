"""Ways of removal: their paths, what is chosen on them, and NPO, against slow and obvious computations."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from experiments.common.data import Collate
from experiments.common.npo import BETA, log_likelihoods, preference_loss
from experiments.common.removal import between, follow, noise_floors, put, rise
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration


def quadratic(dial: float) -> dict[str, Any]:
    """Perplexity of what stays is exp(d²/10) times that at 0."""
    return {"dial": dial, "validation": {"kept": 3 + dial**2 / 10}, "test": {}}


def test_a_path_is_halved_where_it_passes_the_budget() -> None:
    curve, chosen = follow(quadratic, (0.5, 1.0, 2.0, 9.0), 0.05, 8)
    assert chosen == pytest.approx(math.sqrt(10 * math.log1p(0.05)), abs=0.01)
    assert rise(quadratic(chosen)["validation"], quadratic(0)["validation"]) <= 0.05
    assert chosen in [point["dial"] for point in curve]
    assert follow(quadratic, (0.1, 0.2), 0.05, 5)[1] == 0.2


def test_between_two_places_weights_are_interpolated() -> None:
    points = [{"w": torch.tensor([float(n), -(2.0**n)])} for n in range(3)]
    for dial in (0.0, 1.0, 2.0):
        assert torch.equal(between(points, dial)["w"], points[int(dial)]["w"])
    assert torch.allclose(between(points, 1.25)["w"], torch.tensor([1.25, -2.5]))
    model = torch.nn.Linear(2, 1, bias=False)
    put(model, {"weight": torch.tensor([[3.0, 4.0]])})
    assert model.weight.tolist() == [[3.0, 4.0]]


def gpt() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=12, n_embd=8, n_layer=1, n_head=2, **none)).double()


def t5() -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    shape: Any = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=23, **shape)).double().eval()


def rows(count: int, seed: int, same: bool) -> list[dict[str, list[int]]]:
    """Of several lengths; labels that are the input, as of a language model, or others."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for number in range(count):
        ids = torch.randint(1, 23, (4 + number % 3,), generator=generator).tolist()
        made.append({"input_ids": ids, "labels": ids if same else ids[::-1][: 2 + number % 3]})
    return made


@pytest.mark.parametrize("make", [gpt, t5])
def test_the_log_likelihood_of_a_row_is_a_sum_over_its_tokens_whatever_the_padding(make: Any) -> None:
    model, decoder = make().requires_grad_(False), make is t5
    made = rows(5, 0, same=not decoder)
    found = log_likelihoods(model, Collate(0)(made))
    for row, value in zip(made, found, strict=True):
        ids, labels = torch.tensor([row["input_ids"]]), row["labels"]
        told = {"decoder_input_ids": torch.tensor([[0, *labels[:-1]]])} if decoder else {}
        scores = model(input_ids=ids, **told).logits[0].double().log_softmax(-1)
        wanted = labels if decoder else labels[1:]
        slow = sum(float(scores[place, token]) for place, token in enumerate(wanted))
        assert float(value) == pytest.approx(slow, rel=1e-5)


def test_the_loss_of_npo_is_its_formula() -> None:
    goes, before, stays = (torch.randn(6, dtype=torch.float64) * 5 - 20 for _ in range(3))
    slow = 0.0
    for own, reference in zip(goes.tolist(), before.tolist(), strict=True):
        slow += 2 / BETA * math.log(1 + (math.exp(own) / math.exp(reference)) ** BETA) / 6
    slow -= sum(stays.tolist()) / 6
    assert float(preference_loss(goes, before, stays)) == pytest.approx(slow, rel=1e-12)


def test_the_noise_floor_of_a_seed_is_how_far_the_targets_of_the_others_are() -> None:
    def bench(own: int) -> Any:
        return SimpleNamespace(load=lambda name: own, measure=lambda model, split: {"kl_forget": 10 * own + model})

    found: Any = noise_floors([bench(n) for n in (1, 2, 4)])
    assert [one["kl_forget"] for one in found] == [10 + 3, 20 + 2.5, 40 + 1.5]
    assert noise_floors([bench(1)]) is None
