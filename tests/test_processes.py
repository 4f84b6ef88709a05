"""Measuring on several processes: what one process finds, and how all of them end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import gradmerge as gm
from gradmerge import process_group, processes
from gradmerge.api import saved_sums
from gradmerge.curvature.batches import Placed
from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.together import Together, parts, without
from gradmerge.progress import Progress
from gradmerge.tasks import load_task

from .curvature import slow
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
    written = gm.evaluate(place / "gpt2", place / "texts.jsonl", generation=gm.Generation(max_new_tokens=4), **more)
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
        assert own.examples == 1 and processes.joined() is None  # a module's batches are nobody else's
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
    mine, theirs = (gm.KroneckerCurvature.load(where / "kronecker") for where in (out, one[0]))
    assert all(mine.layers[name].tokens == layer.tokens for name, layer in theirs.layers.items())
    assert not list(out.glob("*.gradmerge-partial"))


def test_sums_of_several_processes_are_those_of_the_slow_loop(place: Path, several: tuple[Path, list[Ended]]) -> None:
    loaded = load_task(place / "bert", place / "rows.jsonl", device="cpu", dtype="float64")
    rows = [{k: v[0] for k, v in b.items() if k != "attention_mask"} for b in loaded.batches(1)]
    slow.assert_same(gm.Curvature.load(several[0] / "diagonal"), slow.empirical(loaded.model, rows, "classes"), 1e-4)
    slow.assert_same(gm.Curvature.load(several[0] / "few"), slow.empirical(loaded.model, rows[:1], "classes"), 1e-4)


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


class Wandering(nn.Module):
    """A linear layer whose weight is also used outside it, where an example says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2 and os.environ.get("RANK") == "1" and os.environ.get("SMALL"):
            raise RuntimeError("out of memory: a batch of more than two")
        y = self.inner(x)
        strays = x[:, :1] > 5
        if bool(strays.any()):
            y = y + strays * F.linear(x, self.inner.weight)
        found: Tensor = self.outer(y.tanh())
        return found


def wandering(count: int, at: int | None) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    if at is not None:
        x[at, 0] = 9.0
    return [(x[i : i + 3], torch.arange(i, min(i + 3, count)) % 2) for i in range(0, count, 3)]


@pytest.mark.parametrize("at", [None, 18, 22], ids=["memory runs out", "from the first example", "later"])
def test_what_one_process_finds_out_all_begin_anew_with(at: int | None, tmp_path: Path) -> None:
    """Of 12 + 12 examples the second process has one that no formula fits, or memory for two at once."""

    def run(rank: int) -> Any:
        if at is None:
            os.environ["SMALL"] = "1"
        group = processes.current()
        mine = list(enumerate(wandering(24, at)))[4 * rank : 4 * rank + 4]
        batches = Placed(lambda: ((3 * number, batch) for number, batch in mine))
        found = estimate_curvature(Wandering(), batches, structure="kronecker", together=Together(group))
        group.wait()
        return {name: value.tolist() for name, value in found.items()} | {"examples": found.examples}

    ended = launch(2, run, tmp_path)
    assert [end.status for end in ended] == [0, 0], ended
    want = estimate_curvature(Wandering(), wandering(24, at), structure="kronecker")
    assert ("inner.weight" in want) is (at is not None)  # a diagonal, once the formula does not fit
    for end in ended:
        assert end.gave.pop("examples") == 24 and end.gave.keys() == want.keys()
        for name, value in end.gave.items():
            torch.testing.assert_close(torch.tensor(value), want[name], rtol=1e-5, atol=1e-7)


def command(*words: str | Path) -> Callable[[int], Any]:
    def run(rank: int) -> None:
        from gradmerge.cli.app import main

        sys.argv = ["gradmerge", *map(str, words)]
        main()

    return run


def said_once(ended: list[Ended], status: int, *texts: str) -> None:
    """All end with one status, and one of them has said why, once."""
    assert [end.status for end in ended] == [status] * len(ended), ended
    heard = [end.said for end in ended if end.said]
    assert len(heard) == 1 and heard[0].count("error:") == 1 and "Traceback" not in heard[0], ended
    assert all(text in heard[0] for text in texts), heard


def test_a_bad_row_of_one_process_ends_all_with_one_message(place: Path, tmp_path: Path) -> None:
    words = ("curvature", "estimate", place / "bert", "--data", place / "bad.jsonl", "-o", tmp_path / "out")
    ended = launch(3, command(*words, "--device", "cpu"), tmp_path / "said")
    said_once(ended, 2, "row 12: 'text' holds no text", "(process 2 of 3, on ")
    assert ended[0].said and sorted(path.name for path in tmp_path.iterdir()) == ["said"]


