"""Stages are made once, and anew when what they depend on has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from experiments.common.seeds import over_seeds
from experiments.common.tables import markdown, shown

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
