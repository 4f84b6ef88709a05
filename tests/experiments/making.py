"""Runs an experiment from its command line, and checks what holds for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest


def smoke_run(main: Callable[[Sequence[str]], int], options: Sequence[str], out: Path) -> dict[str, Any]:
    """The results of a tiny run. A second run skips all stages; --render-only makes the same page and figures."""
    command = ["--scale", "tiny", "--seeds", "0", "--device", "cpu", *options, "-o", str(out)]
    assert main(command) == 0
    files = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.common.stages.shutil.rmtree", fail)
        assert main(command) == 0
        assert main(["--render-only", "-o", str(out)]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == files
    text = (out / "results.json").read_text()
    assert str(out) not in text and "nan" not in (out / "results.md").read_text().lower().split()
    assert all("<text" in figure.read_text() for figure in (out / "figures").iterdir())
    results: dict[str, Any] = json.loads(text)
    return results


def fail(*_: Any, **__: Any) -> None:
    raise AssertionError("a stage is repeated")


def figures(out: Path) -> set[str]:
    return {path.stem for path in (out / "figures").iterdir()}
