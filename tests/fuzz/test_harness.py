"""The fuzzer itself: every kind begins with inputs that work, its cases repeat, and what is wrong is noticed."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm

from . import trial
from .inputs import Chunk, cases_of
from .kills import Merge, kill_once
from .kinds import KINDS
from .models import Mappings, Merging, recipe
from .trial import BROKEN, GOOD, HANG, OTHER, REFUSED, WORKED, Kind, run_case


@pytest.mark.parametrize("name", KINDS)
def test_the_valid_inputs_of_every_kind_work_and_its_first_cases_end_well_or_in_a_refusal(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind = KINDS[name](tmp_path / name)
    run_case(kind)  # what comes with the first case of a process, such as files of libraries, is not its doing
    valid = run_case(kind)
    assert valid.outcome == WORKED, valid.trace or valid.message
    for case in cases_of(kind, Chunk(name, 0, 10), 0):
        result = run_case(kind, case)
        assert result.outcome in GOOD, result.trace
    assert run_case(kind).outcome == WORKED, "a case has left something behind"


def test_a_case_is_the_same_every_time_and_wherever_it_runs(tmp_path: Path) -> None:
    one, other = (cases_of(KINDS["recipe"](tmp_path / name), Chunk("recipe", 50, 20), 3) for name in ("here", "there"))
    assert one == other and len(one) > 10


class Wrong(Mappings):
    """A kind whose case does what no case should."""

    stays_inside = True

    def __init__(self, place: Path, does: str) -> None:
        self.does = does
        super().__init__(place)

    def make(self) -> None:
        Path("precious").write_text("mine")

    def read(self, **how: Any) -> None:
        if self.does == "raise":
            raise KeyError("x")
        if self.does == "refuse":
            raise gm.InputError("no")
        if self.does == "change an input":
            Path("precious").write_text("theirs")
        if self.does == "lose an input":
            Path("precious").unlink()
        if self.does == "leave half a model":
            self.place.out.mkdir()
        if self.does == "leave a file open":
            os.open("precious", os.O_RDONLY)
        if self.does == "look elsewhere":
            (self.place.root / "secret.safetensors").read_bytes()
        if self.does == "sleep":
            time.sleep(5)


@pytest.mark.parametrize(
    ("does", "outcome"),
    [
        *[("raise", OTHER), ("refuse", REFUSED), ("sleep", HANG)],
        *[(does, BROKEN) for does in ("change an input", "lose an input", "leave half a model", "leave a file open")],
        ("look elsewhere", BROKEN),
    ],
)
def test_what_no_case_should_do_is_noticed(
    does: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 0.2 if does == "sleep" else 20.0)
    kind: Kind = Wrong(tmp_path / "place", does)
    assert run_case(kind).outcome == outcome
    assert (kind.place.inputs / "precious").read_text() == "mine"
    assert not any(kind.place.out.parent.iterdir())


def test_a_result_with_a_shard_cut_short_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cut(Merging):
        name = "cut"

        def read(self, **how: Any) -> None:
            self.merge(recipe())
            os.truncate(self.place.out / "model.safetensors", 300)

    assert run_case(Cut(tmp_path / "cut")).outcome == BROKEN


def test_a_killed_merge_is_held_to_its_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scenario = Merge(tmp_path / "merge")
    for number in range(3):
        kill_once(scenario, random.Random(number))
        scenario.clear()
