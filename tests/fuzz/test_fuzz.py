"""Mutated inputs of every kind. `make fuzz` runs many cases, `FUZZ_INPUTS=5000 pytest tests/fuzz` fewer."""

from __future__ import annotations

import contextlib
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, given, settings

import gradmerge as gm

from . import curvature, data, models, trial
from .models import Merging, recipe
from .trial import REFUSED, WORKED, Broken, Kind, run_case

KINDS = [*models.KINDS, *curvature.KINDS, *data.KINDS]
#: Mutated inputs in all; 0: the same ten of every kind.
INPUTS = int(os.environ.get("FUZZ_INPUTS", "0"))
#: Bytes of address space beyond those in use. An input that asks for more ends the case and not the machine.
ROOM = 8 << 30


@pytest.fixture(scope="module", autouse=True)
def bounded_memory() -> Iterator[None]:
    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, old[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, old)


@pytest.mark.parametrize("chosen", KINDS, ids=lambda kind: kind.name)
def test_mutated_inputs_work_or_are_refused(
    chosen: type[Kind], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    kind = chosen(tmp_path / "place")
    monkeypatch.chdir(kind.place.inputs)
    with contextlib.suppress(Broken):
        run_case(kind)  # the first case of a process also opens files of libraries
    assert run_case(kind).outcome == WORKED
    number = max(10, round(INPUTS * kind.share / sum(one.share for one in KINDS)))

    @settings(max_examples=number, deadline=None, derandomize=not INPUTS, suppress_health_check=[*HealthCheck])
    @given(kind.cases())
    def check(case: trial.Case) -> None:
        event(run_case(kind, case).outcome)

    check()
    assert run_case(kind).outcome == WORKED


class Wrong(Kind):
    """A kind whose case does what no case should."""

    name, stays_inside = "wrong", True

    def __init__(self, place: Path, does: str) -> None:
        self.does = does
        super().__init__(place)

    def make(self) -> None:
        Path("precious").write_text("mine")

    def read(self, **how: Any) -> None:
        if self.does == "refuse":
            raise gm.InputError("no")
        if self.does == "change an input":
            Path("precious").write_text("theirs")
        if self.does == "leave half a model":
            self.place.out.mkdir()
        if self.does == "look elsewhere":
            (self.place.root / "secret.safetensors").read_bytes()
        if self.does == "sleep":
            time.sleep(5)


@pytest.mark.parametrize("does", ["change an input", "leave half a model", "look elsewhere", "sleep"])
def test_the_fuzzer_notices_what_no_case_should_do(does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MOST_SECONDS", 0.2 if does == "sleep" else 20.0)
    assert run_case(Wrong(tmp_path / "refusal", "refuse")).outcome == REFUSED
    kind = Wrong(tmp_path / "place", does)
    with pytest.raises(Broken):
        run_case(kind)
    assert (kind.place.inputs / "precious").read_text() == "mine"
    assert not any(kind.place.out.parent.iterdir())


def test_the_fuzzer_notices_a_truncated_shard(tmp_path: Path) -> None:
    class Cut(Merging):
        name = "cut"

        def read(self, **how: Any) -> None:
            self.merge(recipe())
            os.truncate(self.place.out / "model.safetensors", 300)

    with pytest.raises(Broken):
        run_case(Cut(tmp_path / "cut"))
