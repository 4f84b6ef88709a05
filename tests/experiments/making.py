"""Runs an experiment at its tiny scale, and checks what holds for all of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from experiments.common import driver


def smoke_run(experiment: driver.Experiment, options: Sequence[str], out: Path) -> dict[str, Any]:
    """Return the results of a tiny run; a second run skips all stages, and --render-only makes the same files."""
    command = ["--scale", "tiny", "--seeds", "0", "--device", "cpu", *options, "-o", str(out)]
    assert driver.run_program(experiment, command) == 0
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.common.driver.shutil.rmtree", fail)
        assert driver.run_program(experiment, command) == 0
        assert driver.run_program(experiment, ["--render-only", "-o", str(out)]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    text = (out / "results.json").read_text("utf-8")
    assert str(out) not in text and "nan" not in (out / "results.md").read_text("utf-8").lower().split()
    assert {path.stem for path in (out / "figures").iterdir()} == set(experiment.report.figures)
    results: dict[str, Any] = json.loads(text)
    return results


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("a stage is repeated")
