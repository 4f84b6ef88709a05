"""The search for weights, against brute force on problems whose loss is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import gradmerge as gm
from gradmerge.compare import predict, search

SIZE = 12


def suggested(recipe: Any, **options: Any) -> gm.Preview:
    return gm.preview(recipe, suggest=True, **options)


def weights_of(found: gm.Preview) -> dict[str, Any]:
    best = found.best()
    assert best is not None
    return found.weights(best)


class Regression:
    """Linear regressions with XᵀX diagonal: a model is one vector, and the diagonal curvature is the whole Hessian."""

    def __init__(self, path: Path, counts: tuple[int, ...] = (60, 30, 90), seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.path, self.names = path, ["base", "a", "b", "c"][: len(counts)]
        self.data: list[tuple[Tensor, Tensor]] = []
        self.best: list[Tensor] = []
        self.hessians: list[Tensor] = []
        for name, count in zip(self.names, counts, strict=True):
            # Orthonormal columns, each stretched by its own factor: XᵀX is diagonal.
            x = torch.linalg.qr(normal(count, SIZE)).Q * (3 * normal(SIZE).abs() + 0.3)
            y = x @ normal(SIZE) + 0.1 * normal(count)
            best = torch.linalg.lstsq(x, y[:, None]).solution[:, 0]
            self.data.append((x, y))
            self.best.append(best)
            self.hessians.append((x.T @ x).diagonal())
            save_file({"weight": best}, path / f"{name}.safetensors")
            gm.Curvature({"weight": self.hessians[-1].float()}, count, "exact", name).save(path / f"{name}-curvature")
        self.recipe: dict[str, Any] = {
            "method": "task-arithmetic",
            "base": self._entry("base"),
            "models": [self._entry(name) for name in self.names[1:]],
        }

    def _entry(self, name: str) -> dict[str, Any]:
        return {"model": str(self.path / f"{name}.safetensors"), "curvature": str(self.path / f"{name}-curvature")}

    def merged(self, method: str, weights: Tensor) -> Tensor:
        """Rows of weights → rows of merged models."""
        base, deltas = self.best[0], torch.stack([tuned - self.best[0] for tuned in self.best[1:]])
        if method == "task-arithmetic":
            return base + weights @ deltas
        prior, hs = self.hessians[0] + 1e-10, torch.stack(self.hessians[1:])
        return base + (weights @ ((prior + hs) * deltas)) / (prior + weights @ hs)

    def losses(self, merged: Tensor) -> Tensor:
        """Rows of models → (tasks, then the base): mean excess over examples of ½(xᵀθ − y)², exactly quadratic."""
        columns = []
        for i in [*range(1, len(self.best)), 0]:
            x, y = self.data[i]
            excess = 0.5 * (merged @ x.T - y).square() - 0.5 * (x @ self.best[i] - y).square()
            columns.append(excess.mean(1))
        return torch.stack(columns, 1)

    def brute_force(self, method: str, steps: int = 301) -> tuple[Tensor, float]:
        side = torch.linspace(0, 1.5, steps, dtype=torch.float64)
        points = torch.cartesian_prod(side, side)
        losses = self.losses(self.merged(method, points))
        scores = losses.amax(1)
        return points[scores.argmin()], float(scores.min())


@pytest.mark.parametrize("method", ["task-arithmetic", "gradient-matching"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_weights_are_those_of_brute_force_where_the_curvature_is_the_whole_truth(
    tmp_path: Path, method: str, seed: int
) -> None:
    problem = Regression(tmp_path, seed=seed)
    found = suggested({**problem.recipe, "method": method})
    where, smallest = problem.brute_force(method)
    weights = torch.tensor(list(weights_of(found).values()), dtype=torch.float64)
    losses = problem.losses(problem.merged(method, weights[None]))[0]
    reached = float(losses.max())
    assert reached <= smallest * 1.01, (weights, where)
    best = found.best()
    assert best is not None and best.score == pytest.approx(reached, rel=1e-4), "curvature is stored in float32"
    assert list(best.values.values()) == pytest.approx(losses.tolist(), rel=1e-4, abs=1e-9)
    assert found.tasks == ["a.safetensors", "b.safetensors", "base"]
    assert (weights - where).abs().max() < 0.03


def test_every_round_is_one_pass_over_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    passes = []
    predicted = predict.predict
    monkeypatch.setattr(predict, "predict", lambda *a, **k: passes.append(len(a[2])) or predicted(*a, **k))  # type: ignore[func-returns-value]
    found = suggested(Regression(tmp_path).recipe)
    assert len(passes) == 4 and sum(passes) == len(found.rows)


def test_ranges_are_kept_to_and_a_shared_weight_is_shared(tmp_path: Path) -> None:
    recipe = Regression(tmp_path).recipe
    a, b = "a.safetensors", "b.safetensors"
    narrow = suggested(recipe, weights=[f"{a}=0.1:0.2", f"{b}=0.05"])
    for row in narrow.rows:
        if row is not narrow.own:
            assert 0.1 <= narrow.weights(row)[a] <= 0.2 and narrow.weights(row)[b] == 0.05


def test_on_data_the_share_that_is_lost_is_made_small(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "SAMPLES", 2)
    monkeypatch.setattr(search, "DIAGONAL", 2)
    data = {name: str(texts / f"{name}.jsonl") for name in ("a", "b")}
    found = suggested(texts / "recipe.yml", data=data, device="cpu", batch_size=16)
    assert found.measured and found.tasks == ["a", "b"]

    for task, source in data.items():
        base, tuned = (
            gm.evaluate(str(texts / model), source, device="cpu")["loss_per_example"] for model in ("base", task)
        )
        gain = max(base - tuned, 0.01 * max(base, tuned))
        for row in found.rows:
            want = (row.metrics[task]["loss_per_example"] - tuned) / gain
            assert row.costs[task] == pytest.approx(want, rel=1e-4, abs=1e-5)
    assert all(row.score == max(row.costs.values()) for row in found.rows)
    leading, best = found.leading(), found.best()
    assert leading is not None and leading.score == min(max(row.costs.values()) for row in found.rows)
    assert best is found.reference, "ten rows do not tell the recipe's own weights from the best"


@pytest.mark.parametrize("options", [{"methods": "removal"}, {"weights": "x=0:1"}])
def test_a_wrong_search_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(gm.InputError):
        suggested(Regression(tmp_path).recipe, **options)
