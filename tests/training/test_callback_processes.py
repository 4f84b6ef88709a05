"""CurvatureCallback in several processes: what one process finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import BertForSequenceClassification

import gradmerge as gm
from gradmerge.errors import InputError

from ..curvature import slow
from ..groups import launch
from .callback_runs import bert, read, sentences, trainer_for


def callbacks() -> dict[str, gm.CurvatureCallback]:
    return {
        "adam": gm.CurvatureCallback("adam"),
        "uneven": gm.CurvatureCallback("pass", likelihood="sampled", limit=7),
        "few": gm.CurvatureCallback("pass", limit=1),
    }


def train(out: Path, kind: str, batch: int) -> None:
    """Train on 16 examples for four steps; with `pass` for three on 11, which processes cannot share equally."""
    data = sentences(16 if kind == "adam" else 11)
    settings = {"per_device_train_batch_size": batch, "num_train_epochs": 1, "save_strategy": "epoch"}
    trainer_for(out / kind, bert(), data, callbacks()[kind], **settings).train()


def work(out: Path) -> None:
    """What one of several processes that train together does, with each source."""
    AcceleratorState._reset_state(reset_partial_state=True)  # of trainings by the process that this one is forked from
    for kind in callbacks():
        train(out, kind, 2)
    try:
        trainer_for(out / "sharded", bert(), sentences(16), gm.CurvatureCallback("pass"), fsdp=True).train()
    except InputError as error:
        (out / "refused.json").write_text(json.dumps(str(error)))


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes on this machine have written, set up as torchrun does."""
    out = tmp_path_factory.mktemp("two")
    for ended in launch(2, lambda rank: work(out), out / "said"):
        assert ended.status == 0, ended.said[-6000:]
    return out


def test_two_processes_find_the_curvature_that_one_does(two_processes: Path, tmp_path: Path) -> None:
    train(tmp_path, "adam", 4)
    one, two = read(tmp_path / "adam"), read(two_processes / "adam")
    assert (one.examples, one.likelihood) == (two.examples, two.likelihood)
    slow.assert_same(two, one.sum(), 1e-3)


@pytest.mark.parametrize(("kind", "examples"), [("uneven", 7), ("few", 1)])
def test_two_processes_pass_over_every_example_once(two_processes: Path, kind: str, examples: int) -> None:
    model = BertForSequenceClassification.from_pretrained(two_processes / kind / "checkpoint-3")
    rows = sentences(11)[:examples]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    want = gm.estimate_curvature(model, [batch], callbacks()[kind].likelihood)
    got = read(two_processes / kind)
    assert got.examples == examples
    slow.assert_same(got, want.sum(), 1e-4)


def test_sharded_parameters_are_refused_when_training_begins(two_processes: Path) -> None:
    assert "FSDP" in json.loads((two_processes / "refused.json").read_text())
