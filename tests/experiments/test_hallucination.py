"""The hallucination experiment: a tiny run, and its numbers against slow ones."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common.data import Collate
from experiments.common.pretraining import Shape, make_model, make_tokenizer
from experiments.common.removal import WAYS
from experiments.hallucination.__main__ import main
from experiments.hallucination.data import TAGS, Lengths, Turn, encode, swap_knowledge
from experiments.hallucination.evaluation import Likelihood
from experiments.hallucination.metrics import text_metrics

from .making import figures, smoke_run

TOPICS = ["gardens", "trains", "painters", "guitars", "volcanoes", "whales", "bread", "chess", "rivers", "castles"]
THINGS = ["old", "large", "famous", "quiet", "green", "heavy", "famous", "early", "modern", "northern"]


def turns(count: int, seed: int) -> list[Turn]:
    chance = random.Random(seed)
    made = []
    for number in range(count):
        topic, thing = chance.choice(TOPICS), chance.choice(THINGS)
        known = f"The {thing} {topic} of {1500 + number} were known in {chance.choice(TOPICS)} towns."
        history = (f"I like {topic}.", "So do I.", "Tell me more!")
        made.append(Turn(known, history, f"Well, {thing} {topic} were known."))
    return made


def write_data(folder: Path) -> None:
    (folder / "wizard_of_wikipedia").mkdir(parents=True)
    for split, made in (("train", turns(60, 0)), ("test", turns(14, 1))):
        with gzip.open(folder / "wizard_of_wikipedia" / f"{split}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(vars(turn)) + "\n" for turn in made))
    (folder / "wikitext2").mkdir()
    chance = random.Random(2)
    with gzip.open(folder / "wikitext2" / "train.txt.gz", "wt") as file:
        for _ in range(40):
            sentences = (" ".join(chance.choice(TOPICS + THINGS) for _ in range(8)) for _ in range(3))
            file.write("".join(f" The {words} came , and it was <unk> in 1 @,@ 900 ." for words in sentences) + " \n")


def test_a_tiny_run_has_numbers_for_every_method(tmp_path: Path) -> None:
    write_data(tmp_path / "data")
    results = smoke_run(main, ["--data-dir", str(tmp_path / "data")], tmp_path / "out")
    (seed,) = results["seeds"]
    assert set(seed["models"]) == {"base", "target", "hallucinating"}
    assert seed["turns"]["true"] == seed["turns"]["swapped"] == 48
    assert {entry["method"] for entry in seed["entries"]} == {"task-arithmetic", "fa1", "removal"}
    assert seed["models"]["target"]["test"]["divergence"] == pytest.approx(0, abs=1e-6)
    assert seed["comparison"]["ways"].keys() == WAYS.keys()
    assert figures(tmp_path / "out") == {"trade-off", "damping", "removal"}


def test_text_metrics_are_those_of_a_count_by_hand() -> None:
    made = [
        Turn("the green whales sing early", (), "the green whales sing early in old rivers"),
        Turn("bread and castles", (), "modern chess needs quiet northern castles here"),
    ]
    said = ["the green whales sing in rivers", "modern chess needs quiet bread bread"]
    found = text_metrics(made, said)
    # green whales sing | rivers; bread bread | modern chess needs quiet
    assert found["hallucination"] == pytest.approx(100 * 5 / 10)
    assert found["knowledge_f1"] == pytest.approx(100 * (2 * 3 / (4 + 4) + 2 * 1 / (6 + 2)) / 2)


def test_likelihoods_are_those_of_single_turns_without_padding() -> None:
    words = make_tokenizer([turn.knowledge for turn in turns(30, 0)], Shape(1, 16, 32, 2, 300), TAGS)
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(make_model(Shape(1, 16, 32, 2, 300), words).eval())
        models[-1].shared.weight.data.mul_(3)
    own, swapped = (
        encode(rows, words, Lengths(30, 30, 30)) for rows in (turns(7, 5), swap_knowledge(turns(7, 5), 7, 0))
    )
    found = Likelihood(own, swapped, Collate(words.pad_token_id), 3, models[1])(models[0])

    def log_probabilities(model: Any, row: Any) -> torch.Tensor:
        with torch.no_grad():
            output = model(input_ids=torch.tensor([row["input_ids"]]), labels=torch.tensor([row["labels"]]))
        return output.logits[0].double().log_softmax(-1)

    nll = grounding = apart = tokens = 0.0
    for row, other in zip(own, swapped, strict=True):
        mine, theirs, target = (
            log_probabilities(*pair) for pair in ((models[0], row), (models[0], other), (models[1], row))
        )
        labels = torch.tensor(row["labels"])[:, None]
        nll -= float(mine.gather(1, labels).sum())
        grounding += float((mine - theirs).gather(1, labels).sum())
        apart += float((target.exp() * (target - mine)).sum())
        tokens += len(row["labels"])
    assert found["nll"] == pytest.approx(nll / tokens, rel=1e-5)
    assert found["grounding"] == pytest.approx(grounding / tokens, rel=1e-3)
    assert found["divergence"] == pytest.approx(apart / tokens, rel=1e-4)
