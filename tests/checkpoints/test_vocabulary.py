"""Vocabularies of tokenizer files, and reordered vocabulary rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from gradmerge.checkpoints.checkpoint import Buffers, Checkpoint
from gradmerge.checkpoints.embedding_rows import (
    MISSING,
    PADDING,
    VocabularyCheckpoint,
    VocabularyRows,
    read_rows,
    vocabulary_tensors,
)
from gradmerge.checkpoints.tokenizer import make_tokenizer, read_chat_template, read_vocabulary
from gradmerge.errors import InputError

from .vocabularies import ENGLISH, KINDS, MERGING, save_tokenizer

NAME = "model.embed_tokens.weight"


@given(rows=st.lists(st.integers(0, 30), min_size=1, max_size=40), columns=st.sampled_from([1, 3]))
@settings(max_examples=30, deadline=None)
def test_rows_are_read_in_any_order(rows: list[int], columns: int) -> None:
    source = torch.arange(31 * columns, dtype=torch.float64)
    found = read_rows(lambda start, stop: source[start:stop], columns, np.array(rows))
    assert torch.equal(found, source.view(31, columns)[rows])


@pytest.mark.parametrize("columns", [1, 3])
def test_a_view_reads_the_same_in_blocks_of_any_size(columns: int) -> None:
    """Two models with 6 rows, 7 rows in the result: own rows, rows of one or both donors, padding, and zeros."""
    own = [[5, 0, MISSING, MISSING, PADDING, 1, MISSING], [0, 1, 2, MISSING, PADDING, 3, MISSING]]
    given_ = [[5, 0, -1, 4, -1, 1, -1], [0, 1, 2, 3, -1, 3, -1]]
    tables = [torch.randn((6, columns), generator=torch.Generator().manual_seed(i)).double() for i in range(2)]
    models = [Checkpoint("m", memory={NAME: table if columns > 1 else table[:, 0]}) for table in tables]
    donors = [(model, np.array(rows)) for model, rows in zip(models, given_, strict=True)]
    for model, table, rows in zip(models, tables, own, strict=True):
        want = [table[row] if row >= 0 else torch.zeros(columns) for row in rows]
        want[2] = tables[1][2]
        want[3] = (tables[0][4] + tables[1][3]) / 2
        want[4] = torch.stack([row for number, row in enumerate(want) if number != 4]).mean(0)
        flat = torch.cat(want)
        view = VocabularyCheckpoint(model, VocabularyRows(np.array(rows), 6, frozenset([NAME])), donors, {})
        assert view.tensors[NAME].shape[0] == 7 and view.tensors[NAME].numel == flat.numel()
        for step in (1, columns + 1, flat.numel()):
            for start in range(0, flat.numel(), max(step, flat.numel() // 97)):
                got = view.read(NAME, start, min(start + step, flat.numel()), Buffers())
                assert torch.allclose(got.double(), flat[start : start + step], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [*KINDS])
def test_ids_are_those_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    want = save_tokenizer(tmp_path, kind, ENGLISH, ["<x>"], pad_token="<pad!>", extra_special_tokens=["<tool>"])
    found = read_vocabulary(tmp_path, "model")
    assert found.ids == want and found.added["<pad!>"]["special"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 0}}},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": [["a"]]}},
        {"model": {"vocab": {}}},
        {"model": 3},
    ],
)
def test_broken_tokenizers_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError):
        read_vocabulary(tmp_path, "model")


def test_vocabulary_tensors_are_known_by_name_and_their_number_of_rows() -> None:
    shapes = {
        NAME: (99, 8),
        "model.layers.0.embed_tokens.weight": (99, 8),
        "final_logits_bias": (1, 99),
        "model.embed_positions.weight": (99, 8),
        "decoder.weight": (3, 8),
    }
    model = Checkpoint("m", memory={name: torch.zeros(shape) for name, shape in shapes.items()})
    assert vocabulary_tensors(model) == (99, frozenset([NAME, "final_logits_bias"]))
    with pytest.raises(InputError):
        vocabulary_tensors(Checkpoint("m", memory={"weight": torch.zeros(3, 3)}))


def test_gaps_between_ids_are_kept_and_refused_where_they_cannot_be(tmp_path: Path) -> None:
    for name, kind in (("a", "BPE"), ("u", "Unigram")):
        save_tokenizer(tmp_path / name, kind, ENGLISH, ["<x>"])
        path = tmp_path / name / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        words = tokenizer["model"]["vocab"]
        if kind == "BPE":
            words["<x>"] = 400
        tokenizer["added_tokens"][-1]["id"] = 400
        path.write_text(json.dumps(tokenizer))
        save_tokenizer(tmp_path / f"{name}2", kind, MERGING, ["<tool>"])
    one, two = (read_vocabulary(tmp_path / name, name) for name in ("a", "a2"))
    result = make_tokenizer(one, [two], union=True)
    assert result.ids["<x>"] == 400 and min(result.ids[t] for t in two.ids if t not in one.ids) == 401
    with pytest.raises(InputError):
        make_tokenizer(*(read_vocabulary(tmp_path / "u", "u"), [read_vocabulary(tmp_path / "u2", "u2")]), union=True)


def test_chat_templates_are_read_from_files_or_the_config(tmp_path: Path) -> None:
    assert read_chat_template(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert read_chat_template(tmp_path) == ""
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert read_chat_template(tmp_path) == "a"
    (tmp_path / "chat_template.jinja").write_text("plain")
    assert read_chat_template(tmp_path) == "plain"
