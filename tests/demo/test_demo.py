"""The whole demonstration at a tiny size: its files, its numbers, and the commands that repeat it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from scipy import stats
from transformers import ViTForImageClassification
from typer.testing import CliRunner

from gradmerge.cli.app import app
from gradmerge.demo import run_demo
from gradmerge.demo.run import EVERY
from gradmerge.engine.executor import one_thread_each
from gradmerge.errors import InputError

from .making import tiny

Demo = tuple[Path, dict[str, Any]]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """The folder and results of a demonstration, which replaces an earlier one."""
    folder = tmp_path_factory.mktemp("demo") / "my demo"
    folder.mkdir()
    for name in ("commands.sh", "results.json", "old"):
        (folder / name).write_text("old")
    with pytest.raises(InputError):
        run_demo(folder, settings=tiny())
    results = run_demo(folder, settings=tiny(), force=True)
    assert not (folder / "old").exists() and [path.name for path in folder.parent.iterdir()] == ["my demo"]
    return folder, results


def test_the_command_prints_tables(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    _, results = demo
    monkeypatch.setattr("gradmerge.demo.run_demo", lambda *_, **__: results)
    full, quiet, facts = (CliRunner().invoke(app, ["demo", *words]) for words in ([], ["--quiet"], ["--json"]))
    for row in (*results["merging"], *results["removal"]):
        assert row["name"] in full.stdout and row["name"] in quiet.stdout
    assert "commands.sh" in full.stdout and "commands.sh" not in quiet.stdout
    assert json.loads(facts.stdout)["merging"] == results["merging"]


def test_an_interrupted_run_leaves_nothing(tmp_path: Path) -> None:
    def stop(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo", settings=tiny(), say=stop)
    assert list(tmp_path.iterdir()) == []


def test_all_recipes_and_reports_are_in_the_folder(demo: Demo) -> None:
    folder, results = demo
    names = {path.stem for path in (folder / "recipes").iterdir()}
    merged = {row["folder"] for row in results["merging"] if row["folder"].startswith("merged/")}
    assert merged == {f"merged/{name}" for name in names if name not in ("removal", "negation")}
    assert json.loads((folder / "results.json").read_text()) == results
    for report in ("preview", "diagnose", "improved/calibrated", "improved/distilled"):
        assert (folder / report / "report.html").stat().st_size > 10_000


def predictions(folder: Path, task: str) -> tuple[torch.Tensor, np.ndarray]:
    """Return ln p of every class, and the labels, of a task's test images."""
    model = ViTForImageClassification.from_pretrained(folder).double().eval()
    data_folder = next(path for path in folder.parents if (path / "data").is_dir()) / "data"
    with np.load(data_folder / f"{task}.npz") as data, torch.no_grad():
        pixels = torch.from_numpy(data["x_test"].astype(np.float64))[:, None] / 127.5 - 1
        return model(pixel_values=pixels).logits.log_softmax(-1), data["y_test"]


def test_scores_are_those_of_the_models_on_test_images(demo: Demo) -> None:
    folder, results = demo
    for row in results["merging"]:
        right = {}
        for task in EVERY:
            predicted, labels = predictions(folder / row["folder"], task)
            right[task] = predicted.argmax(1).numpy() == labels
            loss = -float(predicted[range(len(labels)), labels].mean())
            assert row["scores"][task] == pytest.approx(right[task].mean(), abs=1.5 / len(labels)), row["folder"]
            assert row["losses"][task] == pytest.approx(loss, rel=1e-4)
        assert row["mean_error"] == pytest.approx(stats.sem(np.mean(list(right.values()), 0)), rel=0.05)
    target = predictions(folder / results["removal"][-1]["folder"], "tilted")[0]
    for row in results["removal"]:
        kl = (target.exp() * (target - predictions(folder / row["folder"], "tilted")[0])).sum(1).mean()
        assert row["kl"] == pytest.approx(float(kl), rel=1e-3, abs=1e-6)


def test_the_tuned_weight_is_the_best_on_validation_images(demo: Demo) -> None:
    folder, results = demo
    rows = json.loads((folder / "preview" / "preview.json").read_text())["settings"]
    scores = {
        row["weights"]["tilted"]: np.mean([numbers["accuracy"] for numbers in row["metrics"].values()])
        for row in rows
        if row["method"] == "task-arithmetic"
    }
    assert len(scores) == 3 and scores[results["tuned_weight"]] == max(scores.values())
    recipe = yaml.safe_load((folder / "recipes/task-arithmetic-tuned.yml").read_text())
    assert all(model["weight"] == results["tuned_weight"] for model in recipe["models"])


def test_commands_give_the_same_results(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, results = demo
    monkeypatch.chdir(folder)
    script = Path("commands.sh").read_text()
    commands = results["commands"]
    assert script.splitlines()[-len(commands) :] == commands
    last = {words[1]: words for words in map(shlex.split, reversed(commands))}  # one of each kind
    assert last.keys() == {"curvature", "merge", "preview", "calibrate", "distill", "diagnose", "remove"}
    for words in last.values():
        out = Path(words[words.index("-o") + 1])
        before = {path: load_file(path) for path in out.glob("*.safetensors")}
        with one_thread_each():
            invoked = CliRunner().invoke(app, words[1:])
        assert invoked.exit_code == 0, invoked.output
        for path, want in before.items():
            for name, got in load_file(path).items():
                torch.testing.assert_close(got, want[name], rtol=1e-3, atol=1e-5)


def test_the_script_finds_gradmerge(demo: Demo) -> None:
    folder, _ = demo
    lines = (folder / "commands.sh").read_text().splitlines()
    script = [line for line in lines if line.startswith(("set", "cd", "export", "gradmerge merge recipes/ties.yml"))]
    assert len(script) == 4
    (folder / "some.sh").write_text("\n".join(script) + "\n")
    environment = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sh", folder / "some.sh"], env=environment, capture_output=True, text=True, check=False, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_without_scikit_learn_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    result = CliRunner().invoke(app, ["demo", "-o", str(tmp_path / "demo")])
    assert result.exit_code == 2 and "gradmerge[demo]" in result.stderr and not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    result = CliRunner().invoke(app, ["demo", "-o", str(tmp_path), "--force"])
    assert result.exit_code == 2 and [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
