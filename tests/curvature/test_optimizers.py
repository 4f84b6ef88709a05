"""Curvature from optimizers, against slow training and squared gradients."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import ivon
import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import Adafactor

import gradmerge as gm

from .training import Run, assert_same, examples, fresh, moments_by_hand, train


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(tmp_path_factory.mktemp("bert"), "bert")


@pytest.mark.parametrize("family", ["bert", "vit"])
def test_a_trainers_second_moments_become_a_sum_over_examples(family: str, tmp_path: Path, bert: Run) -> None:
    run = bert if family == "bert" else train(tmp_path, family)
    got = gm.import_curvature(run.checkpoint, 10, 4)
    want = {name: 10 * 4 * v for name, v in moments_by_hand(run).items()}
    assert_same(got, run.stored(want))
    assert got.keys() == run.weights.keys()
    assert (got.examples, got.likelihood) == (10, "adam")


def saved(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Path:
    """Save a checkpoint of a training loop without Trainer."""
    model.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, number: int = 3) -> list[dict[str, Tensor]]:
    """Take steps with one example each, and return their gradients."""
    gradients = []
    for example in examples("bert", number):
        optimizer.zero_grad()
        model(**{k: v[None] for k, v in example.items()}).loss.backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    return gradients


def running_mean(gradients: list[dict[str, Tensor]], beta: float) -> dict[str, Tensor]:
    """Return v̂ as a weighted mean."""
    weights = [(1 - beta) * beta ** (len(gradients) - 1 - t) for t in range(len(gradients))]
    return {
        name: sum(w * g[name] ** 2 for w, g in zip(weights, gradients, strict=True)) / sum(weights)
        for name in gradients[0]
    }


@pytest.mark.parametrize("named", [False, True])
def test_adam_in_a_plain_loop_is_read_too(named: bool, tmp_path: Path) -> None:
    model = fresh("bert")
    optimizer = torch.optim.AdamW(list(model.named_parameters())[::-1] if named else model.parameters(), lr=1e-3)
    gradients = steps(model, optimizer)
    got = gm.import_curvature(saved(tmp_path / "c", model, optimizer), dataset_size=50, batch_size=2)
    assert_same(got, {n: 50 * 2 * v for n, v in running_mean(gradients, 0.999).items()})


def test_a_model_that_is_not_of_transformers_can_be_given(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3).double()).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    got = gm.import_curvature(tmp_path, 7, 1, model=model)
    assert_same(got, {n: 7 * p.grad**2 for n, p in model.named_parameters()})
    with pytest.raises(gm.InputError):
        gm.import_curvature(tmp_path, 7, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_ivon(groups: int, tmp_path: Path) -> None:
    model = fresh("bert")
    named = list(model.named_parameters())
    decay = [p for n, p in named if "bias" not in n and "norm" not in n.lower()]
    rest = [p for n, p in named if "bias" in n or "norm" in n.lower()]
    parts = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = ivon.IVON(model.parameters() if groups == 1 else parts, lr=0.1, ess=40, hess_init=0.5, beta2=0.9)
    for example in examples("bert", 3):
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            model(**{k: v[None] for k, v in example.items()}).loss.backward()
        optimizer.step()
    names = {p: n for n, p in named}
    want: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        start = 0
        for p in group["params"]:
            want[names[p]] = 40 * group["hess"][start : start + p.numel()].reshape(p.shape)
            start += p.numel()
    folder = saved(tmp_path / "c", model, optimizer)
    same = gm.import_curvature(folder, 40, 2)
    assert (same.examples, same.likelihood, same.notes) == (40, "ivon", [])
    assert_same(same, want)
    other = gm.import_curvature(folder, 39, 2)
    assert other.examples == 39 and "ess" in other.notes[0]
    assert_same(other, want)


def test_parameters_that_shapes_do_not_tell_apart_are_named(tmp_path: Path) -> None:
    model = fresh("bert")
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith(("classifier", "bert.pooler"))
    run = train(tmp_path, "bert", model=model)
    with pytest.raises(gm.InputError, match=r"bert\.pooler"):
        gm.import_curvature(run.checkpoint, 10, 4)


def test_frozen_parameters_are_missing(tmp_path: Path) -> None:
    model = fresh("bert")
    head = [p for n, p in model.named_parameters() if n.startswith("classifier")]
    for parameter in model.parameters():
        parameter.requires_grad = any(parameter is p for p in head)
    optimizer = torch.optim.AdamW(head)
    gradients = steps(model, optimizer)
    got = gm.import_curvature(saved(tmp_path / "c", model, optimizer), 10, 1)
    assert_same(got, {n: 10 * v for n, v in running_mean(gradients, 0.999).items()})
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert str(len(frozen)) in got.notes[0] and frozen[0] in got.notes[0]
    optimizer = torch.optim.AdamW(model.parameters())  # has the frozen parameters, without a state
    steps(model, optimizer)
    assert gm.import_curvature(saved(tmp_path / "d", model, optimizer), 10, 1).keys() == got.keys()


def test_no_model_is_built_if_its_config_names_code_from_the_hub(
    bert: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(bert.checkpoint, tmp_path / "c")
    path = tmp_path / "c" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_attn_implementation": "org/repo"}))
    built: list[Any] = []
    monkeypatch.setattr(transformers.BertForSequenceClassification, "__init__", lambda *_, **__: built.append(1))
    with pytest.raises(gm.InputError):
        gm.import_curvature(tmp_path / "c", 10, 4)
    assert not built


@pytest.mark.parametrize("make", [torch.optim.SGD, Adafactor])
def test_other_optimizers_are_refused(make: Any, tmp_path: Path) -> None:
    model = fresh("bert")
    optimizer = make(model.parameters())
    steps(model, optimizer)
    with pytest.raises(gm.InputError):
        gm.import_curvature(saved(tmp_path / "c", model, optimizer), 10, 1)


class _Trap:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('it was run')",)


def test_an_optimizer_file_is_never_run(bert: Run, tmp_path: Path) -> None:
    shutil.copytree(bert.checkpoint, tmp_path / "c")
    torch.save({"state": _Trap(), "param_groups": []}, tmp_path / "c" / "optimizer.pt")
    with pytest.raises(gm.InputError):
        gm.import_curvature(tmp_path / "c", 10, 4)
