"""CurvatureCallback in runs that are stopped and resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import gradmerge as gm

from .callback_runs import bert, read, same_bytes, sentences, trainer_for


class StopAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.mark.parametrize("source", ["adam", "pass"])
def test_a_resumed_run_ends_with_the_same_bytes_as_one_without_a_stop(tmp_path: Path, source: str) -> None:
    settings: dict[str, Any] = {"save_steps": 3, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}
    whole, parts = tmp_path / "whole" / "out", tmp_path / "parts" / "out"
    data = sentences(16)
    trainer_for(whole, bert(dropout=0.1), data, gm.CurvatureCallback(source), **settings).train()
    trainer_for(parts, bert(dropout=0.1), data, gm.CurvatureCallback(source), StopAfter(3), **settings).train()
    trainer_for(parts, bert(dropout=0.1), data, gm.CurvatureCallback(source), **settings).train(
        resume_from_checkpoint=True
    )
    assert (whole / "checkpoint-6" / "model.safetensors").read_bytes() == (
        parts / "checkpoint-6" / "model.safetensors"
    ).read_bytes()
    for folder in ("curvature", *([] if source == "pass" else ["checkpoint-6/curvature"])):
        assert same_bytes(whole / folder, parts / folder), folder


def test_a_run_that_resumes_at_its_end_has_the_checkpoints_curvature(tmp_path: Path) -> None:
    trainer_for(tmp_path, bert(), sentences(8), gm.CurvatureCallback()).train()
    shutil.rmtree(tmp_path / "curvature")
    trainer_for(tmp_path, bert(), sentences(8), gm.CurvatureCallback()).train(resume_from_checkpoint=True)
    got, want = read(tmp_path), read(tmp_path / "checkpoint-4")
    assert all(torch.equal(got[name], value) for name, value in want.items())
