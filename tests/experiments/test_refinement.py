"""The experiment on refinement at its smallest: what it compares, and its numbers against slow ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.refinement import __main__ as program, study
from experiments.refinement.__main__ import main
from experiments.refinement.pictures import PictureSeed
from experiments.refinement.report import draw, having, rows_of, share, tables
from experiments.refinement.study import MERGE, Wanted
from experiments.refinement.text import TextSeed
from experiments.sentiment.data import SETS
from experiments.sentiment.run import prepare as prepare_text
from experiments.sentiment.settings import Settings, settings_for
from experiments.vision.run import prepare
from experiments.vision.settings import LOCAL, SCALES
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gradmerge as gm
from gradmerge.refinement import adamw, newton

from .test_vision import CLASSES, archive

MERGES = {"average", MERGE, *(f"{MERGE}, {more}" for more in ("penalty none", "Kronecker", "Kronecker, penalty none"))}


def run(out: Path, *arguments: str) -> dict[str, Any]:
    assert main(["--scale", "tiny", "--rows", "24", "--device", "cpu", "-o", str(out), *arguments]) == 0
    found: dict[str, Any] = json.loads((out / "results.json").read_text())
    return found


def short_text() -> Settings:
    """The sentiment experiment at its smallest, with every model trained for one epoch."""
    tiny = settings_for("tiny", seq2seq=False, pretrained=False)
    return replace(tiny, epochs=dict.fromkeys(tiny.epochs, 1))


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short training, and refinement that tries little, to save time."""
    monkeypatch.setattr(program, "settings_for", lambda *_, **__: short_text())
    monkeypatch.setattr(study, "PASSES", 2)
    monkeypatch.setattr(newton, "STEPS", 1)
    monkeypatch.setattr(adamw, "TRIALS", 2)


def first_taught_loss(out: Path) -> float:
    """The merge's, on rows of `dev`: half to labels, half to answers of each task's model; summed over tasks."""
    settings = short_text()
    seed = TextSeed(0, Wanted(out, settings, "cpu", prepare_text(out, settings, "cpu", None, "made up"), (24,)))
    seed.results()  # of which every stage is done, so that what it made can be read
    merged, total = seed.module(seed._models()[MERGE]()), 0.0
    for task in SETS:
        teacher = AutoModelForSequenceClassification.from_pretrained(out / "seed-0" / task).eval()
        losses, texts = [], gm.read_rows(str(out / "data" / task / "dev.jsonl.gz")).rows
        known = {tuple(seed._kind.examples([row])[0]["ids"]) for row in texts}
        for batch in seed.rows(task, 24 // 10, unseen=True):
            assert all(
                tuple(ids[ids != seed._kind.tokenizer.pad_token_id].tolist()) in known for ids in batch["input_ids"]
            )
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            with torch.no_grad():
                logs = merged(**inputs).logits.double().log_softmax(-1)
                answers = teacher(**inputs).logits.double().softmax(-1)
            for label, own, answer in zip(batch["labels"].tolist(), logs, answers, strict=True):
                taught = sum(float(p * log) for p, log in zip(answer, own, strict=True))
                losses.append(-0.5 * float(own[label]) - 0.5 * taught)
        total += sum(losses) / len(losses)
    return total


def test_sentiment_is_refined_and_scored_on_every_set(tmp_path: Path) -> None:
    results = run(tmp_path / "text")
    (seed,) = results["seeds"]
    refined = {"newton, 24 rows", "adamw, 24 rows", "base tuned on the same 24 rows"}
    refined |= {"newton, taught, 24 rows", "adamw, taught, 24 rows", "base taught on the same 24 rows"}
    assert seed["refinements"].keys() == refined and seed["scores"].keys() == {"base", "joint"} | MERGES | refined
    for one in seed["refinements"].values():
        assert one["held_back"] == sorted(one["held_back"], reverse=True), "never worse on the rows held back"
    assert share(seed, "joint", "loss") == pytest.approx(100)
    folder = tmp_path / "text" / "seed-0" / "imdb"
    model = AutoModelForSequenceClassification.from_pretrained(folder).double().eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "text" / "model")
    for name in SETS[:2]:
        losses, right = [], 0
        for row in gm.read_rows(str(tmp_path / "text" / "data" / name / "test.jsonl.gz")).rows:
            with torch.no_grad():
                logits = model(**tokenizer(row["text"], truncation=True, max_length=32, return_tensors="pt")).logits[0]
            losses.append(-float(logits.log_softmax(-1)[row["label"]]))
            right += int(logits.argmax()) == row["label"]
        assert seed["scores"]["base"][name]["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
        assert seed["scores"]["base"][name]["accuracy"] == pytest.approx(right / len(losses), abs=1.5 / len(losses))
    assert first_taught_loss(tmp_path / "text") == pytest.approx(
        seed["refinements"]["adamw, taught, 24 rows"]["held_back"][0], rel=1e-4
    )
    page = (tmp_path / "text" / "results.md").read_text()
    assert all(f"| {name} |" in page for name in seed["scores"]) and (tmp_path / "text/figures/scores.svg").is_file()


def test_images_are_refined_with_their_heads_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "METHODS", ("adamw",))
    tasks = LOCAL[4:7]
    monkeypatch.setitem(SCALES, "tiny", replace(SCALES["tiny"], tasks=tasks))
    (tmp_path / "data").mkdir()
    for number, task in enumerate(tasks):
        archive(tmp_path / "data" / f"{task}.npz", CLASSES.get(task, 10), (28, 28), number)
    results = run(tmp_path / "images", "--tasks", "images", "--data-dir", str(tmp_path / "data"))
    (seed,) = results["seeds"]
    assert results["tasks"] == list(tasks)
    assert all(scores.keys() == set(tasks) for scores in seed["scores"].values())


