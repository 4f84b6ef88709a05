"""Which parameters get curvature during training, and the saved running average."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from gradmerge.errors import InputError
from gradmerge.training.curvature_sources import RUNNING_AVERAGE, OnlineSource, SourceOptions, TrainingRun
from gradmerge.training.curvature_targets import CurvatureTargets

from .callback_runs import bert


def test_a_model_without_trained_parameters_is_refused() -> None:
    with pytest.raises(InputError):
        CurvatureTargets(bert().requires_grad_(False))


def test_only_targets_require_gradients_inside() -> None:
    model = bert()
    model.bert.embeddings.requires_grad_(False)
    targets = CurvatureTargets(model)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(False)
    with targets.only_these_require_gradients():
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    assert not any(p.requires_grad for p in model.parameters())


def online(model: Any, decay: float = 0.5) -> OnlineSource:
    args = SimpleNamespace(torch_compile=False, should_save=True)
    run = TrainingRun(args, CurvatureTargets(model), None, None, batch_size=2, max_steps=9, first_step=0)
    return OnlineSource(run, SourceOptions(1, decay, "empirical", None, None, 0))


def test_a_running_average_of_another_run_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    source = online(model)
    source._average = {name: torch.ones_like(p).detach() for name, p in model.named_parameters()}
    source._steps_used, source._examples_used = 1, 2
    source.write_state(tmp_path, 7)
    path = tmp_path / RUNNING_AVERAGE
    resumed = online(model)
    resumed._read_state(path, 7)
    assert (resumed._steps_used, resumed._examples_used) == (1, 2)
    assert torch.equal(resumed._average["weight"], source._average["weight"])
    for other, step in ((online(model), 8), (online(torch.nn.Linear(3, 1)), 7), (online(model, 0.9), 7)):
        with pytest.raises(InputError, match=RUNNING_AVERAGE):
            other._read_state(path, step)
    save_file({"weight": torch.ones(1, 2)}, path)
    with pytest.raises(InputError, match=RUNNING_AVERAGE):
        online(model)._read_state(path, 7)
    path.write_bytes(b"no tensors")
    with pytest.raises(InputError, match=RUNNING_AVERAGE):
        online(model)._read_state(path, 7)
