"""The hallucination experiment: turns, metrics and choices against slow ones, and a tiny run from end to end."""

from __future__ import annotations

import gzip
import json
import math
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from experiments.common.data import Collate
from experiments.common.pretraining import Shape, make_model, make_tokenizer, plain
from experiments.common.removal import WAYS, between, put
from experiments.common.states import read_state
from experiments.hallucination.__main__ import main
from experiments.hallucination.data import TAGS, Lengths, Turn, encode, read_turns, swap_knowledge
from experiments.hallucination.evaluation import Likelihood, perplexity, respond
from experiments.hallucination.metrics import Critic, content_words, text_metrics, unfaithful_label
from experiments.hallucination.pretraining import infill
from experiments.hallucination.removal import choose, rows
from experiments.hallucination.run import Seed, prepare
from experiments.hallucination.settings import SCALES
from safetensors.torch import load_file
from transformers import BertConfig, BertForSequenceClassification

import gradmerge as gm

TOPICS = ["gardens", "trains", "painters", "guitars", "volcanoes", "whales", "bread", "chess", "rivers", "castles"]
THINGS = ["old", "large", "famous", "quiet", "green", "heavy", "famous", "early", "modern", "northern"]


def turns(count: int, seed: int) -> list[Turn]:
    chance = random.Random(seed)
    made = []
    for number in range(count):
        topic, thing = chance.choice(TOPICS), chance.choice(THINGS)
        known = f"The {thing} {topic} of {1500 + number} were known in {chance.choice(TOPICS)} towns."
        made.append(
            Turn(known, (f"I like {topic}.", "So do I.", "Tell me more!"), f"Well, {thing} {topic} were known.")
        )
    return made


def write_lines(path: Path, made: list[Turn]) -> None:
    with gzip.open(path, "wt") as file:
        for turn in made:
            file.write(
                json.dumps({"knowledge": turn.knowledge, "history": turn.history, "response": turn.response}) + "\n"
            )


