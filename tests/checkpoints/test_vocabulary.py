"""Reading vocabularies, and rows of one model in the order of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import (
    AutoTokenizer,
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForMaskedLM,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

from gradmerge.checkpoints.checkpoint import Buffers, Checkpoint
from gradmerge.checkpoints.tokenizer.chat_template import chat_templates
from gradmerge.checkpoints.tokenizer.differences import token_difference
from gradmerge.checkpoints.tokenizer.embedding_rows import (
    ELSEWHERE,
    PADDING,
    Defaults,
    VocabularyCheckpoint,
    VocabularyRows,
    gather,
    vocabulary_tensors,
)
from gradmerge.checkpoints.tokenizer.result_tokenizer import result_tokenizer
from gradmerge.checkpoints.tokenizer.vocabulary import read_vocabulary, vocabulary_of
from gradmerge.errors import InputError

from .vocabularies import ENGLISH, KINDS, MERGING, save_tokenizer, vocabulary

TINY: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}


@given(
    rows=st.lists(st.integers(-2, 30), min_size=1, max_size=40),
    columns=st.sampled_from([1, 3, 5000]),
    cut=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
@settings(max_examples=60, deadline=None)
def test_any_range_of_any_rows_is_gathered(rows: list[int], columns: int, cut: tuple[int, int]) -> None:
    source = torch.arange(31 * columns, dtype=torch.float64)
    start, stop = sorted(place % (len(rows) * columns + 1) for place in cut)
    out = torch.full((stop - start,), -1.0, dtype=torch.float64)
    gather(lambda low, high: source[low:high], columns, np.array(rows), start, stop, out)
    want = [source[row * columns + column] if row >= 0 else -1.0 for row in rows for column in range(columns)]
    assert out.tolist() == [float(value) for value in want[start:stop]]


def views(own: list[list[int]], given_: list[list[int]], columns: int) -> list[VocabularyCheckpoint]:
    shape = (6, columns) if columns > 1 else (6,)
    name = "model.embed_tokens.weight"
    models = [
        Checkpoint(f"m{i}", memory={name: torch.randn(shape, generator=torch.Generator().manual_seed(i)).double()})
        for i in range(len(own))
    ]
    counts = (np.array(given_) >= 0).sum(0)
    defaults = Defaults(models, [np.array(rows) for rows in given_], counts)
    return [
        VocabularyCheckpoint(model, VocabularyRows(np.array(rows), 6, frozenset([name])), defaults, {})
        for model, rows in zip(models, own, strict=True)
    ]


@pytest.mark.parametrize("columns", [1, 3, 700])
def test_a_view_reads_the_same_in_blocks_of_any_size(columns: int) -> None:
    own = [[5, 0, ELSEWHERE, ELSEWHERE, PADDING, 1, ELSEWHERE], [0, 1, 2, ELSEWHERE, PADDING, 3, ELSEWHERE]]
    given_ = [[5, 0, -1, 4, -1, 1, -1], [0, 1, 2, 3, -1, 3, -1]]
    name = "model.embed_tokens.weight"
    for view in views(own, given_, columns):
        others = [model._memory[name].reshape(6, -1) for model in view._defaults.models]
        mine = view.inner._memory[name].reshape(6, -1)
        rows = [mine[row] if row >= 0 else None for row in view.rows.own]
        rows[3] = (others[0][4] + others[1][3]) / 2 if view.rows.own[3] == ELSEWHERE else rows[3]
        rows[2] = others[1][2] if rows[2] is None else rows[2]
        rows[6] = torch.zeros(columns, dtype=torch.float64)
        rows[4] = torch.stack([row for place, row in enumerate(rows) if place != 4 and row is not None]).mean(0)
        want = torch.cat([row for row in rows if row is not None])
        assert view.tensors[name].shape[0] == 7 and view.tensors[name].numel == want.numel()
        for step in (1, 4, columns, columns + 1, want.numel()):
            starts = range(0, want.numel(), max(step, want.numel() // 97))
            for start in starts:
                stop = min(start + step, want.numel())
                got = view.read(name, start, stop, Buffers()).double()
                assert torch.allclose(got, want[start:stop], rtol=0, atol=1e-7), (start, stop)


@pytest.mark.parametrize("kind", [*KINDS])
def test_ids_are_those_that_transformers_loads(kind: str, tmp_path: Path) -> None:
    want = save_tokenizer(tmp_path, kind, ENGLISH, ["<x>"], pad_token="<pad!>", extra_special_tokens=["<tool>"])
    assert read_vocabulary(tmp_path, "model").ids == want
    # Special tokens that only the config names get the next ids.
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"sep_token": "<new>"}))
    found = read_vocabulary(tmp_path, "model")
    assert found.ids == vocabulary(tmp_path) == want | {"<new>": len(want)}
    assert found.special["sep_token"] == "<new>" and found.added["<new>"]["special"]


def test_older_files_are_converted(tmp_path: Path) -> None:
    ids = save_tokenizer(tmp_path, "WordPiece", ENGLISH)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join(sorted(ids, key=ids.__getitem__)))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    found = read_vocabulary(tmp_path, "model").ids
    assert {token: found[token] for token in ids} == ids
    assert found == dict(AutoTokenizer.from_pretrained(tmp_path).get_vocab())


def test_a_tokenizer_that_nobody_can_convert_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x00 not sentencepiece")
    with pytest.raises(InputError, match="model"):
        vocabulary_of(Checkpoint("model", folder=tmp_path))


def test_a_model_without_tokenizer_files_is_refused(tmp_path: Path) -> None:
    for checkpoint in (Checkpoint("model", folder=tmp_path), Checkpoint("model")):
        with pytest.raises(InputError, match="model"):
            vocabulary_of(checkpoint)


@pytest.mark.parametrize(
    "tokenizer",
    [
        {"model": {"vocab": {"a": 0, "b": 0}}},
        {"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 0, "content": "<x>"}]},
        {"model": {"vocab": {"a": -1}}},
        {"model": {"vocab": {"a": "0"}}},
        {"model": {"vocab": [["a"]]}},
        {"model": {"vocab": {}}},
        {"model": 3},
        {"added_tokens": []},
    ],
)
def test_broken_tokenizers_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match=r"model|tokenizer\.json"):
        read_vocabulary(tmp_path, "model")


def test_tensors_with_a_row_for_each_token_are_known_by_name_or_by_their_number(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (99, 8),
        "model.layers.0.embed_tokens.weight": (99, 8),
        "odd_name": (99, 8),
        "final_logits_bias": (1, 99),
        "model.norm.weight": (8,),
        "model.embed_positions.weight": (99, 8),
        "decoder.weight": (3, 8),
    }
    model = Checkpoint("m", memory={n: torch.zeros(s) for n, s in shapes.items()}, config={"vocab_size": 99})
    assert vocabulary_tensors(model) == (99, ["model.embed_tokens.weight", "final_logits_bias"])  # 99 is a width too
    model = Checkpoint("m", memory={n: torch.zeros(s) for n, s in shapes.items() if n != "final_logits_bias"})
    assert vocabulary_tensors(model) == (99, ["model.embed_tokens.weight", "odd_name"])
    with pytest.raises(InputError, match="m"):
        vocabulary_tensors(Checkpoint("m", memory={"weight": torch.zeros(3, 3)}))


HEADS = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
FAMILIES = {
    BertForMaskedLM: BertConfig(vocab_size=97, num_attention_heads=2, max_position_embeddings=97, **TINY),
    GPT2LMHeadModel: GPT2Config(vocab_size=97, n_embd=8, n_layer=1, n_head=2, n_positions=97),
    BartForConditionalGeneration: BartConfig(vocab_size=97, d_model=8, encoder_layers=1, decoder_layers=1, **HEADS),
    DistilBertForMaskedLM: DistilBertConfig(vocab_size=97, dim=8, hidden_dim=8, n_layers=1, n_heads=2),
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_all_tensors_of_a_family_with_a_row_for_each_token_are_found(kind: type[PreTrainedModel]) -> None:
    config = FAMILIES[kind]
    state = dict(kind(config).state_dict())
    tables = {name for name, tensor in state.items() if tensor.is_floating_point() and 97 in tensor.shape[:2]}
    want = {name for name in tables if "position" not in name and "wpe" not in name}
    assert want and set(vocabulary_tensors(Checkpoint("m", memory=state, config=config.to_dict()))[1]) == want


def test_differences_are_counted(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "a", "BPE", ENGLISH, ["<x>", "<y>"])
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    a, b = (Checkpoint(name, folder=tmp_path / name) for name in "ab")
    assert token_difference(a, b) is None
    save_tokenizer(tmp_path / "b", "BPE", ENGLISH, ["<z>", "<x>"])
    found = token_difference(a, b)
    assert found is not None and len(found.lines) == 3
    assert all(name in line for name, line in zip(("'<x>'", "'<y>'", "'<z>'"), found.lines, strict=True))


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
    result = result_tokenizer(one, [two], union=True)
    assert result.ids["<x>"] == 400 and min(result.ids[t] for t in two.ids if t not in one.ids) == 401
    with pytest.raises(InputError, match="u"):
        result_tokenizer(*(read_vocabulary(tmp_path / "u", "u"), [read_vocabulary(tmp_path / "u2", "u2")]), union=True)


def test_special_tokens_and_settings_that_differ_are_noted(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "a", "BPE", ENGLISH, ["<x>"])
    save_tokenizer(tmp_path / "b", "BPE", ENGLISH, eos_token="<x>", mask_token="<mask>", extra_special_tokens=["<t>"])
    a, b = (read_vocabulary(tmp_path / name, name) for name in "ab")
    result = result_tokenizer(a, [b], union=True)
    assert [note.partition(":")[0] for note in result.notes] == ["b", "eos_token", "mask_token"]
    assert json.loads(result.written["tokenizer_config.json"])["mask_token"] == "<mask>"
    assert "<t>" in json.loads(result.written["tokenizer_config.json"])["extra_special_tokens"]
    apart = result_tokenizer(a, [b], union=False).notes
    assert [note.partition(":")[0] for note in apart] == ["eos_token", "mask_token"]


def test_chat_templates_lie_in_files_or_in_the_config(tmp_path: Path) -> None:
    assert chat_templates(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text("{}")
    assert chat_templates(tmp_path) == {}
    named = [
        {"name": "default", "template": "a"},
        {"name": "tools", "template": "b"},
        {"name": "../x", "template": "c"},
    ]
    config.write_text(json.dumps({"chat_template": named}))
    assert chat_templates(tmp_path) == {"default": "a", "tools": "b"}
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("more")
    assert chat_templates(tmp_path) == {"default": "plain", "rag": "more"}
