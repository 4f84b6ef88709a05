"""An estimate that is killed at any moment and resumed has the result of an uninterrupted one."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.api.saved_sums import SavedSums, estimate_with_saves
from gradmerge.distributed import SINGLE
from gradmerge.tasks import load_task

from ..curvature import slow
from ..curvature.test_kronecker import assert_factors, loop
from ..fuzz.killing import kill_before_change
from ..groups import Ended, launch
from ..making import Stop
from ..tasks.making import labelled, tiny_bert_checkpoint, write_jsonl

ROWS, BATCH = 4, 2
SAVED = "saved-sums-0.safetensors"


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
        assert_factors(gm.KroneckerCurvature.load(out), wanted[kind], 1e-5)


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


def test_a_kill_of_the_process_that_saves_for_several_counts_no_row_twice(
    inputs: Path, wanted: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"batch_size": 1, "processes": True}

    def run(number: int, at: int | None) -> list[Ended]:
        out = tmp_path / str(number) / "out"
        out.parent.mkdir(exist_ok=True)
        action = lambda: estimate(inputs, out, **options)  # noqa: E731
        return launch(2, lambda rank: killed_at(at if rank == 0 else None, out, action), tmp_path / "said")

    changes = run(0, None)[0].gave
    saved = set()
    for at in range(2, changes, 3):
        killed, _ = run(at, at)
        assert killed.status in (-signal.SIGKILL, 0)  # there may be fewer changes: processes may meet less often
        out = tmp_path / str(at) / "out"
        saved.add(resumed(inputs, out))
        assert_right(wanted, out)
    assert 0 in saved and len(saved) > 2


class Wandering(nn.Module):
    """A linear layer whose weight is also used outside it, for marked examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        marked = x[:, :1] > 5
        if bool(marked.any()):
            y = y + marked * F.linear(x, self.inner.weight)
        result: Tensor = self.outer(y.tanh())
        return result


def test_saved_sums_are_removed_once_a_formula_turns_out_wrong(tmp_path: Path) -> None:
    """A resumed estimate must not use sums that the interrupted one has dropped."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    x[7, 0] = 9.0
    batches = [(x[i : i + 3], torch.arange(i, i + 3) % 2) for i in range(0, 12, 3)]

    def run(batches_done: int, resume: bool) -> Any:
        loaded: Any = SimpleNamespace(model=Wandering(), examples=12, batch_size=3, output=None, device="cpu")

        def batches_of(size: int | None = None, start: int = 0, end: int = 12) -> list[Any]:
            return [(x[:2], torch.tensor([0, 1]))] if size == 2 else batches[start // 3 : -(-end // 3)]

        loaded.batches = batches_of
        saved = SavedSums(tmp_path, {"request": 1})
        done = saved.join(12) if resume else []
        assert done in ([], [[0, 3]])
        options: Any = {"structure": "kronecker"}
        stop = Stop(after=batches_done)
        return estimate_with_saves(loaded, "empirical", done, saved, 0.0, stop, SINGLE, **options), saved

    with pytest.raises(KeyboardInterrupt):
        run(4, resume=False)  # two batches before the formula fails, and two after the restart
    with pytest.raises(gm.InputError, match="resume"):
        run(99, resume=True)  # the restarted run saved one batch, whose layer has a diagonal
    (tmp_path / "saved-sums-joined.safetensors").unlink()
    (found, saved) = run(99, resume=True)
    saved.add_joined(found)
    wanted = gm.estimate_curvature(Wandering(), batches, structure="kronecker")
    assert (found.examples, found.keys()) == (12, wanted.keys())
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)


FEWER, MORE, TWICE = "[[0, 1]]", "[[0, 3]]", "[[0, 1], [0, 1]]"
OUTSIDE, BACKWARDS, NO_ROWS = "[[3, 5]]", "[[2, 0], [0, 4]]", "rows"


@pytest.mark.parametrize("rows", [FEWER, MORE, TWICE, OUTSIDE, BACKWARDS, NO_ROWS])
def test_saved_sums_over_other_rows_than_they_list_are_refused(inputs: Path, tmp_path: Path, rows: str) -> None:
    out, saved = tmp_path / "out", tmp_path / "out.gradmerge-partial" / SAVED
    with pytest.raises(KeyboardInterrupt):
        estimate(inputs, out, progress=Stop(after=2))
    with safe_open(saved, "pt") as file:
        header = dict(file.metadata())
    assert (header["examples"], header["rows"]) == ("2", "[[0, 2]]")
    save_file(load_file(saved), saved, header | {"rows": rows})
    before = saved.read_bytes()
    with pytest.raises(gm.InputError):
        estimate(inputs, out, resume=True)
    assert saved.read_bytes() == before and not out.exists()
    assert estimate(inputs, out).resumed_from == 0