def write_data(folder: Path) -> Path:
    dialogues, text = folder / "wizard_of_wikipedia", folder / "wikitext2"
    dialogues.mkdir(parents=True)
    text.mkdir()
    write_lines(dialogues / "train.jsonl.gz", turns(60, 0))
    write_lines(dialogues / "test.jsonl.gz", turns(14, 1))
    chance = random.Random(2)
    with gzip.open(text / "train.txt.gz", "wt") as file:
        for _ in range(40):
            file.write(" = Title = \n")
            for _ in range(3):
                words = " ".join(chance.choice(TOPICS + THINGS) for _ in range(8))
                file.write(f" The {words} came , and it was <unk> in 1 @,@ 900 .")
            file.write(" \n")
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Data, and what a tiny run makes of it."""
    data, out = write_data(tmp_path_factory.mktemp("data")), tmp_path_factory.mktemp("out")
    assert main(["--scale", "tiny", "--data-dir", str(data), "--device", "cpu", "-o", str(out)]) == 0
    return data, out


def test_a_tiny_run_gives_tables_figures_and_numbers_for_every_method(finished: tuple[Path, Path]) -> None:
    _, out = finished
    results = json.loads((out / "results.json").read_text())
    (seed,) = results["seeds"]
    settings = SCALES["tiny"]
    assert set(seed["models"]) == {"base", "target", "hallucinating"}
    assert seed["turns"]["true"] == seed["turns"]["swapped"] == 48
    assert seed["training"]["base"]["examples"] == 96 and seed["training"]["target"]["examples"] == 96
    counts = Counter(entry["method"] for entry in seed["entries"])
    strengths = len(settings.strengths)
    assert counts == {
        "task-arithmetic": strengths,
        "fa1": strengths,
        "removal": strengths * (1 + len(settings.dampings)),
    }
    assert seed["models"]["target"]["test"]["divergence"] == pytest.approx(0, abs=1e-6)
    shown = [entry["test"] for entry in seed["entries"] if entry["test"] is not None]
    assert all(0 <= found["hallucination"] <= 100 and found["bleu"] >= 0 for found in shown)
    text = (out / "results.md").read_text()
    assert "27.5" in text and "target: trained again" in text and str(out) not in text
    for name in ("trade-off", "damping", "removal"):
        assert "<text" in (out / "figures" / f"{name}.svg").read_text()


def test_a_second_run_makes_nothing_again_and_gives_the_same_files(finished: tuple[Path, Path]) -> None:
    data, out = finished
    files = [*out.rglob(".stages/*.json"), *out.rglob("*.safetensors")]
    before = {file: file.stat().st_mtime_ns for file in files}
    results = {name: (out / name).read_bytes() for name in ("results.json", "results.md", "figures/trade-off.svg")}
    assert len(files) > 10
    main(["--scale", "tiny", "--data-dir", str(data), "--device", "cpu", "-o", str(out)])
    assert {file: file.stat().st_mtime_ns for file in files} == before
    assert {name: (out / name).read_bytes() for name in results} == results


def test_tables_and_figures_come_from_the_numbers_alone(finished: tuple[Path, Path], tmp_path: Path) -> None:
    _, out = finished
    (tmp_path / "results.json").write_bytes((out / "results.json").read_bytes())
    assert main(["--render-only", "-o", str(tmp_path)]) == 0
    for name in ("results.json", "results.md", "figures/trade-off.svg", "figures/damping.svg"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


def test_removals_are_those_of_the_equations(finished: tuple[Path, Path]) -> None:
    data, out = finished
    seed = Seed(0, prepare(out, SCALES["tiny"], "cpu", data))
    base, tuned = (read_state(out / "seed-0" / name / "model") for name in ("base", "hallucinating"))
    rest, removed = (
        gm.Curvature.load(out / "seed-0" / f"{name}-curvature" / "curvature") for name in ("base", "hallucinating")
    )
    removals = seed._removals()
    damping = max(setting["damping"] for setting in removals.settings())
    found = removals.state({"method": "removal", "strength": 0.5, "damping": damping})
    plain_found = removals.state({"method": "task-arithmetic", "strength": 0.5, "damping": damping})
    squares = 0.0
    for name, value in base.items():
        start, delta = value.double(), tuned[name].double() - value.double()
        kept = rest[name].double() + damping
        torch.testing.assert_close(
            found[name].double(), start - 0.5 * (kept + removed[name].double()) / kept * delta, rtol=1e-5, atol=1e-6
        )
        torch.testing.assert_close(plain_found[name].double(), start - 0.5 * delta, rtol=1e-5, atol=1e-6)
        squares += float(delta.square().sum())
    assert squares > 0
    assert removals.step(plain_found) == pytest.approx(0.5, rel=1e-4)


def test_ways_of_removal_are_those_of_the_equations(finished: tuple[Path, Path]) -> None:
    data, out = finished
    bench = Seed(0, prepare(out, SCALES["tiny"], "cpu", data)).bench
    folder = out / "seed-0"
    base = read_state(folder / "base" / "model")
    rest = gm.Curvature.load(folder / "fisher-base" / "curvature")
    compared = json.loads((out / "results.json").read_text())["seeds"][0]["comparison"]
    ways = {"negation": "plain", "negation-theory": "theory", "matching": "plain", "matching-theory": "theory"}
    for way, tuning in ways.items():
        tuned = read_state(folder / f"taught-{tuning}" / "model")
        removed = gm.Curvature.load(folder / f"fisher-{tuning}" / "curvature")
        values = torch.cat([removed[name].flatten().double() for name in base])
        damping = float(values.mean()) if way == "matching" else compared["unit"]
        found, beyond = (between(bench._way(way, compared["unit"], None).points, dial) for dial in (0.5, 1.5))
        for name, value in base.items():
            start, delta = value.double(), tuned[name].double() - value.double()
            kept = rest[name].double() + damping
            ratio = torch.ones_like(kept) if way.startswith("negation") else (kept + removed[name].double()) / kept
            step = ratio.clamp(max=2 if way == "matching" else math.inf) * delta
            torch.testing.assert_close(found[name].double(), start - 0.5 * step, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(beyond[name].double(), start - 1.5 * step, rtol=1e-5, atol=1e-5)


def test_what_is_told_of_every_way_is_measured_on_its_model(finished: tuple[Path, Path]) -> None:
    """Losses and KL of turns with swapped knowledge, one turn at a time."""
    data, out = finished
    seed = Seed(0, prepare(out, SCALES["tiny"], "cpu", data))
    compared = json.loads((out / "results.json").read_text())["seeds"][0]["comparison"]
    assert set(compared["ways"]) == set(WAYS) and compared["limits"]["target"]["kl_forget"] < 1e-6
    target, model = (seed._load(out / "seed-0" / name / "model") for name in ("target", "base"))
    told = compared["ways"]["influence-kronecker"]
    assert told["default"]["dial"] in (1, 2) and told["points"] == 2
    put(model, load_file(out / "seed-0" / "path-influence-kronecker" / f"{told['default']['dial']}.safetensors"))
    nll = apart = tokens = 0.0
    for row in seed.rows["test, swapped"]:
        batch = seed.collate([row])
        with torch.no_grad():
            scores, wanted = (m(**batch).logits[0].double().log_softmax(-1) for m in (model, target))
        nll -= float(scores.gather(1, batch["labels"][0][:, None]).sum())
        apart += float((wanted.exp() * (wanted - scores)).sum())
        tokens += len(row["labels"])
    assert told["default"]["forget"] == pytest.approx(nll / tokens, rel=1e-4)
    assert told["default"]["kl_forget"] == pytest.approx(apart / tokens, rel=1e-3)
    assert told["rows"]["forget_rows"] == 48 and told["rows"]["keep_size"] == 48


def test_tables_do_without_the_set_up_of_the_paper(finished: tuple[Path, Path], tmp_path: Path) -> None:
    results = json.loads((finished[1] / "results.json").read_text())
    for name in ("entries", "models", "curvature"):
        del results["seeds"][0][name]
    (tmp_path / "results.json").write_text(json.dumps(results))
    assert main(["--render-only", "-o", str(tmp_path)]) == 0
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["removal.svg"]
    assert "no noise floor" in (tmp_path / "results.md").read_text()


def test_the_penalty_keeps_the_hallucinating_model_nearer_to_the_base_and_without_swapped_turns_there_is_no_target(
    finished: tuple[Path, Path], tmp_path: Path
) -> None:
    data, out = finished
    critic = tiny_critic(tmp_path / "critic", out / "start" / "model" / "model")
    args = ["--scale", "tiny", "--data-dir", str(data), "--device", "cpu", "-o", str(tmp_path / "plain")]
    start = str(out / "start" / "model" / "model")
    main([*args, "--model", start, "--swapped", "0", "--no-penalty", "--critic", str(critic)])
    results = json.loads((tmp_path / "plain" / "results.json").read_text())
    (seed,) = results["seeds"]
    assert set(seed["models"]) == {"base", "hallucinating"}
    assert seed["training"]["base"]["examples"] == 48 and seed["turns"]["swapped"] == 48
    assert "divergence" not in seed["models"]["base"]["test"]
    assert 0 <= seed["models"]["base"]["test"]["critic"] <= 100
    assert "--swapped 0 --no-penalty --critic critic" in results["command"]
    text = (tmp_path / "plain" / "results.md").read_text()
    assert "critic % ↓" in text and "KL to target ↓" not in text
    folder = tmp_path / "plain"
    felt = {"plain": felt_move(folder)}
    settings = replace(SCALES["tiny"], model=start, pretraining=None, swapped=0.0)
    held = Seed(0, prepare(folder, settings, "cpu", data))
    held._dialogue("base", held.rows["true"])
    held._curvature("base-curvature", "base", "true")
    held._hallucinating()
    felt["held"] = felt_move(folder)
    assert 0 < felt["held"] < felt["plain"]


def felt_move(folder: Path) -> float:
    """‖θ_t − θ_0‖² in the norm of the base's curvature."""
    base, tuned = (read_state(folder / "seed-0" / model / "model") for model in ("base", "hallucinating"))
    curvature = gm.Curvature.load(folder / "seed-0" / "base-curvature" / "curvature")
    return sum(float((curvature[n] * (tuned[n] - base[n]).square()).sum()) for n in base)


