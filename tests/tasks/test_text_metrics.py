"""Scores of texts against counts by hand, their standard errors, and judges of users."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

import gradmerge as gm
from gradmerge.tasks import Generation, judge_of
from gradmerge.tasks.text_metrics import normalised, score_texts
from gradmerge.tasks.uncertainty import standard_error

from .making import sentences, tiny_gpt2_checkpoint, write_jsonl

ANSWERS = ["the cat sat on the mat", "a dog runs", "it is red", "what was it", "paris"]
REFERENCES = ["the cat is on the mat", "the dog runs fast", "it is red", "who was that", "Paris."]


def scores(*metrics: str, answers: list[str] = ANSWERS, references: list[str] = REFERENCES) -> dict[str, torch.Tensor]:
    return score_texts([""] * len(answers), answers, references, Generation(metrics))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("Paris.", " paris ", True),
        ("the  cat\nruns", "The cat runs!", True),
        ("“No”", "no", True),
        ("\N{LATIN SMALL LIGATURE FI}ne", "fine", True),
        ("3.5", "3.6", False),
        ("a b", "ab", False),
        ("...", "", False),
        ("-1", "1", False),
        ("(50%).", "50%", True),
        ("50%", "50", False),
        ("Straße", "STRASSE", True),
    ],
)
def test_exact_match_is_of_normalised_texts(one: str, other: str, same: bool) -> None:
    assert (normalised(one) == normalised(other)) is same


def test_exact_match_is_a_share() -> None:
    assert scores("exact-match")["exact_match"].tolist() == [0, 0, 1, 0, 1]


def f_measure(shared: int, answer: int, reference: int) -> float:
    return 2 * shared / (answer + reference) if shared else 0.0


def longest_common(one: list[str], other: list[str]) -> int:
    if not one or not other:
        return 0
    if one[-1] == other[-1]:
        return 1 + longest_common(one[:-1], other[:-1])
    return max(longest_common(one[:-1], other), longest_common(one, other[:-1]))


def test_rouge_is_counted_by_hand() -> None:
    found = scores("rouge")
    for place, (answer, reference) in enumerate(zip(ANSWERS, REFERENCES, strict=True)):
        one, other = ([word.strip(".").lower() for word in text.split()] for text in (answer, reference))
        for name, size in (("rouge1", 1), ("rouge2", 2)):
            grams = [Counter(zip(*(words[i:] for i in range(size)), strict=False)) for words in (one, other)]
            want = f_measure((grams[0] & grams[1]).total(), grams[0].total(), grams[1].total())
            assert float(found[name][place]) == pytest.approx(want)
        want = f_measure(longest_common(one, other), len(one), len(other))
        assert float(found["rougeL"][place]) == pytest.approx(want)


def test_bleu_is_counted_by_hand() -> None:
    """exp(Σ ln p_n / 4) times the penalty of brevity, of counts over the whole corpus."""
    answers, references = ["the cat is on the mat now", "a b c d e"], ["the cat is on the mat", "a b c d f g h"]
    logs = []
    for size in range(1, 5):
        right = whole = 0
        for answer, reference in zip(answers, references, strict=True):
            grams = [Counter(zip(*(t.split()[i:] for i in range(size)), strict=False)) for t in (answer, reference)]
            right, whole = right + (grams[0] & grams[1]).total(), whole + grams[0].total()
        logs.append(math.log(right / whole))
    brevity = min(0.0, 1 - 13 / 12)
    want = 100 * math.exp(brevity + sum(logs) / 4)
    assert float(scores("bleu", answers=answers, references=references)["bleu"].mean()) == pytest.approx(want)


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


def test_a_judge_is_given_texts_or_lists() -> None:
    def single(prompt: str, answer: str, reference: str) -> float:
        return len(prompt) + 10 * len(answer) + 100 * len(reference)

    def many(prompts: list[str], answers: list[str], references: list[str]) -> list[float]:
        return [single(*texts) for texts in zip(prompts, answers, references, strict=True)]

    for judge in (single, many, lambda p, a, r: single(p, a, r)):
        found = score_texts(["a", "bb"], ["c", ""], ["d", "eee"], Generation(judge=judge))
        assert list(found) == ["judge"] and found["judge"].tolist() == [111, 302]
    beside = score_texts(["a"], ["c"], ["c"], Generation("exact-match", judge=single))
    assert list(beside) == ["judge", "exact_match"]


@pytest.mark.parametrize(
    ("judge", "message"),
    [
        (lambda p, a, r: 1 / 0, "the judge failed on row 1: ZeroDivisionError: division by zero"),
        (lambda p, a, r: "good", "the judge gives 'good' for row 1, but must give a finite number"),
        (lambda p, a, r: float("nan"), "the judge gives nan for row 1"),
        (lambda prompts, answers, references: [1.0], "the judge gives 1 numbers for 2 answers"),
        (lambda prompts, answers, references: None, "the judge gives None, but must give a list"),
        (lambda p: 1.0, "the judge failed on row 1: TypeError"),
    ],
)
def test_what_a_judge_does_wrong_is_said(judge: Any, message: str) -> None:
    with pytest.raises(gm.InputError, match=message):
        score_texts(["a", "b"], ["c", "d"], ["e", "f"], Generation(judge=judge))


def test_a_judge_is_found_in_the_working_folder_or_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_judges_of_text.py").write_text("def score(prompt, answer, reference):\n    return 2\nWORD = 1\n")
    monkeypatch.chdir(tmp_path)
    assert judge_of("my_judges_of_text:score")("", "", "") == 2
    assert judge_of("os.path:basename") is not None
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "judges_of_a_file.py").write_text("def score(prompt, answer, reference):\n    return 3\n")
    assert judge_of("in/judges_of_a_file.py:score")("", "", "") == 3
    for text, message in (
        ("my_judges_of_text", "write module:function"),
        ("my_judges_of_text:WORD", "is no function"),
        ("my_judges_of_text:other", "cannot be imported: .*other"),
        ("no_such_module_here:score", "cannot be imported: No module named"),
        ("in/os.py:getcwd", "cannot be imported: os is the name of another module"),
    ):
        with pytest.raises(gm.InputError, match=message):
            judge_of(text)


def test_what_is_wrong_with_a_generation_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, message in (
        ({"metrics": ["rogue"]}, "did you mean 'rouge'"),
        ({"max_new_tokens": 0}, "at least one token"),
        ({"judge": "score"}, "must be a function"),
    ):
        with pytest.raises(gm.InputError, match=message):
            Generation(**given)
    assert Generation().metrics == ("exact-match",) and Generation("bleu, exact_match").metrics == (
        "bleu",
        "exact-match",
    )
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "sacrebleu" else True)
    with pytest.raises(
        gm.InputError, match=r"needs sacrebleu, which is not installed: pip install 'gradmerge\[metrics\]'"
    ):
        Generation("chrf")


def test_an_evaluation_has_both_the_loss_and_what_was_written(tmp_path: Path) -> None:
    model = tiny_gpt2_checkpoint(tmp_path / "model")
    rows = [{"prompt": text, "completion": "cat"} for text in sentences(6, 3)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    plain = gm.evaluate(model, data, device="cpu", progress=False)
    seen: list[tuple[str, str, str]] = []

    def judge(prompt: str, answer: str, reference: str) -> float:
        seen.append((prompt, answer, reference))
        return len(prompt) + len(answer.split())

    generation = gm.Generation(["exact-match", "rouge"], judge=judge, max_new_tokens=4)
    found = gm.evaluate(model, data, generation=generation, device="cpu", progress=False)
    assert [(prompt, reference) for prompt, _, reference in seen] == [(row["prompt"], "cat") for row in rows]
    lengths = torch.tensor(
        [float(len(prompt) + len(answer.split())) for prompt, answer, _ in seen], dtype=torch.float64
    )
    assert found["judge"] == float(lengths.mean())
    assert found["standard_errors"]["judge"] == pytest.approx(float(lengths.std()) / math.sqrt(6))
    assert found["exact_match"] == sum(answer.strip(" .,\n") == "cat" for _, answer, _ in seen) / 6
    for name, value in plain.items():
        if name != "standard_errors":
            assert found[name] == value
    assert set(found["standard_errors"]) > set(plain["standard_errors"])
