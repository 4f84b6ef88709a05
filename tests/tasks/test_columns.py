"""Which column is what, and what labels become."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradmerge.errors import InputError
from gradmerge.tasks import load_task
from gradmerge.tasks.data.columns import choose_columns, parse_columns
from gradmerge.tasks.data.labels import read_labels
from gradmerge.tasks.data.read import Rows

from .making import tiny_bert_checkpoint
from .test_data import write_format


def rows_of(*names: str, **values: Any) -> Rows:
    """One row: text in the columns named, and some others."""
    row = dict.fromkeys(names, "some words") | values
    return Rows("data.csv", [row], tuple(row))


@pytest.mark.parametrize(
    ("task", "names", "chosen"),
    [
        ("classify", "id text label", "text=text label=label"),
        ("classify", "premise hypothesis label idx", "text=premise text2=hypothesis label=label"),
        ("classify", "sentence1 sentence2 label", "text=sentence1 text2=sentence2 label=label"),
        ("classify", "text target", "text=text label=target"),
        ("causal-lm", "text meta", "text=text"),
        ("causal-lm", "prompt completion", "prompt=prompt completion=completion"),
        ("causal-lm", "instruction output", "prompt=instruction completion=output"),
        ("causal-lm", "messages prompt", "messages=messages"),
        ("seq2seq", "source target", "source=source target=target"),
        ("seq2seq", "article highlights id", "source=article target=highlights"),
        ("seq2seq", "knowledge response", "source=knowledge target=response"),
        ("image", "image label", "image=image label=label"),
        ("image", "img fine_label coarse_label", "image=img label=fine_label"),
    ],
)
def test_usual_names_are_found(task: str, names: str, chosen: str) -> None:
    fields = choose_columns(task, rows_of(*names.split()), None)
    assert fields == {pair.split("=")[0]: (pair.split("=")[1],) for pair in chosen.split()}


def test_what_the_user_says_comes_first() -> None:
    rows = rows_of("text", "label", "review", "stars", "a+b")
    assert choose_columns("classify", rows, {"text": "review", "label": "stars"}) == {
        "text": ("review",),
        "label": ("stars",),
    }
    assert choose_columns("classify", rows, {"text": "a+b"})["text"] == ("a+b",)
    assert choose_columns("classify", rows, {"text": "text+review", "labels": "stars+label"}) == {
        "text": ("text", "review"),
        "labels": ("stars", "label"),
    }
    assert parse_columns("text=review, label=stars") == {"text": "review", "label": "stars"}


@pytest.mark.parametrize(
    ("task", "names", "given", "named"),
    [
        ("classify", "text", {}, "text=text,"),
        ("classify", "one two label", {}, "one, two, label"),
        ("classify", "text label", {"txet": "text"}, "'text'"),
        ("classify", "text label", {"source": "text"}, "'source'"),
        ("classify", "review label", {"text": "reviews"}, "'review'"),
        ("causal-lm", "one two", {"prompt": "one"}, "completion"),
        ("causal-lm", "text prompt", {"text": "text", "prompt": "prompt"}, "prompt"),
        ("seq2seq", "source", {}, "target"),
        ("image", "text label", {}, "image"),
        ("image", "image", {}, "label"),
    ],
)
def test_columns_that_do_not_fit_are_refused(task: str, names: str, given: dict[str, str], named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        choose_columns(task, rows_of(*names.split()), given)


@pytest.mark.parametrize("text", ["text", "text=", "=a", "text=a,text=b"])
def test_columns_are_written_as_key_equals_column(text: str) -> None:
    with pytest.raises(InputError, match="--columns"):
        parse_columns(text)


def test_lists_and_several_columns_become_lines() -> None:
    rows = rows_of(history=["hello", "hi there"], knowledge="a fact", number=3)
    assert rows.text(0, ["knowledge", "history"]) == "a fact\nhello\nhi there"
    with pytest.raises(InputError, match="row 1: 'number'"):
        rows.text(0, ["number"])


def labels_of(
    cells: list[Any],
    *,
    classes: int = 3,
    problem: str | None = None,
    names: list[str] | None = None,
    data_names: list[str] | None = None,
) -> Any:
    names = names or [f"LABEL_{n}" for n in range(classes)]
    config = SimpleNamespace(
        num_labels=classes, problem_type=problem, label2id={name: n for n, name in enumerate(names)}
    )
    rows = Rows("d", [{"label": c} for c in cells], ("label",), {"label": data_names} if data_names else {})
    return read_labels(rows, {"label": ("label",)}, config).tolist()


NLI = ["entailment", "neutral", "contradiction"]


def test_classes_are_numbers_or_names() -> None:
    assert labels_of([0, 2, 1.0, "1", "2.0", True]) == [0, 2, 1, 1, 2, 1]
    assert labels_of([" Neutral", "CONTRADICTION", "entailment"], names=NLI) == [1, 2, 0]
    assert labels_of(["2", "1"], classes=2, names=["2", "1"]) == [0, 1]


def test_classes_of_the_data_go_by_name_where_the_model_has_the_names() -> None:
    assert labels_of([0, 1, 2], names=NLI, data_names=["Contradiction", "Entailment", "Neutral"]) == [2, 0, 1]
    assert labels_of([0, 1, 2], data_names=["x", "y", "z"]) == [0, 1, 2]
    assert labels_of([0, 1, 2], classes=11, data_names=["0", "10", "2"]) == [0, 10, 2]
    with pytest.raises(InputError, match="maybe"):
        labels_of([0, 1], names=NLI, data_names=["neutral", "maybe"])


def test_several_labels_are_lists_of_bits_of_numbers_or_of_names() -> None:
    assert labels_of([[0, 1, 1], [1.0, 0, 0]]) == [[0, 1, 1], [1, 0, 0]]
    assert labels_of([[2], [], [0, 1]]) == [[0, 0, 1], [0, 0, 0], [1, 1, 0]]
    assert labels_of([["neutral"], []], names=NLI) == [[0, 1, 0], [0, 0, 0]]
    row = {"a": "1", "b": 0, "c": "true"}
    config = SimpleNamespace(num_labels=3, problem_type=None, label2id={"c": 0, "b": 1, "a": 2})
    rows = Rows("d", [row], tuple(row))
    assert read_labels(rows, {"labels": ("a", "b", "c")}, config).tolist() == [[1, 0, 1]]
    config.label2id = {"LABEL_0": 0}
    row["a"] = 0
    assert read_labels(rows, {"labels": ("a", "b", "c")}, config).tolist() == [[0, 0, 1]]


def test_a_regression_reads_numbers() -> None:
    assert labels_of([1, "2.5", -3.0], classes=1) == [1, 2.5, -3]
    assert labels_of([[1, 2], [3, 4]], classes=2, problem="regression") == [[1, 2], [3, 4]]
    config = SimpleNamespace(num_labels=1, problem_type=None, label2id={})
    rows = Rows("d", [{"y": 1}], ("y",))
    assert read_labels(rows, {"label": ("y",)}, config).dtype == torch.float32


@pytest.mark.parametrize(
    ("cells", "options", "named"),
    [
        ([0, 3], {}, "d: row 2: 'label' is 3"),
        ([-1], {}, "row 1: 'label' is -1"),
        ([0, None], {}, "row 2: 'label' is None"),
        ([0.5], {}, "row 1: 'label' is 0.5"),
        (["yes", "no"], {"names": NLI}, "entailment, neutral, contradiction.\n  The data has yes, no"),
        ([[1, 0]], {"problem": "single_label_classification"}, "label"),
        ([1], {"problem": "multi_label_classification"}, "label"),
        ([[0, 5]], {}, "'label' is 5"),
        ([[0], 1], {}, "row 2: 'label' is 1"),
        (["many"], {"classes": 1}, "row 1: 'label' is 'many'"),
        ([float("nan")], {"classes": 1}, "row 1: 'label' is nan"),
    ],
)
def test_labels_that_do_not_fit_are_named_with_their_row(cells: list[Any], options: Any, named: str) -> None:
    with pytest.raises(InputError, match=re.escape(named)):
        labels_of(cells, **options)


def test_a_row_without_the_column_is_named() -> None:
    rows = Rows("d.jsonl", [{"text": "a", "label": 0}, {"text": "b"}], ("text", "label"))
    config = SimpleNamespace(num_labels=2, problem_type=None, label2id={})
    with pytest.raises(InputError, match=r"row 2.*'label'"):
        read_labels(rows, {"label": ("label",)}, config)


STARS = ["1", "2", "3", "4", "5"]


def data_in(folder: Path, form: str, numbers: list[int]) -> str:
    """The same labels as they come from other programs: text, whole numbers, or floating-point numbers."""
    kind, _, type_ = form.partition(" ")
    turn: Any = {"text": str, "float": float}.get(type_, int)
    rows = [{"text": "good", "label": turn(number)} for number in numbers]
    return str(write_format(folder, kind, rows))


@pytest.mark.parametrize(
    ("numbers", "expected"), [([1, 5, 3, 2, 4], [0, 4, 2, 1, 3]), ([2, 3], [1, 2]), ([0, 4, 2], [0, 4, 2])]
)
def test_classes_with_numbers_for_names_are_the_same_from_every_format(
    tmp_path: Path, numbers: list[int], expected: list[int]
) -> None:
    names = {"id2label": dict(enumerate(STARS)), "label2id": {s: n for n, s in enumerate(STARS)}}
    model = str(tiny_bert_checkpoint(tmp_path / "m", labels=5, **names))
    for form in ("csv", "csv float", "jsonl", "jsonl text", "jsonl float", "parquet", "parquet text", "jsonl.gz"):
        loaded = load_task(model, data_in(tmp_path, form, numbers), device="cpu")
        assert next(loaded.batches(9))["labels"].tolist() == expected, form
        assert loaded.notes, form


def test_the_models_names_are_known_from_either_table() -> None:
    rows = Rows("d", [{"label": 1}, {"label": "5"}], ("label",))
    for tables in (
        {"id2label": dict(enumerate(STARS))},
        {"label2id": {s: n for n, s in enumerate(STARS)}},
        {"id2label": dict(enumerate(STARS)), "label2id": {f"LABEL_{n}": n for n in range(5)}},
    ):
        config = SimpleNamespace(num_labels=5, problem_type=None, **tables)
        assert read_labels(rows, {"label": ("label",)}, config).tolist() == [0, 4]


def test_true_and_false_are_the_same_from_every_format() -> None:
    assert labels_of([True, False]) == labels_of(["True", "False"]) == labels_of(["true", "false"]) == [1, 0]
    assert labels_of([True, "false"], names=["true", "false", "x"]) == [0, 1]


def test_a_note_is_made_only_where_numbers_could_mean_two_things() -> None:
    for names in (NLI, ["0", "1", "2"], ["LABEL_0", "LABEL_1", "LABEL_2"]):
        rows = Rows("d", [{"label": 1}], ("label",))
        config = SimpleNamespace(num_labels=3, problem_type=None, label2id={name: n for n, name in enumerate(names)})
        assert read_labels(rows, {"label": ("label",)}, config).tolist() == [1]
        assert rows.notes == []


@pytest.mark.parametrize(
    ("cells", "tables", "named"),
    [
        ([0, 5], {"id2label": dict(enumerate(STARS))}, "row 1: 'label' is 0"),
        ([6], {"id2label": dict(enumerate(STARS))}, "row 1: 'label' is 6"),
        (["a"], {"id2label": {0: "a", 1: "b"}, "label2id": {"a": 1, "b": 0}}, "'a'"),
        (["7"], {"id2label": {0: "7", 1: "007"}}, "'7'"),
        ([1], {"label2id": {"a": "x"}}, "label2id"),
        ([1], {"label2id": 5}, "label2id"),
        ([1], {"num_labels": None}, "num_labels"),
        ([{"a": 1}], {}, "row 1"),
        (["9" * 5000], {}, "row 1"),
        ([10**400], {}, "row 1"),
    ],
)
def test_names_of_classes_that_contradict_or_are_none_are_refused(cells: Any, tables: Any, named: str) -> None:
    config = SimpleNamespace(**{"num_labels": 5, "problem_type": None} | tables)
    rows = Rows("d", [{"label": cell} for cell in cells], ("label",))
    with pytest.raises(InputError, match=named):
        read_labels(rows, {"label": ("label",)}, config)