def test_images_that_the_base_knows_by_heart_are_not_refined_with(tmp_path: Path) -> None:
    settings = SCALES["tiny"]
    for number, task in enumerate(LOCAL):
        archive(tmp_path / f"{task}.npz", CLASSES.get(task, 10), (28, 28), number)
    wanted = Wanted(tmp_path, settings, "cpu", prepare(tmp_path, settings, "cpu", None, tmp_path), (24,))
    drawn = []
    for number in (0, 1):
        seed = PictureSeed(number, wanted)
        drawn.append(torch.cat([batch["pixels"] for batch in seed.rows(LOCAL[0], 24)]))
        known = seed._images([LOCAL[0]], "train", settings.base_rows).batch(range(settings.base_rows))["pixels"]
        assert len(drawn[-1]) == 24 and not (drawn[-1][:, None] == known).flatten(2).all(-1).any()
        rows = sum(len(batch["pixels"]) for batch in seed.rows(LOCAL[0], None))
        assert rows == len(seed._images([LOCAL[0]], "train")) - settings.base_rows, "without a number all the others"
    assert not torch.equal(*drawn), "every seed has rows of its own"


def test_a_model_that_some_seeds_lack_is_shown_of_the_others(tmp_path: Path) -> None:
    def seed(number: int, **more: float) -> dict[str, Any]:
        accuracies = {"base": 0.5, MERGE: 0.6, "joint": 0.8, **more}
        scores = {name: {"one": {"accuracy": a, "loss": 1 - a}} for name, a in accuracies.items()}
        seconds = {name: {"seconds": 2.0 + number * (name == "newton")} for name in more}
        return {"seed": number, "scores": scores, "refinements": seconds}

    results = {
        "command": "run",
        "machine": {"device": "CPU"},
        "tasks": ["one"],
        "seeds": [seed(0, adamw=0.7), seed(1, newton=0.7, adamw=0.7), seed(2, newton=0.75, adamw=0.7)],
    }
    assert rows_of(results) == ["base", MERGE, "joint", "newton", "adamw"], "where the others have it"
    assert [one["seed"] for one in having(results, "newton")] == [1, 2]
    page = tables(results)
    assert "| newton (2 of 3 seeds) | 72.50 ± 3.54 | 0.2750 ± 0.0354 | 62 ± 18 | 62 ± 18 | 3 to 4 |" in page
    assert "| adamw | 70.00 ± 0.00 | 0.3000 ± 0.0000 | 50 ± 0 | 50 ± 0 | 2 |" in page
    assert "| base | 50.00 ± 0.00 |" in page
    draw(results, tmp_path)
    assert "newton" in (tmp_path / "scores.svg").read_text()


def test_what_it_cannot_do_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        ([], "has the scales small and tiny"),
        (["--scale", "small"], "needs --model"),
        (["--scale", "tiny", "--tasks", "images"], "needs --data-dir"),
    ):
        with pytest.raises(SystemExit) as stop:
            main([*arguments, "-o", str(tmp_path / "out")])
        assert stop.value.code == 2 and words in capsys.readouterr().err
