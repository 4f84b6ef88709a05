"""Losses against the models' own, one example at a time in float64; metrics against slow ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradmerge as gm
from gradmerge.curvature.losses import LOSSES, MASKED
from gradmerge.tasks import LoadedTask, evaluate, load_task, measure
from tests.tasks import slow
from tests.tasks.making import (
    WORDS,
    labelled,
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_llama_checkpoint,
    tiny_t5_checkpoint,
    word_tokenizer,
    write_jsonl,
)

EXACT: dict[str, Any] = {"dtype": "float64", "device": "cpu"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("evaluation")


def made(place: Path, name: str, maker: Callable[..., Path], **options: Any) -> str:
    """A checkpoint, made once for all tests of the file."""
    folder = place / name
    return str(folder if folder.exists() else maker(folder, **options))


def one_by_one(loaded: LoadedTask) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Logits and batch of every example alone."""
    with torch.no_grad():
        return [(loaded.model(**batch).logits[0], batch) for batch in loaded.batches(1)]


def close(got: Any, want: float, tolerance: float = 1e-9) -> bool:
    return math.isclose(got, want, rel_tol=tolerance, abs_tol=1e-12)


@pytest.mark.parametrize("classes", [2, 4])
def test_classes(place: Path, classes: int) -> None:
    model = made(place, f"bert{classes}", tiny_bert_checkpoint, labels=classes)
    data = write_jsonl(place / f"classes{classes}.jsonl", labelled(13, classes))
    loaded = load_task(model, str(data), **EXACT)
    assert (loaded.task, loaded.examples, loaded.loss.name, loaded.missing_keys) == ("classify", 13, "classes", [])
    predicted, true, losses = [], [], []
    for logits, batch in one_by_one(loaded):
        predicted.append(int(logits.argmax()))
        true.append(int(batch["labels"]))
        losses.append(slow.cross_entropy(logits.tolist(), true[-1]))
        assert close(loaded.model(**batch).loss.item(), losses[-1])
    for size in (1, 4, 50):
        got = evaluate(loaded, size)
        assert got["accuracy"] == sum(a == b for a, b in zip(predicted, true, strict=True)) / 13
        assert close(got["macro_f1"], slow.macro_f1(predicted, true, classes))
        assert close(got["loss_per_example"], sum(losses) / 13)
        assert got["examples"] == 13
        if classes == 2:
            assert close(got["f1"], slow.f1([t == 1 for t in predicted], [t == 1 for t in true]) or 0.0)
        else:
            assert "f1" not in got


def test_several_labels(place: Path) -> None:
    model = made(place, "bert-labels", tiny_bert_checkpoint, labels=3, problem_type="multi_label_classification")
    bits = np.random.default_rng(3).integers(0, 2, (11, 3)).tolist()
    rows = [{"text": t, "labels": b} for t, b in zip(sentences(11), bits, strict=True)]
    loaded = load_task(model, str(write_jsonl(place / "labels.jsonl", rows)), **EXACT)
    assert loaded.loss.name == "labels"
    made_of = one_by_one(loaded)
    predicted = [[z > 0 for z in logits.tolist()] for logits, _ in made_of]
    for logits, batch in made_of:
        mean = loaded.model(**batch | {"labels": batch["labels"].double()}).loss.item()
        assert close(3 * mean, slow.bernoulli(logits.tolist(), batch["labels"][0].tolist()))
    flat_predicted, flat_true = [b for row in predicted for b in row], [bool(b) for row in bits for b in row]
    each = [slow.f1([row[k] for row in predicted], [bool(row[k]) for row in bits]) for k in range(3)]
    for size in (1, 4):
        got = evaluate(loaded, size)
        assert close(got["micro_f1"], slow.f1(flat_predicted, flat_true) or 0.0)
        assert close(got["macro_f1"], sum(f or 0 for f in each) / 3)
        assert got["exact_match"] == sum(a == [bool(x) for x in b] for a, b in zip(predicted, bits, strict=True)) / 11
        losses = [slow.bernoulli(z.tolist(), b) for (z, _), b in zip(made_of, bits, strict=True)]
        assert close(got["loss_per_example"], sum(losses) / 11)


def test_regression(place: Path) -> None:
    model = made(place, "bert-number", tiny_bert_checkpoint, labels=1)
    rows = [{"sentence": t, "score": float(n) / 3} for n, t in enumerate(sentences(9))]
    loaded = load_task(model, str(write_jsonl(place / "numbers.jsonl", rows)), **EXACT)
    assert loaded.loss.name == "squared"
    made_of = one_by_one(loaded)
    predicted, true = [logits.item() for logits, _ in made_of], [batch["labels"].item() for _, batch in made_of]
    errors = [(a - b) ** 2 for a, b in zip(predicted, true, strict=True)]
    for size in (1, 4):
        got = evaluate(loaded, size)
        assert close(got["mse"], sum(errors) / 9)
        assert close(got["pearson_r"], slow.pearson(predicted, true))
        mean = sum(true) / 9
        assert close(got["r2"], 1 - sum(errors) / sum((b - mean) ** 2 for b in true))


