"""Scores of texts against counts by hand, and their standard errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

import gradmerge as gm
from gradmerge.tasks import Generation, load_task
from gradmerge.tasks.generation import generate, normalize, score_texts
from gradmerge.tasks.standard_errors import standard_error

from .making import sentences, tiny_gpt2_checkpoint, write_jsonl

ANSWERS = ["the cat sat on the mat", "a dog runs", "it is red", "what was it", "paris"]
REFERENCES = ["the cat is on the mat", "the dog runs fast", "it is red", "who was that", "Paris."]


def scores(*metrics: str, answers: list[str] = ANSWERS, references: list[str] = REFERENCES) -> dict[str, torch.Tensor]:
    return score_texts(answers, references, Generation(metrics))


def test_exact_match_is_of_normalized_texts() -> None:
    same = [("Paris.", " paris "), ("the  cat\nruns", "The cat runs!"), ("“No”", "no"), ("(50%).", "50%")]
    same += [("\N{LATIN SMALL LIGATURE FI}ne", "fine"), ("Straße", "STRASSE")]
    assert all(normalize(one) == normalize(other) for one, other in same)
    different = [("3.5", "3.6"), ("a b", "ab"), ("...", ""), ("-1", "1"), ("50%", "50")]
    assert not any(normalize(one) == normalize(other) for one, other in different)


def test_exact_match_is_a_share() -> None:
    assert scores("exact-match")["exact_match"].tolist() == [0, 0, 1, 0, 1]


def test_rouge_is_an_f_measure_of_shared_words() -> None:
    found = scores("rouge", answers=["the cat sat on the mat"], references=["the cat is on the mat"])
    assert float(found["rouge1"]) == pytest.approx(5 / 6)
    assert float(found["rouge2"]) == pytest.approx(3 / 5)
    assert float(found["rougeL"]) == pytest.approx(5 / 6)


@pytest.mark.parametrize(("name", "kind"), [("bleu", sacrebleu.BLEU), ("chrf", sacrebleu.CHRF)])
def test_errors_of_corpus_scores_are_the_jackknifes(name: str, kind: Any) -> None:
    answers, references = sentences(12, 1, 6, 14), sentences(12, 1, 6, 14)
    answers = [text if place % 3 else " ".join([*text.split()[1:], "cat"]) for place, text in enumerate(answers)]
    rows = scores(name, answers=answers, references=references)[name]
    assert float(rows.mean()) == pytest.approx(kind().corpus_score(answers, [references]).score)
    without = torch.tensor(
        [
            kind().corpus_score(answers[:i] + answers[i + 1 :], [references[:i] + references[i + 1 :]]).score
            for i in range(12)
        ],
        dtype=torch.float64,
    )
    want = math.sqrt(11 / 12 * float((without - without.mean()).square().sum()))
    assert standard_error(rows) == pytest.approx(want) and want > 0


def test_invalid_options_of_generation_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in ({"metrics": ["rogue"]}, {"max_new_tokens": 0}):
        with pytest.raises(gm.InputError):
            Generation(**given)  # type: ignore[arg-type]
    assert Generation().metrics == ("exact-match",)
    assert Generation("bleu, exact_match").metrics == ("bleu", "exact-match")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sacrebleu" else True)
    with pytest.raises(gm.InputError):
        Generation("chrf")


def test_an_evaluation_has_both_the_loss_and_the_scores_of_generated_texts(tmp_path: Path) -> None:
    model = tiny_gpt2_checkpoint(tmp_path / "model")
    rows = [{"prompt": text, "completion": "cat"} for text in sentences(6, 3)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    plain = gm.evaluate(model, data, device="cpu", progress=False)
    loaded = load_task(model, data, device="cpu")
    answers = generate(loaded, loaded.model, range(6), 4)
    rows[0]["completion"] = answers[0]  # one answer is right
    write_jsonl(data, rows)
    found = gm.evaluate(model, data, generation=gm.Generation(max_new_tokens=4), device="cpu", progress=False)
    want = torch.tensor([normalize(a) == normalize(row["completion"]) for a, row in zip(answers, rows, strict=True)])
    assert found["exact_match"] == float(want.double().mean()) > 0
    assert found["examples"] == plain["examples"] == 6
    assert set(found["standard_errors"]) == {*plain["standard_errors"], "exact_match"}
