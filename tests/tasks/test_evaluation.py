"""Losses against the models' own, one example at a time in float64; metrics against slow ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2ForSequenceClassification

import gradmerge as gm
from gradmerge.curvature.losses import LOSSES, MASKED
from gradmerge.tasks import evaluate, load_task, measure

from . import slow
from .making import (
    WORDS,
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_llama_checkpoint,
    tiny_t5_checkpoint,
    tiny_vit_checkpoint,
    word_tokenizer,
    write_jsonl,
)

EXACT: dict[str, Any] = {"dtype": "float64", "device": "cpu"}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>{% endgeneration %}"
    "{% else %}<s> {{ m.content }} {% endif %}{% endfor %}"
)
TALK = [{"role": "user", "content": "what is it ?"}, {"role": "assistant", "content": "a cat"}]
PAIRS = list(zip(sentences(6, 5), sentences(6, 6), strict=True))
BITS = np.random.default_rng(3).integers(0, 2, (11, 3)).tolist()
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 8, 8, 3)).tolist()


def chat_checkpoint(folder: Path, template: str = TEMPLATE) -> Path:
    tiny_llama_checkpoint(folder)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def decoder_that_classifies(folder: Path) -> Path:
    """A GPT-2 for three classes, without a padding token."""
    config = GPT2Config(vocab_size=len(WORDS) + 4, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    config.num_labels = 3
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(config)
    model.score.weight.data.normal_()
    model.save_pretrained(folder)
    word_tokenizer(pad=False).save_pretrained(folder)
    return folder


def multi_label_checkpoint(folder: Path) -> Path:
    return tiny_bert_checkpoint(folder, labels=3, problem_type="multi_label_classification")


#: Case → the loss, the model, and rows.
CASES: dict[str, tuple[str, Callable[[Path], Path], list[dict[str, Any]]]] = {
    "two classes": ("classes", tiny_bert_checkpoint, labelled(13)),
    "decoder": ("classes", decoder_that_classifies, labelled(7, 3)),
    "pairs": (
        "classes",
        tiny_bert_checkpoint,
        [{"premise": a, "hypothesis": b, "label": n % 2} for n, (a, b) in enumerate(PAIRS)],
    ),
    "images": ("classes", tiny_vit_checkpoint, [{"image": image, "label": n % 3} for n, image in enumerate(IMAGES)]),
    "several labels": (
        "labels",
        multi_label_checkpoint,
        [{"text": t, "labels": b} for t, b in zip(sentences(11), BITS, strict=True)],
    ),
    "regression": (
        "squared",
        lambda folder: tiny_bert_checkpoint(folder, labels=1),
        [{"sentence": t, "score": n / 3} for n, t in enumerate(sentences(9))],
    ),
    "gpt2": ("next-token", tiny_gpt2_checkpoint, [{"text": t} for t in sentences(8)]),
    "completions": ("next-token", tiny_gpt2_checkpoint, [{"instruction": a, "output": b} for a, b in PAIRS]),
    "conversations": ("next-token", chat_checkpoint, [{"messages": TALK}, {"messages": TALK * 2}]),
    "seq2seq": ("tokens", tiny_t5_checkpoint, [{"source": [a, b], "target": b} for a, b in PAIRS]),
}


@pytest.mark.parametrize("case", CASES)
def test_metrics_are_those_of_single_examples(tmp_path: Path, case: str) -> None:
    loss, maker, rows = CASES[case]
    loaded = load_task(maker(tmp_path / "model"), write_jsonl(tmp_path / "rows.jsonl", rows), **EXACT)
    assert (loaded.loss.name, loaded.examples) == (loss, len(rows))
    logits, labels = [], []
    for batch in loaded.batches(1):
        with torch.no_grad():
            output = loaded.model(**batch | ({"labels": batch["labels"].double()} if loss == "labels" else {}))
        logits.append(output.logits[0].tolist())
        labels.append(batch["labels"][0].tolist())
        # The models' own loss is a mean over labels or tokens, the latter in float32.
        is_tokens = loss in ("tokens", "next-token")
        terms = len(slow.tokens(loss, logits[-1:], labels[-1:])[0]) if is_tokens else np.size(labels[-1])
        want_loss = slow.losses(loss, logits[-1:], labels[-1:])[0]
        assert terms * output.loss.item() == pytest.approx(want_loss, 1e-5 if is_tokens else 1e-9)
    want = slow.metrics(loss, logits, labels) | {"examples": len(rows)}
    for batch_size in (1, 4, 50):
        metrics = evaluate(loaded, batch_size)
        assert set(metrics) == {*want, "task", "standard_errors"}
        assert {name: metrics[name] for name in want} == pytest.approx(want, rel=1e-9, abs=1e-12)


def token_ids(text: str) -> list[int]:
    return [4 + WORDS.index(word) for word in text.split()]


def test_padding_is_on_the_right_and_never_counts(tmp_path: Path) -> None:
    tiny_llama_checkpoint(tmp_path / "model")
    tokenizer = word_tokenizer(bos=True)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"text": "a film"}, {"text": "the cat sleeps again"}]
    loaded = load_task(tmp_path / "model", write_jsonl(tmp_path / "rows.jsonl", rows), **EXACT)
    batch = next(loaded.batches(2))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert (batch["labels"] == MASKED).tolist() == [[False, False, False, True, True], [False] * 5]


def test_without_a_padding_token_a_real_end_token_still_counts(tmp_path: Path) -> None:
    rows = [{"prompt": "what is it ?", "completion": "a cat"}, {"prompt": "who", "completion": "the dog runs"}]
    model = tiny_gpt2_checkpoint(tmp_path / "model")
    loaded = load_task(model, write_jsonl(tmp_path / "rows.jsonl", rows), **EXACT)
    batch = next(loaded.batches(2))
    assert batch["labels"][0].tolist() == [MASKED] * 4 + [*token_ids("a cat"), 1]
    assert batch["labels"][1].tolist() == [MASKED, *token_ids("the dog runs"), 1, MASKED, MASKED]
    assert batch["attention_mask"].sum(1).tolist() == [7, 5]


def test_a_long_prompt_loses_its_beginning_and_a_long_text_its_end(tmp_path: Path) -> None:
    model = tiny_llama_checkpoint(tmp_path / "model")
    rows = [{"prompt": "the cat sleeps again never", "completion": "a dog"}, {"prompt": "the", "completion": "a"}]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    loaded = load_task(model, data, max_length=6, **EXACT)
    assert next(loaded.batches(2))["input_ids"][0].tolist() == [2, *token_ids("again never a dog"), 1]
    assert len(loaded.notes) == 1
    batch = next(load_task(model, data, max_length=2, **EXACT).batches(1))
    assert batch["labels"].tolist() == [[MASKED, *token_ids("a")]]
    batch = next(load_task(model, data, max_length=3, columns={"text": "prompt"}, **EXACT).batches(1))
    assert batch["input_ids"].tolist() == [[2, *token_ids("the cat")]]


def test_empty_texts_are_dropped_and_rows_keep_their_numbers(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "rows.jsonl", [{"text": t} for t in ("", "a cat", "  ", "a dog")])
    loaded = load_task(tiny_llama_checkpoint(tmp_path / "model"), data, **EXACT)
    rows: Any = loaded.data.rows
    assert loaded.examples == 2 and len(loaded.notes) == 1 and rows.number(1) == 4


@pytest.mark.parametrize("marked", [True, False])
def test_what_the_assistant_says_counts(tmp_path: Path, marked: bool) -> None:
    plain = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    model = chat_checkpoint(tmp_path / "model", TEMPLATE if marked else plain)
    loaded = load_task(model, write_jsonl(tmp_path / "rows.jsonl", [{"messages": TALK}]), **EXACT)
    labels = next(loaded.batches(1))["labels"][0].tolist()
    answer = [*token_ids("a cat"), 1]
    assert labels[-3:] == answer
    assert labels == [MASKED] * 5 + answer if marked else MASKED not in labels
    assert bool(loaded.notes) is not marked


def test_batches_can_start_at_any_row(tmp_path: Path) -> None:
    rows = labelled(7)
    loaded = load_task(tiny_bert_checkpoint(tmp_path / "model"), write_jsonl(tmp_path / "rows.jsonl", rows), **EXACT)
    labels = [label for batch in loaded.batches(2, start=3) for label in batch["labels"].tolist()]
    assert labels == [row["label"] for row in rows[3:]]
    loaded.data.rows.rows[0]["text"] = None
    assert len(list(loaded.batches(2, start=1))) == 3
    with pytest.raises(gm.InputError, match="row 1: 'text'"):
        list(loaded.batches(2))


def test_a_model_in_memory_keeps_its_mode_and_batches_may_be_tuples() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.9)).train()
    inputs, labels = torch.randn(10, 4), torch.randint(0, 3, (10,))
    advanced: list[int] = []
    batches = [(inputs[:6], labels[:6]), (inputs[6:], labels[6:])]
    metrics = measure(model, batches, LOSSES["classes"], advanced.append).summary()
    assert model.training
    assert advanced == [6, 4]
    assert metrics["accuracy"] == (model[0](inputs).argmax(-1) == labels).double().mean()
    with pytest.raises(gm.InputError):
        measure(model, [], LOSSES["classes"])
    model[0].weight.data.fill_(math.nan)
    with pytest.raises(gm.InputError, match="example 1"):
        measure(model, [(inputs, labels)], LOSSES["classes"])
