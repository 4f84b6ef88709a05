"""Differential privacy: what a row can change is bounded, ε is what theory says, and the ledger does not forget."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev

from gradmerge.errors import InputError
from gradmerge.federated.answerer import Answerer
from gradmerge.federated.privacy import Bounds, BudgetSpent, Ledger, PrivateOwner, _gaussian, epsilon_of
from gradmerge.federated.running import refine_with_clients
from gradmerge.federated.wire import digest, weights
from gradmerge.refinement.owners import DataOwner
from gradmerge.tasks.loading import DEFAULTS

from ..refinement.making import classes, perceptron
from .making import OPTIONS, GridHere, client_settings, replies_of, server_settings, write_place

BOUNDS = Bounds(noise=2.0, clip=1.3, clip_loss=0.7, clip_curvature=0.05)


def owner_of(x: torch.Tensor, y: torch.Tensor, bounds: Bounds = BOUNDS) -> PrivateOwner:
    return PrivateOwner(DataOwner("a", [(x[:20], y[:20]), (x[20:-5], y[20:-5])], [(x[-5:], y[-5:])]), bounds)


def directions_of(model: nn.Module, count: int) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{name: torch.randn_like(p) for name, p in model.named_parameters()} for _ in range(count)]


def flat(values: Any) -> torch.Tensor:
    return torch.cat([value.flatten() for value in values.values()])


def slow_gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Every row's gradient, one backward pass each."""
    found = []
    for row in range(len(x)):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1], reduction="sum").backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    return found


def test_every_rows_gradient_is_cut_to_the_bound() -> None:
    model, (x, y) = perceptron(), classes(45)
    own = slow_gradients(model, x[:40], y[:40])
    lengths = torch.stack([g.norm() for g in own])
    assert (lengths > BOUNDS.clip).any() and (lengths < BOUNDS.clip).any()
    want = sum(g * min(1.0, BOUNDS.clip / float(g.norm())) for g in own)
    torch.testing.assert_close(flat(owner_of(x, y).clipped_gradient(model)), want)


def test_every_rows_curvature_along_directions_is_cut_to_the_bound() -> None:
    model, (x, y) = perceptron(), classes(45)
    directions = directions_of(model, 2)
    total, cut = torch.zeros(2, 2, dtype=torch.float64), 0
    names = dict(model.named_parameters())
    for row in range(40):
        jacobian = jacrev(lambda p, row=row: functional_call(model, p, (x[row],)))(
            {n: p.detach() for n, p in names.items()}
        )
        logits = model(x[row]).detach()
        middle = hessian(lambda z, row=row: nn.functional.cross_entropy(z, y[row]))(logits)
        moves = torch.stack(
            [sum((jacobian[n].flatten(1) @ d[n].flatten() for n in names), torch.zeros(3)) for d in directions], 1
        )
        own = moves.T @ middle @ moves
        cut += float(own.norm()) > BOUNDS.clip_curvature
        total += own * min(1.0, BOUNDS.clip_curvature / float(own.norm()))
    assert cut > 0
    torch.testing.assert_close(owner_of(x, y).clipped_along(model, directions), total)


@pytest.mark.parametrize("row", [0, 25, 39, 42])
def test_one_row_taken_out_moves_no_sum_by_more_than_its_bound(row: int) -> None:
    """The row is one that the model has never seen the like of, with a label that it finds absurd."""
    model, (x, y) = perceptron(), classes(45)
    x[row] *= 100
    y[row] = model(x[row]).argmin()
    rest = [place for place in range(45) if place != row]
    both = (
        owner_of(x, y),
        PrivateOwner(
            DataOwner(
                "a",
                [(x[p : p + 1], y[p : p + 1]) for p in rest if p < 40],
                [(x[p : p + 1], y[p : p + 1]) for p in rest if p >= 40],
            ),
            BOUNDS,
        ),
    )
    directions = directions_of(model, 3)
    gradients, matrices = (
        [one(o) for o in both]
        for one in (lambda o: flat(o.clipped_gradient(model)), lambda o: o.clipped_along(model, directions))
    )
    assert float((gradients[0] - gradients[1]).norm()) <= BOUNDS.clip * (1 + 1e-9)
    assert float((matrices[0] - matrices[1]).norm()) <= BOUNDS.clip_curvature * (1 + 1e-9)
    for held in (False, True):
        losses = [o.clipped_losses(model, held=held) for o in both]
        assert 0 <= losses[0] - losses[1] <= BOUNDS.clip_loss * (1 + 1e-9)
    if row < 40:  # the bound is reached
        assert float((gradients[0] - gradients[1]).norm()) > 0.99 * BOUNDS.clip


