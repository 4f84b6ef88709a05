"""The hallucination experiment: a tiny run."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
from experiments.common.removal import WAYS
from experiments.hallucination.__main__ import main
from experiments.hallucination.data import Turn

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