def test_metrics_that_are_not_defined_are_none() -> None:
    model = torch.nn.Linear(2, 1)
    inputs = torch.randn(4, 2)
    got = measure(model, [(inputs, torch.ones(4, 1))], LOSSES["squared"]).summary()
    assert got["r2"] is None
    assert got["pearson_r"] is None
    assert got["mse"] is not None


def token_twin(loaded: LoadedTask) -> dict[str, float]:
    """Loss, hits and number of tokens, from the model's own loss on single examples."""
    shift = loaded.loss.name == "next-token"
    losses, tokens, right = [], 0, 0
    for logits, batch in one_by_one(loaded):
        labels = batch["labels"][0].tolist()
        pairs = (
            list(zip(logits.tolist(), labels[1:], strict=False))
            if shift
            else list(zip(logits.tolist(), labels, strict=True))
        )
        counted = [(z, y) for z, y in pairs if y != MASKED]
        losses.append(sum(slow.cross_entropy(z, y) for z, y in counted))
        tokens += len(counted)
        right += sum(max(range(len(z)), key=z.__getitem__) == y for z, y in counted)
        if counted:
            # transformers widens to float32 only, so its own loss is a little less exact
            assert close(loaded.model(**batch).loss.item() * len(counted), losses[-1], 1e-5)
    return {
        "loss_per_token": sum(losses) / tokens,
        "perplexity": math.exp(sum(losses) / tokens),
        "loss_per_example": sum(losses) / len(losses),
        "token_accuracy": right / tokens,
        "tokens": tokens,
        "examples": len(losses),
    }


def agrees(loaded: LoadedTask) -> None:
    want = token_twin(loaded)
    for size in (1, 3, 50):
        got = evaluate(loaded, size)
        assert got.keys() == want.keys() | {"task", "standard_errors"}
        assert all(close(got[name], value) for name, value in want.items()), (got, want)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_plain_texts(place: Path, family: str) -> None:
    maker = tiny_gpt2_checkpoint if family == "gpt2" else tiny_llama_checkpoint
    model = made(place, family, maker)
    texts = sentences(8)
    loaded = load_task(model, str(write_jsonl(place / "texts.jsonl", [{"text": t} for t in texts])), **EXACT)
    assert (loaded.task, loaded.loss.name) == ("causal-lm", "next-token")
    agrees(loaded)
    first = 1 if family == "gpt2" else 0  # without <s> nothing predicts the first word
    assert evaluate(loaded)["tokens"] == sum(len(t.split()) - first for t in texts)


def test_padding_is_on_the_right_and_never_counts(place: Path) -> None:
    model = place / "left"
    tiny_llama_checkpoint(model)
    tokenizer = word_tokenizer(bos=True)
    tokenizer.padding_side = "left"
    tokenizer.save_pretrained(model)
    texts = ["a film", "the cat sleeps again"]
    loaded = load_task(str(model), str(write_jsonl(place / "two.jsonl", [{"text": t} for t in texts])), **EXACT)
    batch = next(loaded.batches(2))
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    assert (batch["labels"] == MASKED).tolist() == [[False, False, False, True, True], [False] * 5]
    agrees(loaded)


def test_without_a_padding_token_a_real_end_token_still_counts(place: Path) -> None:
    model = made(place, "gpt2", tiny_gpt2_checkpoint)
    rows = [{"prompt": "what is it ?", "completion": "a cat"}, {"prompt": "who", "completion": "the dog runs"}]
    loaded = load_task(model, str(write_jsonl(place / "padless.jsonl", rows)), **EXACT)
    batch = next(loaded.batches(2))
    words = [4 + WORDS.index(w) for w in ("a", "cat")]
    assert batch["labels"][0].tolist() == [MASKED] * 4 + [*words, 1]
    assert batch["labels"][1].tolist() == [MASKED] + [4 + WORDS.index(w) for w in ("the", "dog", "runs")] + [
        1,
        MASKED,
        MASKED,
    ]
    assert batch["attention_mask"].sum(1).tolist() == [7, 5]
    agrees(loaded)


def test_only_completions_count(place: Path) -> None:
    model = made(place, "llama", tiny_llama_checkpoint)
    rows = [{"instruction": a, "output": b} for a, b in zip(sentences(6, 5), sentences(6, 6), strict=True)]
    loaded = load_task(model, str(write_jsonl(place / "instructions.jsonl", rows)), **EXACT)
    assert loaded.columns == {"prompt": ("instruction",), "completion": ("output",)}
    assert evaluate(loaded)["tokens"] == sum(len(row["output"].split()) + 1 for row in rows)
    agrees(loaded)


