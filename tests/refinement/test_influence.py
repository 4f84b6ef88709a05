"""Influence steps against retraining, dense solves with plain autograd, and losses computed separately."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.losses import LOSSES
from gradmerge.refinement import influence, rows
from gradmerge.refinement.influence import Dataset, KroneckerBasis, remove_influence
from gradmerge.refinement.rows import count_common_rows, hold_out

from ..curvature.families import FAMILIES, batch_of
from .making import Batch, batches, classes, perceptron


def mean_loss(model: nn.Module, data: Batch) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data[0]), data[1]))


def row_losses(model: nn.Module, data: Batch) -> np.ndarray[Any, Any]:
    with torch.no_grad():
        return nn.functional.cross_entropy(model(data[0]), data[1], reduction="none").numpy()


def trained_on(model: nn.Module, data: Batch, steps: int = 60) -> nn.Module:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

    def closure() -> Any:
        optimizer.zero_grad()
        squares = sum(parameter.square().sum() for parameter in model.parameters())
        loss = nn.functional.cross_entropy(model(data[0]), data[1]) + 1e-3 * squares
        loss.backward()
        return loss

    optimizer.step(closure)
    optimizer.zero_grad()
    return model


def joined(*parts: Batch) -> Batch:
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def held_out_of(retain: Batch) -> Batch:
    return joined(*hold_out("retain", batches(retain))[1])


@pytest.fixture(scope="module")
def task() -> tuple[nn.Module, Batch, Batch]:
    """A perceptron that was trained on two datasets, the retain set and the forget set."""
    retain, forget = classes(200, 0), classes(100, 1, shift=2.0)
    return trained_on(perceptron(hidden=12), joined(retain, forget)), retain, forget


# One step.


def slow_direction(model: nn.Module, forget: Batch, retain: Batch, size: int) -> Tensor:
    """(S + λ)⁻¹ g of a perceptron with two classes: dense solves, and one backward pass for every row and label."""

    def outer_products(layer: nn.Module) -> tuple[Tensor, Tensor]:
        """A and G of a layer over the retain set, with the expectation over both labels."""
        seen: dict[str, Any] = {}
        handles = [
            layer.register_forward_hook(lambda module, inputs, output: seen.update(x=inputs[0], y=output)),
        ]
        inside: Any = 0.0
        outside: Any = 0.0
        for x in retain[0]:
            logits = model(x[None])
            wide = torch.cat([seen["x"][0], torch.ones(1, dtype=torch.float64)]).detach()
            inside = inside + torch.outer(wide, wide)
            logs = logits.log_softmax(-1)[0]
            for label in range(2):
                [g] = torch.autograd.grad(-logs[label], seen["y"], retain_graph=True)
                outside = outside + logs[label].exp().detach() * torch.outer(g[0], g[0])
        for handle in handles:
            handle.remove()
        return inside, outside

    layers = [module for module in model if isinstance(module, nn.Linear)]  # type: ignore[attr-defined]
    scale = size / len(retain[0])
    matrices = []
    for layer in layers:
        inside, outside = outer_products(layer)
        matrices.append(scale * torch.kron(outside, inside) / len(retain[0]))
    damping = 0.1 * float(torch.cat([torch.linalg.eigvalsh(matrix) for matrix in matrices]).mean())
    loss = nn.functional.cross_entropy(model(forget[0]), forget[1], reduction="sum")
    found = []
    for layer, matrix in zip(layers, matrices, strict=True):
        weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
        g = torch.cat([weight, bias[:, None]], 1)
        solved = torch.linalg.solve(matrix + damping * torch.eye(len(matrix)).double(), g.flatten()).view(g.shape)
        found += [solved[:, :-1].flatten(), solved[:, -1]]
    return torch.cat(found)


def test_one_step_is_a_dense_kronecker_solve_with_the_longest_length_within_the_budget() -> None:
    retain, forget = classes(120, 0, labels=2), classes(40, 1, labels=2, shift=2.0)
    model = trained_on(perceptron(labels=2), joined(retain, forget))
    start = copy.deepcopy(model)
    result = gm.remove(model, forget=batches(forget), retain=batches(retain), budget=0.05, progress=False)
    rest, held_out = (joined(*some) for some in hold_out("retain", batches(retain)))
    assert result.rows == {"forget_rows": 40, "retain_rows": 108, "held_out_rows": 12, "retain_size": 120}
    direction = slow_direction(start, forget, rest, size=120)
    torch.testing.assert_close(weights(model), weights(start) + result.s * direction, rtol=1e-8, atol=1e-10)

    def after(s: float) -> float:
        moved = copy.deepcopy(start)
        torch.nn.utils.vector_to_parameters(weights(start) + s * direction, moved.parameters())
        return mean_loss(moved, held_out)

    limit = 1.05 * mean_loss(start, held_out)
    assert after(result.s) <= limit < after(1.001 * influence.PRECISION * result.s)
    assert result.after.retain == pytest.approx(after(result.s)) and result.used <= 0.05
    assert (result.before.forget, result.after.forget) == pytest.approx(
        (mean_loss(start, forget), mean_loss(model, forget))
    )
    assert result.after.forget > result.before.forget


def numbers(seed: int, count: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    truth = torch.randn(4, 2, generator=torch.Generator().manual_seed(seed + 50), dtype=torch.float64)
    return x, x @ truth + noise


def least_squares(data: Batch) -> Tensor:
    """[W b] of the best linear model."""
    wide = torch.cat([data[0], torch.ones(len(data[0]), 1, dtype=torch.float64)], 1)
    return torch.linalg.lstsq(wide, data[1]).solution.T


def linear(solution: Tensor) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(solution[:, :-1])
        model[0].bias.copy_(solution[:, -1])
    return model


def test_in_linear_regression_a_step_of_length_1_is_retraining(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss is quadratic, and the Kronecker curvature of one layer is exact."""
    monkeypatch.setattr(influence, "DAMPING", 0.0)
    retain, forget = numbers(0, 60), numbers(1, 20)
    model = linear(least_squares(joined(retain, forget)))
    start, squared = weights(model), LOSSES["squared"]
    sets = [Dataset(batches(data), squared) for data in (forget, retain, retain)]
    result = remove_influence(model, *sets, retain_size=60, budget=0.01)
    direction = (weights(model) - start) / result.s
    torch.testing.assert_close(start + direction, weights(linear(least_squares(retain))), rtol=1e-9, atol=1e-9)


