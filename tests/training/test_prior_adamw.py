"""Steps of PriorAdamW against a loop over single numbers; resuming, copies, skipped steps and added groups."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.training import prior_adamw

STEPS = 5
SHAPES = {"weight": (3, 4), "bias": (4,), "scale": ()}


def numbers(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for n, s in SHAPES.items()}


GRADIENTS = [numbers(100 + step) for step in range(STEPS)]
START, BASE = numbers(0), numbers(1)
CURVATURE = {n: v.exp().pow(3) for n, v in numbers(2).items()}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.to(dtype, copy=True)) for name, value in START.items()}


def take_steps(
    optimizer: torch.optim.Optimizer,
    params: dict[str, nn.Parameter],
    gradients: Sequence[dict[str, Tensor]] = GRADIENTS,
) -> dict[str, Tensor]:
    for gradient in gradients:
        for name, p in params.items():
            p.grad = gradient[name].to(p.dtype)
        optimizer.step()
    return {name: p.detach().clone() for name, p in params.items()}


def run(dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
    params = parameters(dtype)
    return take_steps(gm.PriorAdamW(list(params.items()), anchor=BASE, **options), params)


def plain(dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Tensor]:
    params = parameters(dtype)
    return take_steps(torch.optim.AdamW(list(params.values()), **options), params)


def slow(
    theta: float,
    base: float,
    prior: float,
    gradients: Sequence[float],
    *,
    strength: float = 1.0,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
    coupling: str = "decoupled",
    damping: float = 0.0,
) -> float:
    """One entry, as the docstring of PriorAdamW and the paper of AdamW read."""
    m = v = largest = 0.0
    for t, g in enumerate(gradients, 1):
        g = -g if maximize else g
        old = theta
        theta -= lr * weight_decay * old
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        largest = max(largest, v)
        d = math.sqrt((largest if amsgrad else v) / (1 - betas[1] ** t)) + eps
        theta -= lr * m / (1 - betas[0] ** t) / d
        h = prior + damping
        metric = d if coupling == "adam" else 1.0
        theta = (metric * theta + lr * strength * h * base) / (metric + lr * strength * h)
    return theta


def slowly(prior: Callable[[str], Tensor], **options: Any) -> dict[str, Tensor]:
    result = {}
    for name, start in START.items():
        h = prior(name)
        numbers = [value.reshape(-1).tolist() for value in (start, BASE[name], *(g[name] for g in GRADIENTS))]
        priors = h.reshape(-1).tolist()[: start.numel()]
        entries = zip(priors, *numbers, strict=True)
        flat = [slow(theta, base, p, gradients, **options) for p, theta, base, *gradients in entries]
        result[name] = torch.tensor(flat, dtype=torch.float64).reshape(start.shape)
    return result


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name].double(), rtol=tolerance, atol=tolerance)


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


IMPLEMENTATIONS = [{}, {"foreach": False}, {"fused": True}]
SETTINGS = [
    {"lr": 0.1, "strength": 3.0},
    {"lr": 0.1, "strength": 0.5, "weight_decay": 0.2, "betas": (0.5, 0.7), "eps": 1e-3, "maximize": True},
    {"lr": 0.02, "strength": 20.0, "amsgrad": True},
]


@pytest.mark.parametrize("coupling", ["decoupled", "adam"])
@pytest.mark.parametrize(
    ("settings", "implementation"),
    [*((settings, {}) for settings in SETTINGS), *((SETTINGS[2], flags) for flags in IMPLEMENTATIONS[1:])],
)
def test_steps_with_a_curvature_are_those_of_the_formula(coupling: str, settings: Any, implementation: Any) -> None:
    got = run(prior=CURVATURE, coupling=coupling, **settings, **implementation)
    assert_close(got, slowly(CURVATURE.__getitem__, coupling=coupling, **settings))


@pytest.mark.parametrize("coupling", ["decoupled", "adam"])
@pytest.mark.parametrize(("prior", "damping"), [("identity", 0.0), (7, 0.0), (0.25, 0.3), (CURVATURE, 0.3)])
def test_a_number_is_a_multiple_of_the_identity_and_damping_is_added(coupling: str, prior: Any, damping: float) -> None:
    got = run(prior=prior, coupling=coupling, lr=0.1, damping=damping)
    value = torch.full((12,), 1.0 if prior == "identity" else prior) if not isinstance(prior, dict) else None
    want = slowly(lambda name: CURVATURE[name] if value is None else value, coupling=coupling, lr=0.1, damping=damping)
    assert_close(got, want)


@pytest.mark.parametrize(
    ("dtype", "prior", "flags"),
    [
        (torch.float64, "identity", {}),
        (torch.bfloat16, "identity", {"fused": True}),
        (torch.float32, CURVATURE, {"foreach": True}),
    ],
)
def test_strength_0_is_torchs_adamw_to_the_last_bit(dtype: torch.dtype, prior: Any, flags: Any) -> None:
    assert_equal(run(dtype, prior=prior, strength=0.0, lr=0.1, **flags), plain(dtype, lr=0.1, **flags))


def test_strength_is_an_option_of_each_group() -> None:
    def groups(params: dict[str, nn.Parameter], **options: Any) -> list[dict[str, Any]]:
        return [
            {"params": [("weight", params["weight"])], "lr": 0.1, **options},
            {"params": [("bias", params["bias"]), ("scale", params["scale"])]},
        ]

    ours, theirs = parameters(), parameters()
    optimizer = gm.PriorAdamW(groups(ours, strength=2.0), lr=0.01, prior=CURVATURE, anchor=BASE, strength=0.0)
    got = take_steps(optimizer, ours)
    want = take_steps(torch.optim.AdamW(groups(theirs), lr=0.01), theirs)
    assert_equal({n: got[n] for n in ("bias", "scale")}, {n: want[n] for n in ("bias", "scale")})
    pulled = slowly(CURVATURE.__getitem__, lr=0.1, strength=2.0)
    assert_close({"weight": got["weight"]}, {"weight": pulled["weight"]})


@pytest.mark.parametrize(("coupling", "dtype"), [("decoupled", torch.float64), ("adam", torch.bfloat16)])
def test_large_curvature_holds_parameters_at_the_anchor(coupling: str, dtype: torch.dtype) -> None:
    huge = {name: torch.full_like(value, 1e20) for name, value in START.items()}
    got = run(dtype, prior=huge, coupling=coupling, lr=1.0)
    assert_close(got, {name: value.to(dtype) for name, value in BASE.items()}, 1e-7)


def test_parameters_without_a_gradient_are_not_touched() -> None:
    params = parameters()
    optimizer = gm.PriorAdamW(list(params.items()), lr=0.1, prior=CURVATURE, anchor=BASE)
    params["weight"].grad = GRADIENTS[0]["weight"]
    optimizer.step()
    assert torch.equal(params["bias"], START["bias"]) and params["bias"] not in optimizer.state
    assert not torch.equal(params["weight"], START["weight"])


@pytest.mark.parametrize(("coupling", "prior"), [("decoupled", CURVATURE), ("adam", CURVATURE), ("adam", "identity")])
def test_arithmetic_on_bfloat16_is_float32_and_rounds_once(coupling: str, prior: Any) -> None:
    params = parameters(torch.bfloat16)
    options: Any = {"lr": 0.1, "coupling": coupling, "strength": 2.0}
    optimizer = gm.PriorAdamW(list(params.items()), prior=prior, anchor=BASE, **options)
    others = parameters(torch.bfloat16)
    other = torch.optim.AdamW(others.values(), lr=0.1, fused=True)
    got, stepped = take_steps(optimizer, params, GRADIENTS[:1]), take_steps(other, others, GRADIENTS[:1])
    for name, value in stepped.items():
        base = BASE[name].to(torch.bfloat16).double()
        h = torch.ones_like(base) if prior == "identity" else CURVATURE[name].float().double()
        v = other.state[others[name]]["exp_avg_sq"].double() / (1 - 0.999)
        d = v.sqrt() + 1e-8 if coupling == "adam" else torch.ones_like(v)
        want = (d * value.double() + 0.2 * h * base) / (d + 0.2 * h)
        assert torch.equal(got[name], want.to(torch.bfloat16)), name


@pytest.mark.parametrize("coupling", ["decoupled", "adam"])
def test_parameters_larger_than_a_chunk_in_any_memory_layout(coupling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prior_adamw, "CPU_CHUNK", 1 << 10)
    generator = torch.Generator().manual_seed(0)
    start, gradient, base, h = (torch.randn(91, 101, generator=generator, dtype=torch.float64) for _ in range(4))
    h = h.exp()
    d = gradient.abs() + 1e-8 if coupling == "adam" else torch.ones_like(h)
    stepped = start * (1 - 1e-3) - 0.1 * gradient / (gradient.abs() + 1e-8)
    want = (d * stepped + 0.1 * h * base) / (d + 0.1 * h)
    for layout in (torch.clone, lambda v: v.t().contiguous().t()):
        p = nn.Parameter(layout(start))
        optimizer = gm.PriorAdamW([("p", p)], lr=0.1, prior={"p": h}, anchor={"p": base}, coupling=coupling)
        p.grad = gradient.clone()
        optimizer.step()
        torch.testing.assert_close(p.detach(), want, rtol=1e-10, atol=1e-10)


# State.

STATES: list[dict[str, Any]] = [
    {},
    {"keep_on": "cpu", "coupling": "adam"},
    {"prior": "identity"},
    {"amsgrad": True, "coupling": "adam", "fused": True},
]


def with_prior(params: dict[str, nn.Parameter], **options: Any) -> gm.PriorAdamW:
    return gm.PriorAdamW(list(params.items()), **{"prior": CURVATURE, "lr": 0.1, **options})


def saved_and_loaded(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    ("dtype", "options", "done"),
    [
        *((torch.bfloat16, options, 2) for options in STATES),
        (torch.float32, {}, 0),
    ],
)
def test_resuming_gives_the_same_bytes(dtype: torch.dtype, options: Any, done: int) -> None:
    params = parameters(dtype)
    optimizer = with_prior(params, anchor=BASE, **options)
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
    optimizer = with_prior(ours, anchor=BASE, strength=3.0)
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
    optimizer = with_prior(params, anchor=BASE)
    take_steps(optimizer, params, GRADIENTS[:2])
    others, other = copied((params, optimizer))
    assert_equal(take_steps(other, others, GRADIENTS[2:]), take_steps(optimizer, params, GRADIENTS[2:]))


@pytest.mark.parametrize(("fused", "coupling"), [(None, "decoupled"), (True, "adam")])
def test_a_step_that_the_gradient_scaler_skips_changes_nothing(fused: Any, coupling: str) -> None:
    params, others = parameters(torch.float32), parameters(torch.float32)
    options = {"anchor": BASE, "fused": fused, "coupling": coupling}
    optimizer, other = with_prior(params, **options), with_prior(others, **options)
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


def test_a_late_group_has_no_penalty() -> None:
    params = parameters()
    optimizer = gm.PriorAdamW([("weight", params["weight"])], lr=0.1, prior=CURVATURE, anchor=BASE)
    late = {"params": [("bias", params["bias"]), ("scale", params["scale"])]}
    with pytest.raises(gm.InputError):
        optimizer.add_param_group(late)
    optimizer.add_param_group({**late, "strength": 0.0})
    got, want = take_steps(optimizer, params), plain(lr=0.1)
    assert_close({name: got[name] for name in ("bias", "scale")}, {name: want[name] for name in ("bias", "scale")})


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
