"""The toxicity experiment: the whole of it on made-up text, and its arithmetic against slow computations."""

from __future__ import annotations

import gzip
import json
import math
import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.common.data import Collate, write_rows
from experiments.common.training import Training
from experiments.toxicity import models, scorer
from experiments.toxicity.__main__ import main
from experiments.toxicity.data import (
    Data,
    cut,
    encode,
    learn_tokenizer,
    local_texts,
    prompts,
    write_prompts,
    write_tokens,
)
from experiments.toxicity.evaluation import continuations, distinct, divergence, loss_on, windows
from experiments.toxicity.removal import Point, Task, advice, candidates, choose, rise, sweep
from experiments.toxicity.report import damping_of, tables
from experiments.toxicity.settings import TINY, TOXIC_SHARE, Shape
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer, GPT2LMHeadModel

import gradmerge as gm

CIVIL = [
    "the",
    "town",
    "has",
    "a",
    "river",
    "and",
    "an",
    "old",
    "church",
    "where",
    "people",
    "like",
    "to",
    "walk",
    "and",
    "talk",
    "about",
    "the",
    "weather",
]
RUDE = ["grumf", "blarg", "snork", "you", "are", "a", "vile", "zorp", "and", "a", "rotten", "mub"]


def sentence(words: list[str], rng: random.Random) -> str:
    return " ".join(rng.choices(words, k=rng.randint(8, 14)))


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("data") / "text"
    for name in ("imdb", "yelp", "amazon"):
        for split, count in (("train", 30), ("test", 6)):
            write_rows(
                folder / name / f"{split}.jsonl.gz", [{"text": sentence(CIVIL, rng), "label": 1} for _ in range(count)]
            )
    for split, count in (("train", 60), ("test", 20)):
        rows = [{"text": sentence(RUDE if i % 2 else CIVIL, rng), "label": i % 2} for i in range(count)]
        write_rows(folder / "jigsaw_toxic" / f"{split}.jsonl.gz", rows)
    write_rows(
        folder / "real_toxicity_prompts" / "prompts.jsonl.gz",
        [
            {
                "text": sentence(RUDE if i % 3 == 0 else CIVIL, rng),
                "toxicity": None if i == 1 else 0.9 if i % 3 == 0 else 0.1,
                "continuation": sentence(RUDE if i % 2 else CIVIL, rng),
                "continuation_toxicity": 0.8 if i % 2 else 0.2,
            }
            for i in range(20)
        ],
    )
    (folder / "wikitext2").mkdir()
    for split, count in (("train", 60), ("valid", 12), ("test", 12)):
        with gzip.open(folder / "wikitext2" / f"{split}.txt.gz", "wt") as file:
            file.write("".join(f" {sentence(CIVIL, rng)} \n \n" for _ in range(count)))
    return folder


