"""What the experiments share: stages, plans and the command line."""

from __future__ import annotations

import importlib
import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.common import hub
from experiments.common.plan import Step
from experiments.common.stages import run_stage, settings_hash, stage_seconds
from experiments.common.tables import shown
from experiments.common.training import Training, fine_tune
from experiments.sentiment.plan import plan as sentiment_plan
from experiments.sentiment.settings import settings_for
from experiments.toxicity.plan import plan as toxicity_plan
from experiments.toxicity.scorer import DETOXIFY
from experiments.toxicity.settings import FULL
from experiments.vision.plan import plan as vision_plan
from experiments.vision.settings import CLIP, SCALES

RESULTS = Path(__file__).parents[2] / "experiments" / "results"
EXPERIMENTS = ["sentiment", "vision", "toxicity", "hallucination"]


def main_of(name: str) -> Any:
    return importlib.import_module(f"experiments.{name}.__main__").main


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


def test_a_mean_has_its_deviation_over_seeds() -> None:
    assert shown([86.0, 87.0]) == "86.5 ± 0.7" and shown([86.04]) == "86.0"


@pytest.mark.parametrize("training", [Training(1e-3, 2, 4), Training(1e-3, 3, 2, accumulate=4)])
def test_a_plan_has_the_steps_of_the_trainer(tmp_path: Path, training: Training) -> None:
    class Square(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": (self.weight * x).square().mean()}

    def collate(rows: list[Any]) -> dict[str, torch.Tensor]:
        return {"x": torch.ones(len(rows))}

    found = fine_tune(Square(1, 1), [{"x": 1.0}] * 11, collate, tmp_path, training, seed=0, device="cpu")
    assert Step("one", "base", 11, training).steps == found["steps"] and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_dry_run_of_the_full_scale_fetches_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("a dry run asked the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.chdir(tmp_path)
    more = ["--data-dir", str(tmp_path)] if name == "hallucination" else []
    assert main_of(name)(["--scale", "full", "--dry-run", "--seeds", "0,1", *more]) == 0
    assert "2 seeds (0, 1)" in capsys.readouterr().out and not any(tmp_path.iterdir())


def test_the_full_scale_asks_for_columns_and_splits_that_the_hub_has() -> None:
    plans = [
        sentiment_plan(settings_for("full", seq2seq=False, pretrained=True), "FacebookAI/roberta-base", "hub"),
        vision_plan(SCALES["full"], CLIP, None),
        toxicity_plan(FULL, "gpt2", None, DETOXIFY),
    ]
    asked = [one for plan in plans for one in plan.data]
    assert len(asked) == len(hub.DATA)
    for one in asked:
        known = hub.data_set(one.place)
        assert known is not None and known.source, one.place
        assert not known.columns or set(one.columns) <= set(known.columns)
        assert not known.rows or set(one.splits) <= set(known.rows)
    assert {model.place for plan in plans for model in plan.models} <= set(hub.MODELS)


@pytest.mark.parametrize("name", [*EXPERIMENTS, "studies"])
@pytest.mark.parametrize(
    "options",
    [["--scale", "huge"], ["--render-only"], ["--scale", "tiny", "--data-dir", "nowhere"], ["--jobs", "0"]],
)
def test_wrong_options_end_with_status_2(
    name: str, options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main_of(name)([*options, "-o", "out"])
    assert stopped.value.code == 2 and not any(tmp_path.iterdir())


@pytest.mark.parametrize("results", sorted(RESULTS.rglob("results.json")), ids=lambda path: path.parent.name)
def test_stored_results_still_make_their_page(results: Path) -> None:
    found = json.loads(results.read_text("utf-8"))
    report = importlib.import_module(f"experiments.{results.relative_to(RESULTS).parts[0]}.report")
    assert report.tables(found) == results.with_name("results.md").read_text("utf-8")
