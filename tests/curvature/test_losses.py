"""Losses, labels drawn from the model, and expectations over them, against what can be written down."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn

from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.losses import LOSSES, MASKED, loss_of

from . import slow

INPUTS, OUTS = 4, 3


LABELS: dict[str, Tensor] = {
    "classes": torch.tensor([0, 1, 2, 0, 1, 2]),
    "labels": torch.tensor([[0, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]]),
    "squared": torch.linspace(-1, 1, 18, dtype=torch.float64).view(6, 3),
}


@pytest.mark.parametrize("output", LABELS)
@pytest.mark.parametrize("likelihood", ["empirical", "exact"])
def test_every_output_is_the_slow_loop(output: str, likelihood: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(INPUTS, 5), nn.Tanh(), nn.Linear(5, OUTS)).double()
    x, y = torch.randn(6, INPUTS, dtype=torch.float64), LABELS[output]
    examples = [{"0": a, "labels": b} for a, b in zip(x, y, strict=True)]
    want = getattr(slow, likelihood)(model, examples, output)
    for sizes in ((6,), (1, 5), (2, 2, 2)):
        batches = list(zip(x.split(sizes), y.split(sizes), strict=True))
        slow.assert_same(estimate_curvature(model, batches, likelihood, output=output), want, 1e-12)


@pytest.mark.parametrize("output", ["classes", "labels"])
def test_draws_have_the_models_probabilities(output: str) -> None:
    copies, logits = 20_000, torch.tensor([0.5, -1.0, 0.0])
    generator = torch.Generator().manual_seed(0)
    uniform = lambda row, count: torch.rand(count, generator=generator, dtype=torch.float64)  # noqa: E731
    labels = torch.zeros(copies, OUTS).long() if output == "labels" else torch.zeros(copies).long()
    drawn = LOSSES[output].draw(logits.expand(copies, OUTS), labels, uniform)
    found = drawn.double().mean(0) if output == "labels" else drawn.bincount(minlength=OUTS).double() / copies
    want = logits.double().sigmoid() if output == "labels" else logits.double().softmax(0)
    assert bool(((found - want).abs() < 5 * (want * (1 - want) / copies).sqrt()).all())


def given(*numbers: float) -> Any:
    """Uniform numbers that a test has chosen, the same for every row."""
    return lambda row, count: torch.tensor(numbers[:count], dtype=torch.float64)


def test_what_cannot_be_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for number in (0.0, 0.5, 1 - 2**-53):
        assert LOSSES["classes"].draw(logits, torch.tensor([0]), given(number)).tolist() == [1]


def test_only_tokens_that_count_are_drawn_and_a_first_token_never_counts() -> None:
    logits = torch.tensor([1.0, 0.0, 0.0]).log().expand(2, 4, 3)
    labels = torch.tensor([[2, 1, MASKED, 2], [MASKED, MASKED, 1, 1]])
    asked: list[tuple[int, int]] = []

    def uniform(row: int, count: int) -> Tensor:
        asked.append((row, count))
        return torch.full((count,), 0.5, dtype=torch.float64)

    assert LOSSES["next-token"].draw(logits, labels, uniform).tolist() == [[2, 0, MASKED, 0], [MASKED, MASKED, 0, 0]]
    assert asked == [(0, 2), (1, 2)]
    assert LOSSES["tokens"].draw(logits, labels, uniform).tolist() == [[0, 0, MASKED, 0], [MASKED, MASKED, 0, 0]]
    assert asked[2:] == [(0, 3), (1, 2)]
    spread = torch.randn(2, 4, 3)
    changed = labels.clone()
    changed[0, 0] = 1
    losses = LOSSES["next-token"].losses
    assert torch.equal(losses(spread, labels), losses(spread, changed))


@pytest.mark.parametrize(
    "logits",
    [
        [[0.3, -0.7, 1.1, 0.0]],
        [[0.0, 0.0]],
        [[-1000.0, 0.0, 1000.0]],
        [[0.0, 800.0, 800.0]],
        [[-math.inf, 0.0, 0.0]],
    ],
)
def test_factors_of_classes_are_a_root_of_their_covariance(logits: list[list[float]]) -> None:
    z = torch.tensor(logits, dtype=torch.float64)
    p = z.softmax(-1)[0]
    factors = list(LOSSES["classes"].factors(z))
    assert len(factors) == len(p) - 1
    total = sum((torch.outer(s[0], s[0]) for s in factors), torch.zeros(len(p), len(p), dtype=torch.float64))
    assert torch.allclose(total, torch.diag(p) - torch.outer(p, p), atol=1e-15)


_BERT = t.BertConfig(vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
_GPT2 = t.GPT2Config(vocab_size=9, n_embd=4, n_layer=1, n_head=1)
_T5 = t.T5Config(vocab_size=9, d_model=4, d_kv=4, d_ff=4, num_layers=1, num_heads=1)


def _bert(**changes: Any) -> t.BertConfig:
    return t.BertConfig(**{**_BERT.to_dict(), **changes})


@pytest.mark.parametrize(
    ("kind", "config", "labels", "want"),
    [
        (t.BertForSequenceClassification, _bert(num_labels=3), torch.tensor([0]), "classes"),
        (t.BertForSequenceClassification, _bert(num_labels=3), torch.zeros(1, 3), "labels"),
        (t.BertForSequenceClassification, _bert(num_labels=1), torch.zeros(1), "squared"),
        (t.BertForSequenceClassification, _bert(num_labels=3, problem_type="regression"), torch.zeros(1, 3), "squared"),
        (
            t.BertForSequenceClassification,
            _bert(num_labels=3, problem_type="multi_label_classification"),
            torch.zeros(1, 3).long(),
            "labels",
        ),
        (t.BertForTokenClassification, _bert(num_labels=3), torch.zeros(1, 5).long(), "tokens"),
        (t.BertForMaskedLM, _BERT, torch.zeros(1, 5).long(), "tokens"),
        (t.GPT2LMHeadModel, _GPT2, torch.zeros(1, 5).long(), "next-token"),
        (t.T5ForConditionalGeneration, _T5, torch.zeros(1, 5).long(), "tokens"),
    ],
)
def test_what_a_model_answers_is_read_off_it(kind: Any, config: Any, labels: Tensor, want: str) -> None:
    with torch.device("meta"):
        model = kind(config)
    assert loss_of(model, labels).name == want
