"""Measuring on several processes: what one process finds, and how all of them end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import gradmerge as gm
from gradmerge.api import saved_sums
from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.tasks import load_task

from .groups import Ended, launch
from .tasks.making import labelled, sentences, tiny_bert_checkpoint, tiny_gpt2_checkpoint, write_jsonl

ROWS = 11
ON_CPU: dict[str, Any] = {"device": "cpu", "progress": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    tiny_bert_checkpoint(folder / "bert", labels=3)
    tiny_gpt2_checkpoint(folder / "gpt2")
    write_jsonl(folder / "rows.jsonl", labelled(ROWS, 3))
    texts = sentences(2 * ROWS)
    pairs = zip(texts[:ROWS], texts[ROWS:], strict=True)
    write_jsonl(folder / "texts.jsonl", [{"prompt": a, "completion": " " + b} for a, b in pairs])
    # Empty lines are left out before rows are shared out.
    (folder / "texts.txt").write_text("\n\n\n".join(texts[:ROWS]))
    write_jsonl(folder / "bad.jsonl", [*labelled(ROWS, 3), {"text": 5, "label": 1}])
    return folder


def measured(place: Path, out: Path, several: bool) -> dict[str, Any]:
    """Everything that can be measured, into ``out``; and the numbers."""
    more: dict[str, Any] = {**ON_CPU, "batch_size": 2, "processes": several}
    bert, rows = place / "bert", place / "rows.jsonl"
    kinds: dict[str, Any] = {
        "diagonal": {},
        "few": {"limit": 1},
        "sampled": {"likelihood": "sampled", "seed": 3},
        "kronecker": {"kind": "kronecker", "likelihood": "sampled"},
        "gram": {"kind": "gram"},
    }
    for name, options in kinds.items():
        done = gm.estimate_curvature(bert, rows, out=out / name, **options, **more)
        assert done.examples == (1 if name == "few" else ROWS)
    gm.estimate_curvature(place / "gpt2", place / "texts.txt", out=out / "gpt2", **more)
    numbers = gm.evaluate(bert, rows, **more)
    written = gm.evaluate(place / "gpt2", place / "texts.jsonl", metrics="exact-match", max_new_tokens=4, **more)
    return {"bert": numbers, "gpt2": written}


@pytest.fixture(scope="module")
def one(place: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("one")
    return out, measured(place, out, several=False)


@pytest.fixture(scope="module")
def several(place: Path, one: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Ended]]:
    """Three processes, whose shares are uneven; where there is one row, two of them have none."""
    out = tmp_path_factory.mktemp("several")  # after `one`, so that what it imports is there

    def run(rank: int) -> Any:
        model = load_task(place / "bert", place / "rows.jsonl", device="cpu").model
        batch = {"input_ids": torch.tensor([[1, 2 + rank]]), "labels": torch.tensor([1])}
        own = gm.estimate_curvature(model, [batch], progress=False)
        assert own.examples == 1  # the batches of a module are not shared
        return measured(place, out, several=True)

    return out, launch(3, run, out / "said")


def near(got: Path, want: Path, tolerance: float = 1e-5) -> None:
    files = sorted(path.name for path in want.glob("*.safetensors"))
    assert files == sorted(path.name for path in got.glob("*.safetensors")) and files
    for name in files:
        mine, theirs = load_file(got / name), load_file(want / name)
        assert mine.keys() == theirs.keys()
        largest = max(float(value.abs().max()) for value in theirs.values())  # some are 0 but for rounding
        for key, value in theirs.items():
            apart = float((mine[key] - value).abs().max())
            assert apart <= tolerance * float(value.abs().max()) + 1e-9 * largest, (name, key)


def test_all_kinds_of_sums_are_those_of_one_process(several: tuple[Path, list[Ended]], one: tuple[Path, Any]) -> None:
    out, ended = several
    assert [end.status for end in ended] == [0] * len(ended), ended
    assert all(end.gave == ended[0].gave for end in ended)  # every process gets the same numbers
    for name in ("diagonal", "few", "sampled", "kronecker", "gram", "gpt2"):
        near(out / name, one[0] / name)
    mine, theirs = (gm.Curvature.load(where / "kronecker") for where in (out, one[0]))
    assert all(mine.layers[name].tokens == layer.tokens for name, layer in theirs.layers.items())
    assert not list(out.glob("*.gradmerge-partial"))


def test_metrics_with_their_errors_are_those_of_all_rows(
    several: tuple[Path, list[Ended]], one: tuple[Path, Any]
) -> None:
    got, want = several[1][0].gave, one[1]
    for name in ("bert", "gpt2"):
        numbers, errors = got[name], got[name].pop("standard_errors")
        assert errors == pytest.approx(want[name]["standard_errors"], rel=1e-4)
        for key, value in numbers.items():
            assert value == (pytest.approx(want[name][key], rel=1e-5) if isinstance(value, float) else want[name][key])
        numbers["standard_errors"] = errors
    assert got["gpt2"]["examples"] == ROWS and "exact_match" in got["gpt2"]


def command(*words: str | Path) -> Callable[[int], Any]:
    def run(rank: int) -> None:
        from gradmerge.cli.app import main

        sys.argv = ["gradmerge", *map(str, words)]
        main()

    return run


def test_a_bad_row_of_one_process_is_reported_and_nothing_is_left(place: Path, tmp_path: Path) -> None:
    words = ("curvature", "estimate", place / "bert", "--data", place / "bad.jsonl", "-o", tmp_path / "out")
    ended = launch(3, command(*words, "--device", "cpu"), tmp_path / "said")
    assert ended[2].status == 2 and "row 12" in ended[2].said and "Traceback" not in ended[2].said
    assert all(end.status != 0 for end in ended)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said"]


def test_a_killed_process_ends_the_others(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return estimate_curvature(*arguments, **options)

    monkeypatch.setattr(saved_sums, "estimate_curvature", killed)
    words = ("curvature", "estimate", place / "bert", "--data", place / "rows.jsonl", "-o", tmp_path / "out")
    ended = launch(3, command(*words, "--device", "cpu"), tmp_path / "said", timeout=60, end_others=False)
    assert ended[1].status == -signal.SIGKILL
    assert ended[0].status == 1 and "error: " in ended[0].said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said"]


def test_a_run_that_was_stopped_goes_on_with_another_number_of_processes(
    place: Path, one: tuple[Path, Any], tmp_path: Path
) -> None:
    class Interrupted(gm.Progress):
        done = 0

        def advance(self, amount: int) -> None:
            Interrupted.done += amount
            if Interrupted.done > 2:
                raise KeyboardInterrupt

    more: dict[str, Any] = {"device": "cpu", "batch_size": 2, "likelihood": "sampled", "seed": 3, "save_every": 0.0}

    def estimate(count: int, kind: str, **options: Any) -> list[Ended]:
        def run(rank: int) -> Any:
            done = gm.estimate_curvature(
                place / "bert", place / "rows.jsonl", out=tmp_path / kind, processes=True, kind=kind, **more, **options
            )
            return [done.resumed_from, done.examples, done.processes]

        return launch(count, run, tmp_path / "said")

    for kind, count in (("diagonal", 3), ("kronecker", 1)):
        ended = estimate(2, kind, progress=Interrupted())
        assert all(end.status != 0 for end in ended)
        rows = []
        for path in (tmp_path / f"{kind}.gradmerge-partial").glob("saved-sums-*.safetensors"):
            with safe_open(path, "pt") as file:
                rows += json.loads(file.metadata()["rows"])
        assert 0 < sum(end - first for first, end in rows) < ROWS
        (end, *_) = estimate(count, kind, progress=False, resume=True)
        assert end.gave[0] > 0 and end.gave[1:] == [ROWS, count], end
    near(tmp_path / "diagonal", one[0] / "sampled")
    alone = gm.estimate_curvature(
        place / "bert", place / "rows.jsonl", out=tmp_path / "alone", kind="kronecker", progress=False, **more
    )
    assert alone.examples == ROWS
    near(tmp_path / "kronecker", tmp_path / "alone")


def test_torchrun_starts_what_goes_on_several_processes(place: Path, one: tuple[Path, Any], tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", "127.0.0.1:0", "-m", "gradmerge"]
    words = ("curvature", "estimate", place / "bert", "-d", place / "rows.jsonl", "-o", tmp_path / "out")
    asked = [*launcher, *map(str, words), "--batch-size", "2", "--device", "cpu", "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(asked, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["examples"], facts["processes"]) == (ROWS, 2)
    near(tmp_path / "out", one[0] / "diagonal")