def test_a_long_prompt_loses_its_beginning_and_a_long_text_its_end(place: Path) -> None:
    model = made(place, "llama", tiny_llama_checkpoint)
    rows = [{"prompt": "the cat sleeps again never", "completion": "a dog"}, {"prompt": "the", "completion": "a"}]
    data = str(write_jsonl(place / "long.jsonl", rows))
    loaded = load_task(model, data, max_length=6, **EXACT)
    batch = next(loaded.batches(2))
    assert batch["input_ids"][0].tolist() == [2, *(4 + WORDS.index(w) for w in ("again", "never", "a", "dog")), 1]
    assert len(loaded.notes) == 1
    batch = next(load_task(model, data, max_length=2, **EXACT).batches(1))
    assert batch["labels"].tolist() == [[MASKED, 4 + WORDS.index("a")]]
    batch = next(load_task(model, data, max_length=3, columns={"text": "prompt"}, **EXACT).batches(1))
    assert batch["input_ids"].tolist() == [[2, *(4 + WORDS.index(w) for w in ("the", "cat"))]]


def test_empty_texts_are_left_out_and_rows_keep_their_numbers(place: Path) -> None:
    model = made(place, "llama", tiny_llama_checkpoint)
    data = write_jsonl(place / "gaps.jsonl", [{"text": t} for t in ("", "a cat", "  ", "a dog")])
    loaded = load_task(model, str(data), **EXACT)
    assert loaded.examples == 2
    assert len(loaded.notes) == 1
    agrees(loaded)
    assert loaded.data.rows.number(1) == 4  # type: ignore[attr-defined]


TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }} </s>{% endgeneration %}"
    "{% else %}<s> {{ m.content }} {% endif %}{% endfor %}"
)


@pytest.mark.parametrize("marked", [True, False])
def test_what_the_assistant_says_counts(place: Path, marked: bool) -> None:
    model = place / f"chat{marked}"
    tiny_llama_checkpoint(model)
    tokenizer = word_tokenizer()
    tokenizer.chat_template = (
        TEMPLATE if marked else TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    )
    tokenizer.save_pretrained(model)
    talk = [{"role": "user", "content": "what is it ?"}, {"role": "assistant", "content": "a cat"}]
    data = write_jsonl(place / "talk.jsonl", [{"messages": talk}, {"messages": talk * 2}])
    loaded = load_task(str(model), str(data), **EXACT)
    labels = next(loaded.batches(1))["labels"][0].tolist()
    answer = [4 + WORDS.index("a"), 4 + WORDS.index("cat"), 1]
    if marked:
        assert labels == [MASKED] * 5 + answer
        assert loaded.notes == []
    else:
        assert labels[-3:] == answer and MASKED not in labels
        assert len(loaded.notes) == 1
    agrees(loaded)


def test_seq2seq(place: Path) -> None:
    model = made(place, "t5", tiny_t5_checkpoint)
    rows: list[dict[str, Any]] = [
        {"knowledge": a, "history": [b, a], "response": b}
        for a, b in zip(sentences(6, 7), sentences(6, 8), strict=True)
    ]
    columns = {"source": "knowledge+history", "target": "response"}
    loaded = load_task(model, str(write_jsonl(place / "dialogue.jsonl", rows)), columns=columns, **EXACT)
    assert (loaded.task, loaded.loss.name) == ("seq2seq", "tokens")
    words = [4 + WORDS.index(w) for w in " ".join([rows[0]["knowledge"], *rows[0]["history"]]).split()]
    assert next(loaded.batches(1))["input_ids"].tolist() == [[*words, 1]]
    assert evaluate(loaded)["tokens"] == sum(len(row["response"].split()) + 1 for row in rows)
    agrees(loaded)


def test_batches_can_start_at_any_row(place: Path) -> None:
    model = made(place, "bert2", tiny_bert_checkpoint)
    rows = labelled(7)
    loaded = load_task(model, str(write_jsonl(place / "start.jsonl", rows)), **EXACT)
    labels = [label for batch in loaded.batches(2, start=3) for label in batch["labels"].tolist()]
    assert labels == [row["label"] for row in rows[3:]]
    loaded.data.rows.rows[0]["text"] = None  # type: ignore[attr-defined]
    assert len(list(loaded.batches(2, start=1))) == 3
    with pytest.raises(gm.InputError, match="row 1: 'text'"):
        list(loaded.batches(2))


def test_a_model_in_memory_keeps_its_mode_and_batches_may_be_tuples() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Dropout(0.9)).train()
    inputs, labels = torch.randn(10, 4), torch.randint(0, 3, (10,))
    seen: list[int] = []
    batches = [(inputs[:6], labels[:6]), (inputs[6:], labels[6:])]
    got = measure(model, batches, LOSSES["classes"], seen.append).summary()
    assert model.training
    assert seen == [6, 4]
    predicted = model[0](inputs).argmax(-1).tolist()
    assert got["accuracy"] == sum(a == b for a, b in zip(predicted, labels.tolist(), strict=True)) / 10
    with pytest.raises(gm.InputError):
        measure(model, [], LOSSES["classes"])
    model[0].weight.data.fill_(math.nan)
    with pytest.raises(gm.InputError, match="example 1"):
        measure(model, [(inputs, labels)], LOSSES["classes"])
