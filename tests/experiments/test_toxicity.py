"""The toxicity experiment: a tiny run on made-up text."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from experiments.common.data import write_rows
from experiments.common.removal import WAYS
from experiments.toxicity.__main__ import main
from experiments.toxicity.removal import Point, rise

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
