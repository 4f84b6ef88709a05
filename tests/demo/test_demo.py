"""The whole demonstration at a tiny size: what it leaves, what it says, and that it can be repeated."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
import yaml
from click.testing import Result
from safetensors.torch import load_file
from scipy import stats
from transformers import ViTForImageClassification
from typer.testing import CliRunner

from gradmerge.cli.app import app
from gradmerge.demo import DemoResult, run_demo
from gradmerge.demo.commands import highlights
from gradmerge.demo.tables import EVERY
from gradmerge.demo.training import train
from gradmerge.engine.thread_pool import one_thread_each
from gradmerge.errors import InputError
from gradmerge.rules import METHODS

from .making import tiny


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """A run that replaced the folder of an earlier one."""
    folder = tmp_path_factory.mktemp("demo") / "my demo"
    folder.mkdir()
    for name in ("commands.sh", "results.json", "results.md", "old"):
        (folder / name).write_text("old")
    with pytest.raises(InputError):
        run_demo(folder, settings=tiny())
    outcome = run_demo(folder, settings=tiny(), force=True)
    assert not (folder / "old").exists() and [path.name for path in folder.parent.iterdir()] == ["my demo"]
    return outcome


def printed(outcome: DemoResult, *arguments: str) -> Result:
    """What the command prints for an outcome."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradmerge.demo.run_demo", lambda *_, **__: outcome)
        result = CliRunner().invoke(app, ["demo", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_the_command_prints_tables_reports_and_commands(outcome: DemoResult) -> None:
    full, quiet = printed(outcome).stdout, printed(outcome, "--quiet").stdout
    for row in (*outcome.merging, *outcome.removal):
        assert row.name in full and row.name in quiet
    commands = [shlex.join(command) for command in highlights(outcome.commands)]
    assert all(command in full and command not in quiet for command in commands)
    facts = json.loads(printed(outcome, "--json").stdout)
    assert {row["folder"] for row in facts["merging"]} >= {"models/base", "models/joint", "merged/gradient-matching"}
    assert all(line.startswith("gradmerge ") for several in facts["commands"].values() for line in several)


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo", settings=tiny(), say=stop)
    assert list(tmp_path.iterdir()) == []


def test_every_kind_of_rule_is_in_the_table(outcome: DemoResult) -> None:
    recipes = {path.stem: yaml.safe_load(path.read_text()) for path in (outcome.folder / "recipes").iterdir()}
    methods = {recipe["method"] for recipe in recipes.values()}
    assert methods <= set(METHODS)
    with_curvature = {name for name, rule in METHODS.items() if {"curvature", "grams"} & set(rule.inputs)}
    without = {"average", "task-arithmetic", "sparse-finetuning", "ties", "dare"}
    assert methods == (with_curvature - {"posterior-sample"}) | without
    merged = {row.folder for row in outcome.merging if row.folder.startswith("merged/")}
    assert merged == {f"merged/{name}" for name in recipes if name not in ("removal", "negation")}
    assert {row.folder for row in outcome.removal} == {
        "models/joint",
        "removed/negation",
        "removed/removal",
        "removed/influence",
        "models/without-tilted",
    }
    assert all(model["weight"] == 1 for model in recipes["task-arithmetic"]["models"])


def test_accuracies_are_those_of_the_models_on_test_images(outcome: DemoResult) -> None:
    for row in (outcome.merging[0], outcome.merging[-2], outcome.removal[2]):
        model = ViTForImageClassification.from_pretrained(outcome.folder / row.folder).double().eval()
        for task in EVERY:
            predicted, labels = predictions(outcome, model, task)
            right = predicted.argmax(1).numpy() == labels
            assert row.scores[task] == pytest.approx(right.mean(), abs=1.5 / len(right)), (row.folder, task)
            loss = -np.mean([float(one[label]) for one, label in zip(predicted, labels, strict=True)])
            assert row.losses[task] == pytest.approx(loss, rel=1e-4)
            share = row.scores[task]
            assert 0 < share < 1 and row.errors[task] == pytest.approx(np.sqrt(share * (1 - share) / len(right)))


def test_merges_are_compared_on_the_same_digits(outcome: DemoResult) -> None:
    """By hand: the mean over tasks of every digit, and the differences of these."""
    merges = {row.folder: row for row in outcome.merging if row.folder.startswith("merged/")}
    means = {}
    for folder, row in merges.items():
        model = ViTForImageClassification.from_pretrained(outcome.folder / folder).double().eval()
        right = [predicted.argmax(1).numpy() == labels for predicted, labels in each_task(outcome, model)]
        means[folder] = np.mean(right, 0)
        assert row.mean == pytest.approx(means[folder].mean(), abs=0.01)
        assert row.mean_error == pytest.approx(stats.sem(means[folder]), rel=0.05)
    best = max(means, key=lambda folder: merges[folder].mean)
    assert merges[best].tied == "best" and not any(row.tied for row in outcome.merging if row.folder not in merges)
    for folder, mean in means.items():
        apart = means[best] - mean
        clearly = apart.mean() / (2 * max(stats.sem(apart), 1e-9))
        if folder != best and abs(clearly - 1) > 0.1:
            assert (merges[folder].tied == "tied") == (clearly < 1), folder


def each_task(outcome: DemoResult, model: ViTForImageClassification) -> list[tuple[torch.Tensor, np.ndarray]]:
    return [predictions(outcome, model, task) for task in EVERY]


def predictions(outcome: DemoResult, model: ViTForImageClassification, task: str) -> tuple[torch.Tensor, np.ndarray]:
    """ln p of every class, and the right ones, of a task's test images."""
    with np.load(outcome.folder / "data" / f"{task}.npz") as data, torch.no_grad():
        pixels = torch.from_numpy(data["x_test"].astype(np.float64))[:, None] / 127.5 - 1
        return model(pixel_values=pixels).logits.log_softmax(-1), data["y_test"]


def test_the_distance_of_removals_is_that_of_their_predictions_from_the_target_s(outcome: DemoResult) -> None:
    models = [ViTForImageClassification.from_pretrained(outcome.folder / row.folder) for row in outcome.removal]
    *others, wanted = [predictions(outcome, model.double().eval(), "tilted")[0] for model in models]
    for row, ours in zip(outcome.removal, others, strict=False):
        assert row.kl == pytest.approx(float((wanted.exp() * (wanted - ours)).sum(1).mean()), rel=1e-3, abs=1e-6)
    assert outcome.removal[-1].kl == pytest.approx(0, abs=1e-9)


def test_the_tuned_weight_is_the_best_of_the_preview_on_validation_images(outcome: DemoResult) -> None:
    found = json.loads((outcome.folder / "preview" / "preview.json").read_text())
    rows = [row for row in found["settings"] if row["method"] == "task-arithmetic"]
    assert len(rows) == 3 and all(row["metrics"][task]["examples"] == 40 for row in rows for task in row["metrics"])

    def mean(row: dict[str, dict[str, dict[str, float]]]) -> float:
        return float(np.mean([numbers["accuracy"] for numbers in row["metrics"].values()]))

    chosen = [row for row in rows if row["weights"]["tilted"] == outcome.results["tuned_weight"]]
    assert mean(chosen[0]) == max(map(mean, rows))
    shown = outcome.results["preview"]["task-arithmetic"]
    assert shown["mean_accuracy"] == pytest.approx(mean(chosen[0]))
    errors = [one["metrics"][task]["standard_errors"]["accuracy"] for one in chosen for task in one["metrics"]]
    assert shown["standard_error"] == pytest.approx(np.sqrt(np.sum(np.square(errors))) / len(errors))
    assert shown["tied"][0] <= shown["weight"] <= shown["tied"][1]


def test_results_and_reports_are_written(outcome: DemoResult) -> None:
    text = (outcome.folder / "results.md").read_text()
    for row in outcome.merging + outcome.removal:
        assert f"| {row.name} |" in text
    for report in ("preview", "diagnose"):
        assert (outcome.folder / report / "report.html").stat().st_size > 10_000


def test_training_with_the_same_seed_gives_the_same_weights(outcome: DemoResult, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        data = outcome.folder / "data" / "upright.npz"
        with one_thread_each():
            train(None, data, tmp_path / name, tiny(seed), stream=0)
    want = (outcome.folder / "models/base/model.safetensors").read_bytes()
    assert (tmp_path / "same/model.safetensors").read_bytes() == want
    assert (tmp_path / "other/model.safetensors").read_bytes() != want


def test_every_command_is_one_that_the_command_line_understands(outcome: DemoResult) -> None:
    group = typer.main.get_command(app)
    script = (outcome.folder / "commands.sh").read_text()
    for command in (c for several in outcome.commands.values() for c in several):
        assert f"\n{shlex.join(command)}\n" in script
        words, found = list(command[1:]), group
        while hasattr(found, "commands"):
            found = found.commands[words.pop(0)]
        found.make_context(shlex.join(command), words)


def test_commands_of_every_kind_succeed_as_printed_and_give_the_same_models(
    outcome: DemoResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(outcome.folder)
    paths = ["curvature/base/curvature.safetensors", "merged/gradient-matching/model.safetensors"]
    before = [load_file(path) for path in paths]
    removed = Path("removed/removal/model.safetensors").read_bytes()
    shown = highlights(outcome.commands)
    kinds = {"curvature", "preview", "merge", "calibrate", "distill", "evaluate", "diagnose", "remove"}
    assert {command[1] for command in shown} == kinds
    for command in shown:
        with one_thread_each():  # for the time it takes
            result = CliRunner().invoke(app, command[1:])
        assert result.exit_code == 0, result.output
    for path, want in zip(paths, before, strict=True):
        for name, got in load_file(path).items():
            torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)
    assert Path("removed/removal/model.safetensors").read_bytes() == removed


def test_a_shell_that_does_not_know_gradmerge_runs_them(outcome: DemoResult) -> None:
    lines = (outcome.folder / "commands.sh").read_text().splitlines()
    wanted = [line for line in lines if line.startswith("gradmerge merge recipes/ties.yml")]
    assert len(wanted) == 1
    head = [line for line in lines if line.startswith(("set", "cd", "export"))]
    (outcome.folder / "some.sh").write_text("\n".join([*head, *wanted]) + "\n")
    bare = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", outcome.folder / "some.sh"], env=bare, capture_output=True, text=True, check=False, timeout=240
    )
    (outcome.folder / "some.sh").unlink()
    assert done.returncode == 0, done.stderr
    assert "tensors merged" in done.stdout