@pytest.fixture(scope="module")
def prepared(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Data:
    folder = tmp_path_factory.mktemp("prepared")
    write_tokens(folder, text_dir, None, TINY)
    return Data.load(folder, TINY)


def small_model(seed: int, context: int = 16) -> GPT2LMHeadModel:
    shape = Shape(300, 1, 16, 2, Training(1e-2, 1, 8))
    model = models.blank(shape, context, 0, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # far from the uniform distribution that a new model gives
    return model.double().eval()


@pytest.mark.parametrize(("length", "context"), [(5, 8), (8, 8), (9, 8), (40, 8), (41, 7), (3, 2)])
def test_every_token_after_the_first_counts_once(length: int, context: int) -> None:
    counted = []
    for start, end, first in windows(torch.arange(length), context):
        assert end - start <= context and first >= 1
        counted += range(start + first, end)
    assert counted == list(range(1, length))


def slow_log_probabilities(model: GPT2LMHeadModel, ids: torch.Tensor, context: int) -> list[torch.Tensor]:
    """Of each token after the first, the distribution given all that its window shows before it."""
    found = []
    for start, end, first in windows(ids, context):
        for place in range(start + first, end):
            with torch.no_grad():
                logits = model(input_ids=ids[None, start:place]).logits[0, -1]
            found.append(logits.double() - logits.double().logsumexp(0))
    return found


def test_loss_and_divergence_equal_slow_sums_over_single_tokens() -> None:
    model, target = small_model(0), small_model(1)
    ids = torch.randint(300, (45,), generator=torch.Generator().manual_seed(0))
    mine, theirs = (slow_log_probabilities(m, ids, 16) for m in (model, target))
    loss = -sum(float(p[token]) for p, token in zip(mine, ids[1:], strict=True)) / 44
    apart = sum(float((q.exp() * (q - p)).sum()) for p, q in zip(mine, theirs, strict=True)) / 44
    assert loss_on(model, ids, 16) == pytest.approx(loss, rel=1e-5)
    assert divergence(target, model, ids, 16) == pytest.approx(apart, rel=1e-5) and apart > 0.05
    assert divergence(model, model, ids, 16) == 0


def test_what_a_model_writes_does_not_depend_on_the_prompts_beside_it(prepared: Data) -> None:
    """Greedy in effect: with a tiny p, only the likeliest token is left."""
    model = small_model(2, context=48)
    both = ["the old church", "the river and the weather and the town where"]
    options: dict[str, Any] = {"new_tokens": 6, "top_p": 1e-9, "seed": 0}
    together = continuations(model, prepared.tokenizer, both, batch=2, **options)
    assert together == continuations(model, prepared.tokenizer, both, batch=1, **options)
    assert together != ["", ""]


def test_repeated_text_has_few_distinct_pairs() -> None:
    assert distinct(["a b c", "c d"]) == 1
    assert distinct(["a a a a a"]) == 0.25
    assert distinct(["", "a"]) == 0


def test_removal_follows_its_equation() -> None:
    def random_state(seed: int) -> dict[str, torch.Tensor]:
        return {"w": torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.1}

    base, tuned, first, second = (random_state(seed) for seed in range(4))
    task = Task(base, tuned, gm.Curvature(first, 3), gm.Curvature(second, 5))
    delta = tuned["w"] - base["w"]
    assert torch.allclose(task.without("task-arithmetic", 0.7, None)["w"], base["w"] - 0.7 * delta, rtol=1e-12)
    wanted = base["w"] - 0.7 * (first["w"] + 0.2 + second["w"]) / (first["w"] + 0.2) * delta
    removed = task.without("gradient-matching", 0.7, 0.2)
    assert torch.allclose(removed["w"], wanted, rtol=1e-12)
    assert task.step(removed) == pytest.approx(float((wanted - base["w"]).norm() / delta.norm()))


def test_embeddings_out_of_scope_stay_as_they_are() -> None:
    base = {
        "transformer.wte.weight": torch.zeros(3),
        "transformer.wpe.weight": torch.zeros(3),
        "transformer.h.0.w": torch.zeros(3),
    }
    tuned = {name: value + 1 for name, value in base.items()}
    ones = gm.Curvature(tuned, 1)
    for method, damping, wanted in (("task-arithmetic", None, -1.0), ("gradient-matching", 1.0, -1.5)):
        removed = Task(base, tuned, ones, ones).without(method, 1.0, damping, "no embeddings")
        assert {name: value[0].item() for name, value in removed.items()} == dict(
            zip(base, (0.0, 0.0, wanted), strict=True)
        )


def quadratic(strength: float, damping: float | None = None) -> Point:
    """Perplexity of what stays is exp(s²/10) times the base's, for a small damping more; that of toxic text exp(s)."""
    cost = strength**2 / 10 * (4 if damping == 1 else 1)
    return Point("m", strength, damping, "all", {"wiki": 3 + cost, "reviews": 4 + cost, "toxic": 5 + strength})


def test_the_sweep_closes_in_on_the_strength_at_which_the_budget_is_spent() -> None:
    base = quadratic(0)
    found = sweep(quadratic, base, (0.5, 1.0, 4.0), (0.05, 0.2), 8)
    for budget in (0.05, 0.2):
        (best,) = candidates(found, base, budget)
        assert best.strength == pytest.approx(math.sqrt(10 * math.log1p(budget)), abs=0.02)
        assert rise(best, base) <= budget
    assert [p.strength for p in found] == sorted({p.strength for p in found})


def test_a_sweep_ends_beyond_strength_1_when_all_is_lost() -> None:
    base = quadratic(0)
    found = sweep(partial(quadratic, damping=1), base, (16.0, 0.5, 1.0, 2.0, 4.0), (0.05,), 0)
    assert [p.strength for p in found] == [0.5, 1.0, 2.0]


def test_nothing_is_evaluated_beyond_the_given_strengths_when_the_budget_is_never_spent() -> None:
    base = quadratic(0)
    assert [p.strength for p in sweep(quadratic, base, (0.1, 0.2), (0.5,), 5)] == [0.1, 0.2]


def test_the_choice_is_the_least_toxic_of_the_largest_strengths_that_the_budget_allows() -> None:
    base = replace(quadratic(0), toxicity=0.3)
    scores = {1: 0.1, 10: 0.2}
    points = [replace(quadratic(s, d), toxicity=scores[d] / s) for s in (0.3, 0.1, 0.6, 0.9, 3.0) for d in (1, 10)]
    for budget in (0.0001, 0.02, 0.05, 0.3):
        largest = []
        for damping in (1, 10):
            allowed = [p for p in points if p.damping == damping and p.stay <= base.stay + math.log1p(budget)]
            largest += [p for p in allowed if p.strength == max(q.strength for q in allowed)]
        assert sorted(candidates(points, base, budget), key=lambda p: p.key) == sorted(largest, key=lambda p: p.key)
        wanted = min([base, *largest], key=lambda p: p.toxicity or 0)
        assert choose(points, base, budget) is wanted
    broken = Point("m", 1.0, None, "all", {"wiki": math.nan, "toxic": math.nan}, toxicity=0.0)
    assert choose([broken], base, 0.5) is base and rise(broken, base) == math.inf


def test_long_texts_are_cut_after_lines_and_nothing_is_lost(prepared: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.toxicity.data.PIECE", 20)
    text = "the river\nand an old church\nwhere people like to walk about in long lines without an end\n"
    parts = list(cut(text))
    assert "".join(parts) == text and len(parts) > 3 and parts[0].endswith("\n")
    ids = encode(prepared.tokenizer, [text, "the town"])
    assert [prepared.tokenizer.decode(i) for i in ids] == [text + "<|endoftext|>", "the town<|endoftext|>"]


def test_held_out_comments_are_not_trained_on(text_dir: Path) -> None:
    texts = local_texts(text_dir, replace(TINY, characters=10**9))
    assert len(texts["toxic"]["train"]) == 27 and len(texts["toxic"]["dev"]) == 3
    assert [*texts["toxic"]["train"], *texts["toxic"]["dev"]] == [
        r["text"] for r in gm.read_rows(str(text_dir / "jigsaw_toxic/train.jsonl.gz")).rows if r["label"] == 1
    ]
    assert set(learn_tokenizer(texts, 300).tokenize("zorp")) != {"<|endoftext|>"}


def test_prompts_are_the_first_or_have_a_share_of_toxic_ones_and_those_without_a_score_are_left_out(
    text_dir: Path,
) -> None:
    assert [p["toxic"] for p in prompts(text_dir, 8, 0.5)] == [True] * 4 + [False] * 4
    assert [p["toxic"] for p in prompts(text_dir, 5, None)] == [True, False, True, False, False]
    assert len(prompts(text_dir, 100, 0.5)) == len(prompts(text_dir, 100, None)) == 19


def test_prompts_for_validation_are_not_those_of_the_test(text_dir: Path, tmp_path: Path) -> None:
    assert write_prompts(tmp_path, text_dir, TINY) == {"dev": 4, "test": 8}
    kept = json.loads((tmp_path / "prompts.json").read_text())
    texts = [[p["text"] for p in kept[split]] for split in ("dev", "test")]
    assert not {*texts[0]} & {*texts[1]} and {*texts[0], *texts[1]} == {p["text"] for p in prompts(text_dir, 12, 0.5)}
    assert sum(p["toxic"] for p in kept["dev"]) == 2


def test_texts_that_are_not_packed_are_padded_and_padding_never_counts(text_dir: Path, tmp_path: Path) -> None:
    settings = replace(TINY, packed=False, length=12, characters=10**9)
    write_tokens(tmp_path, text_dir, None, settings)
    data = Data.load(tmp_path, settings)
    examples = data.examples("toxic")
    assert len(examples) == 27 and max(map(len, examples)) == 12
    batch = Collate(7)([{"input_ids": x, "labels": x} for x in (torch.tensor([1, 2, 3]), torch.tensor([4]))])
    assert batch["input_ids"].tolist() == [[1, 2, 3], [4, 7, 7]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, -100, -100]]


def test_the_target_does_not_depend_on_the_removed_text_but_the_base_does(prepared: Data, tmp_path: Path) -> None:
    other = Data(prepared.kinds, prepared.tokenizer, dict(prepared.tokens), TINY)
    other.tokens["toxic.train.ids"] = prepared.tokens["toxic.train.ids"].flip(0)
    states = {}
    for name, data in (("one", prepared), ("other", other)):
        for without in (None, "toxic"):
            folder = tmp_path / f"{name}-{without}"
            models.pretrain(folder, data, TINY, 0, "cpu", without=without)
            states[name, without] = models.state(folder)
    for tensor in states["one", "toxic"]:
        assert torch.equal(states["one", "toxic"][tensor], states["other", "toxic"][tensor])
    wte = "transformer.wte.weight"
    assert not torch.equal(states["one", None][wte], states["other", None][wte])
    assert not torch.equal(states["one", None][wte], states["one", "toxic"][wte])


def test_the_classifier_of_the_hub_is_read_at_its_toxic_label(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted({*CIVIL, *RUDE})]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    torch.manual_seed(0)
    labels = {0: "insult", 1: "toxic", 2: "threat"}
    shape = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = BertConfig(
        vocab_size=len(words),
        initializer_range=1.0,
        id2label=labels,
        label2id={v: k for k, v in labels.items()},
        problem_type="multi_label_classification",
        **shape,
    )
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    texts = ["the old church", "you are a vile zorp and a rotten mub", "grumf"]
    found = scorer.hub_scorer(str(tmp_path), "cpu", batch=2)(texts)
    for text, score in zip(texts, found, strict=True):
        ids = torch.tensor([[2, *(words.index(w) for w in text.split()), 3]])
        with torch.no_grad():
            assert score == pytest.approx(float(model(input_ids=ids).logits[0, 1].sigmoid()), rel=1e-4)


def test_scores_of_the_classifier_trained_here_have_the_share_of_toxic_comments_set_right(text_dir: Path) -> None:
    rows = gm.read_rows(str(text_dir / "jigsaw_toxic/train.jsonl.gz")).rows
    words = TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, min_df=2, strip_accents="unicode")
    regression = LogisticRegression(C=10.0, max_iter=1000)
    regression.fit(words.fit_transform([r["text"] for r in rows]), [r["label"] for r in rows])
    texts = ["the old church and the river", "you vile zorp", "something else", "you walk to the zorp"]
    balanced = regression.predict_proba(words.transform(texts))[:, 1]
    # Bayes' rule with a share of TOXIC_SHARE instead of one half.
    wanted = TOXIC_SHARE * balanced / (TOXIC_SHARE * balanced + (1 - TOXIC_SHARE) * (1 - balanced))
    score = scorer.train_scorer(text_dir)
    assert score(texts) == pytest.approx(wanted.tolist(), rel=1e-6)
    quality = scorer.scorer_quality(score, text_dir, 0.2)
    assert quality["accuracy"] == 1.0 and quality["auc"] == 1.0 and quality["auc_perspective"] == 1.0


def test_the_damping_that_gradmerge_advises_is_found_in_its_note(tmp_path: Path) -> None:
    paths = {}
    for seed, name in enumerate(("base", "tuned")):
        model = models.blank(TINY.pretraining, 16, 0, seed)  # type: ignore[arg-type]
        model.save_pretrained(tmp_path / name)
        paths[name] = tmp_path / name
    sizes = dict(model.named_parameters())
    for name, value in (("prior", 1e-8), ("curvature", 1e-3)):
        gm.Curvature({n: torch.full_like(p, value) for n, p in sizes.items()}, 1).save(tmp_path / name)
        paths[name] = tmp_path / name
    found = advice(**paths, damping=1e-10, out=tmp_path / "out")
    # (1e-8 + δ + 1e-3) / (1e-8 + δ) is at most 2 from δ = 1e-3 on, which is the least power of ten.
    assert found["damping"] == 1e-3 and "cannot be trusted" in found["note"]
    assert advice(**paths, damping=1.0, out=tmp_path / "out") == {"note": None, "damping": None}


@pytest.fixture(scope="module")
def finished(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out")
    assert main(["--scale", "tiny", "--data-dir", str(text_dir.parent), "--out", str(out), "--device", "cpu"]) == 0
    return out


def test_the_whole_experiment_gives_rows_for_every_model_and_method(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    (seed,) = results["seeds"]
    assert set(seed["rows"]) == {"base", "target", "tuned-plain", "tuned-penalty"}
    for tuning in ("plain", "penalty"):
        found = seed["tunings"][tuning]
        assert {p["method"] for p in found["sweep"]["points"]} == {"task-arithmetic", "gradient-matching"}
        assert len({(p["damping"], p["scope"]) for p in found["sweep"]["points"] if p["damping"] is not None}) == 5
        keys = {(t["method"], t["strength"], t["damping"], t["scope"]) for t in found["tested"]}
        for scope in ("all", "no embeddings"):
            assert {("task-arithmetic", 1.0, None, scope), ("gradient-matching", 1.0, 1e-10, scope)} <= keys
        for by_budget in found["chosen"].values():
            for budget, point in by_budget.items():
                base = Point(**found["sweep"]["base"])
                assert rise(Point(**point), base) <= float(budget)
    assert seed["rows"]["target"]["divergence"] == dict.fromkeys(("wiki", "reviews", "comments", "toxic"), 0.0)
    assert seed["rows"]["base"]["divergence"]["toxic"] > 0
    text = (finished / "results.md").read_text()
    assert (
        "tab:toxicity_hallucinations" in text
        and "retrained without it (target)" in text
        and "nan" not in text.lower().split()
    )
    for name in ("trade-off", "damping-plain", "damping-penalty", "removal"):
        assert "<text" in (finished / "figures" / f"{name}.svg").read_text()


def test_ways_of_removal_are_measured_on_all_kinds_of_text(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    (seed,) = results["seeds"]
    compared = seed["comparison"]
    kinds = seed["rows"]["base"]["loss"]
    stay = [loss for kind, loss in kinds.items() if kind != "toxic"]
    assert compared["limits"]["base"]["kept"] == pytest.approx(sum(stay) / 3, rel=1e-6)
    assert compared["limits"]["base"]["forget"] == pytest.approx(kinds["toxic"], rel=1e-6)
    assert compared["limits"]["target"]["kl_kept"] == 0 < compared["limits"]["base"]["kl_kept"]
    for told in compared["ways"].values():
        assert told["curve"][0]["test"]["forget"] == compared["limits"]["base"]["forget"]
        assert told["chosen"]["rise"] <= results["settings"]["comparing"]["budget"]
        assert told["chosen"]["dial"] in [point["dial"] for point in told["curve"]]
    bare = json.loads(json.dumps(results))
    bare["settings"]["tunings"] = {}
    assert "At the default of each way" in tables(bare) and "## In the paper" in tables(bare)


def test_the_model_that_saw_toxic_text_knows_it_better_than_the_target(finished: Path) -> None:
    (seed,) = json.loads((finished / "results.json").read_text())["seeds"]
    assert seed["rows"]["base"]["loss"]["toxic"] < seed["rows"]["target"]["loss"]["toxic"] - 0.1
    assert seed["rows"]["tuned-plain"]["loss"]["toxic"] < seed["rows"]["base"]["loss"]["toxic"]


def test_a_second_run_makes_nothing_anew_and_gives_the_same_files(
    finished: Path, text_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()}
    main(["--scale", "tiny", "--data-dir", str(text_dir.parent), "--out", str(finished), "--device", "cpu"])
    assert "…" not in capsys.readouterr().out
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before
    main(["--render-only", "--out", str(finished)])
    assert {p: p.read_bytes() for p in finished.rglob("*") if p.is_file()} == before


def test_a_lost_stage_is_made_again_as_it_was(finished: Path, text_dir: Path) -> None:
    stage = finished / "seed-0" / "test-tuned-plain"
    record = stage.parent / ".stages" / f"{stage.name}.json"
    before = json.loads(record.read_text())
    for file in stage.iterdir():
        file.unlink()
    stage.rmdir()
    main(["--scale", "tiny", "--data-dir", str(text_dir.parent), "--out", str(finished), "--device", "cpu"])
    assert json.loads(record.read_text())["result"] == before["result"]


@pytest.mark.parametrize(("factor", "shown"), [(0.01, "0.01"), (1, "1"), (3, "3"), (30, "30"), (100, "100")])
def test_a_damping_is_shown_as_the_multiple_that_was_asked_for(factor: float, shown: str) -> None:
    unit = 113.367  # dampings are kept with three digits, so that factor · unit is not met exactly
    assert damping_of(float(f"{factor * unit:.3g}"), unit, 1e-10) == f"δ = {shown} × mean F_t"


def test_a_model_that_the_paper_lacks_stands_beside_gpt2(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    note = "Model, classifier and choice of prompts are others in the paper"
    assert note in tables(results) and "| paper, gpt2: 100 · mean |" in tables(results)
    assert note not in tables({**results, "model": "gpt2"})


def test_several_seeds_are_shown_with_their_spread(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    (seed,) = results["seeds"]
    other = json.loads(json.dumps(seed)) | {"seed": 1}
    other["rows"]["base"]["toxicity"]["share"] = seed["rows"]["base"]["toxicity"]["share"] + 0.1
    wanted = np.array([seed["rows"]["base"]["toxicity"]["share"], other["rows"]["base"]["toxicity"]["share"]]) * 100
    text = tables(results | {"seeds": [seed, other]})
    assert f"{wanted.mean():.1f} ± {wanted.std(ddof=1):.1f}" in text


def test_full_scale_runs_with_a_local_model_data_and_classifier(text_dir: Path, prepared: Data, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert TINY.pretraining is not None
    models.blank(TINY.pretraining, 1024, prepared.tokenizer.eos_token_id, 0).save_pretrained(folder)
    prepared.tokenizer.save_pretrained(folder)
    out = tmp_path / "out"
    options = ["--model", str(folder), "--data-dir", str(text_dir), "--scorer", "tfidf", "--out", str(out)]
    options += ["--device", "cpu"]
    assert main(options) == 0
    results = json.loads((out / "results.json").read_text())
    (seed,) = results["seeds"]
    assert set(seed["rows"]) == {"base", "tuned-plain"} and "divergence" not in seed["rows"]["base"]
    assert seed["curvature"]["base"]["of"] == 60 and seed["curvature"]["base"]["scaled_by"] == 1
    assert "--model model" in results["command"] and str(tmp_path) not in (out / "results.json").read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--scale", "small"], "needs --data-dir"),
        (["--scale", "tiny", "--data-dir", "nowhere"], "no such folder"),
        (["--scale", "tiny", "--data-dir", ".", "--model", "gpt2"], "trains a model of its own"),
        (["--scorer", "tfidf"], "needs --data-dir"),
        (["--render-only", "--out", "nowhere"], "there is no"),
        (["--scale", "tiny", "--data-dir", "."], "no such file"),
    ],
)
def test_wrong_options_end_with_status_2_and_say_why(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2 and told in capsys.readouterr().err
