"""The studies of curvature at their smallest: what they change, and their numbers against slow ones."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiments.common.training import Training
from experiments.studies import report
from experiments.studies.__main__ import main
from experiments.studies.cases import case_of
from experiments.studies.data import Rows, dealt, digits, joined, relabelled, turned
from experiments.studies.linear import LOSSES, Linear, compare, state_of
from experiments.studies.models import estimated, network, residual, scored, trained
from experiments.studies.settings import DIALS, GENTLE, SCALES
from experiments.studies.whole import match_whole, products

import gradmerge as gm

TINY = SCALES["tiny"]
WIDTHS = (64, 4, 10)


def first(count: int, double: bool = False) -> Rows:
    rows = digits().take(torch.arange(count))
    return Rows(rows.pixels.double(), rows.labels) if double else rows


def test_images_are_turned_clockwise() -> None:
    rows = first(3)
    quarter = torch.rot90(rows.pixels.view(-1, 8, 8), -1, (1, 2)).flatten(1)
    torch.testing.assert_close(turned(rows, 90).pixels, quarter, atol=1e-5, rtol=0)
    image, found = rows.pixels[0].double().view(8, 8), turned(rows, 30).pixels[0].double().view(8, 8)
    cos, sin = math.cos(math.radians(30)), math.sin(math.radians(30))
    for y in range(8):
        for x in range(8):
            # Where the pixel was before: turned back about the middle, 3.5.
            left, up = cos * (x - 3.5) + sin * (y - 3.5) + 3.5, -sin * (x - 3.5) + cos * (y - 3.5) + 3.5
            total = 0.0
            for j in (math.floor(up), math.floor(up) + 1):
                for i in (math.floor(left), math.floor(left) + 1):
                    if 0 <= i < 8 and 0 <= j < 8:
                        total += (1 - abs(left - i)) * (1 - abs(up - j)) * (float(image[j, i]) + 1)
            assert float(found[y, x]) == pytest.approx(total - 1, abs=1e-5)


def test_rows_are_dealt_whole_and_a_share_stays_where_it_was() -> None:
    parts = [Rows(torch.full((40, 1), float(kind)), torch.arange(40) + 40 * kind) for kind in (0, 1)]
    for own in (0.0, 0.5, 1.0):
        hands = dealt(parts, own, seed=3)
        assert sorted(joined(*hands).labels.tolist()) == list(range(80))
        for kind, hand in enumerate(hands):
            assert len(hand.labels) == 40 and hand.pixels.flatten().eq(hand.labels // 40).all()
            stayed = int((hand.pixels == kind).sum())
            assert 40 * own <= stayed <= 40 and (own == 1 or stayed < 40)


def test_digits_swap_their_names_in_a_ring() -> None:
    rows = first(200)
    found = [{0: 1, 1: 2, 2: 0}.get(label, label) for label in rows.labels.tolist()]
    assert relabelled(rows, 3).labels.tolist() == found
    assert relabelled(rows, 0).labels.tolist() == rows.labels.tolist()


def test_a_dial_changes_one_thing() -> None:
    settings = SCALES["small"]
    plain = case_of(settings, 1, "kinds", 100)
    for dial, value in (("sizes", 10), ("epochs", 3), ("penalty", 10)):
        case = case_of(settings, 1, dial, value)
        assert torch.equal(case.base_rows.pixels, plain.base_rows.pixels)
        assert all(torch.equal(case.tests[name].pixels, rows.pixels) for name, rows in plain.tests.items())
        assert (case.strength, case.tuning.epochs) == {"penalty": (10, 30), "epochs": (0, 3)}.get(dial, (0, 30))
        assert [len(rows.labels) for rows in case.tasks] == ([564, 56] if dial == "sizes" else [310, 310])
    assert case_of(settings, 1, "base", 300).base.epochs == 300 and plain.base.epochs == 30
    assert case_of(settings, 1, "network", 4).shape == (64, 32, 32, 32, 32, 10)
    gentle = case_of(settings, 1, "network", GENTLE)
    assert gentle.shape is None and (gentle.base, gentle.tuning) == (settings.transformer, settings.gentle)
    used = [plain.base_rows, plain.held_out, plain.tests["upright"]]
    count = sum(len(rows.labels) for rows in (*used, *plain.tasks))
    assert count == len(digits().labels) and len(torch.cat([rows.pixels for rows in used]).unique(dim=0)) >= 1170


def test_scores_are_those_of_a_loop_over_rows() -> None:
    torch.manual_seed(0)
    rows = first(30)
    state, target = (dict(network(WIDTHS).state_dict()) for _ in range(2))
    found = scored(state, {"some": rows}, WIDTHS, target)["some"]
    losses, right, apart = [], [], []
    for image, label in zip(rows.pixels.double(), rows.labels.tolist(), strict=True):
        one, other = (network(WIDTHS, values).double()(image).detach().numpy() for values in (state, target))
        p, q = (np.exp(z) / np.exp(z).sum() for z in (one, other))
        losses.append(-math.log(p[label]))
        right.append(int(p.argmax()) == label)
        apart.append(float((q * np.log(q / p)).sum()))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert found["accuracy"] == pytest.approx(np.mean(right))
    assert found["kl"] == pytest.approx(np.mean(apart), rel=1e-5)


def test_tuning_under_the_penalty_comes_to_rest_where_loss_and_penalty_balance() -> None:
    rows = first(40)
    base = trained(None, rows, Training(3e-3, 3, 20), WIDTHS, seed=0)
    fisher = estimated(base, rows, WIDTHS, "diagonal").scale(30)
    task = turned(rows, 30)
    short, full = (
        trained(base, task, Training(3e-3, epochs, 40), WIDTHS, seed=0, prior=fisher, damping=1.0)
        for epochs in (5, 800)
    )
    penalty = {name: value + 1.0 for name, value in fisher.items()}
    assert residual(full, base, task, penalty, WIDTHS) < 0.01 < residual(short, base, task, penalty, WIDTHS)
    total, size = 0.0, 0.0
    model = network(WIDTHS, short).double()
    (torch.nn.functional.cross_entropy(model(task.pixels.double()), task.labels) * 40).backward()
    for name, value in model.named_parameters():
        pull = penalty[name].double() * (short[name].double() - base[name].double())
        total, size = total + float((value.grad + pull).square().sum()), size + float(pull.square().sum())
    assert residual(short, base, task, penalty, WIDTHS) == pytest.approx(math.sqrt(total / size), rel=1e-4)


@pytest.mark.parametrize("name", LOSSES)
def test_linear_models_are_fitted_with_their_hessians(name: str) -> None:
    rows, model = first(15, double=True), Linear(name)
    start = torch.linspace(-0.1, 0.1, 650, dtype=torch.float64)
    slow = torch.autograd.functional.hessian(lambda values: model.total(values, rows), start)
    torch.testing.assert_close(model.hessian(start, rows), slow)
    prior = torch.eye(650, dtype=torch.float64)
    found = model.fitted(start, rows, prior).requires_grad_()
    (model.total(found, rows) + 0.5 * (found - start).square().sum()).backward()
    assert float(found.grad.abs().max()) < 1e-9
    if name == "linear regression":
        inputs = np.hstack([rows.pixels.numpy(), np.ones((15, 1))])
        weights = start.view(10, 65).numpy()
        wanted = np.eye(10)[rows.labels] - inputs @ weights.T
        slow = weights + np.linalg.solve(2 * inputs.T @ inputs + np.eye(65), 2 * inputs.T @ wanted).T
        np.testing.assert_allclose(found.detach().view(10, 65), slow, atol=1e-10)
        assert torch.equal(state_of(found)["bias"], found.view(10, 65)[:, 64])


def test_matching_is_joint_training_for_linear_regression_and_not_by_diagonals() -> None:
    rows = first(60, double=True)
    parts = [rows.take(torch.arange(start, start + 20)) for start in (0, 20, 40)]
    found = compare("linear regression", 1.0, parts[0], parts[1:], parts)
    for name in ("full", "kronecker", "all data", "joint, from elsewhere"):
        assert found[name]["distance"] < 1e-8 and found[name]["loss"] == pytest.approx(found["joint"]["loss"])
    assert min(found[name]["distance"] for name in ("average", "task-arithmetic", "diagonal", "base")) > 0.1


def test_the_whole_matrix_is_that_of_a_linear_model() -> None:
    torch.manual_seed(0)
    rows, model = first(60, double=True), Linear("logistic regression")
    parts = [rows.take(torch.arange(start, start + 20)) for start in (0, 20, 40)]
    starts = [0.1 * torch.randn(650, dtype=torch.float64) for _ in parts]
    base, *tuned = ({f"0.{name}": value.float() for name, value in state_of(one).items()} for one in starts)
    found = match_whole((64, 10), base, tuned, *single(parts), damping=2.0)
    prior, *own = (model.hessian(one, part) for one, part in zip(starts, parts, strict=True))
    nothing = torch.zeros_like(prior)
    slow = gm.gradient_matching_full(
        starts[0], starts[1:], prior + 2 * torch.eye(650, dtype=torch.float64), own, penalty=nothing
    )
    moved = torch.cat([found["0.weight"], found["0.bias"][:, None]], 1).flatten().double() - starts[0]
    assert float((moved - (slow - starts[0])).norm() / (slow - starts[0]).norm()) < 1e-3


def single(parts: Sequence[Rows]) -> tuple[Rows, list[Rows]]:
    """The base's rows and the tasks', in float32 as networks take them."""
    base, *tasks = (Rows(rows.pixels.float(), rows.labels) for rows in parts)
    return base, tasks


def test_products_with_the_matrix_of_a_transformer_are_those_of_its_jacobian() -> None:
    torch.manual_seed(0)
    model, rows = network(None), first(3)
    state = dict(model.state_dict())
    size = sum(value.numel() for value in state.values())
    vector, found = torch.randn(size), torch.zeros(size)
    for row in model(rows.pixels):
        slopes = [torch.autograd.grad(logit, list(model.parameters()), retain_graph=True) for logit in row]
        jacobian = torch.stack([torch.cat([one.flatten() for one in each]) for each in slopes])
        p = row.detach().softmax(-1)
        found += jacobian.T @ (torch.diag(p) - torch.outer(p, p)) @ jacobian @ vector
    torch.testing.assert_close(products(None, state, rows)(vector), found, rtol=1e-3, atol=1e-5)


def test_the_share_of_the_gap_is_that_between_average_and_joint_training() -> None:
    def scores(*losses: float) -> dict[str, Any]:
        return {kind: {"loss": loss} for kind, loss in zip("abc", losses, strict=True)}

    case = {
        "trained_on": {"a": 300, "b": 600, "c": 100},
        "scores": {"average": scores(1, 2, 3), "joint": scores(0.5, 0.5, 2), "mine": scores(1, 1, 3)},
    }
    assert report.mean(case, "average") == 2 and report.mean(case, "average", by_rows=True) == pytest.approx(1.8)
    assert report.share(case, "mine", report.mean) == pytest.approx(100 * (1 / 3) / 1)
    assert report.share(case, "joint", report.mean) == 100
    by_rows: Callable[..., float] = lambda one, name: report.mean(one, name, by_rows=True)  # noqa: E731
    assert report.share(case, "mine", by_rows) == pytest.approx(100 * (1.8 - 1.2) / (1.8 - 0.65))


def test_a_run_has_every_study_with_its_table_and_figure(tmp_path: Path) -> None:
    assert main(["--scale", "tiny", "--seeds", "0", "-o", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert [seed["studies"].keys() for seed in results["seeds"]] == [DIALS.keys()]
    for dial, (case,) in results["seeds"][0]["studies"].items():
        names = set(case["scores"])
        assert {"average", "joint", "joint again", "kronecker, P = 0", "diagonal, P = H_0"} <= names
        assert ("kronecker, P = 0, mean" in names) == (dial == "sizes")
        assert ("kronecker, P = 0, held out" in names) == (dial == "base")
        assert all(one["kl"] == 0 for one in case["scores"]["joint"].values())
        assert all(one["kl"] > 0 for one in case["scores"]["average"].values())
    page, figures = (tmp_path / "results.md").read_text(), sorted((tmp_path / "figures").glob("*.svg"))
    assert [file.stem for file in figures] == sorted([*DIALS, "linear"])
    assert "| gradient matching, Kronecker, P = 0 |" in page
    assert all("gradient matching, Kronecker" in file.read_text() for file in figures)


def test_a_dry_run_says_what_would_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "sizes 30, task 2, from the base: 20 rows, batches of 32, 30 epochs, 30 steps" in said
    assert "160 trainings, " in said and not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stop:
        main(["--scale", "full", "-o", str(tmp_path / "out")])
    assert stop.value.code == 2 and "has the scales small and tiny" in capsys.readouterr().err
