"""Steps of PriorAdamW against a loop over single numbers."""

from __future__ import annotations

import copy
import math
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


@pytest.mark.parametrize("coupling", ["decoupled", "adam"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_large_curvature_holds_parameters_at_the_anchor(coupling: str, dtype: torch.dtype) -> None:
    huge = {name: torch.full_like(value, 1e20) for name, value in START.items()}
    got = run(dtype, prior=huge, coupling=coupling, lr=1.0)
    assert_close(got, {name: value.to(dtype) for name, value in BASE.items()}, 1e-7)


def test_parameters_without_a_gradient_are_not_touched() -> None:
    params = parameters()
    optimizer = gm.PriorAdamW(list(params.items()), lr=0.1, prior=CURVATURE, anchor=BASE)
    params["weight"].grad = GRADIENTS[0]["weight"]
    optimizer.step()
    assert torch.equal(params["bias"], START["bias"])
    assert not torch.equal(params["weight"], START["weight"])
    assert params["bias"] not in optimizer.state


@pytest.mark.parametrize("coupling", ["decoupled", "adam"])
@pytest.mark.parametrize("kept", [None, torch.bfloat16])
@pytest.mark.parametrize("prior", ["identity", CURVATURE])
def test_arithmetic_on_bfloat16_is_float32_and_rounds_once(coupling: str, kept: Any, prior: Any) -> None:
    params = parameters(torch.bfloat16)
    options: Any = {"lr": 0.1, "coupling": coupling, "keep_dtype": kept, "strength": 2.0}
    optimizer = gm.PriorAdamW(list(params.items()), prior=prior, anchor=BASE, **options)
    others = parameters(torch.bfloat16)
    other = torch.optim.AdamW(others.values(), lr=0.1, fused=True)
    got, stepped = take_steps(optimizer, params, GRADIENTS[:1]), take_steps(other, others, GRADIENTS[:1])
    for name, value in stepped.items():
        base = BASE[name].to(torch.bfloat16).double()
        h = torch.ones_like(base) if prior == "identity" else CURVATURE[name].to(kept or torch.float32).double()
        v = other.state[others[name]]["exp_avg_sq"].double() / (1 - 0.999)
        d = v.sqrt() + 1e-8 if coupling == "adam" else torch.ones_like(v)
        want = (d * value.double() + 0.2 * h * base) / (d + 0.2 * h)
        assert torch.equal(got[name], want.to(torch.bfloat16)), name


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("coupling", ["decoupled", "adam"])
def test_parameters_larger_than_a_chunk_in_any_memory_layout(
    coupling: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(threads)  # the size of a chunk depends on it
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


@pytest.mark.parametrize("prior", [2.0, CURVATURE])
@pytest.mark.parametrize(("dtype", "metric"), [(torch.float64, False), (torch.bfloat16, True), (torch.float32, False)])
def test_a_batch_of_parameters_is_pulled_by_the_formula(dtype: torch.dtype, metric: bool, prior: Any) -> None:
    params = {name: value.to(dtype) for name, value in START.items()}
    squares = {name: GRADIENTS[0][name].pow(2).to(dtype) for name in SHAPES}
    kept = {name: value.to(torch.bfloat16) for name, value in CURVATURE.items()}
    correction = (1 - 0.9**3) ** -0.5
    batch = [
        prior_adamw._Piece(
            params[name].clone(),
            BASE[name].to(torch.bfloat16),
            kept[name] if isinstance(prior, dict) else None,
            squares[name] if metric else None,
            correction if metric else 1.0,
        )
        for name in SHAPES
    ]
    prior_adamw._pull_batch(batch, 0.3, "curvature" if isinstance(prior, dict) else prior, 1e-8)
    for name, piece in zip(SHAPES, batch, strict=True):
        h = 0.3 * (kept[name].double() if isinstance(prior, dict) else prior)
        d = squares[name].double().sqrt() * correction + 1e-8 if metric else 1.0
        theta, anchor = params[name].double(), BASE[name].to(torch.bfloat16).double()
        want = ((d * theta + h * anchor) / (d + h)).to(dtype)
        torch.testing.assert_close(piece.values, want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_a_learning_rate_may_be_a_tensor() -> None:
    rate = torch.tensor(0.1, dtype=torch.float64)
    assert_equal(run(prior=CURVATURE, lr=rate), run(prior=CURVATURE, lr=0.1))


def test_adams_metric_counts_steps_without_a_penalty() -> None:
    params, others = parameters(), parameters()
    optimizer, other = (
        gm.PriorAdamW(list(p.items()), anchor=BASE, prior=CURVATURE, lr=0.1, coupling="adam") for p in (params, others)
    )
    for strength, gradient in zip((1.0, 1.0, 0.0, 1.0), GRADIENTS, strict=False):
        optimizer.param_groups[0]["strength"] = other.param_groups[0]["strength"] = strength
        other.load_state_dict(copy.deepcopy(other.state_dict()))  # reads the count from Adam's state
        assert_equal(take_steps(optimizer, params, [gradient]), take_steps(other, others, [gradient]))


def ridge() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    y = x @ torch.randn(6, generator=generator, dtype=torch.float64) + torch.randn(
        40, generator=generator, dtype=torch.float64
    )
    base = torch.randn(6, generator=generator, dtype=torch.float64)
    h = torch.tensor([0.01, 0.1, 1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)
    return x, y, base, h


def distance_from_the_closed_form(
    steps: int, lr: Callable[[int], float], strength: float = 2.0, **options: Any
) -> float:
    """Full gradients of ½‖Xθ − y‖², with the penalty of 2H: how far the end is from (XᵀX + 2H)⁻¹(Xᵀy + 2H θ_base)."""
    x, y, base, h = ridge()
    want = torch.linalg.solve(x.T @ x + 2 * torch.diag(h), x.T @ y + 2 * h * base)
    theta = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    optimizer = gm.PriorAdamW(
        [("theta", theta)], prior={"theta": h}, anchor={"theta": base}, strength=strength, weight_decay=0.0, **options
    )
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr(step)
        optimizer.zero_grad()
        (x @ theta - y).pow(2).sum().div(2).backward()
        optimizer.step()
    return float((theta.detach() - want).norm() / want.norm())


def test_in_adams_metric_training_ends_at_the_minimizer_of_loss_and_penalty() -> None:
    assert distance_from_the_closed_form(1500, lambda t: 0.05 * 0.99**t, coupling="adam", betas=(0.9, 0.99)) < 1e-4


def test_decoupled_training_ends_at_the_minimizer_where_adam_is_gradient_descent() -> None:
    """With a huge ε, Adam's step is lr·g/ε, and a strength of 2/ε is the penalty of 2H."""
    eps = 1e8
    distance = distance_from_the_closed_form(1500, lambda _: 0.01 * eps, 2 / eps, eps=eps, betas=(0.0, 0.999))
    assert distance < 1e-5
