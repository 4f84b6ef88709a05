"""The sentiment experiment: a whole run at the tiny scale, and its numbers against slow, obvious ones."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import experiments.sentiment.__main__ as program
import pytest
import torch
from experiments.common.states import distance, norm
from experiments.common.training import Training, fine_tune
from experiments.sentiment import grid, paper, report
from experiments.sentiment.data import BASE, SETS, TASKS, held_out, write_splits
from experiments.sentiment.made_up import made_up, make_encoder, make_seq2seq
from experiments.sentiment.merging import RULES, SWEPT, Parts
from experiments.sentiment.models import batches, kind_of, mean_gradient, prepared, score
from experiments.sentiment.run import Seed, prepare
from experiments.sentiment.settings import ALL_DATA, JOINT, settings_for

import gradmerge as gm

ROWS = made_up("imdb", train=12, test=8)["train"]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run at the tiny scale."""
    folder = tmp_path_factory.mktemp("runs") / "sentiment"
    assert program.main(["--scale", "tiny", "--device", "cpu", "-o", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module", params=[make_encoder, make_seq2seq], ids=["encoder", "encoder-decoder"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    request.param(folder, [*(row["text"] for row in ROWS), "good great bad poor"])
    return kind_of(folder, 32)


def results_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "results.json").read_text())


def files_of(out: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in [out / "results.json", out / "results.md", *(out / "figures").iterdir()]}


def test_a_run_scores_every_model_and_merge_on_every_set(out: Path) -> None:
    results = results_of(out)
    (seed,) = results["seeds"]
    assert set(seed["scores"]) == {*SETS, ALL_DATA, JOINT, *RULES}
    for score_ in [*seed["scores"].values(), *(s for method in SWEPT for s in seed["sweep"][method])]:
        for name in SETS:
            assert score_[name]["test"]["rows"] == results["rows"][name]["test"]
            assert 0 <= score_[name]["test"]["right"] <= score_[name]["test"]["rows"]
            assert math.isfinite(score_[name]["dev"]["loss"])
    assert report.accuracy(seed["scores"][BASE], BASE) > 80, "the base has learned its task"
    assert report.average(seed["scores"][ALL_DATA]) > 80


