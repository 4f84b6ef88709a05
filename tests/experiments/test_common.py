"""What the experiments share: stages, the command line and stored results."""

from __future__ import annotations

import importlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
from experiments.common.driver import Experiment, run_program, run_stage, settings_hash, stage_seconds
from experiments.common.report import page

RESULTS = Path(__file__).parents[2] / "experiments" / "results"


def experiment(name: str) -> Experiment:
    found: Experiment = importlib.import_module(f"experiments.{name}.run").EXPERIMENT
    return found


def test_a_stage_is_skipped_until_its_settings_or_those_of_its_inputs_change(tmp_path: Path) -> None:
    calls: list[str] = []

    def make(folder: Path) -> dict[str, Any]:
        calls.append(folder.name)
        assert not list(folder.iterdir())
        (folder / "file").write_text("text")
        return {"calls": len(calls)}

    for seed in (1, 1, 2, 2):
        run_stage(tmp_path / "a", make, {"seed": seed})
        run_stage(tmp_path / "b", make, after=["a"])
        run_stage(tmp_path / "c", make)
    assert calls == ["a", "b", "c", "a", "b"]
    assert run_stage(tmp_path / "b", make, after=["a"]) == {"calls": 5}
    assert stage_seconds(tmp_path).keys() == {"a", "b", "c"}
    assert settings_hash(tmp_path / "a") != settings_hash(tmp_path / "c")


def test_an_interrupted_stage_is_repeated(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_stage(tmp_path / "a", stop)
    assert run_stage(tmp_path / "a", lambda folder: [path.name for path in folder.iterdir()]) == []


@pytest.mark.parametrize("name", ["sentiment", "vision", "removal"])
def test_the_full_scale_is_a_dry_run_that_fetches_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("a dry run asked the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.chdir(tmp_path)
    assert run_program(experiment(name), ["--scale", "full", "--dry-run"]) == 0
    assert "warmup_steps" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        run_program(experiment(name), ["--scale", "full"])
    assert stopped.value.code == 2 and not any(tmp_path.iterdir())


#: The results of the small T5 are those of an earlier version of the experiment.
STORED = sorted(path for path in RESULTS.rglob("results.json") if path.parent.name != "t5")


@pytest.mark.parametrize("results", STORED, ids=lambda path: path.parent.name)
def test_stored_results_still_make_their_page(results: Path) -> None:
    report = importlib.import_module(f"experiments.{results.relative_to(RESULTS).parts[0]}.report").REPORT
    assert page(report, json.loads(results.read_text("utf-8"))) == results.with_name("results.md").read_text("utf-8")
