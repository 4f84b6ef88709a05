"""An estimate that is killed at any moment and resumed has the result of an uninterrupted one."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from gradmerge.tasks import load_task

from ..curvature import slow
from ..curvature.test_kronecker import assert_factors, loop
from ..fuzz.killing import kill_before_change
from ..groups import Ended, launch
from ..tasks.making import labelled, tiny_bert_checkpoint, write_jsonl

ROWS, BATCH = 4, 2


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_bert_checkpoint(folder / "bert", num_hidden_layers=1)
    write_jsonl(folder / "rows.jsonl", labelled(ROWS))
    return folder


@pytest.fixture(scope="module")
def wanted(inputs: Path) -> dict[str, Any]:
    """The result of each kind by the slow loop in float64, over rows without padding."""
    loaded = load_task(inputs / "bert", inputs / "rows.jsonl", device="cpu", dtype="float64")
    rows = [{k: v[0] for k, v in batch.items() if k != "attention_mask"} for batch in loaded.batches(1)]
    factors = loop(loaded.model, rows, "classes")
    return {"diagonal": slow.empirical(loaded.model, rows, "classes"), "kronecker": factors}


def estimate(inputs: Path, out: Path, **options: Any) -> gm.Estimate:
    return gm.estimate_curvature(
        inputs / "bert",
        inputs / "rows.jsonl",
        out=out,
        **{"device": "cpu", "batch_size": BATCH, "save_every": 0.0, "progress": False, **options},
    )


def killed_at(at: int | None, out: Path, action: Callable[[], Any]) -> int:
    """Run something that is killed before its ``at``-th change on disk; return how many changes it has made."""
    changes = kill_before_change(str(out), at)

    def announced(run: Callable[..., Any], every: int) -> Callable[..., Any]:
        """Announce every so many calls, as Python itself does with all other changes."""
        calls = itertools.count()

        def announce(*arguments: Any) -> Any:
            if next(calls) % every == 0:
                sys.audit("os.truncate", str(out))
            return run(*arguments)

        return announce

    os.pwrite, os.fsync = announced(os.pwrite, every=5), announced(os.fsync, every=1)  # 25 tensors are written alike
    action()
    return changes()


def resumed(inputs: Path, out: Path, **options: Any) -> int:
    """Resume; return the number of examples that were saved."""
    done = estimate(inputs, out, resume=True, force=True, **options)
    assert done.examples == ROWS
    assert [path.name for path in out.parent.iterdir() if path.name != "said"] == [out.name]
    return done.resumed_from


def assert_right(wanted: dict[str, Any], out: Path, kind: str = "diagonal") -> None:
    if kind == "diagonal":
        slow.assert_same(gm.Curvature.load(out), wanted[kind], 1e-5)
    else:
        assert_factors(gm.Curvature.load(out), wanted[kind], 1e-5)


@pytest.mark.parametrize(("kind", "step"), [("diagonal", 1), ("kronecker", 3)])
def test_a_kill_between_two_file_operations_counts_no_row_twice(
    inputs: Path, wanted: dict[str, Any], tmp_path: Path, kind: str, step: int
) -> None:
    def run(number: int, at: int | None) -> Ended:
        out = tmp_path / str(number) / "out"
        out.parent.mkdir(exist_ok=True)
        action = lambda: estimate(inputs, out, kind=kind)  # noqa: E731
        (ended,) = launch(1, lambda _: killed_at(at, out, action), tmp_path / "said")
        return ended

    changes = run(0, None).gave
    assert changes > 20
    saved = set()
    for at in range(1, changes + 1, step):
        assert run(at, at).status == -signal.SIGKILL
        out = tmp_path / str(at) / "out"
        saved.add(resumed(inputs, out, kind=kind))
        assert_right(wanted, out, kind)
    assert saved == {0, 2, 4}
