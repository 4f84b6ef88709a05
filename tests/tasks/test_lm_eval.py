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

from ..compare.conftest import tuned_from
from ..making import write_recipe
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
    words: Any = load_tokenizer(str(folder), info)
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
    raw = {"method": "task-arithmetic", "base": "./base", "models": ["./one", "./two"]}
    write_recipe(folder / "recipe.yml", raw)
    return folder


def test_accuracy_is_that_of_the_likeliest_choice(place: Path) -> None:
    right = by_hand(place / "one")
    share = sum(right) / COUNT
    assert 0 < share < 1, "or little is tested"
    options: Any = {"lm_eval_tasks": place / "tasks", "device": "cpu", "progress": False}
    found = gm.evaluate(place / "one", lm_eval="cities", **options)["lm_eval"]["cities"]
    assert found["acc"] == pytest.approx(share) and found["examples"] == COUNT
    assert found["standard_errors"]["acc"] == pytest.approx(math.sqrt(share * (1 - share) / (COUNT - 1)))
    some = gm.evaluate(place / "one", lm_eval=["cities"], limit=4, **options)
    assert some["lm_eval"]["cities"]["acc"] == pytest.approx(sum(right[:4]) / 4)


def test_groups_have_the_rows_of_their_tasks(place: Path) -> None:
    model, info = load_model(str(place / "two"), "causal-lm", device="cpu")
    words = load_tokenizer(str(place / "two"), info)
    harness = LMEval("geography", place / "tasks", batch_size=3)
    found, again = harness.evaluate(model, words), harness.evaluate(model, words)
    right = by_hand(place / "two")
    assert found["cities"].rows["acc"].tolist() == right and found["fewer_cities"].rows["acc"].tolist() == right[:5]
    whole = found["geography"]
    assert whole.rows["acc"].tolist() == [*right, *right[:5]] and whole.examples == COUNT + 5
    assert whole.metrics["acc"] == pytest.approx(sum([*right, *right[:5]]) / (COUNT + 5))
    assert again["geography"].metrics == whole.metrics, "tasks can be run again"


def write_other_tasks(folder: Path) -> Path:
    """`wiki`: perplexity by words and bytes; `copy`: BLEU of what is written. Neither is a mean over rows."""
    folder.mkdir()
    write_jsonl(folder / "rows.jsonl", [{"text": text} for text in sentences(8, 3)])
    files = {"data_files": {"test": str(folder / "rows.jsonl")}, "cache_dir": str(folder / "cache")}
    common = {"dataset_path": "json", "dataset_kwargs": files, "test_split": "test", "doc_to_target": "{{text}}"}
    wiki: dict[str, Any] = {"output_type": "loglikelihood_rolling", "doc_to_text": ""}
    wiki["metric_list"] = [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]
    copy: dict[str, Any] = {"output_type": "generate_until", "doc_to_text": "{{text}}"}
    copy |= {"generation_kwargs": {"until": ["."], "max_gen_toks": 4}, "metric_list": [{"metric": "bleu"}]}
    for name, task in (("wiki", wiki), ("copy", copy)):
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}))
    return folder


def test_metrics_that_are_not_means_have_standard_errors(place: Path, tmp_path: Path) -> None:
    tasks = write_other_tasks(tmp_path / "tasks")
    one = gm.evaluate(place / "one", lm_eval="wiki", lm_eval_tasks=tasks, device="cpu")["lm_eval"]["wiki"]
    model, info = load_model(str(place / "one"), "causal-lm", device="cpu")
    rows = LMEval("wiki", tasks).evaluate(model, load_tokenizer(str(place / "one"), info))["wiki"].rows
    texts = sentences(8, 3)
    for metric, units in (
        ("word_perplexity", [len(t.split()) for t in texts]),
        ("bits_per_byte", list(map(len, texts))),
    ):
        value, count = one[metric], len(texts)
        per_unit = math.log(value) if metric == "word_perplexity" else value * math.log(2)
        # Loss of each text, back from its row; leaving out one after the other gives the error of the jackknife.
        scale = value if metric == "word_perplexity" else 1 / math.log(2)
        mean = sum(units) / count
        nats = [
            (row - value) / scale * mean + per_unit * unit
            for row, unit in zip(rows[metric].tolist(), units, strict=True)
        ]
        assert sum(nats) / sum(units) == pytest.approx(per_unit)
        left = [(sum(nats) - n) / (sum(units) - u) for n, u in zip(nats, units, strict=True)]
        left = [math.exp(x) if metric == "word_perplexity" else x / math.log(2) for x in left]
        jackknife = math.sqrt((count - 1) / count * sum((x - sum(left) / count) ** 2 for x in left))
        assert one["standard_errors"][metric] == pytest.approx(jackknife, rel=0.15)


def test_a_preview_compares_generated_text(place: Path) -> None:
    rows = write_jsonl(place / "rows.jsonl", [{"prompt": t, "completion": "the cat"} for t in sentences(5, 8)])
    generation = gm.Generation(max_new_tokens=5)
    options: dict[str, Any] = {"data": {"one": str(rows)}, "device": "cpu", "progress": False}
    found = gm.preview(place / "recipe.yml", weights="0,1", generation=generation, **options)
    assert found.criterion.name == "exact_match" and found.metric("one") == "exact_match"
    plain = gm.preview(place / "recipe.yml", weights="0,1", **options)
    assert plain.criterion.name == "loss_per_token"
    base = gm.evaluate(place / "base", rows, generation=generation, device="cpu", progress=False)
    assert found.rows[0].metrics["one"]["exact_match"] == base["exact_match"]
    assert found.alone["base"]["one"]["exact_match"] == base["exact_match"]
    assert len(found.rows[0].rows["one"]["exact_match"]) == 5


def test_invalid_options_are_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = type("Manager", (), {"all_tasks": ["cities"]})()  # indexing all tasks of the harness takes half a minute
    monkeypatch.setattr("gradmerge.tasks.lm_eval._load_task_manager", lambda folder, defaults: manager)
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
