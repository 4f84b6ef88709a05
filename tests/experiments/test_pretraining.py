"""A T5 that is pre-trained on the spot: holes in texts against a slow reading, and a run that starts with it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import experiments.sentiment.__main__ as program
import numpy as np
import pytest
from experiments.sentiment import report
from experiments.sentiment.data import BASE, SETS
from experiments.sentiment.merging import RULES, SWEPT
from experiments.sentiment.models import kind_of
from experiments.sentiment.pretraining import Holes, chunks
from experiments.sentiment.settings import ALL_DATA, JOINT, Pretraining, pretrained_here, settings_for
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

SENTINEL, END = 1000, 1


def test_sources_and_targets_make_up_the_text_again() -> None:
    """Token by token: at a sentinel the target goes on with what follows the same sentinel there."""
    texts = np.random.default_rng(0).integers(10, 900, (6, 50))
    make = Holes(noise=8, spans=3, first=SENTINEL, end=END, seed=0)
    lengths: set[int] = set()
    for _ in range(20):
        batch = make([{"ids": text} for text in texts])
        assert batch["input_ids"].shape == (6, 50 - 8 + 3 + 1) and batch["labels"].shape == (6, 8 + 3 + 1)
        for text, source, target in zip(texts, batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
            assert source[-1] == target[-1] == END and target[0] == SENTINEL
            assert [token for token in source if token >= SENTINEL] == [SENTINEL, SENTINEL + 1, SENTINEL + 2]
            taken: dict[int, list[int]] = {}
            for token in target[:-1]:
                if token >= SENTINEL:
                    here = taken.setdefault(token, [])
                else:
                    here.append(token)
            lengths |= {len(tokens) for tokens in taken.values()}
            whole = [other for token in source[:-1] for other in taken.get(token, [token])]
            assert whole == text.tolist()
    assert lengths == {1, 2, 3, 4, 5, 6}, "spans of all lengths that three can have in eight tokens"


def test_every_place_but_the_ends_is_taken_out_about_equally_often() -> None:
    places = np.arange(10, 40)[None].repeat(400, 0)
    make = Holes(noise=6, spans=2, first=SENTINEL, end=END, seed=1)
    counts = np.zeros(1001, dtype=int)
    for _ in range(10):
        found = make([{"ids": text} for text in places])["labels"].numpy()
        counts += np.bincount(found[found < 1000], minlength=1001)
    assert counts[10] == counts[39] == 0
    middle = counts[16:34] / 4000
    assert middle.min() > 0.15 and middle.max() < 0.3 and counts[10:40].sum() == 4000 * 6


def test_pieces_are_the_texts_in_a_row() -> None:
    made = chunks([[1, 2, 3], [4, 5, 6, 7], [8]], 3)
    assert [piece["ids"].tolist() for piece in made] == [[1, 2, 3], [4, 5, 6]]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run at the tiny scale, with few weights and epochs."""
    folder = tmp_path_factory.mktemp("runs") / "t5"
    tiny = pretrained_here("tiny")
    few = replace(tiny, weights=(0.0, 1.0), epochs={**dict.fromkeys((*SETS, ALL_DATA, JOINT), 1), BASE: 10})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "pretrained_here", lambda scale: few)
        assert program.main(["--scale", "tiny", "--model", "t5", "--device", "cpu", "-o", str(folder)]) == 0
    return folder


def test_a_run_pre_trains_once_and_merges_what_answers_with_words(out: Path) -> None:
    results = json.loads((out / "results.json").read_text())
    (seed,) = results["seeds"]
    assert results["seq2seq"] and "--model t5" in results["command"]
    assert set(seed["scores"]) == {*SETS, ALL_DATA, JOINT, *RULES}
    assert report.accuracy(seed["scores"][BASE], BASE) > 80, "the base has learned its task"
    assert all(math.isfinite(s["imdb"]["test"]["loss"]) for m in SWEPT for s in seed["sweep"][m])
    page = (out / "results.md").read_text()
    assert "T5 v1.1 base, table t5" in page and "pre-trained once for all seeds" in page
    # Task arithmetic at weight 1 of what was written, tied weights and all.
    model = AutoModelForSeq2SeqLM.from_pretrained(out / "model")
    assert model.lm_head.weight is model.shared.weight
    assert results["pretrained"]["parameters"] == sum(p.numel() for p in model.parameters())


def test_the_pre_trained_model_fills_holes_better_than_chance_and_its_tokenizer_knows_the_answers(out: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert tokenizer("A Good Film")["input_ids"] == tokenizer("a good film")["input_ids"]
    assert tokenizer("good")["input_ids"][-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokenizer("fine film", add_special_tokens=False)["input_ids"]).strip() == "fine film"
    kind = kind_of(out / "model", 32)
    assert kind.targets([0, 1]).tolist()[0] != kind.targets([0, 1]).tolist()[1]
    found = json.loads((out / "results.json").read_text())["pretrained"]
    assert found["last_loss"] < 0.8 * math.log(found["vocabulary"])


def test_holes_are_of_three_tokens_in_the_mean() -> None:
    small = pretrained_here("small").pretraining
    assert isinstance(small, Pretraining) and small.holes == (32, 11)
    assert settings_for("small", seq2seq=True, pretrained=True).pretraining is None


def test_a_dry_run_names_the_pre_training_and_the_full_scale_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", "t5", "--data-dir", str(tmp_path), "--dry-run", "-o", str(tmp_path / "out")]
    assert program.main(["--scale", "small", *asked]) == 0
    said = capsys.readouterr().out
    assert "pre-training, once for all seeds, from random weights" in said and "wikitext2; columns text" in said
    assert "imdb, from the model pre-trained here" in said
    assert "learning rate 0.01 of Adafactor" in said and "imdb, to compare with, from random weights" in said
    for more, says in ((["full"], "google/t5-v1_1-base"), (["small", "--grid"], "not with --model t5")):
        with pytest.raises(SystemExit) as stopped:
            program.main(["--scale", *more, *asked])
        assert stopped.value.code == 2 and says in capsys.readouterr().err
