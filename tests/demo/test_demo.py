"""The whole demonstration at a tiny size: its files, its numbers, and the commands that repeat it."""

from __future__ import annotations

import json
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy import stats
from transformers import ViTForImageClassification
from typer.testing import CliRunner

from gradmerge.cli.app import app
from gradmerge.demo import DemoResult, run_demo
from gradmerge.demo.tables import EVERY
from gradmerge.engine.executor import one_thread_each
from gradmerge.errors import InputError

from .making import tiny


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> DemoResult:
    """Replace the folder of an earlier run."""
    folder = tmp_path_factory.mktemp("demo") / "my demo"
    folder.mkdir()
    for name in ("commands.sh", "results.json", "results.md", "old"):
        (folder / name).write_text("old")
    with pytest.raises(InputError):
        run_demo(folder, settings=tiny())
    result = run_demo(folder, settings=tiny(), force=True)
    assert not (folder / "old").exists() and [path.name for path in folder.parent.iterdir()] == ["my demo"]
    return result


def test_the_command_prints_tables(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradmerge.demo.run_demo", lambda *_, **__: result)
    full, quiet, facts = (CliRunner().invoke(app, ["demo", *words]) for words in ([], ["--quiet"], ["--json"]))
    for row in (*result.merging, *result.removal):
        assert row.name in full.stdout and row.name in quiet.stdout
    assert "commands.sh" in full.stdout and "commands.sh" not in quiet.stdout
    assert {row["folder"] for row in json.loads(facts.stdout)["merging"]} == {row.folder for row in result.merging}


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo", settings=tiny(), say=stop)
    assert list(tmp_path.iterdir()) == []


def test_all_recipes_and_reports_are_in_the_folder(result: DemoResult) -> None:
    names = {path.stem for path in (result.folder / "recipes").iterdir()}
    merged = {row.folder for row in result.merging if row.folder.startswith("merged/")}
    assert merged == {f"merged/{name}" for name in names if name not in ("removal", "negation")}
    text = (result.folder / "results.md").read_text()
    assert all(f"| {row.name} |" in text for row in result.merging + result.removal)
    for report in ("preview", "diagnose", "improved/calibrated", "improved/distilled"):
        assert (result.folder / report / "report.html").stat().st_size > 10_000


def predictions(result: DemoResult, folder: str, task: str) -> tuple[torch.Tensor, np.ndarray]:
    """Return ln p of every class, and the labels, of a task's test images."""
    model = ViTForImageClassification.from_pretrained(result.folder / folder).double().eval()
    with np.load(result.folder / "data" / f"{task}.npz") as data, torch.no_grad():
        pixels = torch.from_numpy(data["x_test"].astype(np.float64))[:, None] / 127.5 - 1
        return model(pixel_values=pixels).logits.log_softmax(-1), data["y_test"]


def test_scores_are_those_of_the_models_on_test_images(result: DemoResult) -> None:
    means = {}
    for row in result.merging:
        right = {}
        for task in EVERY:
            predicted, labels = predictions(result, row.folder, task)
            right[task] = predicted.argmax(1).numpy() == labels
            share = row.scores[task]
            assert share == pytest.approx(right[task].mean(), abs=1.5 / len(labels)), (row.folder, task)
            assert row.losses[task] == pytest.approx(-float(predicted[range(len(labels)), labels].mean()), rel=1e-4)
        means[row.folder] = np.mean(list(right.values()), 0)
        assert row.mean_error == pytest.approx(stats.sem(means[row.folder]), rel=0.05)
    best = next(row.folder for row in result.merging if row.tied == "best")
    for row in result.merging:
        apart = means[best] - means[row.folder]
        clearly = apart.mean() / (2 * max(stats.sem(apart), 1e-9))
        if row.folder.startswith("merged/") and row.folder != best and abs(clearly - 1) > 0.1:
            assert (row.tied == "tied") == (clearly < 1), row.folder
    target = predictions(result, result.removal[-1].folder, "tilted")[0]
    for row in result.removal:
        kl = (target.exp() * (target - predictions(result, row.folder, "tilted")[0])).sum(1).mean()
        assert row.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)


def test_the_tuned_weight_is_the_best_on_validation_images(result: DemoResult) -> None:
    rows = json.loads((result.folder / "preview" / "preview.json").read_text())["settings"]
    scores = {
        row["weights"]["tilted"]: np.mean([numbers["accuracy"] for numbers in row["metrics"].values()])
        for row in rows
        if row["method"] == "task-arithmetic"
    }
    weight = result.results["tuned_weight"]
    assert len(scores) == 3 and scores[weight] == max(scores.values())
    recipe = yaml.safe_load((result.folder / "recipes/task-arithmetic-tuned.yml").read_text())
    assert all(model["weight"] == weight for model in recipe["models"])


def test_commands_give_the_same_results(result: DemoResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(result.folder)
    script = Path("commands.sh").read_text()
    commands = [words for several in result.commands.values() for words in several]
    assert all(f"\n{shlex.join(words)}\n" in script for words in commands)
    last = {words[1]: words for words in reversed(commands)}  # one of each kind
    assert last.keys() == {"curvature", "merge", "preview", "calibrate", "distill", "diagnose", "remove", "evaluate"}
    for words in last.values():
        out = Path(words[words.index("-o") + 1]) if "-o" in words else Path()
        before = {path: load_file(path) for path in out.glob("*.safetensors")}
        with one_thread_each():
            invoked = CliRunner().invoke(app, words[1:])
        assert invoked.exit_code == 0, invoked.output
        for path, want in before.items():
            for name, got in load_file(path).items():
                torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)


def test_the_script_finds_gradmerge(result: DemoResult) -> None:
    lines = (result.folder / "commands.sh").read_text().splitlines()
    script = [line for line in lines if line.startswith(("set", "cd", "export", "gradmerge merge recipes/ties.yml"))]
    assert len(script) == 4
    (result.folder / "some.sh").write_text("\n".join(script) + "\n")
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", result.folder / "some.sh"], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    (result.folder / "some.sh").unlink()
    assert done.returncode == 0, done.stderr
