"""The sentiment experiment: tiny runs, and its numbers against slow ones."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiments.sentiment.__main__ as program
import pytest
import torch
from experiments.common.states import norm
from experiments.sentiment import grid, report
from experiments.sentiment.data import BASE, SETS, TASKS
from experiments.sentiment.made_up import made_up
from experiments.sentiment.merging import RULES, SWEPT, Parts
from experiments.sentiment.models import kind_of, mean_gradient, prepared, score
from experiments.sentiment.settings import ALL_DATA, JOINT, pretrained_here

from .making import smoke_run

ROWS = made_up("imdb", train=12, test=8)["train"]
CELLS = [
    grid.Cell("plain", "diagonal", "sampled", "N · mean", "none"),
    grid.Cell("prior", "kronecker", "sampled", "mean", "none"),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A tiny run with two cells of the table of Hessians."""
    out = tmp_path_factory.mktemp("runs") / "sentiment"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "cells", lambda: CELLS)
        return out, smoke_run(program.main, ["--grid"], out)


def test_a_tiny_run_scores_every_model_and_merge_on_every_set(run: tuple[Path, dict[str, Any]]) -> None:
    (seed,) = run[1]["seeds"]
    assert set(seed["scores"]) == {*SETS, ALL_DATA, JOINT, *RULES} and len(seed["grid"]["cells"]) == len(CELLS)
    for one in [*seed["scores"].values(), *(s for method in SWEPT for s in seed["sweep"][method])]:
        assert all(one[name]["test"]["rows"] == run[1]["rows"][name]["test"] for name in SETS)
    assert report.accuracy(seed["scores"][BASE], BASE) > 80 and report.average(seed["scores"][ALL_DATA]) > 80


@pytest.fixture(scope="module")
def t5_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("runs") / "t5"
    tiny = pretrained_here("tiny")
    few = replace(tiny, weights=(0.0, 1.0), epochs={**dict.fromkeys((*SETS, ALL_DATA, JOINT), 1), BASE: 10})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "pretrained_here", lambda scale: few)
        return out, smoke_run(program.main, ["--model", "t5"], out)


def test_a_t5_is_pretrained_and_merged(t5_run: tuple[Path, dict[str, Any]]) -> None:
    results = t5_run[1]
    found = results["pretrained"]
    assert results["seq2seq"] and found["last_loss"] < 0.8 * math.log(found["vocabulary"])
    assert report.accuracy(results["seeds"][0]["scores"][BASE], BASE) > 80


def test_merges_are_what_their_formulas_say(run: tuple[Path, dict[str, Any]]) -> None:
    folder, rows = run[0] / "seed-0", {name: counts["train"] for name, counts in run[1]["rows"].items()}
    curvatures, grams = ({n: folder / f"{what}-{n}" / what for n in SETS} for what in ("curvature", "gram"))
    parts = Parts({n: folder / n for n in SETS}, curvatures, grams, rows, damping=1e-10, density=0.2)
    name = "bert.encoder.layer.1.output.dense.weight"
    theta = {n: s[name].double() for n, s in zip(SETS, [parts.base, *parts.tuned], strict=True)}
    fisher = {n: c[name].double() for n, c in zip(SETS, [parts.prior, *parts.curvature], strict=True)}
    prior, change = fisher[BASE] + 1e-10, {n: theta[n] - theta[BASE] for n in TASKS}
    total = prior + sum(0.6 * fisher[n] for n in TASKS)
    slow = theta[BASE] + sum(0.6 * (prior + fisher[n]) / total * change[n] for n in TASKS)
    torch.testing.assert_close(parts.swept("gradient-matching", 0.6)[name].double(), slow, rtol=1e-4, atol=1e-6)
    means = {n: fisher[n] / rows[n] + 1e-10 for n in SETS}
    slow = sum(means[n] * theta[n] for n in SETS) / sum(means.values())
    torch.testing.assert_close(parts.merged("fisher-averaging-mean")[name].double(), slow, rtol=1e-4, atol=1e-6)


@pytest.fixture(params=["run", "t5_run"])
def kind(request: pytest.FixtureRequest) -> Any:
    out, _ = request.getfixturevalue(request.param)
    return kind_of(out / "model", 32)


def alone(kind: Any, model: Any, row: dict[str, Any], label: int) -> torch.Tensor:
    """−ln p of a label for one text without padding; of an answer, the sum over the tokens of its word."""
    ids = torch.tensor([kind.tokenizer(row["text"])["input_ids"]])
    if not model.config.is_encoder_decoder:
        return -model(input_ids=ids).logits[0].log_softmax(-1)[label]
    word = kind.tokenizer(("negative", "positive")[label])["input_ids"]
    logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0, *word[:-1]]])).logits[0]
    return -sum(logits[place].log_softmax(-1)[token] for place, token in enumerate(word))


def test_scores_and_gradients_are_those_of_one_text_at_a_time(kind: Any) -> None:
    model = kind.start(kind.path).double().eval()
    found = score(kind, model, prepared(kind, kind.examples(ROWS), 40, "cpu"))
    right, loss = 0, 0.0
    for row in ROWS:
        with torch.no_grad():
            negative, positive = (float(alone(kind, model, row, label)) for label in (0, 1))
        right += (positive < negative) == bool(row["label"])
        loss += (positive if row["label"] else negative) + math.log(math.exp(-negative) + math.exp(-positive))
    assert (found["right"], found["rows"]) == (right, len(ROWS))
    assert found["loss"] == pytest.approx(loss / len(ROWS), rel=1e-5)
    gradients = mean_gradient(kind, model, kind.examples(ROWS), tokens=40)
    sum(alone(kind, model, row, row["label"]) for row in ROWS).div(len(ROWS)).backward()
    slow = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == slow.keys() and norm(gradients) > 0
    for name, value in slow.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-8, atol=1e-12)
