"""Mutated inputs of every kind. `make fuzz` runs many cases, `FUZZ_INPUTS=5000 pytest tests/fuzz` fewer."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings

from . import curvature, data, models, trial
from .trial import WORKED, Broken, Kind, run_case

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