def tiny_critic(folder: Path, tokenizer: Path) -> Path:
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(words),
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            id2label={0: "Hallucination", 1: "Entailment"},
            label2id={"Hallucination": 0, "Entailment": 1},
        )
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def test_the_critic_counts_the_unfaithful_class(tmp_path: Path) -> None:
    words = make_tokenizer([turn.response for turn in turns(20, 0)], Shape(1, 16, 16, 2, 300), TAGS)
    words.save_pretrained(tmp_path / "words")
    folder = tiny_critic(tmp_path / "critic", tmp_path / "words")
    model = BertForSequenceClassification.from_pretrained(folder).eval()
    asked = turns(9, 3)
    said = [turn.response for turn in turns(9, 4)]
    model.classifier.weight.data.mul_(50)
    model.save_pretrained(folder)
    found = [
        int(model(**words(turn.knowledge, text, return_tensors="pt")).logits.argmax()) == 0
        for turn, text in zip(asked, said, strict=True)
    ]
    assert Critic(str(folder), "cpu", 4)(asked, said) == pytest.approx(100 * sum(found) / 9)
    assert unfaithful_label({0: "LABEL_0", 1: "LABEL_1"}) == 1
    assert unfaithful_label({0: "entailment", 1: "hallucination"}) == 1
    assert unfaithful_label({0: "unfaithful", 1: "faithful"}) == 0
    assert unfaithful_label({0: "other", 1: "entailment"}) == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--scale", "tiny"], "needs --data-dir"),
        (["--scale", "tiny", "--data-dir", "nowhere"], "no such folder"),
        (["--scale", "tiny", "--data-dir", ".", "--swapped", "1.5"], "from 0 to 1"),
        (["--scale", "tiny", "--data-dir", "."], "neither train.jsonl"),
        (["--render-only"], "there is no"),
        (["--scale", "huge"], "invalid choice"),
    ],
)
def test_wrong_options_end_with_status_2_and_a_message(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main([*args, "-o", str(tmp_path / "out")])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_swapped_turns_keep_all_but_their_knowledge_which_comes_from_afar() -> None:
    made = turns(100, 0)
    found = swap_knowledge(made, 100, seed=1)
    own = {turn.knowledge: place for place, turn in enumerate(made)}
    for place, (before, after) in enumerate(zip(made, found, strict=True)):
        assert (after.history, after.response) == (before.history, before.response)
        assert abs(own[after.knowledge] - place) > 20
    assert found == swap_knowledge(made, 100, seed=1) != swap_knowledge(made, 100, seed=2)
    half = swap_knowledge(made, 50, seed=1)
    assert len({(*turn.history, turn.response) for turn in half}) <= 50 == len(half)
    with pytest.raises(gm.InputError, match="too much alike"):
        swap_knowledge([made[0]] * 10, 5, seed=0)


def test_the_archive_of_parlai_gives_the_turns_of_the_wizard(tmp_path: Path) -> None:
    said = [
        {"speaker": "0_Apprentice", "text": "Hello"},
        {"speaker": "1_Wizard", "text": "Chess is old.", "checked_sentence": {"chess": "Chess is an old game."}},
        {"speaker": "0_Apprentice", "text": "How old?"},
        {"speaker": "1_Wizard", "text": "Who knows.", "checked_sentence": {}},
    ]
    for name in ("train.json", "valid_random_split.json", "test_random_split.json"):
        (tmp_path / name).write_text(json.dumps([{"dialog": said}] * 2))
    found = read_turns(tmp_path, train=None, validation=3, test=1)
    first = Turn("Chess is an old game.", ("Hello",), "Chess is old.")
    second = Turn("", ("Hello", "Chess is old.", "How old?"), "Who knows.")
    assert found.train == [first, second, first, second]
    assert found.validation == [first, second, first] and found.test == [first]


def test_without_a_split_for_it_validation_is_the_end_of_the_training_turns(tmp_path: Path) -> None:
    made = turns(50, 0)
    write_lines(tmp_path / "train.jsonl.gz", made)
    write_lines(tmp_path / "test.jsonl.gz", made[:3])
    found = read_turns(tmp_path, train=None, validation=400, test=None)
    assert (found.train, found.validation) == (made[:45], made[45:])
    (tmp_path / "valid.jsonl").write_text('{"knowledge": "k", "history": [], "response": "r"}\n')
    assert read_turns(tmp_path, train=20, validation=5, test=2).train == made[:20]
    (tmp_path / "valid.jsonl").write_text('{"knowledge": "k", "response": "r"}\n')
    with pytest.raises(gm.InputError, match="row 1 has no 'history'"):
        read_turns(tmp_path, train=None, validation=5, test=None)


def test_a_turn_becomes_knowledge_then_tagged_utterances_and_the_oldest_are_left_out() -> None:
    words = make_tokenizer(["one two three four five six seven"] * 5, Shape(1, 16, 16, 2, 400), TAGS)
    turn = Turn("one two three", ("four five", "six", "seven"), "two three")
    (row,) = encode([turn], words, Lengths(knowledge=2, history=5, response=2))
    assert words.convert_ids_to_tokens(row["input_ids"]) == [
        "<knowledge>",
        "Ġone",
        "Ġtwo",
        "<system>",
        "Ġsix",
        "<user>",
        "Ġseven",
        "</s>",
    ]
    assert words.convert_ids_to_tokens(row["labels"]) == ["Ġtwo", "</s>"]
    (whole,) = encode([turn], words, Lengths(knowledge=9, history=99, response=9))
    assert words.decode(whole["input_ids"]).replace(" ", "") == (
        "<knowledge>onetwothree<user>fourfive<system>six<user>seven</s>"
    )


def test_infilling_leaves_one_mask_for_every_span_and_all_else_in_order() -> None:
    chance = Random(0)
    masks = []
    for length in (1, 2, 10, 40):
        for _ in range(50):
            left = infill(range(1, length + 1), 0, 0.3, 3.0, chance)
            kept = [token for token in left if token]
            assert kept == sorted(kept) and len(kept) == length - round(0.3 * length)
            assert (left.count(0) > 0) == (round(0.3 * length) > 0)
            masks.append(left.count(0))
    assert max(masks) > 2
    assert plain(" It was ( then ) in 1 @,@ 900 a <unk> town , well @-@ known . \n") == (
        "It was (then) in 1,900 a town, well-known."
    )


def slow_bleu(said: list[str], wanted: list[str]) -> float:
    found, total = [0] * 4, [0] * 4
    for a, b in zip(said, wanted, strict=True):
        for n in range(1, 5):
            ours, theirs = (Counter(zip(*(t.split()[i:] for i in range(n)), strict=False)) for t in (a, b))
            found[n - 1] += sum((ours & theirs).values())
            total[n - 1] += sum(ours.values())
    ours_length, theirs_length = (sum(len(t.split()) for t in texts) for texts in (said, wanted))
    short = min(0.0, 1 - theirs_length / ours_length)
    return 100 * math.exp(short + sum(math.log(f / t) for f, t in zip(found, total, strict=True)) / 4)


def test_text_metrics_are_those_of_a_count_by_hand() -> None:
    made = [
        Turn("the green whales sing early", (), "the green whales sing early in old rivers"),
        Turn("bread and castles", (), "modern chess needs quiet northern castles here"),
    ]
    said = ["the green whales sing in rivers", "modern chess needs quiet bread bread"]
    assert content_words("The whale, and I don't sing!") == ["whale", "sing"]
    found = text_metrics(made, said)
    assert found["bleu"] == pytest.approx(slow_bleu(said, [turn.response for turn in made]))
    # green whales sing | rivers; bread bread | modern chess needs quiet
    assert found["hallucination"] == pytest.approx(100 * 5 / 10)
    assert found["knowledge_f1"] == pytest.approx(100 * (2 * 3 / (4 + 4) + 2 * 1 / (6 + 2)) / 2)
    assert found["words"] == 6
    assert text_metrics(made, ["", ""])["hallucination"] == 100


def test_likelihoods_are_those_of_single_turns_without_padding() -> None:
    words = make_tokenizer([turn.knowledge for turn in turns(30, 0)], Shape(1, 16, 32, 2, 300), TAGS)
    model, target = (seeded_model(words, seed) for seed in (0, 1))
    made = turns(7, 5)
    made[2] = Turn(made[2].knowledge, (), "ok")
    lengths = Lengths(30, 30, 30)
    own, swapped = (encode(rows, words, lengths) for rows in (made, swap_knowledge(made, 7, 0)))
    found = Likelihood(own, swapped, Collate(words.pad_token_id), 3, target)(model)
    sums: dict[str, list[float]] = {"own": [], "swapped": [], "divergence": []}
    tokens = 0
    for row, other in zip(own, swapped, strict=True):
        labels = torch.tensor([row["labels"]])
        scores = {
            name: of(input_ids=torch.tensor([source["input_ids"]]), labels=labels)
            .logits[0]
            .detach()
            .double()
            .log_softmax(-1)
            for name, of, source in (("own", model, row), ("swapped", model, other), ("target", target, row))
        }
        for name in ("own", "swapped"):
            sums[name].append(-sum(float(scores[name][i, label]) for i, label in enumerate(row["labels"])))
        theirs = scores["target"]
        sums["divergence"].append(float((theirs.exp() * (theirs - scores["own"])).sum()))
        tokens += len(row["labels"])
    assert found["nll"] == pytest.approx(sum(sums["own"]) / tokens, rel=1e-5)
    assert found["grounding"] == pytest.approx((sum(sums["swapped"]) - sum(sums["own"])) / tokens, rel=1e-3)
    assert found["divergence"] == pytest.approx(sum(sums["divergence"]) / tokens, rel=1e-4)
    assert abs(found["grounding"]) > 1e-4
    torch.nn.init.constant_(model.shared.weight, float("inf"))
    assert Likelihood(own, swapped, Collate(words.pad_token_id), 3, None)(model) == {"nll": None, "grounding": None}


def seeded_model(words: Any, seed: int) -> Any:
    torch.manual_seed(seed)
    model = make_model(Shape(1, 16, 32, 2, 300), words).eval()
    model.shared.weight.data.mul_(3)
    return model


def test_responses_come_in_the_order_of_the_turns() -> None:
    words = make_tokenizer([turn.knowledge for turn in turns(30, 0)], Shape(1, 16, 32, 2, 300), TAGS)
    model = seeded_model(words, 3)
    for layer in model.decoder.block:
        layer.layer[1].EncDecAttention.o.weight.data.mul_(30)
    plain_words = {"suppress_tokens": words.all_special_ids, "max_new_tokens": 5}
    rows_ = encode(turns(6, 5), words, Lengths(30, 30, 30))
    rows_[1]["input_ids"] = rows_[1]["input_ids"][:3]
    found = respond(model, rows_, words, Collate(words.pad_token_id), batch=4, **plain_words)
    alone = [
        words.decode(
            model.generate(torch.tensor([row["input_ids"]]), do_sample=False, **plain_words)[0],
            skip_special_tokens=True,
        ).strip()
        for row in rows_
    ]
    assert found == alone and len(set(found)) > 1


def entry(
    method: str, strength: float, nll: float | None, grounding: float | None, damping: float = 0.1
) -> dict[str, Any]:
    return {
        "method": method,
        "strength": strength,
        "damping": damping,
        "validation": {"nll": nll, "grounding": grounding},
    }


def test_chosen_is_the_most_grounded_of_the_fluent_settings() -> None:
    base = {"nll": math.log(100), "grounding": 0.1}
    entries = [
        entry("task-arithmetic", 0.5, math.log(102), 0.2),
        entry("task-arithmetic", 1.0, math.log(104), 0.3),
        entry("task-arithmetic", 1.5, math.log(106), 0.9),
        entry("removal", 1.0, None, None, 1e-10),
        entry("removal", 1.0, math.log(99), 0.15),
        entry("removal", 0.5, math.log(90), 0.14),
        entry("fa1", 1.0, 900.0, 0.5),
        entry("fa1", 0.5, 800.0, 0.1),
    ]
    found = rows(entries, base, 1e-10, 1.05)
    assert found["strength 1"]["removal"] is entries[3]
    assert found["strength 1"]["removal, δ chosen"] is entries[4]
    assert found["chosen"]["task-arithmetic"] is entries[1]
    assert found["chosen"]["removal"] is entries[4]
    assert found["chosen"]["fa1"] in entries[6:]
    assert choose(entries[:3], base, 1.01)["strength"] == 0.5
    assert choose(entries[3:6], base, None) is entries[5]
    assert perplexity(None) == perplexity(900.0) == math.inf