def test_curvature_of_a_sample_is_scaled_to_the_retain_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """A linear model, S from 30 of 60 rows that stand for 600."""
    monkeypatch.setattr(influence, "SAMPLE_ROWS", 30)
    retain, forget = numbers(0, 60), numbers(1, 20)
    solution = least_squares(joined(retain, forget))
    model = linear(solution)
    sets = [Dataset(batches(data), LOSSES["squared"]) for data in (forget, retain, retain)]
    result = remove_influence(model, *sets, retain_size=600, budget=0.05)
    sample = torch.cat([x for x, _ in rows.sample_rows(batches(retain), 30)])
    assert len(sample) == 30 and all((row == retain[0]).all(1).any() for row in sample)
    wide, other = (torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1) for x in (sample, forget[0]))
    hessian = 600 / 30 * torch.kron(torch.eye(2, dtype=torch.float64), 2 * wide.T @ wide)
    damping = 0.1 * float(hessian.diagonal().mean())
    gradient = (2 * (other @ solution.T - forget[1]).T @ other).flatten()
    direction = torch.linalg.solve(hessian + damping * torch.eye(10, dtype=torch.float64), gradient)
    moved = torch.cat([model[0].weight, model[0].bias[:, None]], 1).detach() - solution
    torch.testing.assert_close(moved.flatten(), result.s * direction, rtol=1e-8, atol=1e-10)
    assert result.steps[0].damping == pytest.approx(damping, rel=1e-8)


def test_the_standard_errors_are_those_of_the_row_losses(task: Any) -> None:
    model, retain, forget = copy.deepcopy(task[0]), task[1], task[2]
    result = gm.remove(model, forget=batches(forget), retain=batches(retain), progress=False)
    errors = result.facts()["standard_errors"]
    before, after = row_losses(task[0], forget), row_losses(model, forget)
    for name, losses in (("before", before), ("after", after), ("rise", after - before)):
        assert errors[name]["forget"] == pytest.approx(losses.std(ddof=1) / np.sqrt(len(losses)), rel=1e-4)
    a, b = (row_losses(which, held_out_of(retain)) for which in (task[0], model))
    count = len(a)
    left = [(b.sum() - b[i]) / (a.sum() - a[i]) - 1 for i in range(count)]
    jackknife = np.sqrt((count - 1) / count * np.square(left - np.mean(left)).sum())
    assert result.used == pytest.approx(b.sum() / a.sum() - 1, rel=1e-4)
    assert errors["used"]["retain"] == pytest.approx(jackknife, rel=0.2)


def test_a_module_is_changed_in_place_except_for_frozen_parameters(task: Any) -> None:
    model = copy.deepcopy(task[0])
    model[0].requires_grad_(False)
    first, last = model[0].weight.clone(), model[2].weight.detach().clone()
    result = gm.remove(model, forget=batches(task[2]), retain=iter(batches(task[1])), progress=False)
    assert result.model is model and torch.equal(model[0].weight, first) and not torch.equal(model[2].weight, last)


# Several steps.


