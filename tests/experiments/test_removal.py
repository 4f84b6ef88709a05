"""The removal experiment: tiny runs on made-up text."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
import torch
import transformers as t
from experiments.common.data import write_rows
from experiments.removal.report import WAYS
from experiments.removal.robustness import BLOCK, quantize
from experiments.removal.run import EXPERIMENT

from .making import smoke_run

CIVIL = ["the", "town", "has", "a", "river", "and", "an", "old", "church", "where", "people", "like", "to", "walk"]
RUDE = ["grumf", "blarg", "snork", "you", "are", "a", "vile", "zorp", "and", "a", "rotten", "mub"]
TOPICS = ["gardens", "trains", "painters", "guitars", "volcanoes", "whales", "bread", "chess", "rivers", "castles"]


def sentence(words: list[str], rng: random.Random) -> str:
    return " ".join(rng.choices(words, k=rng.randint(8, 14))).capitalize() + "."


def write_data(folder: Path) -> None:
    rng = random.Random(0)
    for name in ("imdb", "yelp", "amazon"):
        for split, count in (("train", 30), ("test", 6)):
            rows = [{"text": sentence(CIVIL, rng), "label": 1} for _ in range(count)]
            write_rows(folder / name / f"{split}.jsonl.gz", rows)
    for split, count in (("train", 60), ("test", 20)):
        rows = [{"text": sentence(RUDE if i % 2 else CIVIL, rng), "label": i % 2} for i in range(count)]
        write_rows(folder / "jigsaw_toxic" / f"{split}.jsonl.gz", rows)
    prompts = [{"text": sentence(CIVIL if i % 3 else RUDE, rng), "toxicity": 0.1 if i % 3 else 0.9} for i in range(20)]
    write_rows(folder / "real_toxicity_prompts" / "prompts.jsonl.gz", prompts)
    (folder / "wikitext2").mkdir()
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        with gzip.open(folder / "wikitext2" / f"{split}.txt.gz", "wt") as file:
            file.write("".join(f" {sentence(CIVIL, rng)} {sentence(CIVIL, rng)} \n \n" for _ in range(count)))
    for split, count in (("train", 60), ("test", 14)):
        turns = []
        for number in range(count):
            topic = rng.choice(TOPICS)
            known = f"{1500 + number} saw {topic} in {rng.choice(TOPICS)} towns."
            history = [f"I like {topic}.", "So do I.", "Tell me more!"]
            turns.append({"knowledge": known, "history": history, "response": f"Well, {number} {topic}."})
        write_rows(folder / "wizard_of_wikipedia" / f"{split}.jsonl.gz", turns)


@pytest.mark.parametrize("task", ["toxicity", "hallucination"])
def test_a_tiny_run_compares_every_way_with_the_target(task: str, tmp_path: Path) -> None:
    write_data(tmp_path / "data" / "text")
    options = ["--task", task, "--data-dir", str(tmp_path / "data")]
    results = smoke_run(EXPERIMENT, options, tmp_path / "out")
    (compared,) = [seed["comparison"] for seed in results["seeds"]]
    limits, budget = compared["limits"], results["settings"]["methods"]["budget"]
    assert limits["target"]["kl_kept"] == pytest.approx(0, abs=1e-6)
    assert limits["taught-plain"]["forget"] < limits["base"]["forget"] < limits["target"]["forget"]
    assert compared["ways"].keys() == WAYS.keys()
    assert all(way["chosen"]["rise"] <= budget for way in compared["ways"].values())
    assert compared["robust"].keys() == {*WAYS, "base", "target"}
    assert all(states["4 bits"] != states["as it is"] for states in compared["robust"].values())
    target = compared["robust"]["target"]
    assert target["relearned"]["forget"] < target["as it is"]["forget"]


def test_quantized_layers_have_at_most_16_values_per_block_and_the_output_layer_is_unchanged() -> None:
    sizes = {"n_embd": 2 * BLOCK, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 40}
    model = t.GPT2LMHeadModel(t.GPT2Config(**sizes))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    after = quantize(model).state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))}
    # A block is 64 inputs of one output; GPT-2 has the inputs in rows.
    blocks = after["transformer.h.0.mlp.c_fc.weight"].T.reshape(-1, BLOCK)
    assert max(len(block.unique()) for block in blocks) <= 16
