"""CurvatureCallback in several processes: what one process finds."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BertForSequenceClassification

import gradmerge as gm

from ..curvature import slow
from .callback_runs import read, sentences
from .callback_worker import callbacks, train


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes on this machine have written, set up as torchrun does."""
    out = tmp_path_factory.mktemp("two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.training.callback_worker", str(out)],
        cwd=Path(__file__).parents[2],
        env=os.environ | shared,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said = process.communicate(timeout=240)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, said[-6000:]
    return out


@pytest.mark.parametrize("kind", ["adam", "online"])
def test_two_processes_find_the_curvature_that_one_does(two_processes: Path, tmp_path: Path, kind: str) -> None:
    train(tmp_path, kind, 4)
    one, two = read(tmp_path / kind), read(two_processes / kind)
    assert (one.examples, one.likelihood) == (two.examples, two.likelihood)
    slow.assert_same(two, one.sum(), 1e-3)


@pytest.mark.parametrize(("kind", "examples"), [("uneven", 7), ("few", 1)])
def test_two_processes_pass_over_every_example_once(two_processes: Path, kind: str, examples: int) -> None:
    model = BertForSequenceClassification.from_pretrained(two_processes / kind / "checkpoint-3")
    rows = sentences(11)[:examples]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    want = gm.estimate_curvature(model, [batch], callbacks()[kind].options.likelihood)
    got = read(two_processes / kind)
    assert got.examples == examples
    slow.assert_same(got, want.sum(), 1e-4)


def test_sharded_parameters_are_refused_when_training_begins(two_processes: Path) -> None:
    assert "spread over processes (FSDP)" in json.loads((two_processes / "refused.json").read_text())
