"""Batches generate what single rows do, whatever their padding and the model's generation config."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

import gradmerge as gm
from gradmerge.tasks import LoadedTask, load_task
from gradmerge.tasks.generation import Generation, generate, normalize, prompts, score_texts
from gradmerge.tasks.metrics import standard_error

from .making import (
    sentences,
    tiny_bert_checkpoint,
    tiny_gpt2_checkpoint,
    tiny_llama_checkpoint,
    tiny_t5_checkpoint,
    write_jsonl,
)

CHAT = "{% for m in messages %}{{ m['content'] }} ? {% endfor %}{% if add_generation_prompt %}the{% endif %}"
COUNT = 9


def pairs(one: str, other: str) -> list[dict[str, Any]]:
    longest = zip(sentences(COUNT, 1, 2, 9), sentences(COUNT, 2), strict=True)
    return [{one: prompt, other: answer} for prompt, answer in longest]


def loaded_for(folder: Path, make: Callable[..., Path], rows: list[dict[str, Any]], **loading: Any) -> LoadedTask:
    model = make(folder / "model")
    return load_task(model, write_jsonl(folder / "rows.jsonl", rows), device="cpu", **loading)


def one_at_a_time(loaded: LoadedTask, ids: list[list[int]], length: int) -> list[str]:
    """Token by token, without padding and without a cache: always the likeliest one, until </s>."""
    model: Any = loaded.model
    texts = []
    for prompt in ids:
        written: list[int] = []
        while len(written) < length and 1 not in written:
            with torch.no_grad():
                if loaded.task == "seq2seq":
                    begun = torch.tensor([[model.config.decoder_start_token_id, *written]])
                    logits = model(input_ids=torch.tensor([prompt]), decoder_input_ids=begun).logits
                else:
                    logits = model(input_ids=torch.tensor([prompt + written])).logits
            written.append(int(logits[0, -1].argmax()))
        words: Any = loaded.data.tokenizer
        texts.append(words.decode([token for token in written if token > 3], skip_special_tokens=False))
    return texts


@pytest.mark.parametrize("make", [tiny_gpt2_checkpoint, tiny_llama_checkpoint, tiny_t5_checkpoint])
def test_batches_generate_what_single_rows_do(make: Callable[..., Path], tmp_path: Path) -> None:
    names = ("source", "target") if make is tiny_t5_checkpoint else ("prompt", "completion")
    loaded = loaded_for(tmp_path, make, pairs(*names))
    words: Any = loaded.data.tokenizer
    ids = [words(row[names[0]])["input_ids"] for row in pairs(*names)]
    want = one_at_a_time(loaded, ids, 6)
    assert len(set(want)) > 2, "texts differ, or little is tested"
    for batch_size in (1, 4, COUNT):
        loaded.batch_size = batch_size
        got = generate(loaded, loaded.model, range(COUNT), 6)
        assert [text.split() for text in got] == [text.split() for text in want]
    assert generate(loaded, loaded.model, [4, 2], 6) == [want[4], want[2]]


def test_generation_stops_at_the_end_token(tmp_path: Path) -> None:
    loaded = loaded_for(tmp_path, tiny_llama_checkpoint, pairs("prompt", "completion"))
    model: Any = loaded.model
    with torch.no_grad():
        model.lm_head.weight[1] *= 20  # </s> is likely after some prompts
    ids = [prompt.ids for prompt in prompts(loaded, range(COUNT))]
    want = one_at_a_time(loaded, ids, 12)
    assert len({len(text.split()) for text in want}) > 1
    assert [text.split() for text in generate(loaded, model, range(COUNT), 12)] == [text.split() for text in want]


def test_the_generation_config_of_the_model_is_not_used(tmp_path: Path) -> None:
    rows = pairs("prompt", "completion")
    loaded = loaded_for(tmp_path, tiny_llama_checkpoint, rows)
    want = generate(loaded, loaded.model, range(COUNT), 8)
    told = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "eos_token_id": [1, 7], "num_beams": 3}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(told))
    again = load_task(tmp_path / "model", tmp_path / "rows.jsonl", device="cpu")
    kept = again.model.generation_config
    got = generate(again, again.model, range(COUNT), 8)
    assert again.model.generation_config is kept and not again.model.training
    words: Any = again.data.tokenizer
    end = words.convert_ids_to_tokens(7)
    assert got == [text.partition(end)[0].strip() if end in text.split() else text for text in want]


def test_prompts_are_cut_at_the_beginning(tmp_path: Path) -> None:
    loaded = loaded_for(tmp_path, tiny_llama_checkpoint, pairs("prompt", "completion"))
    row = pairs("prompt", "completion")[3]
    (whole,), (cut,) = prompts(loaded, [3]), prompts(loaded, [3], 3)
    assert (whole.text, whole.reference) == (row["prompt"], row["completion"])
    assert whole.ids[0] == 2 and cut.ids == [2, *whole.ids[-2:]], "<s> stays"
    with pytest.raises(gm.InputError):
        generate(loaded, loaded.model, [0], 64)
    empty = loaded_for(tmp_path / "empty", tiny_gpt2_checkpoint, [{"prompt": "", "completion": "a"}])
    with pytest.raises(gm.InputError, match="row 1"):
        generate(empty, empty.model, [0])
    bert = tiny_bert_checkpoint(tmp_path / "bert")
    rows = write_jsonl(tmp_path / "labels.jsonl", [{"text": "a", "label": 0}])
    with pytest.raises(gm.InputError):
        prompts(load_task(bert, rows, device="cpu"), [0])


def test_the_prompt_of_a_conversation_ends_before_the_last_answer(tmp_path: Path) -> None:
    model = tiny_llama_checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(CHAT)
    said = [{"role": "user", "content": "who is it"}, {"role": "assistant", "content": "the cat"}]
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"messages": said}, {"messages": said[:1]}])
    loaded = load_task(model, rows, device="cpu")
    first, second = prompts(loaded, [0, 1])
    assert (first.text, first.reference) == ("who is it ? the", "the cat")
    assert (second.text, second.reference) == ("who is it ? the", None)
    words: Any = loaded.data.tokenizer
    assert words.decode(first.ids, skip_special_tokens=True) == "who is it ? the"
    with pytest.raises(gm.InputError, match="row 2"):
        gm.evaluate(model, rows, metrics="exact-match", device="cpu")


# Scores of texts against counts by hand, and their standard errors.

ANSWERS = ["the cat sat on the mat", "a dog runs", "it is red", "what was it", "paris"]
REFERENCES = ["the cat is on the mat", "the dog runs fast", "it is red", "who was that", "Paris."]


def scores(*metrics: str, answers: list[str] = ANSWERS, references: list[str] = REFERENCES) -> dict[str, torch.Tensor]:
    return score_texts(answers, references, Generation(metrics))


def test_exact_match_is_of_normalized_texts() -> None:
    same = [("Paris.", " paris "), ("the  cat\nruns", "The cat runs!"), ("“No”", "no"), ("(50%).", "50%")]
    same += [("\N{LATIN SMALL LIGATURE FI}ne", "fine"), ("Straße", "STRASSE")]
    assert all(normalize(one) == normalize(other) for one, other in same)
    assert scores("exact-match")["exact_match"].tolist() == [0, 0, 1, 0, 1]
    different = [("3.5", "3.6"), ("a b", "ab"), ("...", ""), ("-1", "1"), ("50%", "50")]
    assert not any(normalize(one) == normalize(other) for one, other in different)


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
    found = gm.evaluate(model, data, metrics="exact-match", max_new_tokens=4, device="cpu", progress=False)
    want = torch.tensor([normalize(a) == normalize(row["completion"]) for a, row in zip(answers, rows, strict=True)])
    assert found["exact_match"] == float(want.double().mean()) > 0
    assert found["examples"] == plain["examples"] == 6
    assert set(found["standard_errors"]) == {*plain["standard_errors"], "exact_match"}
