"""PriorAdamW after resuming, copying, skipped steps and added groups."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import gradmerge as gm

from .test_prior_adamw import (
    BASE,
    CURVATURE,
    GRADIENTS,
    START,
    assert_close,
    assert_equal,
    parameters,
    take_steps,
)

OPTIONS: list[dict[str, Any]] = [
    {},
    {"keep_on": "cpu", "keep_dtype": torch.bfloat16, "coupling": "adam"},
    {"prior": "identity"},
    {"amsgrad": True, "coupling": "adam", "fused": True},
]


def make(params: dict[str, nn.Parameter], **options: Any) -> gm.PriorAdamW:
    return gm.PriorAdamW(list(params.items()), **{"prior": CURVATURE, "lr": 0.1, **options})


def saved_and_loaded(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("dtype", "options", "done"),
    [
        *((torch.bfloat16, options, 2) for options in OPTIONS),
        (torch.bfloat16, {}, 0),
        (torch.float32, {"keep_dtype": torch.bfloat16}, 2),
    ],
)
def test_resuming_gives_the_same_bytes(dtype: torch.dtype, options: Any, done: int) -> None:
    params = parameters(dtype)
    optimizer = make(params, anchor=BASE, **options)
    middle = take_steps(optimizer, params, GRADIENTS[:done])
    saved = saved_and_loaded(optimizer.state_dict())
    want = take_steps(optimizer, params, GRADIENTS[done:])
    # The Trainer loads weights before it creates the optimizer, whose anchor is then wrong until its state is loaded.
    others = {name: nn.Parameter(value.clone()) for name, value in middle.items()}
    other = gm.PriorAdamW(others.values())
    other.load_state_dict(saved)
    assert_equal(take_steps(other, others, GRADIENTS[done:]), want)


def test_state_dicts_are_exchanged_with_torchs_adamw() -> None:
    theirs, ours = parameters(), parameters()
    adamw = torch.optim.AdamW(theirs.values(), lr=0.1)
    middle = take_steps(adamw, theirs, GRADIENTS[:2])
    optimizer = make(ours, anchor=BASE, strength=3.0)
    optimizer.load_state_dict(saved_and_loaded(adamw.state_dict()))
    with torch.no_grad():
        for name, p in ours.items():
            p.copy_(middle[name])
    stepped = take_steps(adamw, theirs, GRADIENTS[2:3])
    want = {n: (v + 0.3 * CURVATURE[n] * BASE[n]) / (1 + 0.3 * CURVATURE[n]) for n, v in stepped.items()}
    got = take_steps(optimizer, ours, GRADIENTS[2:3])
    assert_close(got, want)

    others = {n: nn.Parameter(v.clone()) for n, v in got.items()}
    adamw = torch.optim.AdamW(others.values(), lr=0.5)
    adamw.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    optimizer.param_groups[0]["strength"] = 0.0
    assert_close(take_steps(adamw, others, GRADIENTS[3:]), take_steps(optimizer, ours, GRADIENTS[3:]))


def test_a_state_of_other_parameters_is_refused() -> None:
    optimizer = gm.PriorAdamW([nn.Parameter(torch.zeros(3))])
    with pytest.raises(gm.InputError):
        gm.PriorAdamW([nn.Parameter(torch.zeros(4))]).load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError):
        gm.PriorAdamW([nn.Parameter(torch.zeros(3)) for _ in range(2)]).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_copies_are_independent(copied: Any) -> None:
    params = parameters()
    optimizer = make(params, anchor=BASE)
    take_steps(optimizer, params, GRADIENTS[:2])
    others, other = copied((params, optimizer))
    assert_equal(take_steps(other, others, GRADIENTS[2:]), take_steps(optimizer, params, GRADIENTS[2:]))


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize(("prior", "coupling"), [("identity", "decoupled"), (CURVATURE, "adam")])
def test_a_step_that_the_gradient_scaler_skips_changes_nothing(fused: Any, prior: Any, coupling: str) -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    options = {"prior": prior, "anchor": BASE, "fused": fused, "coupling": coupling}
    optimizer, other = make(params, **options), make(others, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def scaled_step(factor: float) -> None:
        optimizer.zero_grad()
        loss = sum((p * GRADIENTS[0][n].float()).sum() * factor for n, p in params.items())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(float("inf"))
    assert_equal({n: p.detach() for n, p in params.items()}, {n: v.float() for n, v in START.items()})
    scaled_step(1.0)
    scaled_step(float("nan"))
    assert scaler.get_scale() == 1.0
    got = {n: p.detach() for n, p in params.items()}
    assert_close(got, take_steps(other, others, GRADIENTS[:1]), 1e-6)


def test_a_late_group_is_anchored_at_its_current_values() -> None:
    first, late = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.full((2,), 3.0))
    optimizer = gm.PriorAdamW([first], lr=0.1, prior=1e20)
    optimizer.add_param_group({"params": [late]})
    with torch.no_grad():
        late.fill_(5.0)
    first.grad = late.grad = torch.ones(2)
    optimizer.step()
    assert first.tolist() == pytest.approx([0.0, 0.0]) and late.tolist() == pytest.approx([3.0, 3.0])

    params = parameters()
    optimizer = gm.PriorAdamW([("weight", params["weight"])], prior=CURVATURE)
    with pytest.raises(gm.InputError):  # the optimizer does not keep the mapping
        optimizer.add_param_group({"params": [("bias", params["bias"])]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("bias", params["bias"])], "strength": 0.0})


def test_gradients_with_another_memory_layout() -> None:
    """torch's fused kernel for CPUs would pair them with the wrong weights."""
    start, gradient = START["weight"], GRADIENTS[0]["weight"]
    got = []
    for layout in (torch.clone, lambda v: v.t().contiguous().t()):
        p = nn.Parameter(start.clone())
        optimizer = gm.PriorAdamW([p], lr=0.1)
        for factor in (torch.ones_like(gradient), gradient):
            p.grad = layout(gradient * factor)
            optimizer.step()
        got.append(p.detach())
    torch.testing.assert_close(got[0], got[1], rtol=1e-12, atol=1e-12)