def test_several_steps_end_where_the_loss_reaches_the_level_within_the_budget(task: Any) -> None:
    retain, forget = task[1], task[2]
    given: Any = {"forget": batches(forget), "retain": batches(retain), "budget": 0.2, "progress": False}
    one = gm.remove(copy.deepcopy(task[0]), **given)
    low = (one.before.forget + one.after.forget) / 2
    model = copy.deepcopy(task[0])
    result = gm.remove(model, **given, steps=6, until=low)
    assert len(result.steps) < 6 and result.until == low
    assert result.before.forget < mean_loss(model, forget) <= low
    high, model = 1.5 * one.after.forget, copy.deepcopy(task[0])
    result = gm.remove(model, **given, steps=3, until=high)
    start = mean_loss(task[0], held_out_of(retain))
    assert len(result.steps) <= 3 and mean_loss(model, forget) <= high
    for number, step in enumerate(result.steps, 1):
        taken = next(trial for trial in step.trials if trial.s == step.s)
        assert taken.retain <= (1 + 0.2 * number / 3) * start
    assert result.s == pytest.approx(sum(step.s for step in result.steps))


def test_an_error_during_a_step_leaves_the_model_as_it_was(task: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, losses, calls = copy.deepcopy(task[0]), influence._Run.losses, iter(range(100))

    def interrupted(*arguments: Any) -> Tensor:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return losses(*arguments)

    monkeypatch.setattr(influence._Run, "losses", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gm.remove(model, forget=batches(task[2]), retain=batches(task[1]), progress=False)
    assert torch.equal(weights(model), weights(task[0]))


# Requests.


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"budget": 0}, "budget"),
        ({"budget": "2"}, "budget"),
        ({"steps": 0}, "steps"),
        ({"until": 1.0, "unseen": batches(classes(9))}, "unseen"),
        ({"max_kronecker_dim": -1}, "max_kronecker_dim"),
        ({"retain": None}, "retain"),
        ({"retain_size": 150}, "retain_size"),
        ({"limit": 3}, "limit"),
        ({"retain": batches(classes(1))}, "retain"),
    ],
)
def test_wrong_requests_are_refused(task: Any, options: dict[str, Any], names: str) -> None:
    model, before = task[0], weights(task[0])
    given: Any = {"forget": batches(task[2]), "retain": batches(task[1]), **options}
    with pytest.raises(gm.InputError, match=names):
        gm.remove(model, given.pop("out", None), **given)
    assert torch.equal(weights(model), before)


def test_rows_are_compared_without_their_padding() -> None:
    short = {"input_ids": [[5, 6, 0], [7, 8, 9]], "attention_mask": [[1, 1, 0], [1, 1, 1]], "labels": [1, 0]}
    long = {"input_ids": [[5, 6, 0, 0], [7, 8, 9, 4]], "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 1]], "labels": [1, 0]}
    one, other = ({name: torch.tensor(value) for name, value in batch.items()} for batch in (short, long))
    assert count_common_rows([one], [other]) == 1
    assert count_common_rows([one], [{**other, "labels": torch.tensor([0, 0])}]) == 0
    # Text to text: labels of the batch's width or of another, and longer than the row's own text.
    targets = torch.tensor([[3, 4, 5], [6, -100, -100]])
    wider = torch.tensor([[3, 4, 5, -100], [6, 2, 2, 2]])
    assert count_common_rows([{**one, "labels": targets}], [{**other, "labels": wider}]) == 1


# The Kronecker basis.


def test_solving_is_a_dense_solve_with_every_layers_kronecker_matrix() -> None:
    model = perceptron()
    curvature = estimate_curvature(model, batches(classes(50)), "exact", kind="kronecker")
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    basis = KroneckerBasis(curvature, 2.0)
    solution, eigenvalues = basis.solve(gradient, 0.1), []
    for name in ("0", "2"):
        layer = curvature.layers[f"{name}.weight"]
        matrix = 2 * torch.kron(layer.outputs, layer.inputs) / layer.tokens
        eigenvalues.append(torch.linalg.eigvalsh(matrix))
        g = torch.cat([gradient[f"{name}.weight"], gradient[f"{name}.bias"][:, None]], 1)
        want = torch.linalg.solve(matrix + 0.1 * torch.eye(len(matrix)).double(), g.flatten()).view(g.shape)
        torch.testing.assert_close(solution[f"{name}.weight"], want[:, :-1])
        torch.testing.assert_close(solution[f"{name}.bias"], want[:, -1])
    assert basis.mean() == pytest.approx(float(torch.cat(eigenvalues).mean()))


@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_every_parameter_of_a_transformer_gets_a_solution_of_its_shape(family: str) -> None:
    found = FAMILIES[family]
    model = found.model()
    curvature = estimate_curvature(model, [batch_of(found.examples())], "sampled", kind="kronecker")
    gradient = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    solution = KroneckerBasis(curvature).solve(gradient, 1e9)
    assert solution.keys() == gradient.keys()
    for name, value in solution.items():  # the damping is far larger than the curvature
        torch.testing.assert_close(value * 1e9, gradient[name], rtol=1e-4, atol=1e-4)
