"""Columns are found by their names, and labels fit the model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gradmerge.errors import InputError
from gradmerge.tasks import load_task
from gradmerge.tasks.columns import choose_columns, read_labels
from gradmerge.tasks.data import Rows

from .making import tiny_bert_checkpoint
from .test_data import write_format


def rows_of(*names: str, **values: Any) -> Rows:
    """One row: text in the named columns, and other values."""
    row = dict.fromkeys(names, "some words") | values
    return Rows("data.csv", [row], tuple(row))


@pytest.mark.parametrize(
    ("task", "names", "chosen"),
    [
        ("classify", "id text label", "text=text label=label"),
        ("classify", "premise hypothesis label idx", "text=premise text2=hypothesis label=label"),
        ("causal-lm", "instruction output", "prompt=instruction completion=output"),
        ("causal-lm", "messages prompt", "messages=messages"),
        ("seq2seq", "article highlights id", "source=article target=highlights"),
        ("image", "img fine_label coarse_label", "image=img label=fine_label"),
        ("embedding", "sentence1 sentence2 score", "anchor=sentence1 positive=sentence2 score=score"),
        ("embedding", "query positive negative_1", "anchor=query positive=positive negative=negative_1"),
    ],
)
def test_common_names_are_found(task: str, names: str, chosen: str) -> None:
    columns = names.split()
    fields = choose_columns(task, rows_of(*columns), None)
    assert fields == {pair.split("=")[0]: (pair.split("=")[1],) for pair in chosen.split()}


def test_the_columns_of_the_user_come_first() -> None:
    rows = rows_of("text", "label", "review", "stars", "a+b")
    chosen = {"text": ("review",), "label": ("stars",)}
    assert choose_columns("classify", rows, {"text": "review", "label": "stars"}) == chosen
    assert choose_columns("classify", rows, {"text": "a+b"})["text"] == ("a+b",)
    assert choose_columns("classify", rows, {"text": "text+review"})["text"] == ("text", "review")
    partly = choose_columns("embedding", rows_of("query", "positive"), {"anchor": "query"})
    assert partly == {"anchor": ("query",), "positive": ("positive",)}
    assert choose_columns("classify", rows, None, labeled=False) == {"text": ("text",)}


@pytest.mark.parametrize(
    ("task", "names", "given"),
    [
        ("classify", "text", {}),
        ("classify", "text label", {"txet": "text"}),
        ("classify", "review label", {"text": "reviews"}),
        ("classify", "text label b", {"label": "label+b"}),
        ("causal-lm", "text prompt completion", {"text": "text", "prompt": "prompt"}),
        ("causal-lm", "one two", {"prompt": "one"}),
        ("embedding", "anchor positive score", {"score": "score", "negative": "anchor"}),
    ],
)
def test_columns_that_do_not_fit_are_refused(task: str, names: str, given: dict[str, str]) -> None:
    with pytest.raises(InputError):
        choose_columns(task, rows_of(*names.split()), given)


def test_lists_and_several_columns_become_lines() -> None:
    rows = rows_of(history=["hello", "hi there"], knowledge="a fact", number=3)
    assert rows.text(0, ["knowledge", "history"]) == "a fact\nhello\nhi there"
    with pytest.raises(InputError, match="row 1: 'number'"):
        rows.text(0, ["number"])


NLI = ["entailment", "neutral", "contradiction"]
STARS = ["1", "2", "3", "4", "5"]


def read(
    cells: list[Any], *, classes: int = 3, names: list[str] | None = None, data_names: Any = None, **config: Any
) -> Any:
    """The labels of a column for a model with some classes."""
    names = names or [f"LABEL_{n}" for n in range(classes)]
    tables: dict[str, Any] = {"label2id": {name: n for n, name in enumerate(names)}, "problem_type": None} | config
    rows = Rows("d", [{"label": c} for c in cells], ("label",), {"label": data_names} if data_names else {})
    return read_labels(rows, "label", SimpleNamespace(num_labels=classes, **tables)).tolist()


def test_classes_are_numbers_or_names() -> None:
    assert read([0, 2, 1.0, "1", "2.0", True]) == [0, 2, 1, 1, 2, 1]
    assert read([" Neutral", "CONTRADICTION", "entailment"], names=NLI) == [1, 2, 0]
    assert read(["2", "1"], classes=2, names=["2", "1"]) == [0, 1]
    assert read([True, "false"], names=["true", "false", "x"]) == [0, 1]
    assert read([1, "5"], classes=5, label2id={}, id2label=dict(enumerate(STARS))) == [0, 4]


def test_class_names_of_the_data_are_matched_with_those_of_the_model() -> None:
    assert read([0, 1, 2], names=NLI, data_names=["Contradiction", "Entailment", "Neutral"]) == [2, 0, 1]
    assert read([0, 1, 2], data_names=["x", "y", "z"]) == [0, 1, 2]
    assert read([0, 1, 2], classes=11, data_names=["0", "10", "2"]) == [0, 10, 2]
    with pytest.raises(InputError, match="maybe"):
        read([0, 1], names=NLI, data_names=["neutral", "maybe"])


def test_labels_may_be_lists_or_numbers() -> None:
    assert read([[0, 1, 1], [1.0, 0, 0]]) == [[0, 1, 1], [1, 0, 0]]
    assert read([[2], [], [0, 1]]) == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]
    assert read([["neutral"], []], names=NLI) == [[0, 1, 0], [0, 0, 0]]
    assert read([1, "2.5", -3.0], classes=1) == [1, 2.5, -3]
    assert read([[1, 2], [3, 4]], classes=2, problem_type="regression") == [[1, 2], [3, 4]]


#: Labels that do not fit, and what the model's config says.
WRONG: list[tuple[list[Any], dict[str, Any]]] = [
    ([0, 3], {}),
    ([0, None], {}),
    ([0.5], {}),
    (["yes", "no"], {"names": NLI}),
    ([[0], 1], {}),
    (["many"], {"classes": 1}),
    ([float("nan")], {"classes": 1}),
    ([0, 4], {"classes": 5, "names": STARS}),
    ([1], {"label2id": {"a": "x"}}),
]


def test_labels_that_do_not_fit_are_refused() -> None:
    for cells, options in WRONG:
        with pytest.raises(InputError):
            read(cells, **options)
    rows = Rows("d.jsonl", [{"text": "a", "label": 0}, {"text": "b"}], ("text", "label"))
    with pytest.raises(InputError, match="row 2"):
        read_labels(rows, "label", SimpleNamespace(num_labels=2, problem_type=None, label2id={}))


def test_classes_with_numbers_as_names_are_the_same_from_every_format(tmp_path: Path) -> None:
    names = {"id2label": dict(enumerate(STARS)), "label2id": {s: n for n, s in enumerate(STARS)}}
    model = str(tiny_bert_checkpoint(tmp_path / "m", labels=5, **names))
    for form, kind in (("csv", float), ("jsonl", int), ("jsonl", str), ("parquet", int), ("parquet", str)):
        rows = [{"text": "good", "label": kind(number)} for number in (1, 5, 3)]
        loaded = load_task(model, str(write_format(tmp_path, form, rows)), device="cpu")
        assert next(loaded.batches(9))["labels"].tolist() == [0, 4, 2], form
