"""Optimizer states that cannot be are refused in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from tests.fuzz.curvature import TrainerCheckpoints

State = dict[str, Any]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerCheckpoints:
    made = TrainerCheckpoints(tmp_path / "trainer")
    monkeypatch.chdir(made.place.inputs)
    return made


def first(**changes: Any) -> Callable[[State], None]:
    """Change what is kept for the first parameter."""
    return lambda state: state["state"][0].update(changes)


def group(**changes: Any) -> Callable[[State], None]:
    return lambda state: state["param_groups"][0].update(changes)


STATES: dict[str, tuple[str, Callable[[State], None]]] = {
    "one beta": ("adam", group(betas=(0.9,))),
    "no betas": ("adam", group(betas=[])),
    "a beta that is not a number": ("adam", group(betas=(0.9, float("nan")))),
    "a beta of 1": ("adam", group(betas=(0.9, 1.0))),
    "a beta above 1": ("adam", group(betas=(0.9, 1.5))),
    "betas that are words": ("adam", group(betas="ab")),
    "moments without numbers": ("adam", first(exp_avg_sq=torch.empty(4, 3, device="meta"))),
    "sparse moments": ("adam", first(exp_avg_sq=torch.ones(4, 3).to_sparse())),
    "complex moments": ("adam", first(exp_avg_sq=torch.ones(4, 3, dtype=torch.complex64))),
    "moments that are a list": ("adam", first(exp_avg_sq=[[1.0] * 3] * 4)),
    "moments of another shape": ("adam", first(exp_avg_sq=torch.ones(2))),
    "moments that are not finite": ("adam", first(exp_avg_sq=torch.full((4, 3), float("inf")))),
    "many steps at once": ("adam", first(step=torch.ones(3))),
    "a step that is a word": ("adam", first(step="many")),
    "a step that is not a number": ("adam", first(step=float("nan"))),
    "a state that is a tensor": ("adam", lambda state: state["state"].update({0: torch.ones(3)})),
    "a state that is a number": ("adam", lambda state: state["state"].update({0: 5})),
    "parameters that are lists": ("adam", group(params=[[0], [1]])),
    "a parameter twice": ("named", group(param_names=["a.bias"] * 6, params=[1] * 6)),
    "names that are numbers": ("named", group(param_names=[1, 2, 3, 4, 5, 6])),
    "no groups": ("adam", lambda state: state.update(param_groups=[])),
    "an infinite ess": ("ivon", group(ess=float("inf"))),
    "an ess that is not a number": ("ivon", group(ess=float("nan"))),
    "an ess beyond all data": ("ivon", group(ess=1e300)),
    "an ess that is a list": ("ivon", group(ess=[1])),
    "a Hessian without numbers": ("ivon", group(hess=torch.empty(34, device="meta"))),
    "a Hessian that is too short": ("ivon", group(hess=torch.ones(3))),
    "a Hessian of negative numbers": ("ivon", group(hess=-torch.ones(34))),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("case", STATES)
def test_an_optimizer_that_cannot_be_is_refused(checkpoint: TrainerCheckpoints, case: str) -> None:
    kind, spoil = STATES[case]
    state = checkpoint.states[kind]
    spoil(state)
    torch.save(state, "optimizer.pt")
    with pytest.raises(gm.InputError) as refusal:
        gm.import_curvature(".", 24, 8, model=checkpoint.model).save(checkpoint.place.out)
    assert len(str(refusal.value)) < 2000
    assert not any(checkpoint.place.out.parent.iterdir())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["adam", "named", "ivon"])
def test_the_same_optimizers_unspoiled_are_read(checkpoint: TrainerCheckpoints, kind: str) -> None:
    """Else the refusals above might have any reason."""
    torch.save(checkpoint.states[kind], "optimizer.pt")
    gm.import_curvature(".", 24, 8, model=checkpoint.model).save(checkpoint.place.out)
    assert gm.Curvature.load(checkpoint.place.out).examples == 24