def test_a_row_without_a_finite_gradient_counts_as_none() -> None:
    model, (x, y) = perceptron(), classes(45)
    x[3] = float("nan")
    found = flat(owner_of(x, y).clipped_gradient(model))
    x[3] = 0
    want = owner_of(x, y).clipped_gradient(model)
    assert bool(found.isfinite().all()) and float((found - flat(want)).norm()) <= BOUNDS.clip * (1 + 1e-9)
    assert math.isfinite(owner_of(x * math.nan, y).clipped_losses(model, held=True))


class _Mates(nn.Module):
    """Logits that depend on what else is in the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.own = perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x + (x.sum(0) if len(x) > 1 else 0))


def test_a_rows_part_does_not_depend_on_other_rows() -> None:
    """A server can send weights that make as much of a last bit, which padding and other rows decide."""
    (x, y), model = classes(45), _Mates()
    alone = model.own
    directions = directions_of(alone, 2)
    of_both = directions_of(model, 2)
    torch.testing.assert_close(
        flat(owner_of(x, y).clipped_gradient(model)), flat(owner_of(x, y).clipped_gradient(alone))
    )
    along = [owner_of(x, y).clipped_along(one, d) for one, d in ((model, of_both), (alone, directions))]
    torch.testing.assert_close(*along)
    for held in (False, True):
        losses = [owner_of(x, y).clipped_losses(one, held=held) for one in (model, alone)]
        assert losses[0] == pytest.approx(losses[1])


def test_noise_is_of_the_systems_source_and_not_of_a_generator_with_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first = _gaussian(1000)
    torch.manual_seed(0)
    assert not torch.equal(first, _gaussian(1000))
    drawn: list[int] = []
    for byte, want in ((b"\x00", -8.2095), (b"\xff", 8.2095)):
        monkeypatch.setattr("os.urandom", lambda count, byte=byte: drawn.append(count) or byte * count)
        assert _gaussian(3).tolist() == pytest.approx([want] * 3, rel=1e-4)
    assert drawn == [24, 24]


def test_noise_has_the_size_that_is_stated_and_is_never_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = perceptron(), classes(45)
    directions, points = directions_of(model, 2), torch.zeros(4, 2, dtype=torch.float64)
    owner = owner_of(x, y)
    clean, straight = owner.clipped_gradient(model), owner.clipped_along(model, directions)
    rows, held_sum = owner.clipped_losses(model, held=False), owner.clipped_losses(model, held=True)
    monkeypatch.setattr(owner, "clipped_gradient", lambda model: clean)
    monkeypatch.setattr(owner, "clipped_along", lambda model, directions: straight)
    noise = torch.cat([flat(owner.gradient(model)) - flat(clean) for _ in range(100)])
    assert float(noise.std()) == pytest.approx(BOUNDS.noise * BOUNDS.clip, rel=0.1)
    assert abs(float(noise.mean())) < 6 * BOUNDS.noise * BOUNDS.clip / math.sqrt(len(noise))
    matrices = torch.stack([owner.along(model, directions) - straight for _ in range(500)])
    assert torch.equal(matrices, matrices.mT)
    upper = matrices[:, *torch.triu_indices(2, 2)]
    assert float(upper.std()) == pytest.approx(BOUNDS.noise * BOUNDS.clip_curvature, rel=0.15)
    monkeypatch.setattr(owner, "clipped_losses", lambda model, held: held_sum if held else rows)
    pairs = torch.tensor([owner.losses(model) for _ in range(1000)]) - torch.tensor([rows, held_sum / 5])
    want = BOUNDS.noise * BOUNDS.clip_loss
    assert pairs.std(0).tolist() == pytest.approx([want, want / 5], rel=0.15)
    four = (
        torch.tensor([owner.losses_at_points(model, directions, points, held=True) for _ in range(300)]) - held_sum / 5
    )
    assert float(four.std()) == pytest.approx(2 * want / 5, rel=0.15)
    assert not torch.equal(flat(owner_of(x, y).gradient(model)), flat(owner_of(x, y).gradient(model)))


@pytest.mark.parametrize(("noise", "count", "delta"), [(1.0, 1, 1e-5), (4.0, 40, 1e-5), (8.0, 100, 1e-6)])
def test_epsilon_is_what_theory_gives(noise: float, count: int, delta: float) -> None:
    """Rényi: k α/(2 z²) at every order, turned into (ε, δ). The exact ε of k Gaussians is below, and not far."""
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    want = min(
        count * a / (2 * noise**2) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )
    found = epsilon_of([(noise, count)], delta)
    assert found == pytest.approx(want, rel=1e-9)
    assert (
        exact_epsilon(math.sqrt(count) / noise, delta) < found < 1.25 * exact_epsilon(math.sqrt(count) / noise, delta)
    )
    assert epsilon_of([(noise, 1)] * count, delta) == pytest.approx(found)


def exact_epsilon(mu: float, delta: float) -> float:
    """Of a Gaussian mechanism: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), solved by halving."""
    phi = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1).cdf
    low, high = 0.0, 200.0
    for _ in range(200):
        middle = (low + high) / 2
        first, second = (float(phi(torch.tensor(sign * mu / 2 - middle / mu, dtype=torch.float64))) for sign in (1, -1))
        low, high = (middle, high) if first - math.exp(middle) * second > delta else (low, middle)
    return high


def test_the_ledger_keeps_to_the_budget_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "ledger.json"
    most = epsilon_of([(4.0, 5)], 1e-5)
    for count in range(1, 6):
        assert Ledger(path, budget=most, delta=1e-5).add(4.0) == pytest.approx(epsilon_of([(4.0, count)], 1e-5))
    with pytest.raises(BudgetSpent):
        Ledger(path, budget=most, delta=1e-5).add(4.0)
    assert Ledger(path, budget=most, delta=1e-5).spent == pytest.approx(most)
    assert json.loads(path.read_text())["releases"] == [[4.0, 5]]
    for text in (
        "",
        "[]",
        '{"format": "gradmerge-privacy/1", "releases": [[0, 1]]}',
        '{"format": "x", "releases": []}',
    ):
        path.write_text(text)
        with pytest.raises(InputError, match="is not a ledger"):
            Ledger(path, budget=most, delta=1e-5).add(4.0)
        assert path.read_text() == text


def test_answers_of_two_clients_at_once_are_both_counted(tmp_path: Path) -> None:
    """By a link too: it is the file that is counted in."""
    (tmp_path / "link").symlink_to(tmp_path / "ledger")

    def add(name: str) -> None:
        ledger = Ledger(tmp_path / name, budget=1e9, delta=1e-5)
        for _ in range(20):
            ledger.add(4.0)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(add, ("ledger", "link")))
    assert json.loads((tmp_path / "ledger").read_text())["releases"] == [[4.0, 40]]
    assert (tmp_path / "link").is_symlink()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("private"))


def test_with_privacy_all_that_is_told_is_counted_and_the_rest_is_not_told(place: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "a.ledger"
    loading = DEFAULTS | OPTIONS | {"limit": 12}
    settings = client_settings(place, "a", noise=0.05, epsilon=1e9, ledger=str(ledger), loading=loading)
    said: list[str] = []
    with Answerer(settings, said.append) as answerer:
        grid = GridHere(replies_of(answerer))
        done = refine_with_clients(grid, server_settings(place, tmp_path / "out", clients=1), said.append)
        questions = [kind for kind in grid.asked if kind not in ("query.hello", "query.end")]
        assert set(questions) == {"query.losses", "query.gradient", "query.along", "query.points"}
        assert json.loads(ledger.read_text())["releases"] == [[0.05, len(questions)]]
        spent = epsilon_of([(0.05, len(questions))], 1e-5)
        assert done["clients"]["a"]["privacy"]["epsilon"] == pytest.approx(spent)
        assert f"client a: ε = {spent:.3g} in all, at δ = 1e-05" in said
        assert any("steps follow the gradient" in text for text in done["notes"])
        state = weights(answerer._model)
        for kind in ("score", "curvature", "metrics", "__init__"):
            facts, groups = answerer.answer(kind, {"mark": "0", "model": digest(state)}, {"state": state})
            assert "does not answer that kind" in facts["refused"] and not groups
        assert json.loads(ledger.read_text())["releases"] == [[0.05, len(questions)]]


def test_a_client_whose_budget_is_spent_refuses_and_says_so(place: Path, tmp_path: Path) -> None:
    budget = epsilon_of([(4.0, 1)], 1e-5)
    with Answerer(client_settings(place, "a", noise=4.0, epsilon=budget, ledger=str(tmp_path / "l"))) as answerer:
        state = weights(answerer._model)
        question = ("losses", {"mark": "0", "model": digest(state)}, {"state": state})
        assert answerer.answer(*question)[0]["epsilon"] == pytest.approx(budget)
        assert answerer.answer(*question)[0] == {"refused": "its privacy budget is spent"}
