"""Stages are made once, and anew when what they depend on has changed; plans say what a run would do."""

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
from experiments.common.seeds import over_seeds
from experiments.common.tables import markdown, shown
from experiments.common.training import Training, fine_tune
from experiments.sentiment.plan import plan as sentiment_plan
from experiments.sentiment.settings import settings_for
from experiments.toxicity.plan import plan as toxicity_plan
from experiments.toxicity.scorer import DETOXIFY
from experiments.toxicity.settings import FULL
from experiments.vision.plan import plan as vision_plan
from experiments.vision.settings import CLIP, SCALES

from gradmerge.demo.stages import Stages

from .tenfold import tenfold


def counted(calls: list[str], name: str):
    def make(folder: Path) -> dict[str, int]:
        calls.append(name)
        (folder / "file").write_text(name)
        return {"calls": len(calls)}

    return make


def test_a_finished_stage_is_not_made_again(tmp_path: Path) -> None:
    calls: list[str] = []
    first = Stages(tmp_path).run("a", counted(calls, "a"), given={"x": 1})
    again = Stages(tmp_path).run("a", counted(calls, "a"), given={"x": 1})
    assert calls == ["a"] and first == again == {"calls": 1}
    assert (tmp_path / "a" / "file").read_text() == "a"


def test_a_change_reaches_every_stage_that_comes_after(tmp_path: Path) -> None:
    calls: list[str] = []
    for x in (1, 2, 2):
        stages = Stages(tmp_path)
        stages.run("a", counted(calls, "a"), given={"x": x})
        stages.run("b", counted(calls, "b"), after=["a"])
        stages.run("c", counted(calls, "c"))
    assert calls == ["a", "b", "c", "a", "b"]


def test_an_interrupted_stage_finds_its_files_again_and_is_not_there_under_its_name(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        (folder / "begun").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stages(tmp_path).run("a", stop)
    assert not (tmp_path / "a").exists()
    found = Stages(tmp_path).run("a", lambda folder: (folder / "begun").read_text())
    assert found == "half" and not (tmp_path / "a.partial").exists()
    assert json.loads((tmp_path / ".stages" / "a.json").read_text())["result"] == "half"


def test_what_an_interrupted_stage_left_is_thrown_away_when_its_settings_changed(tmp_path: Path) -> None:
    def stop(folder: Path) -> None:
        (folder / "begun").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stages(tmp_path).run("a", stop, given={"x": 1})
    assert Stages(tmp_path).run("a", lambda folder: [p.name for p in folder.glob("begun")], given={"x": 2}) == []


def test_seeds_in_processes_of_their_own_give_the_same_in_the_same_order() -> None:
    assert over_seeds(tenfold, [3, 1, 2], 2, 5) == over_seeds(tenfold, [3, 1, 2], 1, 5) == [35, 15, 25]


def test_numbers_are_shown_with_their_spread_over_seeds() -> None:
    assert shown([86.0, 87.0]) == "86.5 ± 0.7"
    assert shown([86.04]) == "86.0"
    assert markdown(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |\n"


def test_steps_are_those_that_a_trainer_counts(tmp_path: Path) -> None:
    class Square(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return {"loss": (self.weight * x).square().mean()}

    model = Square(1, 1)
    for rows, training in ((11, Training(1e-3, 2, 4)), (11, Training(1e-3, 3, 2, accumulate=4))):
        found = fine_tune(
            model, [{"x": 1.0}] * rows, lambda batch: {"x": torch.ones(len(batch))}, tmp_path, training, seed=0,
            device="cpu",
        )  # fmt: skip
        assert Step("one", "base", rows, training).steps == found["steps"]


@pytest.mark.parametrize("name", ["sentiment", "vision", "toxicity", "hallucination"])
def test_a_dry_run_of_the_full_scale_fetches_and_writes_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(*given: Any) -> None:
        raise AssertionError("a dry run asked the network")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.chdir(tmp_path)
    program = importlib.import_module(f"experiments.{name}.__main__")
    more = ["--data-dir", str(tmp_path)] if name == "hallucination" else []
    assert program.main(["--scale", "full", "--dry-run", "--seeds", "0,1", *more]) == 0
    said = capsys.readouterr().out
    assert "2 seeds (0, 1)" in said and "Nothing was fetched" in said and not any(tmp_path.iterdir())
    # Every model and data set that is asked for was looked up.
    assert "not looked up" not in said
    if name == "sentiment":
        assert "stanfordnlp/sst2, configuration default; columns sentence, label; splits train (67,349 rows)" in said
        assert "yelp, from imdb: 112,000 rows, batches of 16, 2 epochs, 14,000 steps, learning rate 5e-06" in said


def test_what_is_asked_of_a_data_set_is_what_its_page_has() -> None:
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
        assert one.place.count("/") == 1 or one.place.endswith(f"/{known.configuration}")
    assert {model.place for plan in plans for model in plan.models} <= set(hub.MODELS)