def test_a_killed_process_ends_the_others_soon(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return estimate_curvature(*arguments, **options)

    monkeypatch.setattr(saved_sums, "estimate_curvature", killed)
    words = ("curvature", "estimate", place / "bert", "--data", place / "rows.jsonl", "-o", tmp_path / "out")
    ended = launch(3, command(*words, "--device", "cpu"), tmp_path / "said", timeout=60)
    assert ended[1].status == -signal.SIGKILL
    said_once([ended[0], ended[2]], 1, "process 1 of 3 (on ", "has ended, or cannot be reached", "Nothing was written")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["said"]


def test_a_process_that_stands_still_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMERGE_PROCESS_TIMEOUT", "3")

    def run(rank: int) -> None:
        group = processes.current()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        with pytest.raises(gm.MachineError, match=r"process 1 of 2 .* cannot be reached"), group.answering():
            group.wait()
        stopped = int(Path(tmp_path / "pid").read_text())
        os.kill(stopped, signal.SIGKILL)

    def first(rank: int) -> None:
        if rank == 1:
            (tmp_path / "pid").write_text(str(os.getpid()))
        run(rank)

    ended = launch(2, first, tmp_path / "said", timeout=60)
    assert [end.status for end in ended] == [0, -signal.SIGKILL], ended


def test_a_run_that_was_stopped_goes_on_with_another_number_of_processes(
    place: Path, one: tuple[Path, Any], tmp_path: Path
) -> None:
    class Interrupted(gm.Progress):
        done = 0

        def advance(self, amount: int) -> None:
            Interrupted.done += amount
            if Interrupted.done > 6:
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
        assert [end.status for end in ended] == [1, 1] and "KeyboardInterrupt" in ended[0].said
        with safe_open(tmp_path / f"{kind}.gradmerge-partial" / "saved-sums.safetensors", "pt") as file:
            saved = json.loads(file.metadata()["rows"])
        assert len(saved) == 2 and 0 < sum(end - first for first, end in saved) < ROWS
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


def test_a_command_for_one_process_is_refused_by_all_and_the_first_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE", 0.5)
    ended = launch(2, command("merge", "recipe.yml", "-o", tmp_path / "merged"), tmp_path / "said")
    said_once(ended, 2, "merge: runs in one process, and this is one of 2")
    assert ended[0].said


def test_rows_that_are_left_are_shared_out_in_stretches() -> None:
    left = without([[8, 9], [0, 3], [3, 4]], 12)
    assert left == [range(4, 8), range(9, 12)]
    number = sum(map(len, left))
    assert parts([(one.start, one.stop) for one in left], range(3)) == [range(4, 7)]
    assert parts([(one.start, one.stop) for one in left], range(3, number)) == [range(7, 8), range(9, 12)]
    assert without([[0, 12]], 12) == [] and parts([], range(0)) == []


def test_the_environment_of_a_launcher_is_read_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert processes.announced() is None and processes.current() is processes.ALONE
    given = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "MASTER_ADDR": "here", "MASTER_PORT": "1"}
    for name, text in given.items():
        monkeypatch.setenv(name, text)
    assert processes.announced() == (1, 4, 0)
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    assert processes.announced() is None
    for rank in ("four", "9"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(gm.InputError, match=r"RANK.* in the environment"):
            processes.announced()


def test_a_patience_that_is_no_number_of_seconds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("soon", "-1", "nan"):
        monkeypatch.setenv("GRADMERGE_PROCESS_TIMEOUT", text)
        with pytest.raises(gm.InputError, match=f"GRADMERGE_PROCESS_TIMEOUT={text} in the environment"):
            process_group._patience()


def test_progress_counts_anew_in_every_call_of_a_script() -> None:
    class Store:
        def __init__(self) -> None:
            self.counts: dict[str, int] = {}

        def add(self, key: str, amount: int) -> int:
            self.counts[key] = self.counts.get(key, 0) + amount
            return self.counts[key]

    class Bar(Progress):
        def __init__(self) -> None:
            self.done = 0

        def advance(self, amount: int) -> None:
            self.done += amount

    group: Any = SimpleNamespace(first=True, begun=0, check=lambda: None)
    store, bars = Store(), [Bar(), Bar()]
    for bar in bars:
        told = process_group.SharedProgress(group, store, bar)
        told.begin("estimating", 4)
        told.advance(3)
    assert [bar.done for bar in bars] == [3, 3]