def test_a_second_run_makes_nothing_again_and_gives_the_same_files(
    out: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(out)
    program.main(["--scale", "tiny", "--device", "cpu", "-o", str(out)])
    assert "done in" not in capsys.readouterr().out
    assert files_of(out) == before


def test_tables_and_figures_come_from_the_results_alone(out: Path, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_bytes((out / "results.json").read_bytes())
    program.main(["--render-only", "-o", str(tmp_path)])
    assert files_of(tmp_path) == files_of(out)


def test_a_stage_that_is_gone_is_made_again_with_the_same_result(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = results_of(out)["seeds"][0]["scores"]
    lost = out / "seed-0" / "score-regmean"
    lost.rmdir()
    program.main(["--scale", "tiny", "--device", "cpu", "-o", str(out)])
    assert capsys.readouterr().out.count("done in") == 1
    assert results_of(out)["seeds"][0]["scores"] == before


def test_merges_are_what_their_formulas_say(out: Path) -> None:
    stages = out / "seed-0"
    rows = {name: counts["train"] for name, counts in results_of(out)["rows"].items()}
    parts = Parts(
        {n: stages / n for n in SETS},
        {n: stages / f"curvature-{n}" / "curvature" for n in SETS},
        {n: stages / f"gram-{n}" / "gram" for n in SETS},
        rows,
        damping=1e-10,
        density=0.2,
    )
    name = "bert.encoder.layer.1.output.dense.weight"
    theta = {n: s[name].double() for n, s in zip(SETS, [parts.base, *parts.tuned], strict=True)}
    fisher = {n: c[name].double() for n, c in zip(SETS, [parts.prior, *parts.curvature], strict=True)}
    prior, change = fisher[BASE] + 1e-10, {n: theta[n] - theta[BASE] for n in TASKS}
    total = prior + sum(0.6 * fisher[n] for n in TASKS)
    identity = float(sum(rows.values()))
    slow = {
        "average": sum(theta.values()) / 5,
        "average of four": sum(theta[n] for n in TASKS) / 4,
        "fisher-averaging-mean": sum((fisher[n] / rows[n] + 1e-10) * theta[n] for n in SETS)
        / sum(fisher[n] / rows[n] + 1e-10 for n in SETS),
        "gradient-matching-identity": theta[BASE] + sum((rows[BASE] + rows[n]) / identity * change[n] for n in TASKS),
    }
    for rule, expected in slow.items():
        torch.testing.assert_close(parts.merged(rule)[name].double(), expected, rtol=1e-4, atol=1e-6)
    expected = theta[BASE] + sum(0.6 * (prior + fisher[n]) / total * change[n] for n in TASKS)
    torch.testing.assert_close(parts.swept("gradient-matching", 0.6)[name].double(), expected, rtol=1e-4, atol=1e-6)
    expected = theta[BASE] + sum(0.6 * change[n] for n in TASKS)
    torch.testing.assert_close(parts.swept("task-arithmetic", 0.6)[name].double(), expected, rtol=1e-4, atol=1e-6)


def test_the_table_of_hessians_is_what_its_formulas_say(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cells of the grid, on the models and stages of the finished run."""
    chosen = [
        grid.Cell("plain", "diagonal", "sampled", "N · mean", "none"),
        grid.Cell("prior", "diagonal", "exact", "mean", "H_0"),
        grid.Cell("prior", "kronecker", "sampled", "mean", "none"),
        grid.Cell("prior", "task-arithmetic"),
    ]
    assert set(chosen) <= set(grid.cells()) and len(grid.cells()) == 50
    assert len({cell.name for cell in grid.cells()}) == 50
    monkeypatch.setattr(grid, "cells", lambda: chosen)
    settings = replace(settings_for("tiny", seq2seq=False, pretrained=False), grid=True)
    run = prepare(out, settings, "cpu", None, "made up")
    made: list[dict[str, torch.Tensor]] = []
    usual = grid.merged
    monkeypatch.setattr(grid, "merged", lambda *given, **how: made.append(usual(*given, **how)) or made[-1])
    held: list[tuple[Training, dict[str, torch.Tensor]]] = []

    def tuned_under(*given: Any, **how: Any) -> dict[str, Any]:
        held.append((given[4], how["prior"]))
        return fine_tune(*given, **how)

    monkeypatch.setattr("experiments.sentiment.run.fine_tune", tuned_under)
    seed = Seed(0, run)
    found = seed.results()
    name, rows = "bert.encoder.layer.1.output.dense.weight", {n: counts["train"] for n, counts in run.rows.items()}
    weights = {n: seed._state(n)[name].double() for n in (*SETS, *(f"{task}-under-prior" for task in TASKS))}
    base = weights[BASE]
    few = {n: seed.estimated(n, labels="sampled", sample=True) for n in SETS}
    assert {one.examples for one in few.values()} == {settings.sample_rows}
    fisher = {n: one[name].double() / one.examples * rows[n] for n, one in few.items()}
    total = fisher[BASE] + 1e-10 + sum(fisher[n] for n in TASKS)
    expected = base + sum(fisher[n] / total * (weights[n] - base) for n in TASKS)
    torch.testing.assert_close(made[0][name].double(), expected, rtol=1e-4, atol=1e-6)
    tuned = {n: f"{n}-under-prior" for n in TASKS}
    fisher = {n: seed.estimated(tuned.get(n, n), labels="exact")[name].double() / rows[n] for n in SETS}
    total = fisher[BASE] + 1e-10 + sum(fisher[n] for n in TASKS)
    expected = base + sum((fisher[BASE] + 1e-10 + fisher[n]) / total * (weights[tuned[n]] - base) for n in TASKS)
    torch.testing.assert_close(made[1][name].double(), expected, rtol=1e-4, atol=1e-6)
    # The loss of a batch is a mean, and the penalty that of the sum over all rows.
    assert [one.strength for one, _ in held] == [1 / rows[task] for task in TASKS]
    assert all(one.coupling == "adam" and torch.equal(prior[name], seed.estimated(BASE)[name]) for one, prior in held)
    # Only the grid is in a page that has one; --render-only sees what a run sees.
    results = json.loads(json.dumps({**results_of(out), "seeds": [found]}))
    page = report.tables(results)
    assert "Models tuned under the penalty" in page and "Models tuned under" not in (out / "results.md").read_text()
    assert "| diagonal | drawn from the model | N · mean | none | " in page and "| Kronecker | drawn" in page
    score = results["seeds"][0]["grid"]["cells"][0]["score"]
    assert (
        f"| {report.average(score):.1f} | {report.true_average(score):.1f} | {report.average_loss(score):.3f} |" in page
    )


def alone(kind: Any, model: Any, row: dict[str, Any], label: int) -> torch.Tensor:
    """−ln p of a label for one text without padding; of an answer, the sum over the tokens of its word."""
    ids = torch.tensor([kind.tokenizer(row["text"])["input_ids"]])
    if not model.config.is_encoder_decoder:
        return -model(input_ids=ids).logits[0].log_softmax(-1)[label]
    word = kind.tokenizer(("negative", "positive")[label])["input_ids"]
    logits = model(input_ids=ids, decoder_input_ids=torch.tensor([[0, *word[:-1]]])).logits[0]
    return -sum(logits[place].log_softmax(-1)[token] for place, token in enumerate(word))


def test_scores_are_those_of_one_text_at_a_time(kind: Any) -> None:
    model = kind.start(kind.path).double().eval()
    found = score(kind, model, prepared(kind, kind.examples(ROWS), 40, "cpu"))
    right, loss = 0, 0.0
    for row in ROWS:
        with torch.no_grad():
            negative, positive = (float(alone(kind, model, row, label)) for label in (0, 1))
        right += (positive < negative) == bool(row["label"])
        own = positive if row["label"] else negative
        loss += own + math.log(math.exp(-negative) + math.exp(-positive))
    assert (found["right"], found["rows"]) == (right, len(ROWS))
    assert found["loss"] == pytest.approx(loss / len(ROWS), rel=1e-5)


def test_a_model_trained_on_the_batches_answers_right(kind: Any, tmp_path: Path) -> None:
    clear = [{"text": "good great" if n % 2 else "bad poor", "label": n % 2} for n in range(16)]
    model = kind.start(kind.path)
    training = Training(learning_rate=1e-2, epochs=15, batch_size=8)
    fine_tune(model, kind.examples(clear), kind.collate, tmp_path, training, seed=0, device="cpu")
    assert score(kind, model.eval(), prepared(kind, kind.examples(clear), 40, "cpu"))["right"] == 16


def test_gradients_are_the_mean_of_those_of_single_texts(kind: Any) -> None:
    model = kind.start(kind.path).double().eval()
    found = mean_gradient(kind, model, kind.examples(ROWS), tokens=40)
    sum(alone(kind, model, row, row["label"]) for row in ROWS).div(len(ROWS)).backward()
    slow = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == slow.keys() and norm(found) > 0
    for name, value in slow.items():
        torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-12)


def test_every_text_is_in_one_batch_of_bounded_size(kind: Any) -> None:
    examples = kind.examples(ROWS)
    made = list(batches(kind, examples, 40))
    assert sum(len(batch["input_ids"]) for batch in made) == len(examples) and len(made) > 1
    assert all(batch["input_ids"].numel() <= 40 for batch in made)


def test_curvature_can_be_measured_on_the_batches(kind: Any) -> None:
    model = kind.start(kind.path).double().eval()
    found = gm.estimate_curvature(model, batches(kind, kind.examples(ROWS), 40))
    slow = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for row in ROWS:
        model.zero_grad()
        alone(kind, model, row, row["label"]).backward()
        for name, p in model.named_parameters():
            slow[name] += 0 if p.grad is None else p.grad.square()
    assert found.examples == len(ROWS)
    for name, value in slow.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-12)


def test_the_distance_of_gradients_is_over_all_parameters() -> None:
    one, other = {"a": torch.tensor([3.0]), "b": torch.tensor([1.0, 1.0])}, {"a": torch.zeros(1), "b": torch.ones(2)}
    other["b"][1] = 5.0
    assert distance(one, other) == 5.0


def test_held_out_rows_share_no_text_with_the_rest() -> None:
    rows = [{"text": f"text {n % 15}", "label": n % 2} for n in range(30)]
    train, dev = held_out(rows, 6)
    assert len(dev) == 6 and not {r["text"] for r in train} & {r["text"] for r in dev}
    assert held_out(rows, 6) == (train, dev)


def test_development_rows_that_another_set_trains_on_are_dropped_and_shared_rows_counted(tmp_path: Path) -> None:
    def rows(*texts: str) -> list[dict[str, Any]]:
        return [{"text": text, "label": 1} for text in texts]

    sets = {
        "one": {"train": rows("a", "b"), "dev": rows("c", "d"), "test": rows("e", "f")},
        "two": {"train": rows("C .", "e", "b"), "dev": rows("h"), "test": rows("i")},
    }
    counts = write_splits(tmp_path, sets, dev_rows=1)
    with gzip.open(tmp_path / "one" / "dev.jsonl.gz", "rt") as file:
        assert [json.loads(line)["text"] for line in file] == ["d"]
    shared, leaked = "train rows in another's train", "test rows in some train"
    assert counts["one"] == {"train": 2, "dev": 1, "test": 2, shared: 1, leaked: 1}
    assert counts["two"] == {"train": 3, "dev": 1, "test": 1, shared: 1, leaked: 0}


def scored(*right: int, rows: tuple[int, ...] = (10, 20, 10, 10, 50)) -> dict[str, Any]:
    return {
        name: {split: {"right": r, "rows": n, "loss": 0.5} for split in ("dev", "test")}
        for name, r, n in zip(SETS, right, rows, strict=True)
    }


def test_the_average_is_over_sets_and_the_true_average_over_predictions() -> None:
    found = scored(9, 10, 8, 7, 50)
    assert report.average(found) == pytest.approx((90 + 50 + 80 + 70 + 100) / 5)
    assert report.true_average(found) == pytest.approx(100 * 84 / 100)
    error = math.sqrt(0.09 / 10 + 0.25 / 20 + 0.16 / 10 + 0.21 / 10) / 5
    assert report.standard_error(found) == pytest.approx(100 * error)


def test_the_tuned_weight_is_the_smallest_of_the_best_up_to_one() -> None:
    sweep = [scored(5, 5, 5, 5, 5), scored(9, 9, 9, 9, 9), scored(9, 9, 9, 9, 9), scored(9, 9, 9, 9, 10)]
    seed = {"sweep": {"task-arithmetic": sweep}}
    assert report.best_weight(seed, (0.0, 0.4, 1.0, 1.5), "task-arithmetic", "dev") == 0.4


def test_the_papers_averages_are_those_of_its_columns() -> None:
    for table in (paper.ROBERTA, paper.T5):
        for row in table.values():
            assert row[5] == pytest.approx(sum(row[:5]) / 5, abs=0.11)
    # The figure's tasks are matched to data sets by these differences.
    for method, key in (("task-arithmetic", "task-arithmetic"), ("gradient-matching", "gradient-matching-sum")):
        for place, name in enumerate(SETS):
            difference = paper.ROBERTA["all-data"][place] - paper.ROBERTA[key][place]
            assert paper.MISMATCH[method][name][1] == pytest.approx(difference, abs=0.45)


def test_the_full_scale_is_the_papers() -> None:
    full = settings_for("full", seq2seq=False, pretrained=True)
    assert [full.training(n).epochs for n in SETS] == [2, 2, 5, 5, 1]
    assert (full.training(BASE).learning_rate, full.training("yelp").learning_rate) == (1e-5, 5e-6)
    assert (full.tokens, full.batch_size, full.warmup_steps, full.damping) == (384, 16, 100, 1e-10)
    assert settings_for("full", seq2seq=True, pretrained=True) == replace(full, base_rate=1e-4, task_rate=5e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--scale", "small"], "needs --model"),
        (["--render-only"], "there is no"),
        (["--scale", "tiny", "--model", "./nothing"], "--model ./nothing: "),
        (["--scale", "tiny", "--data-dir", "."], "there is no file train.jsonl.gz"),
        (["--curvature-rows", "none"], "neither a number"),
    ],
)
def test_wrong_options_are_refused_with_status_2(
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        program.main([*options, "-o", str(tmp_path / "out")])
    assert stopped.value.code == 2 and message in capsys.readouterr().err
