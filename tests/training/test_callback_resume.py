"""CurvatureCallback in runs that are stopped and resumed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import gradmerge as gm
from gradmerge.errors import InputError

from .callback_runs import bert, read, same_bytes, sentences, trainer_for


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


def callback_of(source: str) -> gm.CurvatureCallback:
    if source == "online":
        return gm.CurvatureCallback("online", every=2, decay=0.8, likelihood="sampled")
    return gm.CurvatureCallback(source)


@pytest.mark.parametrize("source", ["adam", "online", "pass"])
def test_a_resumed_run_ends_with_the_same_bytes_as_one_without_a_stop(tmp_path: Path, source: str) -> None:
    settings: dict[str, Any] = {"save_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    whole, parts = tmp_path / "whole" / "out", tmp_path / "parts" / "out"
    data = sentences(16)
    trainer_for(whole, bert(dropout=0.1), data, callback_of(source), **settings).train()
    trainer_for(parts, bert(dropout=0.1), data, callback_of(source), StopAfter(3), **settings).train()
    trainer_for(parts, bert(dropout=0.1), data, callback_of(source), **settings).train(resume_from_checkpoint=True)
    assert (whole / "checkpoint-6" / "model.safetensors").read_bytes() == (
        parts / "checkpoint-6" / "model.safetensors"
    ).read_bytes()
    for folder in ("curvature", *([] if source == "pass" else ["checkpoint-6/curvature"])):
        assert same_bytes(whole / folder, parts / folder), folder


def test_a_checkpoint_elsewhere_is_found_by_the_arguments_and_missed_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, moved, out = tmp_path / "out", tmp_path / "moved" / "checkpoint-2", tmp_path / "second" / "out"
    trainer_for(first, bert(), sentences(16), callback_of("online"), StopAfter(2)).train()
    shutil.copytree(first / "checkpoint-2", moved)
    with caplog.at_level(logging.WARNING, logger="gradmerge"):
        trainer_for(out, bert(), sentences(16), callback_of("online"), resume_from_checkpoint=str(moved)).train(
            resume_from_checkpoint=str(moved)
        )
        assert not caplog.text
        found = read(out).sum()
        trainer_for(out, bert(), sentences(16), callback_of("online")).train(resume_from_checkpoint=str(moved))
        assert caplog.text
    missed = read(out).sum()
    assert any(not torch.equal(found[name], missed[name]) for name in found)


def test_a_damaged_or_foreign_running_average_is_refused(tmp_path: Path) -> None:
    trainer_for(tmp_path, bert(), sentences(16), callback_of("online"), StopAfter(2)).train()
    other = gm.CurvatureCallback("online", every=2, decay=0.5)
    with pytest.raises(InputError):
        trainer_for(tmp_path, bert(), sentences(16), other).train(resume_from_checkpoint=True)
    (tmp_path / "checkpoint-2" / "curvature" / "online.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError):
        trainer_for(tmp_path, bert(), sentences(16), callback_of("online")).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("source", ["adam", "online"])
def test_a_run_that_resumes_at_its_end_has_the_checkpoints_curvature(tmp_path: Path, source: str) -> None:
    trainer_for(tmp_path, bert(), sentences(8), callback_of(source)).train()
    shutil.rmtree(tmp_path / "curvature")
    trainer_for(tmp_path, bert(), sentences(8), callback_of(source)).train(resume_from_checkpoint=True)
    got, want = read(tmp_path), read(tmp_path / "checkpoint-4")
    assert all(torch.equal(got[name], value) for name, value in want.items())
    assert not (tmp_path / "curvature" / "online.safetensors").exists()
