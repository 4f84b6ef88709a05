"""Tasks of the lm-evaluation-harness from local files, against log-likelihoods by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.tasks import load_model
from gradmerge.tasks.lm_eval import LMEval
from gradmerge.tasks.loading import load_tokenizer

from ..making import tuned_from
from .making import sentences, tiny_bert_checkpoint, tiny_llama_checkpoint, write_jsonl

CHOICES = ["paris", "rome", "blue sky"]
COUNT = 12


def write_tasks(folder: Path) -> Path:
    """A task of choices, and a group of it with a second one; their rows beside them."""
    folder.mkdir(parents=True)
    rows = [{"asked": text, "label": place % 3} for place, text in enumerate(sentences(COUNT, 5))]
    write_jsonl(folder / "rows.jsonl", rows)
    for name, count in (("cities", COUNT), ("fewer_cities", 5)):
        write_jsonl(folder / f"{name}.jsonl", rows[:count])
        task: dict[str, Any] = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(folder / f"{name}.jsonl")},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{asked}}",
            "doc_to_choice": CHOICES,
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }
        (folder / f"{name}.yaml").write_text(json.dumps(task))  # which is YAML too
    group = {
        "group": "geography",
        "task": ["cities", "fewer_cities"],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }
    (folder / "geography.yaml").write_text(json.dumps(group))
    return folder


def by_hand(folder: Path) -> list[float]:
    """1 for every row whose own choice has the highest summed log-probability after the text."""
    model, info = load_model(str(folder), "causal-lm", device="cpu")
    words: Any = load_tokenizer(info)
    right = []
    for place, text in enumerate(sentences(COUNT, 5)):
        begun = words(text)["input_ids"]
        likely = []
        for choice in CHOICES:
            more = words(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([begun + more])).logits[0].double().log_softmax(-1)
            likely.append(sum(float(logs[len(begun) + i - 1, token]) for i, token in enumerate(more)))
        right.append(float(max(range(3), key=likely.__getitem__) == place % 3))
    return right


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    tiny_llama_checkpoint(folder / "base")
    for seed, name in enumerate(("one", "two"), 1):
        tuned_from(folder / "base", folder / name, seed)
    write_tasks(folder / "tasks")
    return folder


def test_accuracy_is_that_of_the_likeliest_choice(place: Path) -> None:
    right = by_hand(place / "one")
    share = sum(right) / COUNT
    assert 0 < share < 1, "or little is tested"
    options: Any = {"lm_eval_tasks": place / "tasks", "device": "cpu", "progress": False}
    found = gm.evaluate(place / "one", lm_eval="cities", **options)["lm_eval"]["cities"]
    assert found["acc"] == pytest.approx(share) and found["examples"] == COUNT
    assert found["standard_errors"]["acc"] == pytest.approx(math.sqrt(share * (1 - share) / (COUNT - 1)))


def test_a_group_and_its_tasks_are_evaluated(place: Path) -> None:
    model, info = load_model(str(place / "two"), "causal-lm", device="cpu")
    words = load_tokenizer(info)
    found = LMEval("geography", place / "tasks").evaluate(model, words, batch_size=3)
    right = by_hand(place / "two")
    assert found["cities"]["acc"] == pytest.approx(sum(right) / COUNT)
    assert found["geography"]["acc"] == pytest.approx(sum([*right, *right[:5]]) / (COUNT + 5))
    assert found["geography"]["examples"] == COUNT + 5


def test_invalid_options_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = type("Manager", (), {"all_tasks": ["cities"]})()  # indexing all tasks of the harness takes half a minute
    monkeypatch.setattr("gradmerge.tasks.lm_eval._load_task_manager", lambda folder, *, defaults: manager)
    options: list[Any] = [
        {"lm_eval": "no_such_task_at_all"},
        {"lm_eval": "cities", "lm_eval_tasks": "nowhere"},
        {"lm_eval": ","},
        {"lm_eval_tasks": "."},
        {},
    ]
    for each in options:
        with pytest.raises(gm.InputError):
            gm.evaluate(place / "one", **each)


def test_a_task_that_fails_and_a_model_without_text_are_refused(place: Path, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks")
    (tasks / "cities.jsonl").unlink()
    with pytest.raises(gm.InputError, match="lm_eval"):
        gm.evaluate(place / "one", lm_eval="cities", lm_eval_tasks=tasks, device="cpu")
    bert = tiny_bert_checkpoint(tmp_path / "bert")
    with pytest.raises(gm.InputError):
        gm.evaluate(bert, lm_eval="cities", lm_eval_tasks=place / "tasks", device="cpu")
