"""The toxicity experiment: a tiny run on made-up text, and its numbers against slow ones."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
import torch
from experiments.common.data import write_rows
from experiments.common.removal import WAYS
from experiments.common.training import Training
from experiments.toxicity import models
from experiments.toxicity.__main__ import main
from experiments.toxicity.evaluation import divergence, loss_on, windows
from experiments.toxicity.removal import Point, Task, rise
from experiments.toxicity.settings import Shape
from transformers import GPT2LMHeadModel

import gradmerge as gm

from .making import smoke_run

CIVIL = ["the", "town", "has", "a", "river", "and", "an", "old", "church", "where", "people", "like", "to", "walk"]
RUDE = ["grumf", "blarg", "snork", "you", "are", "a", "vile", "zorp", "and", "a", "rotten", "mub"]


def sentence(words: list[str], rng: random.Random) -> str:
    return " ".join(rng.choices(words, k=rng.randint(8, 14)))


def write_text(folder: Path) -> None:
    rng = random.Random(0)
    for name in ("imdb", "yelp", "amazon"):
        for split, count in (("train", 30), ("test", 6)):
            rows = [{"text": sentence(CIVIL, rng), "label": 1} for _ in range(count)]
            write_rows(folder / name / f"{split}.jsonl.gz", rows)
    for split, count in (("train", 60), ("test", 20)):
        rows = [{"text": sentence(RUDE if i % 2 else CIVIL, rng), "label": i % 2} for i in range(count)]
        write_rows(folder / "jigsaw_toxic" / f"{split}.jsonl.gz", rows)
    prompts = [
        {
            "text": sentence(CIVIL if i % 3 else RUDE, rng),
            "toxicity": 0.1 if i % 3 else 0.9,
            "continuation": sentence(RUDE if i % 2 else CIVIL, rng),
            "continuation_toxicity": 0.8 if i % 2 else 0.2,
        }
        for i in range(20)
    ]
    write_rows(folder / "real_toxicity_prompts" / "prompts.jsonl.gz", prompts)
    (folder / "wikitext2").mkdir()
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        with gzip.open(folder / "wikitext2" / f"{split}.txt.gz", "wt") as file:
            file.write("".join(f" {sentence(CIVIL, rng)} \n \n" for _ in range(count)))


def test_a_tiny_run_has_rows_for_every_model_and_method(tmp_path: Path) -> None:
    write_text(tmp_path / "data" / "text")
    results = smoke_run(main, ["--data-dir", str(tmp_path / "data")], tmp_path / "out")
    (seed,) = results["seeds"]
    assert set(seed["rows"]) == {"base", "target", "tuned-plain", "tuned-penalty"}
    losses = {name: row["loss"]["toxic"] for name, row in seed["rows"].items()}
    assert losses["tuned-plain"] < losses["base"] < losses["target"] - 0.1
    for found in seed["tunings"].values():
        base = Point(**found["sweep"]["base"])
        for by_budget in found["chosen"].values():
            assert all(rise(Point(**point), base) <= float(budget) for budget, point in by_budget.items())
    ways, budget = seed["comparison"]["ways"], results["settings"]["comparing"]["budget"]
    assert ways.keys() == WAYS.keys() and all(way["chosen"]["rise"] <= budget for way in ways.values())


def slow_log_probabilities(model: GPT2LMHeadModel, ids: torch.Tensor, context: int) -> list[torch.Tensor]:
    """Of each token after the first, the distribution given all that its window shows before it."""
    found = []
    for start, end, first in windows(ids, context):
        for place in range(start + first, end):
            with torch.no_grad():
                logits = model(input_ids=ids[None, start:place]).logits[0, -1]
            found.append(logits.double().log_softmax(0))
    return found


def test_loss_and_divergence_are_sums_over_single_tokens() -> None:
    pair = [models.blank(Shape(300, 1, 16, 2, Training(1e-2, 1, 8)), 16, 0, seed).double().eval() for seed in (0, 1)]
    for parameter in (p for model in pair for p in model.parameters()):
        parameter.data.mul_(5)  # far from the uniform distribution that a new model gives
    ids = torch.randint(300, (45,), generator=torch.Generator().manual_seed(0))
    mine, theirs = (slow_log_probabilities(model, ids, 16) for model in pair)
    loss = -sum(float(p[token]) for p, token in zip(mine, ids[1:], strict=True)) / 44
    apart = sum(float((q.exp() * (q - p)).sum()) for p, q in zip(mine, theirs, strict=True)) / 44
    assert loss_on(pair[0], ids, 16) == pytest.approx(loss, rel=1e-5)
    assert divergence(pair[1], pair[0], ids, 16) == pytest.approx(apart, rel=1e-5) and apart > 0.05


def test_removal_follows_its_equation() -> None:
    base, tuned, first, second = (
        {"w": torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1}
        for seed in range(4)
    )
    task, delta = Task(base, tuned, gm.Curvature(first, 3), gm.Curvature(second, 5)), tuned["w"] - base["w"]
    torch.testing.assert_close(task.without("task-arithmetic", 0.7, None)["w"], base["w"] - 0.7 * delta)
    wanted = base["w"] - 0.7 * (first["w"] + 0.2 + second["w"]) / (first["w"] + 0.2) * delta
    torch.testing.assert_close(task.without("gradient-matching", 0.7, 0.2)["w"], wanted)
